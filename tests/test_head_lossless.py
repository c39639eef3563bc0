"""Whatever a head proposes, the text is the target's own: equal tokens when greedy or seeded, the same distribution
when sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import BUNDLED, save_head, save_random_pair
from test_head_module import randomised
from test_lossless_sampled import IDS, PARAMS, VOCAB, exact_distribution, p_value, run_loop
from transformers import LlamaConfig, LlamaForCausalLM

from adaptive.assistant import Assistant, length_policy
from adaptive.caches import Conversation
from adaptive.control.policy import FixedLength
from adaptive.engines.head.engine import HeadEngine, HeadSequence
from adaptive.engines.head.module import Head
from adaptive.engines.hf.engine import TransformersEngine, TransformersSequence
from adaptive.engines.protocol import sequences
from adaptive.pair import Pair, load_pair, pair_identity
from adaptive.settings import Settings, load_settings
from adaptive.types import Message, SamplingParams, StopParams

GREEDY = SamplingParams(temperature=0.0)
# Tokens of an answer, by our forward and by transformers', which takes five times as long.
TOKENS, THEIR_TOKENS = 200, 80
# Noise relative to the weights. At this value the head loses about half of what it has from its target.
NOISE = 0.7


def settings_of(target: Path | str, draft: Path, **options: str) -> Settings:
    """Settings for a target and a head."""
    return load_settings({"target": str(target), "draft": str(draft), "dtype": "float32", **options})


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The bundled target, and one of random weights of another architecture."""
    return {
        "bundled": BUNDLED / "target",
        "qwen2": save_random_pair(tmp_path_factory.mktemp("qwen2"), "qwen2")[0],
    }


def said(
    assistant: Assistant, prompts: list[str], sampling: SamplingParams = GREEDY, most: int = TOKENS
) -> list[list[int]]:
    """The tokens of the answer to each prompt, one conversation each."""
    stop = StopParams(max_new_tokens=most)
    return [[step.token for step in assistant.chat([Message("user", prompt)], sampling, stop)] for prompt in prompts]


def alone(pair: Pair, prompts: list[str], most: int = TOKENS) -> list[list[int]]:
    """The answers of the target without a draft, on the same forward."""
    plain = Assistant(Pair(pair.identity, pair.target, None, pair.tokenizer, ()), FixedLength(0), None)
    return said(plain, prompts, most=most)


@pytest.mark.thorough
@pytest.mark.parametrize("some", [pytest.param(1, marks=pytest.mark.long, id="twenty-prompts"), 5])
@pytest.mark.parametrize("ours", [True, False], ids=["kernels", "transformers"])
@pytest.mark.parametrize("noise", [None, NOISE], ids=["last-layer", "random"])
@pytest.mark.parametrize("name", ["bundled", "qwen2"])
def test_greedy_output_equals_the_target_alone(
    targets: dict[str, Path], name: str, noise: float | None, ours: bool, some: int, prompts: list[str], tmp_path: Path
) -> None:
    pair = load_pair(settings_of(targets[name], save_head(targets[name], tmp_path / "head", noise)))
    target, head = pair.target, pair.draft
    assert isinstance(target, TransformersEngine)
    assert isinstance(head, HeadEngine)
    if not ours:
        target.cpu_forward = head.cpu_forward = None
    whole = some == 1
    longest = TOKENS if ours or whole else THEIR_TOKENS
    prompts = prompts[::some] if ours else prompts[:: some + 5]
    wanted = alone(pair, prompts, longest)
    for length in ("1", "4", "9", "auto"):
        # Short and long drafts are slowest: one token a round, or nine steps of which hardly any is accepted.
        most = longest if whole or length in ("4", "auto") else longest // 3
        assistant = Assistant(pair, length_policy(load_settings({"draft_length": length})), None)
        accepted = drafted = 0
        for prompt, right in zip(prompts, wanted, strict=True):
            assert said(assistant, [prompt], most=most) == [right[:most]]
            assert assistant.last is not None
            assert {outcome.drafter for outcome in assistant.last.rounds} <= {"head", "none"}
            accepted, drafted = accepted + assistant.last.accepted, drafted + assistant.last.drafted
        if length != "auto":
            # With random weights the head keeps almost nothing of what it has from its target.
            if name == "bundled" and noise is None:
                assert accepted > 0
            assert accepted < drafted


@pytest.mark.thorough
def test_a_conversation_goes_on_from_what_both_hold(
    targets: dict[str, Path], prompts: list[str], tmp_path: Path
) -> None:
    """Also when the caches of another conversation are copied, and after the head is swapped."""
    target = targets["bundled"]
    pair = load_pair(settings_of(target, save_head(target, tmp_path / "head")))
    other = save_head(target, tmp_path / "other", NOISE)
    plain = Assistant(Pair(pair.identity, pair.target, None, pair.tokenizer, ()), FixedLength(0), None)
    drafted = Assistant(pair, FixedLength(4), None, cache_bytes=2**28)
    stop = StopParams(max_new_tokens=60, ignore_eos=True)
    system = Message("system", "You answer in short sentences. " * 8)
    accepted = 0
    for number, prompt in enumerate(prompts[:6]):
        messages = [system, Message("user", prompt)]
        for more in ("Go on.", "Say it again."):
            texts = []
            for assistant in (plain, drafted):
                steps = list(assistant.chat(messages, GREEDY, stop))
                texts.append([step.token for step in steps])
            assert texts[0] == texts[1]
            assert drafted.last is not None
            accepted += drafted.last.accepted
            as_if_new(pair, drafted.conversations.take(drafted.last.committed))
            messages += [Message("assistant", drafted.last.text), Message("user", more)]
        if number in (1, 3):
            drafted.use_adapter("0001" if number == 1 else None, other if number == 1 else None)
    assert accepted > 0


def as_if_new(pair: Pair, conversation: Conversation) -> None:
    """Check that the head's state of a conversation equals the state after reading the text in one pass."""
    held = conversation.draft
    assert held is not None
    assert isinstance(held.sequence, HeadSequence)
    assert held.sequence.target is conversation.target.sequence
    length = held.sequence.length
    assert length > 0
    target, head = sequences(pair.target, pair.draft)
    assert isinstance(head, HeadSequence)
    tokens = conversation.target.tokens[:length]
    target.extend(tokens, 1)
    head.extend(tokens, 1)
    found, right = held.sequence.features(0, length), head.features(0, length)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-3 * float(right.abs().max()))


@pytest.mark.thorough
def test_a_head_that_is_promoted_within_an_answer_drafts_the_rest_of_it(
    targets: dict[str, Path], prompts: list[str], tmp_path: Path
) -> None:
    target = targets["bundled"]
    settings = load_settings({"target": str(target), "draft": "auto", "dtype": "float32"})
    pair, trained = load_pair(settings), save_head(target, tmp_path / "head")
    assert isinstance(pair.draft, HeadEngine)
    assert not pair.draft.ready
    assistant, looks = Assistant(pair, FixedLength(4), None), 0

    def between() -> bool:
        nonlocal looks
        looks += 1
        if looks == 5:
            assistant.begin_swap("0001", trained)
        return assistant.finish_swap(0.005)

    assistant.between_rounds = between
    assert said(assistant, prompts[4:5]) == alone(pair, prompts[4:5])
    assert assistant.last is not None
    drafters = [outcome.drafter for outcome in assistant.last.rounds]
    begins = drafters.index("head")
    assert begins >= 4
    assert set(drafters[:begins]) == {"none"}
    assert drafters[begins:].count("head") > len(drafters[begins:]) // 2
    assert [adapter for adapter, _ in assistant.drafted_by] == [None, "0001"]
    assistant.use_adapter(None, None)
    said(assistant, prompts[4:5], most=20)
    assert {outcome.drafter for outcome in assistant.last.rounds} == {"none"}


@pytest.fixture(scope="module")
def models() -> tuple[TransformersEngine, HeadEngine]:
    """A tiny target over eight tokens, and a head that agrees with it only in part."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    target = TransformersEngine(model)
    return target, HeadEngine(randomised(Head.from_target(model)), target)


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["one-call", "by-token"])
@pytest.mark.parametrize("params", PARAMS, ids=IDS)
def test_the_whole_loop_samples_from_the_target(
    models: tuple[TransformersEngine, HeadEngine], params: SamplingParams, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "by-token":
        monkeypatch.setattr(TransformersSequence, "fused", None)
        monkeypatch.setattr(HeadSequence, "fused", None)
    assert p_value(run_loop(models, params, length=2), exact_distribution(models[0], params)) > 0.001


@pytest.mark.thorough
@pytest.mark.parametrize("params", [PARAMS[1], PARAMS[4]], ids=[IDS[1], IDS[4]])
def test_over_all_seeds_the_whole_loop_samples_from_the_target(
    models: tuple[TransformersEngine, HeadEngine], params: SamplingParams
) -> None:
    counts = run_loop(models, params, length=2, seeded=True)
    assert p_value(counts, exact_distribution(models[0], params)) > 0.001


@pytest.mark.thorough
@pytest.mark.parametrize("ours", [True, False], ids=["kernels", "transformers"])
def test_a_seed_means_the_same_text_whatever_drafts(
    targets: dict[str, Path], ours: bool, prompts: list[str], tmp_path: Path
) -> None:
    target = targets["bundled"]
    pairs = [load_pair(settings_of(target, BUNDLED / "draft"))]
    pairs += [load_pair(settings_of(target, save_head(target, tmp_path / f"{n}", n))) for n in (0.0, NOISE)]
    texts = []
    for pair in pairs:
        if not ours:
            pair.target.cpu_forward = pair.draft.cpu_forward = None  # type: ignore[union-attr, attr-defined]
        for length in (0, 3):
            assistant = Assistant(pair, FixedLength(length), None)
            texts.append(said(assistant, prompts[::9], SamplingParams(temperature=0.8, seed=5), 60 if ours else 30))
    assert all(text == texts[0] for text in texts)


def test_a_head_is_loaded_as_one_and_has_a_state_of_its_own(targets: dict[str, Path], tmp_path: Path) -> None:
    target = targets["bundled"]
    one, other = save_head(target, tmp_path / "one"), save_head(target, tmp_path / "other", NOISE)
    ids = [pair_identity(settings_of(target, folder)) for folder in (one, other, BUNDLED / "draft")]
    assert len({identity.id for identity in ids}) == 3
    assert len({identity.base for identity in ids}) == 3
    assert ids[0].id.startswith("target--one-")
    pair = load_pair(settings_of(target, one))
    assert pair.identity == ids[0]
    assert pair.draft is not None
    assert (pair.draft.name, pair.draft.weights) == ("head", "float32")
