"""A node of a tree has the logits of a text that ends with its path, and a kept path is text like any other."""

from __future__ import annotations

import random

import pytest
import torch
from test_cpu_forward import CONFIGS, SIZES, made, text
from test_features import OTHERS, engine_of, model_of
from test_head_engine import bound, engines
from test_joint import FUSED, native, same
from transformers import AutoModelForCausalLM, BloomConfig, PreTrainedModel

from adaptive.engines.cpu import kernels
from adaptive.engines.cpu.cache import GROWTH
from adaptive.engines.hf.engine import TransformersEngine, TransformersSequence
from adaptive.engines.protocol import ExtendCall
from adaptive.engines.tree import NO_TREE
from adaptive.errors import AdaptiveError


def random_parents(dice: random.Random, count: int) -> list[int]:
    """A tree that is deep in some places and wide in others."""
    return [node - 1 if dice.random() < 0.6 else dice.randrange(-1, node) for node in range(count)]


def random_tokens(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(SIZES["vocab_size"]) for _ in range(count)]


def path_to(node: int, parents: list[int]) -> list[int]:
    """The nodes from the root to ``node``."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def alone(engine: TransformersEngine, tokens: list[int]) -> torch.Tensor:
    """The logits (1, vocab) after a whole text, in a new sequence."""
    return engine.sequence().extend(tokens, 1).clone()


def check_nodes(
    engine: TransformersEngine,
    held: list[int],
    tokens: list[int],
    parents: list[int],
    logits: torch.Tensor,
    tolerance: float,
) -> None:
    """Check that ``logits`` are right for the last nodes of a tree after the text ``held``."""
    for row in range(len(logits)):
        path = path_to(len(parents) - len(logits) + row, parents)
        same(logits[row : row + 1], alone(engine, held + [tokens[node] for node in path]), tolerance)


def check(engine: TransformersEngine, tolerance: float, features: bool = True) -> None:
    """Check a text built from paths of trees, some of which come in two passes, with plain passes between them."""
    assert engine.trees
    dice = random.Random(3)
    sequence, held = engine.sequence(features=features), text(9).tolist()
    sequence.prepare(200)
    sequence.extend(held, 1)
    for turn, count in enumerate((1, 7, 24, 12, 5)):
        parents, tokens = random_parents(dice, count), random_tokens(dice, count)
        first = count if turn % 2 == 0 else dice.randrange(1, count)
        rows = min(first, 9)
        logits = sequence.extend(tokens[:first], rows, parents[:first])
        assert logits.shape == (rows, SIZES["vocab_size"])
        check_nodes(engine, held, tokens[:first], parents[:first], logits, tolerance)
        if first < count:
            logits = sequence.extend(tokens[first:], count - first, parents[first:])
            check_nodes(engine, held, tokens, parents, logits, tolerance)
        assert sequence.length == len(held)
        path = path_to(dice.randrange(count), parents) if turn else []
        sequence.keep(path)
        held += [tokens[node] for node in path]
        assert sequence.length == len(held)
        more = random_tokens(dice, 1 + turn % 3)
        same(sequence.extend(more, 1), alone(engine, held + more), tolerance)
        held += more
        if turn == 3:
            held = held[:-5]
            sequence.rollback(len(held))
    if features:
        whole = engine.sequence(features=True)
        whole.extend(held, 1)
        same(sequence.features(0, len(held)), whole.features(0, len(held)), tolerance)


@native
@pytest.mark.parametrize("name", FUSED)
def test_on_our_forward(name: str) -> None:
    check(TransformersEngine(model_of(name)), 2e-5)


@pytest.mark.parametrize("forward", ["layers", "torch"])
@pytest.mark.parametrize("name", [*CONFIGS, "ministral3", "hunyuan_v1_dense"])
def test_on_our_forward_layer_by_layer(name: str, forward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if forward == "torch":
        monkeypatch.setattr(kernels, "library", lambda: None)
    check(engine_of(model_of(name), forward), 2e-5)


@pytest.mark.parametrize("forward", ["own", "transformers"])
@pytest.mark.parametrize("name", CONFIGS)
def test_in_float64(name: str, forward: str) -> None:
    tolerance = 1e-6 if name.startswith("gemma2") else 1e-6 if forward == "transformers" else 1e-9
    check(engine_of(made(name), forward), tolerance, features=False)


@pytest.mark.parametrize("forward", ["transformers", "recorded"])
@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_on_transformers_own_forward(name: str, forward: str) -> None:
    check(engine_of(model_of(name), forward), 2e-5)


@native
@pytest.mark.parametrize("int8", [False, True])
def test_with_narrow_weights_a_path_that_comes_first_is_the_chain_bit_for_bit(int8: bool) -> None:
    """Other paths may round differently."""
    engine = TransformersEngine(made("llama", torch.bfloat16), int8=int8)
    sequence, chain = engine.sequence(features=True), engine.sequence(features=True)
    held, tokens = text(20).tolist(), text(9).tolist()
    for one in (sequence, chain):
        one.extend(held, 1)
    parents = [-1, 0, 1, 2, -1, 0, 5, 3, 1]
    found = sequence.extend(tokens, 9, parents).clone()
    right = chain.extend(tokens[:4], 4)
    assert torch.equal(found[:4], right)
    for node in range(4, 9):
        expected = alone(engine, held + [tokens[n] for n in path_to(node, parents)])
        assert (found[node] - expected[0]).abs().max() < 0.02 * expected.abs().max()
    sequence.keep([0, 1, 2, 3])
    assert torch.equal(sequence.extend([5, 6], 2), chain.extend([5, 6], 2))
    assert torch.equal(sequence.features(0, 26), chain.features(0, 26))


@pytest.mark.parametrize("forward", ["own", "transformers"])
def test_a_tree_that_is_a_chain_is_an_ordinary_pass(forward: str) -> None:
    engine = engine_of(model_of("gemma3"), forward)
    tree, chain = engine.sequence(), engine.sequence()
    for sequence in (tree, chain):
        sequence.extend(text(20).tolist(), 1)
    tokens = text(12).tolist()
    right = chain.extend(tokens, 12).clone()
    found = [tree.extend(tokens[:7], 7, list(range(-1, 6))).clone(), tree.extend(tokens[7:], 5, list(range(6, 11)))]
    same(torch.cat(found), right, 0.0 if forward == "own" and kernels.library() else 2e-5)
    tree.keep(list(range(9)))
    chain.rollback(29)
    same(tree.extend([3], 1), chain.extend([3], 1), 0.0 if forward == "own" and kernels.library() else 2e-5)


@pytest.mark.parametrize("forward", ["own", "transformers"])
@pytest.mark.parametrize("name", ["llama", "mistral, window", "gemma3"])
def test_trees_and_chains_of_several_sequences_in_one_pass(name: str, forward: str) -> None:
    engine, dice = engine_of(model_of(name), forward), random.Random(8)
    texts = [text(count).tolist() for count in (4, 30, 11)]
    sequences: list[TransformersSequence] = [engine.sequence(features=number != 1) for number in range(3)]
    for sequence, held in zip(sequences, texts, strict=True):
        sequence.extend(held, 1)
    for _ in range(3):
        tokens = [random_tokens(dice, count) for count in (9, 4, 14)]
        parents = [random_parents(dice, 9), list(range(-1, 3)), random_parents(dice, 14)]
        calls = [
            ExtendCall(sequences[0], tokens[0], 9, parents[0]),
            ExtendCall(sequences[1], tokens[1], 3),
            ExtendCall(sequences[2], tokens[2], 14, parents[2]),
        ]
        for number, logits in enumerate(engine.extend_together(calls)):
            check_nodes(engine, texts[number], tokens[number], parents[number], logits, 2e-5)
        for number, node in ((0, 8), (1, 3), (2, 13)):
            path = path_to(node, parents[number])
            if number != 1:
                sequences[number].keep(path)
            texts[number] += [tokens[number][node] for node in path]
            assert sequences[number].length == len(texts[number])
    for number, sequence in enumerate(sequences):
        if number != 1:
            whole = engine.sequence(features=True)
            whole.extend(texts[number], 1)
            same(sequence.features(0, len(texts[number])), whole.features(0, len(texts[number])), 2e-5)
        same(sequence.extend([7, 8], 1), alone(engine, [*texts[number], 7, 8]), 2e-5)


@pytest.mark.parametrize("forward", ["own", "layers", "transformers"])
def test_a_large_tree_at_the_end_of_a_buffer(forward: str) -> None:
    """A tree with more nodes than a one-call chain has tokens; the second pass grows the cache while it holds the
    first."""
    engine, dice = engine_of(model_of("qwen3"), forward), random.Random(4)
    sequence, held = engine.sequence(features=True), text(GROWTH - 140).tolist()
    sequence.extend(held, 1)
    parents, tokens = random_parents(dice, 200), random_tokens(dice, 200)
    sequence.extend(tokens[:135], 1, parents[:135])
    logits = sequence.extend(tokens[135:], 8, parents[135:])
    check_nodes(engine, held, tokens, parents, logits, 2e-5)
    path = path_to(199, parents)
    assert path != list(range(len(path)))
    sequence.keep(path)
    held += [tokens[node] for node in path]
    whole = engine.sequence(features=True)
    whole.extend(held, 1)
    same(sequence.features(0, len(held)), whole.features(0, len(held)), 2e-5)
    same(sequence.extend([3], 1), whole.extend([3], 1), 2e-5)


def test_a_tree_is_the_whole_text_too() -> None:
    engine = TransformersEngine(model_of("llama"))
    sequence = engine.sequence()
    tokens, parents = [5, 6, 7, 8, 9], [-1, -1, 0, 1, 2]
    check_nodes(engine, [], tokens, parents, sequence.extend(tokens, 5, parents), 2e-5)
    sequence.keep([1, 3])
    same(sequence.extend([4], 1), alone(engine, [6, 8, 4]), 2e-5)


@pytest.mark.parametrize("forward", ["own", "transformers"])
def test_what_is_no_tree_or_no_path_is_refused(forward: str) -> None:
    engine = engine_of(model_of("llama"), forward)
    sequence, right = engine.sequence(), alone(engine, [5, 6, 7, 1])
    sequence.extend([5, 6, 7], 1)
    for parents in ([-1, 1], [0, 0], [-2, 0], [-1], [-1, 0, 1]):
        with pytest.raises(ValueError):
            sequence.extend([1, 2], 1, parents)
    with pytest.raises(ValueError, match="path"):
        sequence.keep([0])
    with pytest.raises(IndexError):
        sequence.extend([1, 97], 1, [-1, 0])
    sequence.extend([1, 2, 3], 1, [-1, -1, 0])
    for path in ([2], [0, 1], [3], [-1], [1, 2]):
        with pytest.raises(ValueError, match="path"):
            sequence.keep(path)
    same(sequence.extend([1], 1), right, 2e-5)  # a plain pass drops the tree
    with pytest.raises(ValueError, match="path"):
        sequence.keep([0])
    assert sequence.length == 4
    sequence.extend([1, 2, 3], 1, [-1, -1, 0])
    sequence.rollback(3)
    sequence.keep([])
    same(sequence.extend([1], 1), right, 2e-5)


def bloom() -> PreTrainedModel:
    """A model whose attention takes positions from a mask."""
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(BloomConfig(vocab_size=97, hidden_size=48, n_layer=2, n_head=4)).eval()


def test_an_engine_that_makes_no_such_passes_says_so() -> None:
    engine = TransformersEngine(bloom())
    assert not engine.trees
    sequence = engine.sequence()
    sequence.extend([5, 6], 1)
    with pytest.raises(AdaptiveError, match="BloomForCausalLM makes no passes over trees"):
        sequence.extend([1, 2], 1, [-1, -1])
    with pytest.raises(AdaptiveError, match="trees"):
        engine.extend_together([ExtendCall(sequence, [1, 2], 1, [-1, -1])])
    assert sequence.length == 2


def test_a_head_on_transformers_forward_makes_none() -> None:
    target, head = engines("llama", ours=False)
    assert not head.trees
    with pytest.raises(AdaptiveError, match="a head on llama makes no passes over trees"):
        bound(target, head)[1].extend([1, 2], 1, [-1, -1])


def test_positions_and_what_is_hidden() -> None:
    tree = NO_TREE.grown([-1, 0, 0]).grown([2, -1])
    assert tree.depths == (0, 1, 1, 2, 0)
    query, key, hidden = tree.view(2, 2, torch.device("cpu"))
    assert query.tolist() == [[4], [2]]
    assert key.tolist() == [[0, 1, 2, 3, 3, 4, 2]]
    assert hidden.int().tolist() == [[0, 0, 0, 1, 0, 0, 1], [0, 0, 1, 1, 1, 1, 0]]
