"""``adaptive serve`` that, for a benchmark, also answers by fixed draft lengths in the same process.

Two processes of the same program differ in speed by up to a tenth for their whole life, depending on their memory
layout. So a session has to be compared with answers of its own process. A request whose session id is
``fixed-3`` is answered with draft length 3 (0 is plain decoding), and does not affect anything that the session
learns from: it has its own length policy, log, choice of threads and experience of what history is worth, and no
listener is called for it. Its history is, as with ``--draft-length 3``, its own text and the session's log, as far as
that was known before the session's latest answer: which may be one to the same prompt, and half the text of another.

    python benchmarks/paired_server.py serve --port 0 --target ... (as for ``adaptive``)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from adaptive import opened
from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength
from adaptive.drafting.archive import Archive, History
from adaptive.engines.protocol import Engine
from adaptive.engines.threads import ThreadChoice
from adaptive.machine import LoadMeter
from adaptive.records.writer import LogWriter
from adaptive.service import server
from adaptive.service.engine import EngineThread, Work
from adaptive.service.jobs import Done, Failed

PREFIX = "fixed-"


class HeldArchive(Archive):
    """Records that are read at the start, and from then on only by ``read``."""

    def catch_up(self) -> None:
        """Read the log at the start."""
        if not self.loaded.is_set():
            super().catch_up()

    def read(self) -> None:
        """Read what was recorded since."""
        super().catch_up()


class PairedEngine(EngineThread):
    """An engine thread that answers either as the session does or by a fixed draft length."""

    log: LogWriter
    history: History | None
    choices: dict[int, ThreadChoice]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._wanted = "1"  # one slot: the two ways of answering must not run at the same time
        self._apart_from_session = contextlib.ExitStack()

    def _next(self, assistant: Assistant, work: Work) -> None:
        self._apart_from_session.close()  # left over from the previous job's answer
        assistant.conversations.forget_drafts()  # so that the second answer to a prompt has no draft cache of the first
        session = work.job.ask.session or ""
        if session.startswith(PREFIX):
            self._apart_from_session.enter_context(self._apart(assistant, int(session.removeprefix(PREFIX))))
        elif assistant.history is not None and isinstance(assistant.history.archive, HeldArchive):
            assistant.history.archive.read()
        super()._next(assistant, work)

    def _over(self, work: Work, event: Done | Failed) -> None:
        self._apart_from_session.close()
        super()._over(work, event)

    @contextlib.contextmanager
    def _apart(self, assistant: Assistant, length: int) -> Iterator[None]:
        """Within the block, replace everything that learns from an answer."""
        engines = [engine for engine in (assistant.pair.target, assistant.pair.draft) if engine is not None]
        if not hasattr(self, "log"):
            assert self.session is not None
            # In the state folder, which the benchmark deletes; no second ``records.db``, which would pass for a pair's.
            self.log = LogWriter(self.session.state.root / "fixed.db")
            self.history = None if assistant.history is None else History(assistant.history.archive)
            self.choices = {
                i: ThreadChoice(e.threads.most, LoadMeter()) for i, e in enumerate(engines) if e.threads is not None
            }
        kept = assistant.policy, assistant.log, assistant.history, assistant.latest
        told = self.speculation, self._listeners
        theirs = {i: _choose(engines[i], choice) for i, choice in self.choices.items()}
        assistant.policy, assistant.log, assistant.history = FixedLength(length), self.log, self.history
        self._listeners = []
        try:
            yield
        finally:
            assistant.policy, assistant.log, assistant.history, assistant.latest = kept
            self.speculation, self._listeners = told
            for i, choice in theirs.items():
                _choose(engines[i], choice)


def _choose(engine: Engine, choice: ThreadChoice) -> ThreadChoice:
    """Put another choice of threads into an engine. Returns the previous one."""
    holder: Any = getattr(engine, "cpu_forward", engine)
    before: ThreadChoice = holder.threads
    holder.threads = choice
    return before


if __name__ == "__main__":
    opened.Archive, server.EngineThread = HeldArchive, PairedEngine  # type: ignore[misc, assignment]
    from cli.main import run

    run()
