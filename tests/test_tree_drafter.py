"""A drafted tree holds the texts that the draft finds most likely, and any tree leaves the text the target's own."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import BUNDLED, Command, save_head, save_random_adapter
from test_lossless_sampled import PROMPT, VOCAB, exact_distribution, models, p_value  # noqa: F401

from adaptive.answering import Question
from adaptive.assistant import Assistant, encode_chat
from adaptive.control.policy import FixedLength, TreeAdviser
from adaptive.decoding.round import speculative_round
from adaptive.decoding.verifier import Verifier
from adaptive.drafting.tree import TreeDrafter
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.protocol import Engine
from adaptive.engines.tree import TokenTree
from adaptive.errors import AdaptiveError
from adaptive.grammar import Grammar
from adaptive.noise import race
from adaptive.pair import Pair, load_pair
from adaptive.records.log import Log
from adaptive.records.writer import LogWriter
from adaptive.sampling import LogitsProcessor, transform_logits
from adaptive.settings import fixed_draft_length, load_settings
from adaptive.tokens import Ids
from adaptive.types import TREE, Message, SamplingParams, StopParams

GREEDY = SamplingParams(temperature=0.0)
ROUNDS = 600


def drafter_of(engine: Engine, params: SamplingParams, vocab: int = VOCAB, **limits: int) -> TreeDrafter:
    processor = LogitsProcessor(params, vocab, torch.device("cpu"))
    drafter = TreeDrafter(engine.sequence(), engine, vocab, params, processor, torch.Generator())
    for name, limit in limits.items():
        setattr(drafter, name, limit)
    return drafter


def likeliest_texts(engine: TransformersEngine, deepest: int, count: int) -> set[tuple[int, ...]]:
    """The ``count`` most probable texts of up to ``deepest`` tokens after the prompt."""
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    for depth in range(deepest):
        for text in product(range(VOCAB), repeat=depth):
            logits = engine.sequence().extend([*PROMPT, *text], 1)[0].float().log_softmax(-1)
            scores |= {(*text, token): scores[text] + float(logits[token]) for token in range(VOCAB)}
    del scores[()]
    return set(sorted(scores, key=lambda text: -scores[text])[:count])


@pytest.mark.parametrize("count", [1, 2, 5, 9, 20, 40])
def test_its_nodes_are_the_likeliest_texts(models: tuple[TransformersEngine, TransformersEngine], count: int) -> None:  # noqa: F811
    draft = models[1]
    found = drafter_of(draft, GREEDY, width=64, depth=2).propose(PROMPT, count)
    assert found is not None
    assert found.probs is None
    assert found.parents is not None
    assert len(found.tokens) == count
    texts: list[tuple[int, ...]] = []
    for token, parent in zip(found.tokens, found.parents, strict=True):
        texts.append((*(texts[parent] if parent >= 0 else ()), int(token)))
    assert set(texts) == likeliest_texts(draft, 3, count)
    TokenTree().grown(found.parents)  # parents come first


@pytest.mark.parametrize("sharpness", [1.0, 3.0])
def test_an_adviser_ends_it_where_nodes_are_too_unlikely(
    models: tuple[TransformersEngine, TransformersEngine],  # noqa: F811
    sharpness: float,
) -> None:
    """A node's probability is that of its tokens by the draft, raised to a power, in turn."""
    draft, advise = models[1], TreeAdviser()
    advise.sharpness, advise.least = sharpness, [0.02]
    drafter, asked = drafter_of(draft, GREEDY, advised_depth=2), list[int]()
    extend = drafter.sequence.extend

    def noted(tokens: Ids, rows: int, parents: list[int] | None = None) -> torch.Tensor:
        asked.append(rows)
        return extend(tokens, rows, parents)

    drafter.sequence.extend = noted  # type: ignore[method-assign]
    found = drafter.propose(PROMPT, 40, advise)
    assert found is not None
    assert found.parents is not None
    texts, probabilities = list[tuple[int, ...]](), list[float]()
    for token, parent in zip(found.tokens, found.parents, strict=True):
        texts.append((*(texts[parent] if parent >= 0 else ()), int(token)))
        logits = sharpness * draft.sequence().extend([*PROMPT, *texts[-1][:-1]], 1)[0].float()
        probabilities.append((probabilities[parent] if parent >= 0 else 1.0) * float(logits.softmax(-1)[token]))
    assert 2 < len(texts) < 40
    assert min(probabilities) >= 0.02
    assert advise.expected == pytest.approx(sum(probabilities), rel=1e-4)
    if sharpness == 1.0:
        assert set(texts) == likeliest_texts(draft, 3, len(texts))
    assert sum(asked) <= 1 + len(texts)  # what is too unlikely itself is not extended
    advise.least = []
    assert drafter_of(draft, GREEDY).propose(PROMPT, 40, advise) is not None
    assert advise.expected > sum(probabilities)
    advise.least = [1.1]
    assert drafter_of(draft, GREEDY).propose(PROMPT, 40, advise) is None


def test_nodes_of_a_depth_are_extended_if_the_text_may_get_there(
    models: tuple[TransformersEngine, TransformersEngine],  # noqa: F811
) -> None:
    depths, reached = list[int](), list[float]()
    for reach in (0.0, 0.4, 0.8, 1.1):
        advise = TreeAdviser()
        advise.reach = reach
        found = drafter_of(models[1], GREEDY, advised_depth=6).propose(PROMPT, 24, advise)
        assert found is not None
        assert found.parents is not None
        deep = list[int]()
        for parent in found.parents:
            deep.append(1 + (deep[parent] if parent >= 0 else 0))
        assert max(deep) <= 1 + advise.passes
        assert advise.passes <= 6
        depths.append(max(deep))
        reached.append(advise.expected or 0.0)
    assert depths[0] > depths[1] > depths[2] > depths[3] == 1
    assert reached[0] > reached[1] > reached[2]


def test_answers_at_once_get_trees_too() -> None:
    """Where the engine makes chains for several answers in one call, which it does not for trees."""
    pair = load_pair(load_settings({"dtype": "float32"}))
    draft = pair.draft
    assert isinstance(draft, TransformersEngine)
    if draft.cpu_forward is None:
        pytest.skip("the kernels were not built")
    with pytest.raises(StopIteration) as ended:  # it asks for no call that others share
        next(drafter_of(draft, GREEDY, draft.vocab_size).proposing(PROMPT, 8))
    assert ended.value.value == drafter_of(draft, GREEDY, draft.vocab_size).propose(PROMPT, 8)
    assert ended.value.value.parents is not None


def test_it_goes_on_from_what_was_committed(models: tuple[TransformersEngine, TransformersEngine]) -> None:  # noqa: F811
    """Whatever was drafted before, since its cache holds committed tokens only."""
    draft = models[1]
    drafter = drafter_of(draft, GREEDY)
    drafter.propose(PROMPT, 12)
    committed = [*PROMPT, 1, 5, 2]
    drafter.rollback(len(PROMPT) + 1)
    assert drafter.unseen(len(committed)) == 2
    assert drafter.propose(committed, 12) == drafter_of(draft, GREEDY).propose(committed, 12)


@pytest.mark.thorough
@pytest.mark.parametrize("seeds", [False, True], ids=["none", "a seed each"])
@pytest.mark.parametrize("params", [SamplingParams(temperature=1.3), SamplingParams(temperature=1.3, top_p=0.9)])
def test_sampled_rounds_have_the_targets_law(
    models: tuple[TransformersEngine, TransformersEngine],  # noqa: F811
    params: SamplingParams,
    seeds: bool,
) -> None:
    target, draft = models
    drafter, sequence = drafter_of(draft, params, depth=2), target.sequence()
    judge = Verifier(params, drafter.processor, torch.Generator().manual_seed(5))
    counts, depths = Counter[tuple[int, ...]](), Counter[int]()
    for text in range(ROUNDS):
        sequence.rollback(0)
        drafter.rollback(0)
        if seeds:
            seeded = replace(params, seed=1000 + text)
            drafter = drafter_of(draft, seeded, depth=2)
            judge = Verifier(seeded, drafter.processor, torch.Generator())
        committed = list(PROMPT)
        while len(committed) < len(PROMPT) + 3:
            depths[speculative_round(sequence, drafter, judge, committed, 7)[0].accepted] += 1
        counts[tuple(committed[len(PROMPT) :][:3])] += 1
    assert min(depths[0], depths[1]) > 10, depths
    assert p_value(counts, exact_distribution(target, params)) > 1e-4


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(load_settings({"dtype": "float32"}))


def said(
    pair: Pair, policy: FixedLength, prompts: list[str], sampling: SamplingParams, most: int, drafter: str = TREE
) -> list[list[int]]:
    assistant = Assistant(pair, policy, None)
    stop, texts, accepted = StopParams(max_new_tokens=most), [], 0
    for prompt in prompts:
        texts.append([step.token for step in assistant.chat([Message("user", prompt)], sampling, stop)])
        assert assistant.last is not None
        rounds = assistant.last.rounds
        assert {r.drafter for r in rounds} <= {drafter if policy.length else "none", "none"}
        learned = tuple(r for r in rounds if r.drafter != TREE)  # rounds of trees are not used to judge adapters
        assert assistant.rounds_by_adapter in ([], [(None, learned)])
        accepted += assistant.last.accepted
    assert accepted > 0 or policy.length == 0
    return texts


@pytest.mark.thorough(but="8-False-10")
@pytest.mark.parametrize(
    ("nodes", "adapter", "some"),
    [
        *(pytest.param(n, a, 1, marks=pytest.mark.long) for n in (8, 32, 128) for a in (False, True)),
        *((8, False, 10), (32, True, 10), (128, False, 10)),
    ],
)
def test_greedy_output_equals_the_target_alone(
    pair: Pair, nodes: int, adapter: bool, some: int, prompts: list[str], tmp_path: Path
) -> None:
    assert pair.draft is not None
    most = 200 if some == 1 else 60
    wanted = said(pair, FixedLength(0), prompts[::some], GREEDY, most)
    pair.draft.apply_adapter(save_random_adapter(BUNDLED / "draft", tmp_path / "adapter") if adapter else None)
    try:
        assert said(pair, FixedLength(nodes, tree=True), prompts[::some], GREEDY, most) == wanted
    finally:
        pair.draft.apply_adapter(None)


@pytest.mark.thorough
def test_a_seed_means_the_same_text(pair: Pair, prompts: list[str]) -> None:
    seeded = SamplingParams(temperature=0.8, seed=5)
    plain = said(pair, FixedLength(0), prompts[::7], seeded, 40)
    assert said(pair, FixedLength(12, tree=True), prompts[::7], seeded, 40) == plain


@pytest.mark.thorough(but="0.0")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_with_penalties_trees_are_drafted(pair: Pair, prompts: list[str], temperature: float) -> None:
    """They are the default of some checkpoints."""
    penalised = SamplingParams(temperature=temperature, repetition_penalty=1.3, logit_bias={5: 2.0}, seed=3)
    plain = said(pair, FixedLength(0), prompts[:2], penalised, 40)
    assert said(pair, FixedLength(8, tree=True), prompts[:2], penalised, 40) == plain


def test_within_a_grammar_trees_are_drafted(pair: Pair) -> None:
    grammar = Grammar("regex", "(yes|no|maybe)( [0-9]{3}){5}")
    texts = []
    for length in (0, 8):
        assistant = Assistant(pair, FixedLength(length, tree=True), None)
        prompt = encode_chat(pair, [Message("user", "Yes or no?")])
        list(assistant.answer(Question(prompt, (), "", GREEDY, StopParams(max_new_tokens=40), grammar=grammar)))
        assert assistant.last is not None
        texts.append(assistant.last.text)
    assert texts[0] == texts[1]
    assert any(outcome.drafter == TREE and outcome.accepted for outcome in assistant.last.rounds)


def test_a_tree_may_have_more_nodes_than_the_answer_has_tokens(pair: Pair, prompts: list[str]) -> None:
    assistant = Assistant(pair, FixedLength(24, tree=True), None)
    short = StopParams(max_new_tokens=4, ignore_eos=True)
    tokens = [step.token for step in assistant.chat([Message("user", prompts[0])], GREEDY, short)]
    assert assistant.last is not None
    first = assistant.last.rounds[0]
    assert first.drafted > 4
    assert len(tokens) == 4
    assert all(outcome.accepted <= 2 for outcome in assistant.last.rounds)  # and one by the target, one by the prompt
    assert tokens == said(pair, FixedLength(0), prompts[:1], GREEDY, 4)[0]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.7, seed=3),
        SamplingParams(temperature=1.0, seed=4, top_p=0.8),
        SamplingParams(temperature=0.7, seed=5, top_k=20, min_p=0.05),
    ],
    ids=str,
)
def test_kernels_and_tensors_find_the_same_tree(pair: Pair, params: SamplingParams) -> None:
    """Where there are no kernels for the logits, as on a device, torch finds the likeliest tokens."""
    assert pair.draft is not None
    text, found = encode_chat(pair, [Message("user", "What is 7 times 12?")]), []
    for with_kernels in (True, False):
        drafter = drafter_of(pair.draft, params, pair.target.vocab_size)
        if not with_kernels:
            drafter.transform.kernels = None
        elif drafter.transform.kernels is None:
            pytest.skip("there are no kernels for this processor")
        found.append(drafter.propose(text, 64))
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].tokens == found[1].tokens
    assert found[0].parents == found[1].parents
    assert len(found[0].tokens) > 8


def test_the_first_guess_is_the_choice_of_the_noise(models: tuple[TransformersEngine, TransformersEngine]) -> None:  # noqa: F811
    """A draft that is the target foresees every choice."""
    params = SamplingParams(temperature=1.3, seed=11)
    target = models[0]
    drafter, sequence, committed = drafter_of(target, params), target.sequence(), list(PROMPT)
    judge = Verifier(params, drafter.processor, torch.Generator())
    for _ in range(10):
        outcome, _, _ = speculative_round(sequence, drafter, judge, committed, 6)
        assert outcome.accepted > 0
    p = transform_logits(target.sequence().extend(PROMPT, 1), params).softmax(-1)
    assert committed[len(PROMPT)] == int(race(p, 11, len(PROMPT)))


@pytest.mark.thorough
def test_noise_that_is_known_makes_more_guesses_right(models: tuple[TransformersEngine, TransformersEngine]) -> None:  # noqa: F811
    accepted = []
    for seeded in (False, True):
        found = 0
        for text in range(150):
            params = SamplingParams(temperature=1.3, seed=text if seeded else None)
            drafter, sequence = drafter_of(models[1], params), models[0].sequence()
            judge = Verifier(params, drafter.processor, torch.Generator().manual_seed(text))
            found += speculative_round(sequence, drafter, judge, list(PROMPT), 4)[0].accepted
        accepted.append(found)
    assert accepted[1] > 1.1 * accepted[0]


def test_answers_without_a_seed_differ_and_are_logged_without_one(pair: Pair, tmp_path: Path) -> None:
    warm, stop = SamplingParams(temperature=1.2), StopParams(max_new_tokens=20, ignore_eos=True)
    texts = set()
    with LogWriter(tmp_path / "records.db") as log:
        assistant = Assistant(pair, FixedLength(8, tree=True), log)
        for _ in range(3):
            texts.add("".join(step.text for step in assistant.chat([Message("user", "Tell me.")], warm, stop)))
    assert len(texts) == 3
    with Log(tmp_path / "records.db") as records:
        assert len(records.newest(3)) == 3
        assert not records.seeded(records.newest(3))


@pytest.mark.parametrize("text", ["tree:0", "tree:", "tree:257", "tree:auto", "65", "-1", "many", "٣٣٣", ""])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(AdaptiveError, match=r"auto, a number from 0 to 64, or tree:N"):
        load_settings({"draft_length": text})


def test_lengths_are_read() -> None:
    assert [fixed_draft_length(text) for text in ("auto", "0", "64", "tree:256")] == [
        None,
        (0, False),
        (64, False),
        (256, True),
    ]


def test_a_head_on_transformers_forward_drafts_no_trees(adaptive: Command, tmp_path: Path) -> None:
    head = save_head(BUNDLED / "target", tmp_path / "head")
    pair = ("--target", str(BUNDLED / "target"), "--draft", str(head), "--dtype", "float64")
    status, _, errors = adaptive("generate", "Hi", *pair, "--draft-length", "tree:8")
    assert status == 2
    assert "makes no passes over trees of tokens; draft chains" in " ".join(errors.split())


def test_scores_of_a_tree_are_those_of_its_paths(models: tuple[TransformersEngine, TransformersEngine]) -> None:  # noqa: F811
    """With a temperature the most likely texts are those of the sampled distribution."""
    cold = drafter_of(models[1], SamplingParams(temperature=0.05)).propose(PROMPT, 6)
    assert cold is not None
    assert cold.parents is not None
    assert max(TokenTree().grown(cold.parents).depths) >= 3
    hot = drafter_of(models[1], SamplingParams(temperature=50.0)).propose(PROMPT, 6)
    assert hot is not None
    assert hot.parents == [-1] * 6
    assert math.isfinite(sum(hot.tokens))
