"""Caches take memory for the actual text, not for the longest possible one. They grow in steps, in all layers or
none."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from conftest import save_random_pair
from shortages import short_of_memory
from transformers import LlamaConfig, LlamaForCausalLM

from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength
from adaptive.engines.hf import engine as hf
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.errors import AdaptiveError
from adaptive.pair import Pair, load_pair
from adaptive.settings import load_settings
from adaptive.types import Message, SamplingParams, StopParams

CONTEXT = 40_000
# Bytes a token in the random pair: keys and values of four heads of 16 float32 numbers, in four layers and in one.
BYTES = {"target": 4 * 2 * 64 * 4, "draft": 2 * 64 * 4}


@pytest.fixture(scope="module", params=["kernels", "transformers"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A random pair with a long context, on our forward and on transformers' own."""
    folders = save_random_pair(tmp_path_factory.mktemp("pair"), "gpt_neox")
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "transformers":
            patch.setattr(hf, "cpu_forward", lambda *_, **__: None)
        target, draft = map(str, folders)
        yield load_pair(load_settings({"target": target, "draft": draft, "dtype": "float32", "device": "cpu"}))


def test_a_short_answer_takes_little_memory_whatever_it_may_be_at_most(pair: Pair) -> None:
    assistant = Assistant(pair, FixedLength(3), None)
    prompt = [Message("user", "One line, please.")]
    steps = assistant.chat(prompt, SamplingParams(0.7, seed=1), StopParams(32_768, ignore_eos=True))
    for _, _ in zip(range(20), steps, strict=False):
        pass
    steps.close()  # type: ignore[attr-defined]
    (conversation,) = assistant.conversations._kept
    assert conversation.draft is not None
    assert 0 < conversation.target.sequence.memory.total <= 2048 * BYTES["target"]
    assert 0 < conversation.draft.sequence.memory.total <= 2048 * BYTES["draft"]


@pytest.mark.thorough
def test_the_drafts_cache_grows_with_the_targets_and_seldom(pair: Pair) -> None:
    assistant = Assistant(pair, FixedLength(3), None)
    prompt = [Message("user", "A long story, please.")]
    sizes = []
    for number, _ in enumerate(assistant.chat(prompt, SamplingParams(0.0), StopParams(1700, ignore_eos=True))):
        if number:  # the draft proposes from the second round on
            (conversation,) = assistant.conversations._kept
            assert conversation.draft is not None
            sizes.append((conversation.target.sequence.memory.total, conversation.draft.sequence.memory.total))
    assert {target // BYTES["target"] for target, _ in sizes} == {draft // BYTES["draft"] for _, draft in sizes}
    assert all(target // BYTES["target"] == draft // BYTES["draft"] for target, draft in sizes)
    assert len(set(sizes)) == 2


@pytest.mark.parametrize("which", ["kernels", "transformers"])
def test_growing_that_fails_half_way_leaves_every_layer_as_it_was(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if which == "transformers":
        monkeypatch.setattr(hf, "cpu_forward", lambda *_, **__: None)
    tokens = 300_000
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=tokens,
    )
    torch.manual_seed(0)
    engine = TransformersEngine(LlamaForCausalLM(config))
    text = torch.randint(50, (90,)).tolist()
    expected = engine.sequence().extend(text, 1).clone()
    sequence = engine.sequence()
    sequence.extend(text[:60], 1)
    before = sequence.memory.total
    each = tokens * 2 * 64 * 4  # bytes of a layer
    with short_of_memory(3 * each + each // 2), pytest.raises(AdaptiveError, match="no memory"):
        sequence.reserve(tokens)
    assert sequence.memory.total == before
    assert sequence.length == 60
    torch.testing.assert_close(sequence.extend(text[60:], 1), expected)
