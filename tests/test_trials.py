"""A grammar that would take for ever to compile is refused, and long work takes nothing from other requests."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time

import pytest
from shortages import short_of_files
from starlette.exceptions import HTTPException

from adaptive import isolated
from adaptive.grammar import Grammar, GrammarError, json_schema
from adaptive.service.errors import RETRY_AFTER
from adaptive.service.threads import Few
from adaptive.service.trials import Trials

# The first takes most of a minute, the second hours.
ENDLESS = {
    "multiple": {"type": "integer", "multipleOf": 2999999},
    "patterns": {"allOf": [{"type": "string", "pattern": f".*{chr(97 + n)}.{{40}}"} for n in range(20)]},
}
USABLE = json_schema({"type": "object", "properties": {"a": {"type": "string"}}})


@pytest.mark.thorough(but="patterns")
@pytest.mark.parametrize("name", ENDLESS)
def test_a_grammar_that_takes_too_long_is_refused_and_the_next_is_not(name: str) -> None:
    async def run() -> None:
        trials = Trials()
        try:
            await trials.run(USABLE)
            trials._seconds = 3
            with pytest.raises(GrammarError, match="the JSON schema cannot be used: compiling it takes too much time"):
                await trials.run(json_schema(ENDLESS[name]))
            trials._seconds = 60
            began = time.monotonic()
            await asyncio.gather(trials.run(USABLE), trials.run(Grammar("regex", "yes|no")))
            await trials.run(Grammar("regex", "(("))  # whose error is not found here
            assert time.monotonic() - began < 60
        finally:
            trials.close()

    asyncio.run(run())


def test_a_process_that_was_killed_is_started_again() -> None:
    async def run() -> None:
        trials = Trials()
        try:
            await trials.run(USABLE)
            first = trials._process
            assert first is not None
            first.kill()
            first.wait()
            await trials.run(USABLE)
            assert trials._process is not first
        finally:
            trials.close()

    asyncio.run(run())


def test_where_no_process_can_be_started_the_request_may_come_again() -> None:
    async def run() -> None:
        trials = Trials()
        try:
            await asyncio.to_thread(lambda: None)  # a thread for what follows
            with (
                short_of_files(0),
                pytest.raises(HTTPException, match="Too many open files") as refused,
            ):
                await trials.run(USABLE)
            assert refused.value.status_code == 503
            assert refused.value.headers == RETRY_AFTER
            await trials.run(USABLE)
        finally:
            trials.close()

    asyncio.run(run())


def test_the_process_ends_by_itself_when_its_server_was_killed() -> None:
    command = isolated.command("adaptive.grammar_trial")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stdin is not None
        print(json.dumps([1, json_schema(ENDLESS["patterns"]).source()]), file=process.stdin, flush=True)
        try:
            assert process.wait(60) == -signal.SIGALRM
        finally:
            process.kill()


def test_where_less_memory_is_allowed_grammars_are_tried_with_that() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); "
        "from adaptive.grammar_trial import limit_memory; limit_memory(); print(resource.getrlimit(resource.RLIMIT_AS))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str((1 << 30, 1 << 30))


def test_long_work_leaves_threads_to_other_requests() -> None:
    async def run() -> None:
        few, done = Few(), threading.Event()
        tasks = [asyncio.create_task(few.run(done.wait, 60)) for _ in range(64)]
        await asyncio.sleep(0.01)
        try:
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "answered"), 10) == "answered"
        finally:
            done.set()
            assert await asyncio.gather(*tasks) == [True] * 64

    asyncio.run(run())
