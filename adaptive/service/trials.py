"""Compiles a client's grammar in a process of its own first, because that may take hours and gigabytes, and a thread
that does it cannot be ended.

llguidance limits its work, but not that on one regular expression: for a JSON schema of one line it takes a minute (an
integer that is a multiple of 2,999,999), or hours (a text with 20 patterns).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading

from starlette.exceptions import HTTPException

from adaptive import isolated
from adaptive.errors import first_line
from adaptive.grammar import Grammar, GrammarError
from adaptive.service.errors import RETRY_AFTER

# Seconds for one grammar. Too few: a large schema is refused on a busy machine. Too many: other new grammars wait.
SECONDS = 20.0


class Trials:
    """The process in which grammars are tried, one after the other. It starts with the first one. Used on the event
    loop."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[str] | None = None

    async def run(self, grammar: Grammar) -> None:
        """Return when the grammar is compiled, or has an error, which whoever compiles it for use will find too. Raises
        GrammarError if that takes too much time or memory, or if it cannot be parsed, and HTTPException if no process
        can be started now."""
        async with self._lock:
            if not await asyncio.to_thread(self._tried, json.dumps([self._seconds, grammar.source()])):
                raise GrammarError(f"the {grammar.name} cannot be used: compiling it takes too much time or memory")

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _tried(self, line: str) -> bool:
        try:
            process = self._started()
        except OSError as error:  # no file descriptors, processes or memory
            said = f"no process can be started to try the grammar ({first_line(error)}); send the request again later"
            raise HTTPException(503, said, RETRY_AFTER) from error
        timer = threading.Timer(self._seconds, process.kill)
        timer.daemon = True
        timer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            print(line, file=process.stdin, flush=True)
            tried = process.stdout.readline() != ""
        except OSError:  # it has ended
            tried = False
        finally:
            timer.cancel()
        if not tried:
            self.close()
        return tried

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                isolated.command("adaptive.grammar_trial"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
            )
        return self._process
