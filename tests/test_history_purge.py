"""Purged text is no longer proposed by any drafter, neither in later answers of a running assistant nor in the middle
of one."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BUNDLED
from records_factory import generation
from test_grafting import Always

from adaptive.answering import Question
from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength, LengthPolicy
from adaptive.decoding.verifier import Verifier
from adaptive.drafting.archive import Archive, History
from adaptive.drafting.proposal import Proposal
from adaptive.engines.protocol import Sequence
from adaptive.pair import Pair, load_pair
from adaptive.records.writer import LogWriter
from adaptive.settings import load_settings
from adaptive.tokens import as_list
from adaptive.types import SamplingParams, StopParams

# Drafts by history alone; by history, then the model; by the model, then history.
WAYS: dict[str, Callable[[], LengthPolicy]] = {
    "history": lambda: FixedLength(4),
    "history+model": lambda: Always(True, 2, 4),
    "model+history": lambda: Always(False, 2, 4),
}
PURGE = (
    "import sys; from pathlib import Path; from adaptive.records.log import Log\n"
    "with Log(Path(sys.argv[1])) as log: print(log.purge(session='secret'))"
)


@pytest.fixture(scope="module")
def pair() -> Pair:
    names = {"target": str(BUNDLED / "target"), "draft": str(BUNDLED / "draft"), "dtype": "float32"}
    return load_pair(load_settings(names))


def answer(assistant: Assistant, prompt: list[int], tokens: int) -> list[int]:
    steps = assistant.answer(
        Question(prompt, (), "", SamplingParams(), StopParams(tokens, ignore_eos=True), record=False)
    )
    return [step.token for step in steps]


@pytest.mark.parametrize("way", list(WAYS))
def test_what_another_process_purges_is_proposed_no_more(
    pair: Pair, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposed: list[tuple[str, list[int]]] = []
    verify = Verifier.verify

    def seen(self: Verifier, target: Sequence, fed: list[int], proposal: Proposal | None) -> tuple[Any, torch.Tensor]:
        if proposal is not None:
            proposed.append((proposal.drafter, as_list(proposal.tokens)))
        return verify(self, target, fed, proposal)

    monkeypatch.setattr(Verifier, "verify", seen)
    # The secret follows a text that the answer contains: its first token, for "model+history" also the model's draft.
    prompt = np.random.default_rng(3).integers(10, 4000, 40).tolist()
    first = answer(Assistant(pair, FixedLength(2), None), prompt, 6)[0]
    drafted = proposed[0][1]
    secret = [4001 + 7 * place for place in range(12)]
    path = tmp_path / "records.db"
    with LogWriter(path) as log:
        for session, said in (
            ("secret", [first, *(drafted if way == "model+history" else []), *secret]),
            ("kept", [9]),
        ):
            whole = dataclasses.replace(generation(session=session), prompt=np.array(prompt, np.int32))
            log.write(dataclasses.replace(whole, output=np.array(said, np.int32), supervision=None))
    archive = Archive(path, pair.target.vocab_size)
    archive.start()
    try:
        assert archive.loaded.wait(30)
        assistant = Assistant(pair, WAYS[way](), None, history=History(archive))

        def leaked() -> set[str]:
            return {who for who, tokens in proposed if set(secret) & set(tokens)}

        proposed.clear()
        answer(assistant, prompt, 8)
        assert leaked() == {way}
        # In the middle of an answer: earlier matches are dropped, and later lookups no longer find the secret.
        steps = assistant.answer(
            Question(prompt, (), "", SamplingParams(), StopParams(40, ignore_eos=True), record=False)
        )
        next(steps)
        subprocess.run([sys.executable, "-c", PURGE, str(path)], check=True, capture_output=True)
        deadline = time.monotonic() + 30
        while archive.tokens > len(prompt) + 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        proposed.clear()
        list(steps)
        assert leaked() == set()
        answer(assistant, prompt, 8)
        assert leaked() == set()
        assert archive.tokens == len(prompt) + 1  # text that was not purged is still there
    finally:
        archive.close()
