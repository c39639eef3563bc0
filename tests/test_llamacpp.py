"""The llama.cpp engine produces the text of llama.cpp alone, whatever is drafted."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BUNDLED, save_random_adapter
from gguf_pair import decode_alone, engine, write_bundled
from hypothesis import given, settings
from hypothesis import strategies as st
from test_conversations import check_copies
from test_grafting import Always
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaptive.assistant import Assistant, encode_chat
from adaptive.control.policy import FixedLength
from adaptive.drafting.archive import History
from adaptive.engines.llamacpp import model as llama_model
from adaptive.engines.llamacpp.engine import BATCH, ROWS, LlamaCppEngine
from adaptive.engines.llamacpp.lora import write_adapter
from adaptive.errors import AdaptiveError
from adaptive.pair import Pair, PairIdentity
from adaptive.types import Message, SamplingParams, StopParams
from checkpoints.manifest import BaseDraft

TOKENS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def target(folder: Path) -> LlamaCppEngine:
    return engine(write_bundled("target", folder, "f32"))


@pytest.fixture(scope="module")
def draft(folder: Path) -> LlamaCppEngine:
    return engine(write_bundled("draft", folder, "f32"))


@pytest.fixture
def pair(target: LlamaCppEngine, draft: LlamaCppEngine) -> Pair:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    return Pair(PairIdentity("gguf", BaseDraft("draft", "0")), target, draft, tokenizer, ())


def answer(pair: Pair, prompt: str, length: int, sampling: SamplingParams | None = None, tokens: int = TOKENS) -> Any:
    assistant = Assistant(pair, FixedLength(length), None)
    for _ in assistant.chat(
        (Message("user", prompt),), sampling or SamplingParams(), StopParams(tokens, ignore_eos=True)
    ):
        pass
    assert assistant.last is not None
    return assistant.last


@pytest.mark.parametrize("length", [0, 1, 4, 9])
def test_greedy_output_equals_llama_cpp_alone(pair: Pair, prompts: list[str], length: int) -> None:
    for prompt in prompts[::7]:
        alone, _ = decode_alone(pair.target.llama.path, encode_chat(pair, (Message("user", prompt),)), TOKENS)  # type: ignore[attr-defined]
        assert answer(pair, prompt, length).output == alone


@pytest.mark.parametrize("way", ["history", "history+model", "model+history"])
def test_greedy_output_equals_llama_cpp_alone_with_history(pair: Pair, prompts: list[str], way: str) -> None:
    """Every second prompt was just answered, so that history holds the text of its conversation."""
    policy = FixedLength(8) if way == "history" else Always(way == "history+model")
    assistant = Assistant(pair, policy, None, history=History(None))
    drafters: set[str] = set()
    stop = StopParams(TOKENS, ignore_eos=True)
    for prompt in prompts[::5]:
        messages = [Message("user", prompt)]
        for _ in range(2):
            alone, _ = decode_alone(pair.target.llama.path, encode_chat(pair, messages), TOKENS)  # type: ignore[attr-defined]
            assert [step.token for step in assistant.chat(messages, SamplingParams(), stop)] == alone
            assert assistant.last is not None
            drafters |= {outcome.drafter for outcome in assistant.last.rounds}
            messages += [Message("assistant", assistant.last.text), Message("user", "Say it again.")]
    assert way in drafters


def test_greedy_output_equals_llama_cpp_alone_with_an_adapter(
    pair: Pair, draft: LlamaCppEngine, prompts: list[str], tmp_path: Path
) -> None:
    draft.apply_adapter(save_random_adapter(BUNDLED / "draft", tmp_path / "adapter"))
    try:
        for prompt in prompts[::7]:
            alone, _ = decode_alone(pair.target.llama.path, encode_chat(pair, (Message("user", prompt),)), TOKENS)  # type: ignore[attr-defined]
            assert answer(pair, prompt, 4).output == alone
    finally:
        draft.apply_adapter(None)


def test_a_draft_of_its_own_weights_is_always_accepted(target: LlamaCppEngine, pair: Pair, prompts: list[str]) -> None:
    same = dataclasses.replace(pair, draft=engine(target.llama.path))
    done = answer(same, prompts[0], 4)
    assert sum(r.accepted for r in done.rounds) >= 0.97 * sum(r.drafted for r in done.rounds)


def test_sampled_output_does_not_depend_on_where_the_cache_was_rolled_back(pair: Pair, prompts: list[str]) -> None:
    """llama.cpp keeps keys and values in 16 bits, so that reading a prompt in other passes changes probabilities
    slightly: in a trial 2 of 24 answers of 60 tokens then differed somewhere. With a wrong cache every answer
    differs."""
    assistant = Assistant(pair, FixedLength(4), None)
    same = 0
    for seed in range(8):
        sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=seed)
        outputs = []
        for _ in range(2):  # the second run finds the prompt in its cache
            for _ in assistant.chat((Message("user", prompts[3]),), sampling, StopParams(40, ignore_eos=True)):
                pass
            assert assistant.last is not None
            outputs.append(assistant.last.output)
        same += outputs[0] == outputs[1]
    assert same >= 5


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12), st.integers(0, 2**31))
def test_rollback_leaves_what_never_having_seen_the_rest_would(
    draft: LlamaCppEngine, moves: list[tuple[int, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sequence, held = draft.sequence(), torch.empty(0, dtype=torch.long)
    for appended, removed in moves:
        tokens = torch.randint(3, draft.vocab_size, (appended,), generator=generator)
        sequence.extend(tokens, 1)
        held = torch.cat([held, tokens])[: max(1, len(held) + appended - removed)]
        sequence.rollback(len(held))
        assert sequence.length == len(held)
    probe = torch.randint(3, draft.vocab_size, (3,), generator=generator)
    fresh = draft.sequence()
    fresh.extend(held, 0)
    torch.testing.assert_close(sequence.extend(probe, 3), fresh.extend(probe, 3), atol=2e-3, rtol=0)


def test_a_copied_prefix_is_continued_as_the_text_it_came_from(draft: LlamaCppEngine) -> None:
    check_copies(draft)


def test_logits_are_those_of_transformers_also_in_long_and_grown_passes(draft: LlamaCppEngine) -> None:
    reference = AutoModelForCausalLM.from_pretrained(BUNDLED / "draft", dtype=torch.float32)
    tokens = torch.randint(3, draft.vocab_size, (2 * BATCH + 300,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    sequence = draft.sequence()
    sequence.reserve(16)
    assert sequence.extend(tokens[:10], 0).shape == (0, draft.vocab_size)
    rows = 2 * ROWS + 7
    found = sequence.extend(tokens[10:], rows)
    assert sequence.length == len(tokens)
    assert sequence.memory.total >= len(tokens) * draft.bytes_per_token
    torch.testing.assert_close(found, expected[-rows:], atol=0.05, rtol=0)
    grown = draft.sequence()
    grown.extend(tokens[:900], 0)
    grown.reserve(1500)  # beyond the first context: its state moves to a larger one
    torch.testing.assert_close(grown.extend(tokens[900:905], 5), expected[900:905], atol=0.05, rtol=0)


def test_logits_outlive_the_sequence_that_they_came_from(draft: LlamaCppEngine) -> None:
    sequence = draft.sequence()
    first = sequence.extend(torch.tensor([5, 6, 7]), 2)
    kept = first.clone()
    context = weakref.ref(sequence._context)
    del sequence
    gc.collect()
    others = [draft.sequence().extend(torch.tensor([8, 9]), 2) for _ in range(5)]  # would reuse freed memory
    assert torch.equal(first, kept)
    assert len(others) == 5
    del first, others
    gc.collect()
    assert context() is None


def test_a_pass_that_was_interrupted_is_forgotten(draft: LlamaCppEngine) -> None:
    sequence, fresh = draft.sequence(), draft.sequence()
    tokens = torch.arange(10, 30)
    sequence.extend(tokens, 0)
    sequence.extend(torch.tensor([40, 41]), 1)
    sequence.length = 20  # as an exception between the library's call and our bookkeeping leaves it
    fresh.extend(tokens, 0)
    probe = torch.tensor([50, 51])
    torch.testing.assert_close(sequence.extend(probe, 2), fresh.extend(probe, 2), atol=1e-3, rtol=0)


def test_a_sequence_that_found_no_memory_to_grow_begins_anew(
    draft: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence, fresh = draft.sequence(), draft.sequence()
    sequence.extend(torch.arange(10, 30), 0)

    def refuse(model: object, capacity: int) -> None:  # as if memory were short
        raise AdaptiveError("no memory")

    with monkeypatch.context() as short:
        short.setattr(draft, "new_context", refuse)
        with pytest.raises(AdaptiveError):
            sequence.reserve(sequence.capacity + 1)
    assert sequence.length == 0
    probe = torch.tensor([50, 51])
    torch.testing.assert_close(sequence.extend(probe, 2), fresh.extend(probe, 2), atol=1e-3, rtol=0)


def test_an_adapter_predicts_as_peft_does(folder: Path, prompts: list[str], tmp_path: Path) -> None:
    from peft import PeftModel

    drafting = engine(write_bundled("draft", folder, "bf16"))
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "draft")
    tokens = torch.tensor(tokenizer.encode("\n".join(prompts))[:1500])
    adapter = save_random_adapter(BUNDLED / "draft", tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(BUNDLED / "draft", dtype=torch.float32)
    sequence = drafting.sequence()
    before = sequence.extend(tokens, len(tokens)).argmax(-1)
    drafting.apply_adapter(adapter)
    sequence.rollback(0)  # the existing sequence uses the adapter too
    after = sequence.extend(tokens, len(tokens)).argmax(-1)
    with torch.inference_mode():
        expected = PeftModel.from_pretrained(plain, str(adapter))(tokens[None]).logits[0].argmax(-1)
    assert (after == expected).float().mean() >= 0.98
    assert (before == expected).float().mean() < 0.9  # otherwise the adapter would prove nothing
    drafting.apply_adapter(None)
    sequence.rollback(0)
    assert torch.equal(sequence.extend(tokens, len(tokens)).argmax(-1), before)


def test_llama_cpp_itself_reads_the_adapter_file(draft: LlamaCppEngine, prompts: list[str], tmp_path: Path) -> None:
    adapter = save_random_adapter(BUNDLED / "draft", tmp_path / "adapter")
    write_adapter(adapter, draft.llama, tmp_path / "adapter.gguf")
    prompt = AutoTokenizer.from_pretrained(BUNDLED / "draft").encode(prompts[0])
    _, theirs = decode_alone(draft.llama.path, prompt, 5, tmp_path / "adapter.gguf")
    sequence = draft.sequence()
    draft.apply_adapter(adapter)
    try:
        ours = sequence.extend(torch.tensor(prompt), 1)
    finally:
        draft.apply_adapter(None)
    torch.testing.assert_close(ours[0], theirs[0], atol=2e-3, rtol=0)


# Runs in a process of its own, so that no other model is loaded or freed meanwhile.
BYTES_WANTED_HUGE = """
import sys
from pathlib import Path
from adaptive.engines.llamacpp import model as llama_model

def wanted():
    total = size = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size = 1024 * int(line.split()[1])
        elif line.startswith("VmFlags:") and "hg" in line.split():
            total += size
    return total

file, before = Path(sys.argv[1]), wanted()
read = llama_model.LlamaModel(file)
after = wanted()
llama_model.OWN_SHARE = 0.0
mapped = llama_model.LlamaModel(file)
print(read.size, after - before, wanted() - after)
"""


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages on request"
)
def test_weights_lie_in_huge_pages_unless_memory_is_short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_bundled("target", folder, "f32")
    ran = subprocess.run(
        [sys.executable, "-c", BYTES_WANTED_HUGE, str(file)],
        cwd=BUNDLED.parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    size, read_bytes, mapped_bytes = map(int, ran.stdout.split())
    assert read_bytes >= 0.9 * size
    assert mapped_bytes == 0
    read = engine(file)
    monkeypatch.setattr(llama_model, "OWN_SHARE", 0.0)
    mapped = engine(file)
    tokens = [5, 6, 7]
    assert torch.equal(read.sequence().extend(tokens, 3), mapped.sequence().extend(tokens, 3))
