"""A draft server is asked less often if it is late, and forgets conversations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import BUNDLED, save_random_adapter
from draft_servers import DraftServer

from adaptive import draft_server
from adaptive.draft_server import Drafts
from adaptive.engines.load import Source, load_engine
from adaptive.engines.protocol import Engine
from adaptive.errors import AdaptiveError
from adaptive.remote import Remote
from adaptive.settings import load_settings
from adaptive.types import SamplingParams
from adaptive.wire import Asked


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DraftServer]:
    one = DraftServer(tmp_path_factory.mktemp("draft"))
    try:
        yield one
    finally:
        one.kill()


@pytest.fixture
def engine() -> Engine:
    settings = load_settings({"draft": str(BUNDLED / "draft"), "dtype": "float32", "device": "cpu"})
    return load_engine(Source("it", BUNDLED / "draft", "none"), settings, "cpu", lambda share: None, draft=True)


def test_a_server_that_is_late_again_and_again_rests_longer(server: DraftServer) -> None:
    remote, rests = Remote(server.url, None), list[float]()

    def late() -> None:
        remote.late(0.5)
        rests.append(remote._rests_until - time.monotonic())

    for _ in range(4):
        late()
    assert not remote.ready
    remote.in_time(0.1)
    late()
    assert rests == pytest.approx([2.0, 4.0, 8.0, 10.0, 2.0], abs=0.5)
    assert (remote.figures.late, remote.figures.proposals) == (5, 1)


def test_a_server_forgets_conversations_that_are_too_many_or_unused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = Drafts(engine, 10**9)
    asked = Asked("0", 0, [3, 4, 5], 1, False, engine.vocab_size, SamplingParams())
    for number in range(draft_server.MOST + 1):
        drafts.propose(replace(asked, conversation=str(number)))
    assert len(drafts._held) == draft_server.MOST
    assert "0" not in drafts._held
    later = time.monotonic() + draft_server.IDLE_S + 1
    monkeypatch.setattr("adaptive.draft_server.time.monotonic", lambda: later)
    drafts.propose(replace(asked, conversation="new"))
    assert list(drafts._held) == ["new"]


def test_an_adapter_that_cannot_be_merged_is_not_said_to_be_in_use(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (save_random_adapter(BUNDLED / "draft", tmp_path / name) for name in ("first", "second"))
    drafts = Drafts(engine, 10**9)
    drafts.use_adapter("first", first)
    drafts.propose(Asked("0", 0, [3, 4, 5], 1, False, engine.vocab_size, SamplingParams()))
    with pytest.raises(AdaptiveError):
        drafts.use_adapter("none", tmp_path / "missing")
    assert drafts.adapter == "first"  # nothing was changed yet

    def fails(*_: object) -> None:
        monkeypatch.undo()
        raise MemoryError("no memory for the merged weights")

    monkeypatch.setattr("adaptive.engines.hf.lora.Delta.merged", fails)
    with pytest.raises(AdaptiveError, match="could not be merged"):
        drafts.use_adapter("second", second)
    assert drafts.adapter is None
    assert not drafts._held  # computed with the first
