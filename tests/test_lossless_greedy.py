"""Greedy output is the target's own, token for token, whatever drafts it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import BUNDLED, save_random_adapter, save_random_pair

from adaptive.assistant import Assistant, encode_chat
from adaptive.control.policy import FixedLength
from adaptive.pair import Pair, load_pair
from adaptive.settings import load_settings
from adaptive.types import Message, SamplingParams, StopParams

GREEDY = SamplingParams(temperature=0.0)
# Tokens of an answer by the bundled pair, which was trained, and by pairs of random weights.
TOKENS, RANDOM_TOKENS = 200, 80


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of one pair in one xdist worker, so that transformers generates only once. pytest-xdist does not
    see marks on a fixture's own parameters."""
    if "pair" in metafunc.fixturenames:
        names = ("bundled", "gpt_neox", "qwen2")
        together = [pytest.param(name, marks=pytest.mark.xdist_group(f"greedy-{name}")) for name in names]
        metafunc.parametrize("pair", together, indirect=True, scope="module")


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The bundled pair, and pairs of random weights of two other architectures."""
    if request.param == "bundled":
        target, draft = BUNDLED / "target", BUNDLED / "draft"
    else:
        target, draft = save_random_pair(tmp_path_factory.mktemp(request.param), request.param)
    return load_pair(load_settings({"target": str(target), "draft": str(draft), "dtype": "float32"}))


@pytest.fixture(scope="module")
def expected(pair: Pair, prompts: list[str]) -> list[list[int]]:
    """Answers by transformers' own ``generate`` of the target alone to all prompts, in one batch."""
    from transformers import AutoModelForCausalLM

    target, _ = _folders(pair)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    texts = [encode_chat(pair, [Message("user", prompt)]) for prompt in prompts]
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    ends = model.generation_config.eos_token_id
    answers = model.generate(ids, attention_mask=mask, max_new_tokens=tokens(pair), do_sample=False, pad_token_id=ends)
    outputs = answers[:, width:].tolist()
    return [output[: output.index(ends) + 1] if ends in output else output for output in outputs]


def _folders(pair: Pair) -> tuple[Path, Path]:
    target: Path = Path(pair.target.model.name_or_path)  # type: ignore[attr-defined]
    draft: Path = Path(pair.draft.model.name_or_path)  # type: ignore[union-attr, attr-defined]
    return target, draft


def tokens(pair: Pair) -> int:
    return TOKENS if _folders(pair)[0] == BUNDLED / "target" else RANDOM_TOKENS


@pytest.mark.thorough(but="qwen2-4-plain-draft")
@pytest.mark.parametrize(
    ("length", "adapter"),
    [(1, False), (4, False), (4, True), (9, True)],
    ids=["1-plain-draft", "4-plain-draft", "4-with-adapter", "9-with-adapter"],
)
def test_greedy_output_equals_target_alone(
    pair: Pair, expected: list[list[int]], prompts: list[str], length: int, adapter: bool, tmp_path: Path
) -> None:
    assistant = Assistant(pair, FixedLength(length), None)
    assistant.use_adapter("0001", save_random_adapter(_folders(pair)[1], tmp_path / "adapter")) if adapter else None
    accepted = 0
    try:
        for prompt, wanted in zip(prompts, expected, strict=True):
            steps = list(assistant.chat([Message("user", prompt)], GREEDY, StopParams(max_new_tokens=tokens(pair))))
            assert [step.token for step in steps] == wanted
            assert assistant.last is not None
            accepted += assistant.last.accepted
    finally:
        assistant.use_adapter(None, None)
    # A random adapter on random weights removes what the draft has in common with its target.
    if not adapter or _folders(pair)[1] == BUNDLED / "draft":
        assert accepted > 0, "nothing was ever accepted: this would not test acceptance at all"


def test_adapter_really_changes_what_is_drafted(pair: Pair, prompts: list[str], tmp_path: Path) -> None:
    """Otherwise the test above might use an adapter without effect."""
    assistant = Assistant(pair, FixedLength(4), None)
    assert pair.draft is not None
    ids = torch.tensor(encode_chat(pair, [Message("user", prompts[0])]))
    before = pair.draft.sequence().extend(ids, 1)
    assistant.use_adapter("0001", save_random_adapter(_folders(pair)[1], tmp_path / "adapter"))
    changed = pair.draft.sequence().extend(ids, 1)
    assistant.use_adapter(None, None)
    after = pair.draft.sequence().extend(ids, 1)
    assert not torch.allclose(before, changed, atol=1e-3)
    assert torch.equal(before, after)


def test_cached_context_is_not_computed_again_and_changes_nothing(pair: Pair, prompts: list[str]) -> None:
    stop = StopParams(max_new_tokens=40, ignore_eos=True)
    warm, cold = Assistant(pair, FixedLength(4), None), Assistant(pair, FixedLength(4), None)
    first = [Message("user", prompts[0])]
    list(warm.chat(first, GREEDY, stop))
    assert warm.last is not None
    second = [*first, Message("assistant", warm.last.text), Message("user", prompts[1])]
    one = list(warm.chat(second, GREEDY, stop))
    two = list(cold.chat(second, GREEDY, stop))
    assert [step.token for step in one] == [step.token for step in two]
    assert cold.last is not None
    assert cold.last.timings.cached_n == 0
    assert warm.last.timings.cached_n >= len(encode_chat(pair, first))
