"""The engine thread and the caches that are kept on disk: no answer waits for them, and the end only so long."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from conftest import BUNDLED
from rich.console import Console
from slow_disk import until
from test_service_engine import LONG, answered, asking

from adaptive import kept_caches
from adaptive.engines.cpu import kernels
from adaptive.opened import OpenedPair
from adaptive.service.engine import EngineThread
from adaptive.service.jobs import Answer, Ask, Done, Event, Job, Prompt
from adaptive.service.metrics import Metrics
from adaptive.settings import load_settings
from adaptive.types import SamplingParams, StopParams
from cli.opened import open_pair


def test_caches_are_written_only_when_nobody_has_asked_for_a_while(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaptive.service.engine.QUIET_S", 0.0)
    monkeypatch.setattr("adaptive.service.engine.POLL_S", 0.01)
    settings = load_settings({"target": str(BUNDLED / "draft"), "dtype": "float32", "keep_caches": "1GB"})

    def opened() -> contextlib.AbstractContextManager[OpenedPair]:
        return open_pair(settings, Console(file=io.StringIO()), cache_bytes=10**9)

    thread, done = EngineThread(opened, Metrics(), queue=4), threading.Event()
    sampling, stop = SamplingParams(temperature=0.0, seed=1), StopParams(2, ignore_eos=True)
    ask = Ask((Prompt([5, 6, 7] * 100, (), "text"),), sampling, stop, 1, "somebody", None, True, False, False)
    thread.start(when_over=lambda: None)
    try:
        thread.submit(Job(ask, lambda event: done.set() if isinstance(event, Done) else None))
        assert done.wait(120)
        assert thread.session is not None
        folder = thread.session.state.caches
        time.sleep(0.5)
        assert not any(folder.iterdir())
        monkeypatch.setattr("adaptive.service.engine.KEEP_S", 0.5)
        until = time.monotonic() + 60
        while not any(folder.glob("*.safetensors")):
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        thread.close()


def keeping_caches(record: bool = True) -> contextlib.AbstractContextManager[OpenedPair]:
    """The bundled pair, which keeps the caches of its conversations on disk."""
    settings = load_settings({"dtype": "float32", "keep_caches": "1GB", "record": record})
    return open_pair(settings, Console(file=io.StringIO()), cache_bytes=10**9)


@pytest.mark.thorough(but="hurry")
@pytest.mark.parametrize("how", ["whole", "hurry", "late"])
def test_the_end_waits_for_caches_only_so_long_and_first_keeps_what_is_small(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    caplog.set_level(logging.INFO, "adaptive")
    engine = EngineThread(keeping_caches, Metrics(), queue=4)
    engine.start(when_over=lambda: None)
    small: list[bool] = []
    try:
        until(lambda: engine.state == "ready")
        assert engine.session is not None
        state = engine.session.state
        answered(engine, LONG, 2)
        if how == "hurry":
            engine.hurry()
        monkeypatch.setattr("adaptive.opened.KEEP_S", 0.0 if how == "late" else 600.0)
        written = kept_caches.KeptCaches.keep

        def looking(*given: Any) -> Any:
            small.append(state.controller.exists())
            return written(*given)

        state.controller.unlink(missing_ok=True)
        monkeypatch.setattr(kept_caches.KeptCaches, "keep", looking)
    finally:
        engine.close()
    assert small == [True]
    assert "writing the caches of 1 conversation to disk" in caplog.text
    assert len(list(state.caches.glob("*.safetensors"))) == (how == "whole")


@pytest.mark.thorough
@pytest.mark.skipif(kernels.library() is None, reason="one answer at a time without the kernels")
def test_no_answer_waits_while_the_kept_cache_of_another_is_read(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = EngineThread(keeping_caches, Metrics(), queue=4)
    first.start(when_over=lambda: None)
    try:
        answered(first, LONG, 2)
    finally:
        first.close()
    goes_on = threading.Event()
    engine = EngineThread(keeping_caches, Metrics(), queue=4, slots="2")
    engine.start(when_over=lambda: None)
    checksum = zlib.crc32

    def slow(*given: Any) -> int:
        """A checksum that waits as a slow disk does."""
        goes_on.wait(120)
        return checksum(*given)

    long: list[Event] = []
    other: list[Event] = []

    def emit(event: Event) -> None:
        if not long:
            engine.submit(asking([*LONG, 8, 9], 4, other.append))
        long.append(event)

    try:
        until(lambda: engine.state == "ready")
        monkeypatch.setattr("adaptive.kept_caches.zlib.crc32", slow)
        engine.submit(asking([5, 6, 7], 200, emit))
        until(lambda: bool(long) and isinstance(long[-1], Done))
        assert not other
        assert not goes_on.is_set()
        goes_on.set()
        until(lambda: bool(other) and isinstance(other[-1], Done))
    finally:
        goes_on.set()
        engine.close()
    (answer,) = (event for event in other if isinstance(event, Answer))
    assert answer.timings.cached_n >= len(LONG)
