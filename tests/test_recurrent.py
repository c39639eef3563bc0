"""Models with recurrent and convolutional state: rolled-back tokens leave no trace in the state."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Greedy, alone, noisy, prompt_of, tiny_model

from adaptive.engines.cpu import kernels
from adaptive.engines.cpu.delta import States
from adaptive.engines.cpu.kernels import library
from adaptive.engines.hf import engine
from adaptive.engines.hf.cache import RollbackCache
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.hf.recurrent import State
from adaptive.engines.state_checkpoints import CHECKPOINTS, REMEMBER_BEFORE
from trainers.lora import Recipe, attach

TOKENS = 20
RECURRENT = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
OURS = " by our own forward"
# Gated delta nets, a state space dual beside attention in one layer, and short convolutions; two layers each.
TYPES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": RECURRENT,
    "qwen3_5_text" + OURS: RECURRENT,
    "falcon_h1": {"num_hidden_layers": 2},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}
# The same among other layers; a delta rule with a decay for each channel, a selective scan, and a limit on time steps
# that transformers applies in prompts only.
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_next": RECURRENT,
    "granitemoehybrid": RECURRENT,
    "kimi_linear": RECURRENT,
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron_h": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "moe", "full_attention"]},
}


class Case:
    """A model as target and as its own draft, and a draft that agrees with it now and then."""

    def __init__(self, name: str) -> None:
        self.ours = name.endswith(OURS)
        self.model = tiny_model(name.removesuffix(OURS), **{**TYPES, **OTHERS}[name])
        self.target = engine_of(self.model, self.ours)
        self.target.check()
        self.draft = engine_of(noisy(self.model), self.ours)
        self.prompt = prompt_of(40)
        self.expected = alone(self.model, self.prompt, TOKENS)


def engine_of(model: Any, ours: bool) -> TransformersEngine:
    """An engine with our own forward or with transformers'."""
    if not ours:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(engine, "cpu_forward", lambda *given, **named: None)
            return TransformersEngine(model)
    made = TransformersEngine(model)
    assert made.cpu_forward is not None
    assert made.cpu_forward.fused
    return made


@pytest.fixture(scope="module", params=TYPES)
def case(request: pytest.FixtureRequest) -> Case:
    if request.param.endswith(OURS) and kernels.library() is None:
        pytest.skip("the kernels are not built, or not for this processor")
    return Case(request.param)


@pytest.mark.long
@pytest.mark.parametrize("name", [*TYPES, *OTHERS, "qwen3_5_moe_text", "mamba2"])
def test_ten_prompts_of_two_hundred_tokens(name: str, tmp_path: Path) -> None:
    """Each prompt is answered, answered again and continued after an edit, at every length, with and without an adapter
    that changes the draft."""
    ours = name.endswith(OURS)
    model = tiny_model(name.removesuffix(OURS), **{**TYPES, **OTHERS}.get(name, {}))
    target, draft = engine_of(model, ours), engine_of(noisy(model), ours)
    trained = attach(noisy(model), Recipe(rank=4))
    with torch.no_grad():
        for title, weight in trained.named_parameters():
            if "lora_B" in title:
                weight.normal_(std=0.02, generator=torch.Generator().manual_seed(1))
    trained.save_pretrained(tmp_path)
    target.check()
    assert target.undraftable is None
    drafted: tuple[list[float], list[float]] = ([], [])
    for seed in range(10):
        prompt, edited = prompt_of(40, seed=seed), prompt_of(30, seed=seed + 100)
        expected = alone(model, prompt, 200)
        turn = [*prompt, *expected[:50], *edited]
        after = alone(model, turn, 40)
        for adapter, length in itertools.product((None, tmp_path), (1, 4, 9, None)):
            draft.apply_adapter(adapter)
            greedy = Greedy(target, draft, length)
            assert greedy.say(prompt, 200) == expected
            drafted[adapter is not None].append(greedy.accepted)
            greedy.again(len(prompt) - 1)
            assert greedy.say(prompt, 200) == expected
            greedy.again(len(prompt) + 50)
            assert greedy.say(turn, 40) == after
    assert all(sum(shares) for shares in drafted)
    assert drafted[0] != drafted[1]


@pytest.mark.parametrize("model_type", OTHERS)
def test_greedy_output_of_other_kinds_equals_target_alone(model_type: str) -> None:
    case = Case(model_type)
    assert case.target.undraftable is None
    for length in (1, 4, 9, None) if model_type == "qwen3_next" else (4,):
        greedy = Greedy(case.target, case.draft, length)
        assert greedy.say(case.prompt, TOKENS) == case.expected
    assert 0 < greedy.accepted < 1 or length is None
    itself = Greedy(case.target, case.target, 4)
    assert itself.say(case.prompt, TOKENS) == case.expected
    assert itself.accepted == 1


@pytest.mark.parametrize("length", [1, 4, 9, None], ids=["1", "4", "9", "auto"])
def test_greedy_output_equals_target_alone(case: Case, length: int | None) -> None:
    assert case.target.undraftable is None
    greedy = Greedy(case.target, case.draft, length)
    assert greedy.say(case.prompt, TOKENS) == case.expected
    if length is not None:
        assert 0 < greedy.accepted < 1, "nothing was accepted, or nothing taken back: this would test neither"


def test_a_target_that_drafts_for_itself_is_always_right(case: Case) -> None:
    """This draft is rolled back too, after single steps."""
    greedy = Greedy(case.target, case.target, 4)
    assert greedy.say(case.prompt, TOKENS) == case.expected
    assert greedy.accepted == 1


def test_nothing_is_fed_twice_within_an_answer(case: Case) -> None:
    """Rollbacks need no extra passes: the target is fed each committed token and each rejected token once."""
    greedy = Greedy(case.target, case.draft, 4)
    greedy.say(case.prompt, TOKENS)
    rejected = sum(outcome.drafted - outcome.accepted for outcome in greedy.rounds)
    committed = len(case.prompt) + sum(1 + outcome.accepted for outcome in greedy.rounds)
    assert greedy.fed == committed - 1 + rejected


def test_a_rollback_that_keeps_the_state_is_found(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves that the tests above cover the state: without a rollback of the state the answer changes, and the check at
    loading finds it."""

    def wrong(self: State, length: int) -> None:
        self.length = self._done = length
        self._marks = [self._mark()]
        self._calls = []

    def ours_wrong(self: States, length: int) -> int:
        self.length, self._ahead = length, None
        with torch.inference_mode():
            self._inputs.zero_()
            self._chunks.zero_()
        return length

    monkeypatch.setattr(State, "rollback", wrong)
    monkeypatch.setattr(States, "rollback", ours_wrong)
    assert Greedy(case.target, case.draft, 4).say(case.prompt, TOKENS) != case.expected
    if case.ours:  # no check at loading
        return
    other = engine_of(case.model, ours=False)
    other.check()
    assert other.undraftable is not None


def test_an_answer_made_again_is_the_same_and_computes_little(case: Case) -> None:
    greedy = Greedy(case.target, case.draft, 4)
    assert greedy.say(case.prompt, TOKENS) == case.expected
    greedy.again(len(case.prompt) - 1)
    remembered = len(case.prompt) - REMEMBER_BEFORE
    assert greedy.target.length == (whole_chunks(remembered) if case.ours else remembered)
    assert greedy.say(case.prompt, TOKENS) == case.expected


def test_an_edited_message_and_the_next_turn(case: Case) -> None:
    greedy = Greedy(case.target, case.draft, 4)
    first = greedy.say(case.prompt, 20)
    whole = [*case.prompt, *first]
    turn = [*whole, *prompt_of(30, seed=1)]
    assert greedy.target.length == len(whole) - 1
    assert greedy.say(turn, 20) == alone(case.model, turn, 20)
    greedy.again(len(whole) - 1)
    assert 0 < greedy.target.length < len(whole)
    edited = [*whole, *prompt_of(25, seed=2)]
    assert greedy.say(edited, 20) == alone(case.model, edited, 20)


def test_a_copied_beginning_goes_on_alone(case: Case) -> None:
    one, other = Greedy(case.target, case.draft, 4), Greedy(case.target, case.draft, 4)
    one.say(case.prompt, 20)
    other.target.copy_prefix(one.target, len(case.prompt) - 1)
    assert 0 < other.target.length < len(case.prompt)
    assert other.say(case.prompt, TOKENS) == case.expected
    turn = [*case.prompt, *case.expected[:20], *prompt_of(12)]
    assert one.say(turn, 12) == alone(case.model, turn, 12)


def whole_chunks(length: int) -> int:
    """The largest number of a text's tokens that our forward has applied to its state."""
    found = library()
    assert found is not None
    return length // found.chunk * found.chunk


def state_of(cache: Any) -> list[torch.Tensor]:
    assert cache.states is not None
    if isinstance(cache.states, States):
        cache.states.checkpoint()
        length, kept = cache.states._checkpoints.last(cache.states.length)
        assert length == whole_chunks(cache.states.length)
        return [kept.states, kept.inputs]
    assert isinstance(cache, RollbackCache)
    found = []
    for state in cache.states._all:
        window = state.window()
        found += [tensor for tensor in (window, state.recurrent) if tensor is not None]
    return found


def test_after_a_verdict_the_state_is_that_of_the_accepted_tokens(case: Case) -> None:
    for accepted in (0, 1, 3, 5):
        kept, straight = case.target.sequence(), case.target.sequence()
        kept.extend(case.prompt, 1)
        kept.extend(prompt_of(6), 6)
        kept.rollback(len(case.prompt) + accepted)
        straight.extend(case.prompt, 1)
        if accepted:
            straight.extend(prompt_of(6)[:accepted], accepted)
        assert kept.length == straight.length
        if case.ours:  # our forward applies tokens to a state by whole chunks
            for sequence in (kept, straight):
                sequence.extend(prompt_of(20), 1)
        for one, other in zip(state_of(kept.cache), state_of(straight.cache), strict=True):  # type: ignore[union-attr]
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_memory_of_states_is_bounded_and_counted(case: Case) -> None:
    sequence = case.target.sequence()
    sequence.extend(case.prompt, 1)
    cache = sequence.cache  # type: ignore[union-attr]
    one_state = sum(tensor.nbytes for tensor in state_of(cache))
    found = []
    for turn in range(7):
        for seed in range(3):
            held = sequence.length
            sequence.extend(prompt_of(6, seed), 6)
            sequence.rollback(held + 1 + seed)
        sequence.extend(prompt_of(40, turn), 1)
        found.append(sequence.memory.states + sequence.memory.checkpoints)
    assert sequence.memory.total == found[-1] + sequence.memory.keys > found[-1] > 0
    assert sequence.memory.checkpoints > 0
    assert found[-1] == found[-2]
    # The state, two marks, checkpoints; and the inputs of the last pass, at most as wide as a layer's inputs.
    inputs = 16 * 8 * case.model.config.hidden_size * 4 * 6
    assert found[-1] <= (3 + CHECKPOINTS) * one_state + inputs * case.model.config.num_hidden_layers
