"""Reports of the engine thread to the trainer, and what its queue keeps."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import logging
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BUNDLED, save_model_that_says, save_random_pair
from rich.console import Console
from slow_disk import until
from transformers import AutoModelForCausalLM

from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import FixedLength
from adaptive.opened import OpenedPair
from adaptive.pair import load_tokenizer
from adaptive.service import streams
from adaptive.service.calls import Part, Reading
from adaptive.service.chats import prepare
from adaptive.service.dialects.completions import Completion
from adaptive.service.engine import EngineThread
from adaptive.service.formats import Call
from adaptive.service.jobs import Answer, Ask, Done, Event, Failed, FairQueue, Job, NotReadyError, Piece, Prompt
from adaptive.service.metrics import Metrics
from adaptive.service.schemas import ChatRequest, StreamOptions
from adaptive.service.slots import Slot
from adaptive.settings import load_settings
from adaptive.types import Round, SamplingParams, StopParams
from cli.opened import open_pair

GREEDY = SamplingParams(temperature=0.0)


def job(
    tokens: int,
    emit: Callable[[Event], None] = lambda event: None,
    client: str = "somebody",
    record: bool = False,
) -> Job:
    sampling, stop = SamplingParams(temperature=0.0, seed=1), StopParams(tokens, ignore_eos=True)
    ask = Ask((Prompt([5, 6, 7], (), "text"),), sampling, stop, 1, client, None, record, False, False)
    return Job(ask, emit)


@contextlib.contextmanager
def running() -> Iterator[EngineThread]:
    """An engine thread of the bundled pair."""
    settings = load_settings({"dtype": "float32"})
    engine = EngineThread(lambda: open_pair(settings, Console(file=io.StringIO())), Metrics(), queue=4)
    engine.start(when_over=lambda: None)
    try:
        yield engine
    finally:
        engine.close()


class Heard:
    """A listener that keeps the last report."""

    def __init__(self) -> None:
        self.last = ""

    def busy(self) -> None:
        self.last = "busy"

    def idle(self) -> None:
        self.last = "idle"

    def answered(self, adapter: str | None, rounds: tuple[Round, ...]) -> None:
        pass


def test_idle_is_not_said_when_a_request_has_just_come(own_home: Path) -> None:
    settings = load_settings({"target": str(BUNDLED / "draft"), "dtype": "float32", "record": False})

    def opened() -> contextlib.AbstractContextManager[OpenedPair]:
        return open_pair(settings, Console(file=io.StringIO()))

    engine = EngineThread(opened, Metrics(), queue=4)
    heard, said, done = Heard(), [], threading.Event()

    def emit(event: Event) -> None:
        said.append(heard.last)
        if isinstance(event, Done):
            done.set()

    class JustThen(Heard):
        """Submits a request at the moment when the engine reports that it is idle."""

        def idle(self) -> None:
            if not self.last:
                self.last = "asked"
                asking = threading.Thread(target=engine.submit, args=(job(8, emit),))
                asking.start()
                asking.join(0.5)

    engine.listen(JustThen())
    engine.listen(heard)
    engine.start(when_over=lambda: None)
    try:
        assert done.wait(120)
    finally:
        engine.close()
    assert said == ["busy"] * len(said)


@pytest.mark.thorough
def test_an_answer_that_cannot_begin_leaves_the_lone_one_its_own_estimates(own_home: Path) -> None:
    settings = load_settings({"dtype": "float32", "record": False})

    def opened() -> contextlib.AbstractContextManager[OpenedPair]:
        return open_pair(settings, Console(file=io.StringIO()), cache_bytes=10**9)

    thread = EngineThread(opened, Metrics(), queue=4, slots="2")
    failures: list[Event] = []
    kinds: dict[int, set[str]] = {0: set(), 1: set()}  # of the policy's estimates, by the number of failures
    done = threading.Event()

    def ask(prompt: list[int], sampling: SamplingParams, tokens: int, stream: bool) -> Ask:
        stop = StopParams(tokens, ignore_eos=True)
        return Ask((Prompt(prompt, (), "text"),), sampling, stop, 1, "somebody", None, False, False, stream)

    def goes_on(event: Event) -> None:
        if isinstance(event, Piece):
            if not kinds[0]:  # penalties count the tokens of a prompt, and the vocabulary has no such token
                params = SamplingParams(temperature=0.0, presence_penalty=1.0)
                thread.submit(Job(ask([5, 10**6], params, 8, False), fails))
            policy = thread.policy
            assert isinstance(policy, GoodputLength)
            kinds[len(failures)].add(policy.acceptance.kind)
        elif isinstance(event, Done):
            done.set()

    def fails(event: Event) -> None:
        failures.append(event)

    thread.start(when_over=lambda: None)
    try:
        thread.submit(Job(ask([5, 6, 7], SamplingParams(temperature=0.7), 400, True), goes_on))
        assert done.wait(120)
    finally:
        thread.close()
    assert [type(event) for event in failures] == [Failed]
    assert kinds == {0: {"model@0.7"}, 1: {"model@0.7"}}


def test_a_complete_answer_is_sent_though_the_server_stops_and_no_later_request_is_taken(own_home: Path) -> None:
    events: list[Event] = []
    asking = job(4, events.append, record=True)
    with running() as engine:
        until(lambda: engine.state == "ready")
        assert engine.session is not None
        log = engine.session.assistant.log
        assert log is not None
        with contextlib.closing(sqlite3.connect(log.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # the answer cannot be logged yet
            engine.submit(asking)
            until(lambda: log.handed == 1)
            closing = threading.Thread(target=engine.close)
            closing.start()
            until(lambda: asking.cancelled)
        closing.join()
        with pytest.raises(NotReadyError):
            engine.submit(job(4))
    assert [type(event) for event in events] == [Answer, Done]


def test_the_log_says_of_each_answer_how_it_was_decoded_itself(
    own_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "adaptive.service")
    ended = threading.Semaphore(0)
    with running() as engine:
        for tokens in (12, 1):
            engine.submit(job(tokens, lambda event: ended.release() if isinstance(event, Done) else None))
            assert ended.acquire(timeout=120)
        shown = engine.speculation.sentence
    long, short = (said for said in caplog.messages if said.startswith("somebody: "))
    assert shown in long
    assert "1 token at" in short
    assert "plain: one token, which the prompt's own pass gave; no rounds" in short


def test_a_stream_that_waits_says_so_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PING_S", 0.05)
    tokenizer = load_tokenizer(load_settings({}))

    async def read() -> list[str]:
        events: asyncio.Queue[Event] = asyncio.Queue()
        asking = job(8)
        served = streams.Served("x", 0, "m", tokenizer, Reading(), 3)
        lines = streams.chunks(asking, events, Completion(served, chat=True, top=None, options=StreamOptions()))
        said = [await anext(lines) for _ in range(3)]
        events.put_nowait(Piece(0, "text"))
        events.put_nowait(Done())
        said += [line async for line in lines]
        assert asking.cancelled
        return said

    said = asyncio.run(read())
    assert '"role": "assistant"' in said[0]
    assert said[1:3] == [": ping\n\n"] * 2
    assert '"content": "text"' in "".join(said[3:])
    assert said[-1] == "data: [DONE]\n\n"


def test_a_stream_that_fails_is_counted_as_refused() -> None:
    refused: list[int] = []
    served = streams.Served("x", 0, "m", load_tokenizer(load_settings({})), Reading(), 3)
    writer = Completion(served, chat=True, top=None, options=StreamOptions())

    async def read() -> list[str]:
        events: asyncio.Queue[Event] = asyncio.Queue()
        events.put_nowait(Failed(503, "the disk does not answer"))
        return [line async for line in streams.chunks(job(8), events, writer, refused.append)]

    assert "the disk does not answer" in asyncio.run(read())[-1]
    assert refused == [503]


def test_marks_of_calls_that_are_special_tokens_are_in_the_text_of_who_asks_for_them(
    own_home: Path, tmp_path: Path
) -> None:
    marks = ("[TOOL_CALLS]", "[ARGS]")
    said = 'Look.[TOOL_CALLS]weather[ARGS]{"city": 3}'
    target = save_model_that_says(said, tmp_path / "mistral", marks, "{{ tools }} [TOOL_CALLS] [ARGS] {{ messages }}")
    settings = load_settings({"target": str(target), "draft": "none", "dtype": "float32", "record": False})
    engine = EngineThread(lambda: open_pair(settings, Console(file=io.StringIO())), Metrics(), queue=4)
    done = threading.Event()
    events: list[Event] = []

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, Done):
            done.set()

    def ask(tools: list[dict[str, Any]]) -> list[Part]:
        tokenizer = load_tokenizer(settings)
        asked = {"messages": [{"role": "user", "content": "Hello"}], "tools": tools}
        chat = prepare(ChatRequest.model_validate(asked), tokenizer, 2048)
        stop = StopParams(40)
        done.clear()
        events.clear()
        engine.submit(Job(Ask((chat.prompt,), GREEDY, stop, 1, "me", None, False, False, True, marks=chat.marks), emit))
        assert done.wait(120)
        reader = chat.reading.reader()
        pieces = [event.text for event in events if isinstance(event, Piece)]
        assert "".join(pieces) == next(event.text for event in events if isinstance(event, Answer))
        return [part for piece in pieces for part in reader.feed(piece)] + reader.finish()

    engine.start(when_over=lambda: None)
    try:
        *text, call = ask([{"type": "function", "function": {"name": "weather"}}])
        assert "".join(map(str, text)) == "Look."
        assert isinstance(call, Call)
        assert (call.name, call.arguments) == ("weather", '{"city": 3}')
        assert "".join(str(part) for part in ask([])) == 'Look.weather{"city": 3}'
    finally:
        engine.close()


def test_who_goes_away_before_their_turn_leaves_nothing_in_the_queue() -> None:
    gone: list[None] = []
    queue = FairQueue(2, lambda: gone.append(None))
    staying = job(8, client="staying")
    queue.put(staying, free=0)
    prompts = []
    for _ in range(1000):
        leaving = job(8, client="leaving")
        prompts.append(weakref.ref(leaving.ask))
        queue.put(leaving, free=0)
        leaving.cancel()
        del leaving
    gc.collect()
    assert not [ref for ref in prompts if ref() is not None]
    assert len(gone) == 1000
    assert len(queue) == 1
    assert queue.take(0) is staying
    staying.cancel()  # it was taken from the queue, so cancelling it does not shorten any queue
    assert len(gone) == 1000
    assert queue.take(0) is None


def test_a_request_that_is_over_is_freed_at_once() -> None:
    """The next search for cycles may come much later, and a prompt may be long."""
    queue = FairQueue(2)
    gc.disable()
    try:
        for leave in (lambda waiting: queue.take(0), lambda waiting: waiting.cancel()):
            asking = job(8)
            queue.put(asking, free=0)
            leave(asking)
            gone = weakref.ref(asking)
            del asking
            assert gone() is None
    finally:
        gc.enable()


LONG = [5, 6, 7] * 200


def asking(prompt: list[int], tokens: int, emit: Callable[[Event], None]) -> Job:
    """A streamed request of ``tokens`` tokens."""
    stop = StopParams(tokens, ignore_eos=True)
    return Job(Ask((Prompt(prompt, (), "text"),), GREEDY, stop, 1, "somebody", None, True, False, True), emit)


def answered(engine: EngineThread, prompt: list[int], tokens: int) -> list[Event]:
    """All events of a request, once it is over."""
    events: list[Event] = []
    engine.submit(asking(prompt, tokens, events.append))
    until(lambda: bool(events) and isinstance(events[-1], Done | Failed))
    return events


def test_a_failure_of_the_server_is_not_said_to_be_the_requests(own_home: Path, tmp_path: Path) -> None:
    target, _ = save_random_pair(tmp_path, "qwen2")
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.get_output_embeddings().weight[9] = torch.nan
    model.save_pretrained(target)
    settings = load_settings({"target": str(target), "draft": "none", "dtype": "float32", "record": False})
    engine = EngineThread(lambda: open_pair(settings, Console(file=io.StringIO())), Metrics(), queue=4)
    engine.start(when_over=lambda: None)
    try:
        for prompt, status in (([5, 6, 7], 503), ([5, 6, 7] * 1000, 400)):  # no numbers; longer than the context
            failed = answered(engine, prompt, 4)[-1]
            assert isinstance(failed, Failed)
            assert failed.status == status
    finally:
        engine.close()


def test_an_answer_that_cannot_be_ended_is_sent_and_ends_no_other(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as engine:
        until(lambda: engine.state == "ready")
        assert engine.session is not None
        alone = answered(engine, LONG, 1)
        conversations = engine.session.assistant.conversations
        kind = type(conversations.take(LONG).target.sequence)
        rollback, full = kind.rollback, threading.Event()

        def failing(sequence: Any, length: int) -> None:
            if full.is_set():
                full.clear()
                raise torch.OutOfMemoryError("CUDA out of memory")
            rollback(sequence, length)

        monkeypatch.setattr(kind, "rollback", failing)
        events: list[Event] = []

        def emit(event: Event) -> None:
            events.append(event)
            if isinstance(event, Piece):  # the last one: then the caches are rolled back
                full.set()

        engine.submit(asking(LONG, 1, emit))
        until(lambda: bool(events) and isinstance(events[-1], Done | Failed))
        assert not full.is_set()
        again = answered(engine, LONG, 1)
        assert engine.state == "ready"
    texts = [[event.text for event in found if isinstance(event, Answer)] for found in (alone, events, again)]
    assert texts == [texts[0]] * 3
    assert len(texts[0]) == 1


def test_an_answer_that_begins_has_taken_no_time_yet(own_home: Path) -> None:
    seen: list[Slot] = []

    class Looking(FixedLength):
        """Looks at the slots while an answer prepares its passes."""

        @property
        def adviser(self) -> Any:
            seen.extend(engine.doing)
            return None

    with running() as engine:
        until(lambda: engine.state == "ready")
        assert engine.session is not None
        answered(engine, LONG, 3)
        engine.session.assistant.policy = Looking(0)
        began = time.perf_counter()
        answered(engine, LONG, 3)
    first = next(slot for slot in seen if slot.busy)
    assert first.predicted_tokens == 0
    assert first.began is not None
    assert first.began >= began
