"""Recorded passes compute the same as eager ones. On CUDA they are replayed; elsewhere the same operations run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import save_random_adapter
from test_cpu_forward import CONFIGS, SIZES, made, text
from transformers import AutoModelForCausalLM, GPTNeoXConfig, PreTrainedModel

from adaptive.assistant import Assistant
from adaptive.control.confidence import CENTRES
from adaptive.control.costs import LONGEST
from adaptive.control.policy import FixedLength
from adaptive.control.stopping import Stopping
from adaptive.drafting.model import ModelDrafter, prepare, warm_up
from adaptive.drafting.queued import Choice
from adaptive.engines.cuda import operations
from adaptive.engines.cuda.forward import DTYPES, FAMILIES, ShortForward
from adaptive.engines.cuda.linear import product
from adaptive.engines.hf import graphs
from adaptive.engines.hf.cache import GROWTH
from adaptive.engines.hf.engine import TransformersEngine, TransformersSequence
from adaptive.engines.hf.graphs import SIZES as TOKENS
from adaptive.engines.load import Choice as ChosenForward
from adaptive.engines.load import Forward, eagle_on
from adaptive.pair import Pair, load_pair
from adaptive.sampling import LogitsProcessor
from adaptive.settings import load_settings
from adaptive.types import SamplingParams, StopParams

QUEUED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=0.9, seed=5),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def engines(model: PreTrainedModel) -> tuple[TransformersEngine, TransformersEngine]:
    """The same model with recorded passes and without."""
    found = []
    for _ in range(2):
        engine = TransformersEngine(model.to(DEVICE))
        engine.cpu_forward = None
        found.append(engine)
    found[0].record()
    return found[0], found[1]


def same(one: TransformersSequence, other: TransformersSequence, tokens: torch.Tensor, rows: int) -> None:
    """Check that both sequences give the same logits for these tokens."""
    found, expected = one.extend(tokens, rows), other.extend(tokens, rows)
    assert found.shape == expected.shape == (rows, SIZES["vocab_size"])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", [*CONFIGS, "gpt-neox"])
def test_recorded_passes_equal_the_models_own(name: str) -> None:
    if name == "gpt-neox":
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(GPTNeoXConfig(**SIZES, rotary_pct=0.5)).double()
    else:
        model = made(name)
    recorded, plain = engines(model)
    one, other = recorded.sequence(), plain.sequence()
    for sequence in (one, other):
        sequence.prepare(100)
        sequence.extend(text(20), 1)
    for count, rows in ((1, 1), (4, 4), (2, 1), (9, 9), (1, 1), (3, 3)):  # windows are 7 tokens
        same(one, other, text(count), rows)
    for sequence in (one, other):
        sequence.rollback(25)
    same(one, other, text(5), 5)
    same(one, other, text(1), 1)
    passes = recorded.recorded
    assert passes is not None
    assert passes.problem is None
    assert passes.replayed == 8
    assert {which.size for which in passes.recordings} == set(TOKENS)
    ours = type(model).__name__ in FAMILIES and (DEVICE == "cpu" or model.dtype in DTYPES) and "activation" not in name
    assert (recorded.short is not None) == ours


def test_a_cache_that_cannot_grow_stays_as_it_is() -> None:
    model = made("llama")
    model.config.max_position_embeddings = 2 * GROWTH
    sequence = engines(model)[1].sequence()
    sequence.extend(text(20), 1)
    cache = sequence.cache
    before = cache.capacity
    with pytest.raises((RuntimeError, MemoryError)):
        cache.reserve(2**50)
    assert cache.capacity == before
    sequence.extend(text(before), 1)
    assert sequence.length == 20 + before


@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_what_was_not_prepared_is_eager_and_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded while a text is under way. For buffers that grew, and beyond the keys that recorded passes
    cover, passes of a model's own forward are eager then; ours have no such limits."""
    monkeypatch.setattr(graphs, "LEAST_KEYS", GROWTH)
    model = made(name)
    model.config.max_position_embeddings = 2 * GROWTH + 4
    recorded, plain = engines(model)
    passes = recorded.recorded
    assert passes is not None
    one, other = recorded.sequence(), plain.sequence()
    for sequence in (one, other):
        sequence.extend(text(3), 1)
        sequence.prepare(GROWTH)
        sequence.extend(text(GROWTH - 9), 1)
    made_of, eager = dict(passes.recordings), 0
    for number, count in enumerate((1, 3, 5, 2, 1)):  # past the buffer's end
        same(one, other, text(count), count)
        eager += number > 1 and recorded.short is None
        assert passes.replayed == number + 1 - eager
    assert passes.recordings == made_of
    one.prepare(2 * GROWTH + 4)  # as for the next answer
    before = passes.replayed
    for count in (1, 4):
        same(one, other, text(count), count)
    assert passes.replayed == before + 2
    for sequence in (one, other):
        sequence.extend(text(2 * GROWTH - sequence.length), 1)
    same(one, other, text(4), 4)  # a pass filled up to five tokens would go beyond the context
    assert passes.replayed == before + 2
    assert passes.problem is None


def test_every_conversation_is_replayed_by_the_same_recordings() -> None:
    recorded, plain = engines(made("gemma3"))
    passes = recorded.recorded
    assert passes is not None
    ours, theirs = [recorded.sequence() for _ in range(3)], [plain.sequence() for _ in range(3)]
    held: dict[graphs.Which, graphs.RecordedPass] = {}
    for turn in range(6):
        number = (turn * 2) % 3
        one, other = ours[number], theirs[number]
        one.prepare(100)
        held = held or dict(passes.recordings)
        assert passes.recordings == held
        before = passes.replayed
        for count in (20 if turn < 3 else 2, 1, 4):
            same(one, other, text(count), 1)
        assert passes.replayed == before + 2 + (turn > 2)
        for sequence in (one, other):
            sequence.rollback(sequence.length - 2)
    one, other = recorded.sequence(), plain.sequence()
    del ours[:]  # freeing caches leaves the recordings usable
    for sequence in (one, other):
        sequence.copy_prefix(theirs[0], 15)
        sequence.prepare(100)
    same(one, other, text(1), 1)
    assert passes.recordings == held


@pytest.mark.parametrize("params", QUEUED, ids=["greedy", "sampled", "cut", "seeded"])
def test_a_proposal_over_recorded_steps_is_the_one_over_eager_steps(params: SamplingParams) -> None:
    """A recorded step is a pass and the choice of a token; other sampling parameters need another recording."""
    made_of = [drafting(engine, params) for engine in engines(made("qwen3").float())]
    committed = text(20).tolist()
    for drafter in made_of:
        drafter.prepare(100, Stopping(LONGEST))
    passes = made_of[0].engine.recorded  # type: ignore[attr-defined]
    assert {which.size for which in passes.recordings} == set(TOKENS)
    assert {which.size for which in passes.recordings if which.chooser is not None} == set(graphs.CHOSEN)
    held, lengths = dict(passes.recordings), set()
    for turn in range(12):
        found = [d.propose(committed, 1 + turn % 6, stops(0.1 * (turn % 3))) for d in made_of]
        one, other = (None if proposal is None else proposal.closed() for proposal in found)
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.tokens == other.tokens
            if one.probs is not None and other.probs is not None:
                torch.testing.assert_close(one.probs, other.probs, rtol=1e-4, atol=1e-5)
        tokens = [] if one is None else one.tokens
        lengths.add(len(tokens))
        for drafter in made_of:
            drafter.rollback(len(committed) + len(tokens) // 2)
        committed += [*tokens[: len(tokens) // 2], turn]  # type: ignore[list-item]
    assert len(lengths) > 1
    assert passes.replayed > 15
    assert passes.recordings == held
    assert passes.problem is None


def test_answers_find_recorded_what_was_warmed_up() -> None:
    target, draft = engines(made("qwen3").float())[0], engines(made("llama").float())[0]
    warm_up(target, draft, QUEUED[0], None)
    held = [dict(engine.recorded.recordings) for engine in (target, draft) if engine.recorded is not None]
    queues = DEVICE == "cuda"
    assert [len(one) for one in held] == [len(TOKENS)] * 2
    for _ in range(2):
        sequence, drafter = target.sequence(), drafting(draft, QUEUED[0])
        drafter.queues = queues
        prepare(sequence, drafter, 30, 50, None)
    assert held == [engine.recorded.recordings for engine in (target, draft) if engine.recorded is not None]


def test_recordings_under_sampling_parameters_that_are_out_of_use_go() -> None:
    engine = engines(made("llama").float())[0]
    assert engine.recorded is not None
    for number in range(graphs.CHOOSERS + 3):
        drafting(engine, SamplingParams(temperature=0.5 + 0.1 * number)).prepare(100, None)
    chosen = [which for which in engine.recorded.recordings if which.chooser is not None]
    assert len(chosen) == graphs.CHOOSERS * len(graphs.CHOSEN)
    assert len(engine.recorded.recordings) == len(chosen) + len(TOKENS) - len(graphs.CHOSEN)


def test_a_proposal_after_tokens_of_others_is_recorded() -> None:
    """After plain rounds or rounds of history, a proposal's first step feeds what these committed."""
    engine = engines(made("llama").float())[0]
    drafter = drafting(engine, SamplingParams(temperature=0.0))
    drafter.prepare(100, None)
    drafter.propose(text(20).tolist(), 2)
    assert engine.recorded is not None
    for count in range(1, TOKENS[-1] + 1):
        drafter.rollback(20)
        before = engine.recorded.replayed
        drafter.propose(text(20 + count).tolist(), 2)
        assert engine.recorded.replayed == before + 2


def test_a_head_that_reads_layers_is_recorded_where_its_target_is() -> None:
    assert eagle_on(ChosenForward(Forward.CUDA_GRAPHS, "cuda:0", torch.bfloat16)).forward is Forward.CUDA_GRAPHS


def stops(below: float) -> Stopping:
    """Thresholds that end proposals at tokens unlikely to be accepted."""
    found = Stopping(LONGEST)
    found.decide(CENTRES, CENTRES, [below] * LONGEST, [below / 2] * (LONGEST - 1))
    return found


def drafting(engine: TransformersEngine, params: SamplingParams) -> ModelDrafter:
    """A drafter that queues its steps, with the same random numbers each time."""
    processor = LogitsProcessor(params, engine.vocab_size, engine.device)
    generator = torch.Generator(engine.device).manual_seed(7)
    drafter = ModelDrafter(engine.sequence(), engine, engine.vocab_size, params, processor, generator)
    drafter.queues = True
    return drafter


def test_a_choice_that_is_recorded_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines(made("llama").float())[0]
    drafter = drafting(engine, QUEUED[0])
    own = Choice.__call__
    calls: list[int] = []

    def once_wrong(self: Choice, logits: torch.Tensor) -> None:
        calls.append(1)
        own(self, logits.flip(-1) if len(calls) == 1 else logits)

    monkeypatch.setattr(Choice, "__call__", once_wrong)
    drafter.prepare(100, None)
    assert engine.recorded is not None
    assert "another choice" in str(engine.recorded.problem)


def test_other_texts_and_adapters_reuse_the_recordings(tmp_path: Path) -> None:
    recorded, plain = engines(made("qwen3"))
    recorded.model.save_pretrained(tmp_path / "model")
    one, other = recorded.sequence(), plain.sequence()
    for sequence in (one, other):
        sequence.prepare(100)
        sequence.extend(text(20), 1)
    same(one, other, text(2), 2)
    passes = recorded.recorded
    assert passes is not None
    held = dict(passes.recordings)
    adapter = save_random_adapter(tmp_path / "model", tmp_path / "adapter")
    for sequence in (one, other):
        sequence.rollback(3)
        sequence.extend(text(30), 1)
    before = plain.sequence().extend(text(22), 1).clone()
    recorded.apply_adapter(adapter)  # both engines run one model
    assert not torch.allclose(plain.sequence().extend(text(22), 1), before)
    same(one, other, text(2), 2)
    assert (passes.recordings, passes.replayed) == (held, 2)
    recorded.apply_adapter(None)


class CompilationError(Exception):
    """Triton's errors are of many kinds."""


def wrong(output: Any) -> Any:
    return SimpleNamespace(logits=output.logits.flip(-1))


def unable(output: Any) -> Any:
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


@pytest.mark.parametrize("fails", [False, True], ids=["is wrong", "fails"])
def test_a_short_forward_that_cannot_be_used_gives_way_to_the_models_own(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = ShortForward.__call__

    def wrongly(self: ShortForward, *given: Any) -> torch.Tensor:
        if fails:
            raise CompilationError("out of resources")
        return own(self, *given).flip(-1)

    monkeypatch.setattr(ShortForward, "__call__", wrongly)
    monkeypatch.setattr(graphs, "LEAST_KEYS", 64)
    recorded, plain = engines(made("llama"))
    one, other = recorded.sequence(), plain.sequence()
    for sequence in (one, other):
        sequence.prepare(100)
        sequence.extend(text(20), 1)
    for count in (1, 4):
        same(one, other, text(count), count)
    assert recorded.short is None
    assert recorded.recorded is not None
    assert (recorded.recorded.problem, recorded.recorded.replayed) == (None, 2)
    assert caplog.text.count("recorded by its own forward") == 1
    assert {(which.size, which.keys) for which in recorded.recorded.recordings} == {(size, 128) for size in TOKENS}


@torch.inference_mode()
def test_layers_that_read_the_same_input_are_one_product_whatever_biases_they_have() -> None:
    for biases in ((True, True), (False, False), (True, False)):
        layers = [torch.nn.Linear(8, 5 + number, bias=bias) for number, bias in enumerate(biases)]
        x = torch.randn(3, 8)
        expected = torch.cat([layer(x) for layer in layers], 1)
        torch.testing.assert_close(product(layers, operations)(x), expected)
        torch.testing.assert_close(torch.cat([layer(x) for layer in layers], 1), expected)


@pytest.mark.parametrize(("fault", "said"), [(wrong, "differs from the eager one"), (unable, "not permitted")])
def test_a_model_that_cannot_be_recorded_stays_eager(
    fault: Callable[[Any], Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorded, plain = engines(made("gemma3"))
    own = recorded.model.forward

    def forward(*args: Any, **named: Any) -> Any:
        output = own(*args, **named)
        return fault(output) if named["past_key_values"].is_compileable else output

    recorded.model.forward = forward  # type: ignore[method-assign]
    one, other = recorded.sequence(), plain.sequence()
    for sequence in (one, other):
        sequence.prepare(100)
        sequence.extend(text(20), 1)
    for count in (1, 4, 1):
        same(one, other, text(count), count)
    assert recorded.recorded is not None
    assert said in str(recorded.recorded.problem)
    assert caplog.text.count("stay eager") == 1


def bundled() -> tuple[Pair, TransformersEngine, TransformersEngine]:
    """The bundled pair on transformers' own forward, and its two engines."""
    pair = load_pair(load_settings({"dtype": "float32"}))
    target, draft = pair.target, pair.draft
    assert isinstance(target, TransformersEngine)
    assert isinstance(draft, TransformersEngine)
    target.cpu_forward = draft.cpu_forward = None
    return pair, target, draft


@pytest.mark.thorough
def test_answers_are_the_same_with_recorded_passes(prompts: list[str]) -> None:
    pair, target, draft = bundled()
    answers = []
    for record in (False, True):
        if record:
            target.record()
            draft.record()
        for length in (0, 3):
            assistant = Assistant(pair, FixedLength(length), None)
            for prompt in prompts[:2]:
                for _ in assistant.complete(prompt, SamplingParams(), StopParams(32, ignore_eos=True)):
                    pass
                assert assistant.last is not None
                answers.append(assistant.last.output)
    assert answers[0:2] == answers[2:4] == answers[4:6] == answers[6:8]
    for engine in (target, draft):
        assert engine.recorded is not None
        assert engine.recorded.problem is None
        assert engine.recorded.replayed > 20
