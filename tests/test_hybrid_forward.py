"""Our own forward of models with recurrent layers computes what transformers computes, also after rollbacks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_cpu_forward import FEW, SIZES, own, text, truth
from test_head_engine import bound, module_logits
from test_head_module import randomised
from test_joint import check as check_joint
from tiny_models import GREEDY
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5TextConfig

from adaptive.engines.cpu import delta, kernels
from adaptive.engines.cpu.delta import HELD, DeltaNet, States
from adaptive.engines.cpu.families import forward_kind
from adaptive.engines.cpu.forward import CpuForward, cpu_forward
from adaptive.engines.head.engine import HeadEngine
from adaptive.engines.head.module import Head
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.protocol import ProposalCall
from adaptive.engines.state_checkpoints import REMEMBER_BEFORE
from adaptive.errors import AdaptiveError

pytestmark = pytest.mark.skipif(
    kernels.library() is None, reason="the kernels are not built, or not for this processor"
)

HYBRID: dict[str, Any] = {
    **SIZES,
    "max_position_embeddings": 512,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 48,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
CONFIGS = {
    "grouped": HYBRID,
    "one value head a key head, a short convolution": {
        **HYBRID, "linear_num_value_heads": 2, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 2,
    },
    "one key head, biases, tied, half a rotation": {
        **HYBRID, "linear_num_key_heads": 1, "attention_bias": True, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "heads of the sizes of real checkpoints": {
        **HYBRID, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "everything attends": {**HYBRID, "layer_types": ["full_attention"] * 3},
}  # fmt: skip


def made(name: str = "grouped", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A checkpoint of random weights, none of them at a value that would hide a mistake."""
    torch.manual_seed(5)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**CONFIGS[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype)


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    engine = TransformersEngine(made())
    assert engine.cpu_forward is not None
    assert engine.cpu_forward.kind == "fused"
    return engine


def near(got: torch.Tensor, right: torch.Tensor, tolerance: float = 2e-4) -> None:
    torch.testing.assert_close(got / right.abs().max(), right / right.abs().max(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("fused", [True, False], ids=["one call", "by layers"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name: str, fused: bool) -> None:
    model = made(name)
    forward, tokens = own(model), text(300)
    assert forward.fused
    forward.fused = fused
    right, cache, done = truth(model, tokens), forward.cache(), 0
    for count in (9, 1, 1, 5, 16, 1, FEW + 4, 1, HELD + 40, 3):
        got = forward(tokens[done : done + count], count, cache)
        done += count
        near(got, right[done - count : done])
    assert cache.length == done


def test_a_wrong_state_would_be_seen() -> None:
    """The comparison above covers the state kept between passes, not only single passes."""
    model = made()
    forward, tokens = own(model), text(20)
    cache = forward.cache()
    forward(tokens[:10], 1, cache)
    assert cache.states is not None
    cache.states.clear()
    cache.states.length = 10
    cache.states._base = 10
    with pytest.raises(AssertionError):
        near(forward(tokens[10:], 10, cache), truth(model, tokens)[10:])


def test_bfloat16_is_as_close_to_the_truth_as_transformers() -> None:
    exact, rounded = made(dtype=torch.bfloat16).to(torch.float64), made(dtype=torch.bfloat16)
    forward, tokens = own(rounded), text(20)
    right = truth(exact, tokens)
    ours = (forward(tokens, 20, forward.cache()).double() - right).abs().mean()
    theirs = (truth(rounded, tokens).double() - right).abs().mean()
    assert ours <= 1.5 * theirs


def test_int8_says_nearly_the_same() -> None:
    model = made()
    forward = cpu_forward(model, int8=True)
    assert forward is not None
    assert forward.plan.lm_head.int8
    assert forward.fused
    tokens = text(30)
    got, right = forward(tokens, 30, forward.cache()), truth(model, tokens)
    assert torch.nn.functional.cosine_similarity(got, right, dim=1).mean() > 0.98


def test_what_the_kernels_do_not_compute_keeps_transformers_forward() -> None:
    sizes: list[dict[str, Any]] = [
        {"linear_key_head_dim": 24},
        {"linear_value_head_dim": 24},
        {"head_dim": 12},
        {"hidden_act": "gelu"},
    ]
    for changed in sizes:
        config = Qwen3_5TextConfig(**{**HYBRID, **changed})
        assert forward_kind("Qwen3_5ForCausalLM", config, torch.float32, torch.device("cpu")) is None
    config = Qwen3_5TextConfig(**HYBRID)
    for dtype in (torch.float64, torch.float16):
        assert forward_kind("Qwen3_5ForCausalLM", config, dtype, torch.device("cpu")) is None
    assert cpu_forward(made(dtype=torch.float64)) is None


@pytest.mark.thorough
def test_any_order_of_passes_and_rollbacks_leaves_the_state_of_the_text(engine: TransformersEngine) -> None:
    """Passes of one, some and many tokens, proposals, and short and long rollbacks; all logits are compared with
    transformers' for the whole text."""
    dice, vocab = random.Random(11), SIZES["vocab_size"]
    sequence, held, reached = engine.sequence(), [], set()
    for _ in range(120):
        kind = dice.choice(["one", "one", "some", "some", "many", "propose"])
        if kind == "propose":
            fed = [dice.randrange(vocab) for _ in range(dice.randrange(1, 20))]
            drafted = sequence.propose(ProposalCall(fed, dice.randrange(1, 9), vocab, GREEDY, [], None)).tokens
            held += [*fed, *drafted[:-1]]
        else:
            count = {"one": 1, "some": dice.randrange(2, 17), "many": dice.randrange(60, 110)}[kind]
            fed = [dice.randrange(vocab) for _ in range(count)]
            rows = dice.randrange(1, count + 1)
            got = sequence.extend(fed, rows).clone()
            held += fed
            near(got, truth(engine.model, torch.tensor(held))[-rows:])
        assert sequence.length == len(held)
        back = dice.choice([0, 0, 1, 3, 5, 8, 40])
        asked = max(0, len(held) - back)
        sequence.rollback(asked)
        assert sequence.length <= asked
        if back and sequence.length == asked:
            reached.add(back)
        del held[sequence.length :]
        if len(held) > 350:
            sequence.rollback(0)
            held = []
    assert reached >= {1, 3, 5}


@pytest.mark.thorough
def test_what_is_drafted_in_a_call_and_taken_back_was_never_there(engine: TransformersEngine) -> None:
    """A draft rolls back over single steps again and again, and never to a checkpoint."""
    vocab = SIZES["vocab_size"]
    sequence, held = engine.sequence(), text(30).tolist()
    for turn in range(40):
        fed = held[sequence.length :]
        drafted = sequence.propose(ProposalCall(fed, 6, vocab, GREEDY, [], None)).tokens
        right = [*held]
        for token in drafted:
            assert int(truth(engine.model, torch.tensor(right))[-1].argmax()) == token
            right.append(token)
        assert sequence.length == len(held) + 5
        accepted = turn % 7
        held += [*drafted[:accepted], (7 * turn) % vocab]
        before = min(sequence.length, len(held) - 1)
        sequence.rollback(len(held) - 1)
        assert sequence.length == before


def test_a_proposal_that_is_interrupted_leaves_the_text(engine: TransformersEngine) -> None:
    sequence, held = engine.sequence(), text(25).tolist()
    sequence.extend(held, 1)

    def interrupt(position: int, confidence: float) -> int:
        if position == 3:
            raise KeyboardInterrupt
        return 2

    for fed in ([3], [4, 5]):
        with pytest.raises(KeyboardInterrupt):
            sequence.propose(ProposalCall(fed, 6, SIZES["vocab_size"], GREEDY, [], interrupt))
        assert sequence.length == len(held)
    held += [9, 8]
    near(sequence.extend([9, 8], 2), truth(engine.model, torch.tensor(held))[-2:])


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C comes in the block, after the first of the layers with a state."""
    given = DeltaNet.__call__

    def second_raises(self: DeltaNet, projected: Any, out: Any, layer: int, *others: Any) -> None:
        if layer == 1:
            raise KeyboardInterrupt
        given(self, projected, out, layer, *others)

    with monkeypatch.context() as patched:
        patched.setattr(DeltaNet, "__call__", second_raises)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_a_pass_by_layers_that_is_interrupted_goes_back_to_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine(made())
    assert engine.cpu_forward is not None
    engine.cpu_forward.fused = False
    sequence, held = engine.sequence(), text(32).tolist()
    sequence.extend(held, 1)
    sequence.rollback(32)  # the next pass moves the state behind whole chunks of 16 tokens, here behind all
    with interrupted(monkeypatch):
        sequence.extend([1, 2, 3], 1)
    assert sequence.length == len(held) - REMEMBER_BEFORE
    rest = [*held[sequence.length :], 1, 2, 3]
    near(sequence.extend(rest, len(rest)), truth(engine.model, torch.tensor([*held, 1, 2, 3]))[-len(rest) :])


def test_a_checkpoint_that_is_interrupted_leaves_no_layer_ahead_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, held, kept = made(), text(48).tolist(), []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-4.0)  # otherwise a state forgets within the tokens that might count twice
    engine = TransformersEngine(model)
    for interrupt in (False, True):
        sequence = engine.sequence()
        for token in held:
            sequence.extend([token], 1)
        states = sequence.cache.states
        assert isinstance(states, States)
        if interrupt:
            with interrupted(monkeypatch):
                states.checkpoint()
            sequence.rollback(len(held))
            sequence.extend(held[sequence.length :] or [1], 1)
        states.checkpoint()
        length, checkpoint = states._checkpoints.last(len(held))
        assert length == len(held)
        kept.append(checkpoint.states)
    near(*kept)


def test_a_token_beyond_the_vocabulary_changes_nothing(engine: TransformersEngine) -> None:
    sequence, held = engine.sequence(), text(12).tolist()
    sequence.extend(held, 1)
    for wrong in (-1, SIZES["vocab_size"], 2**40):
        with pytest.raises(IndexError):
            sequence.extend([3, wrong], 1)
        with pytest.raises(IndexError):
            sequence.propose(ProposalCall([wrong], 3, SIZES["vocab_size"], GREEDY, [], None))
        assert sequence.length == 12
    near(sequence.extend([5], 1), truth(engine.model, torch.tensor([*held, 5]))[-1:])


def test_a_joint_pass_gives_what_lone_passes_give(engine: TransformersEngine) -> None:
    assert engine.joint
    check_joint(engine, 0)


def test_trees_are_refused(engine: TransformersEngine) -> None:
    assert not engine.trees
    sequence = engine.sequence()
    sequence.extend([1, 2], 1)
    with pytest.raises(AdaptiveError, match="trees"):
        sequence.extend([3, 4], 2, [-1, -1])


def test_adapters_on_the_projections_are_followed() -> None:
    model, tokens = made(), text(12)
    forward = own(model)
    names = [f"model.layers.0.linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "out_proj")]
    names.append("model.layers.2.self_attn.q_proj")
    before = forward(tokens, 12, forward.cache()).clone()
    with torch.no_grad():
        for name in names:
            weight = model.get_submodule(name).weight
            weight.add_(0.1 * torch.randn(weight.shape))
    forward.refresh(frozenset(names))
    got = forward(tokens, 12, forward.cache())
    near(got, truth(model, tokens))
    assert (got - before).abs().max() > 0.01


def test_a_rollback_moves_no_number(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollback is an assignment: the next pass computes the state of the tokens that remain."""
    sequence = engine.sequence()
    sequence.extend(text(20).tolist(), 1)
    sequence.extend(text(6).tolist(), 6)
    states = sequence.cache.states  # type: ignore[union-attr]
    assert isinstance(states, States)
    before = [part.clone() for part in (*states._states, states._inputs, states._chunks)]
    monkeypatch.setattr(delta, "library", lambda: None)  # no kernel may be called
    sequence.rollback(22)
    assert sequence.length == 22
    for part, was in zip((*states._states, states._inputs, states._chunks), before, strict=True):
        assert torch.equal(part.view(torch.int32), was.view(torch.int32))  # as bits: unused places may be NaN


def test_a_log_does_not_grow_without_end() -> None:
    """After many single steps without a rollback the memory of a sequence stays constant."""
    forward: CpuForward = own(made())
    cache, found = forward.cache(), []
    assert cache.states is not None
    for token in text(400).tolist():
        forward(torch.tensor([token]), 1, cache)
        found.append(cache.states.nbytes)
    assert found[-1] == found[len(found) // 2]
    assert cache.states._rows <= 2 * HELD


def test_features_are_those_of_transformers_also_after_rollbacks(engine: TransformersEngine) -> None:
    tokens = text(40)
    sequence = engine.sequence(features=True)
    sequence.extend(tokens[:20].tolist(), 1)
    sequence.extend([1, 2, 3, 4], 4)
    sequence.rollback(20)
    sequence.extend(tokens[20:].tolist(), 1)
    with torch.inference_mode():
        states = engine.model(input_ids=tokens[None], output_hidden_states=True).hidden_states
        normed = engine.model.model.norm(sequence.features(0, 40)[None])[0]
    near(normed, states[-1][0])


def test_a_head_on_a_hybrid_whose_last_layer_attends_is_our_own(engine: TransformersEngine) -> None:
    head = HeadEngine(randomised(Head.from_target(engine.model)), engine)
    assert head.cpu_forward is not None
    held, draft = bound(engine, head)
    tokens = text(30)
    held.extend(tokens.tolist(), 1)
    got = draft.extend(tokens.tolist(), 30)
    near(got, module_logits(head.head, held.features(0, 30), tokens))


def test_proposals_for_several_texts_in_one_call_are_those_of_one_after_the_other(engine: TransformersEngine) -> None:
    """With states that are rolled back after each proposal."""
    dice, vocab = random.Random(3), SIZES["vocab_size"]
    together, alone = ([engine.sequence() for _ in range(4)] for _ in range(2))
    texts = [[dice.randrange(vocab) for _ in range(5 + 9 * number)] for number in range(4)]
    for turn in range(10):
        lengths = [1 + (turn + number) % 5 for number in range(4)]

        def call(number: int, held: int, lengths: list[int] = lengths) -> ProposalCall:
            return ProposalCall(texts[number][held:], lengths[number], vocab, GREEDY, [], None)

        found = engine.propose_together([(one, call(n, one.length)) for n, one in enumerate(together)])
        for number, (proposed, one, other) in enumerate(zip(found, together, alone, strict=True)):
            assert proposed.tokens == other.propose(call(number, other.length)).tokens  # type: ignore[union-attr]
            stands = proposed.tokens[: dice.randrange(len(proposed.tokens) + 1)]
            texts[number] += [*stands, dice.randrange(vocab)]
            one.rollback(len(texts[number]) - 1)
            other.rollback(len(texts[number]) - 1)
            assert one.length == other.length
