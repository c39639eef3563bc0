"""A deleted answer takes the later answers with it whose requests hold it, however the client has changed it."""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Command
from records_factory import generation

from adaptive.records.features import Features, FeatureSpool
from adaptive.records.holders import Asked
from adaptive.records.log import Log
from adaptive.records.schema import connect
from adaptive.records.writer import LogWriter
from adaptive.service.formats import Call
from adaptive.service.schemas import ChatMessage
from adaptive.state import open_state
from adaptive.types import Generation, Message

Turn = tuple[str, str]
SECRET = "Aurelian-4711"
ASKED = (Message("system", "It is 10:00."), Message("user", "Where is it?"))
LATER = Message("user", "And then?")


def said(messages: tuple[Message, ...], text: str, session: str = "s") -> Generation:
    return replace(generation(session=session, text=text), messages=messages)


def logged(path: Path, *generations: Generation) -> Path:
    with LogWriter(path) as writer:
        for one in generations:
            writer.write(one)
        assert writer.flush()
    return path


def call(name: str, **arguments: object) -> str:
    """A message of an assistant that is one tool call, as it is logged."""
    given = Call(name, json.dumps(arguments, ensure_ascii=False)).object()
    return ChatMessage(role="assistant", content=None, tool_calls=[given]).for_log().content


THOUGHTS = (f"<think>\nhm\n</think>\n\nParis {SECRET}", f"Paris {SECRET}")
HARMONY = (
    f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Paris {SECRET}",
    f"Paris {SECRET}",
)
QWEN = (
    '<tool_call>\n{"name": "find", "arguments": {"who": "Aur\\u00e9lian \\"4711\\"\\n", "most": 3}}\n</tool_call>',
    call("find", who='Aurélian "4711"\n', most=3),
)
TAGS = (
    "Let me see.\n<tool_call>\n<function=find>\n<parameter=who>\nAurelian\n</parameter>\n</function>\n</tool_call>",
    f"Let me see.{call('find', who='Aurelian')}",
)
WITHIN = (
    '[TOOL_CALLS][{"name": "find", "arguments": "{\\"who\\": \\"a\\\\nb\\"}"}]',
    call("find", who="a\nb"),
)
WHITE_SPACE = (f"  - one\n  - {SECRET}\n\n", f"- one\n- {SECRET}")
CUT = (f"Paris, {SECRET}, and more", f"Paris, {SECRET}")


@pytest.mark.parametrize("turn", [THOUGHTS, HARMONY, QWEN, TAGS, WITHIN, WHITE_SPACE, CUT])
def test_an_answer_is_known_however_a_client_sends_it_back(tmp_path: Path, turn: Turn) -> None:
    answer, back = turn
    held = (*ASKED, Message("assistant", back), LATER)
    other = (*ASKED, Message("assistant", "In Rome."), LATER)
    called = (*ASKED, Message("assistant", call("find", who="somebody else", most=4)), LATER)
    later = (Message("system", "It is 10:05."), *held[1:], Message("assistant", "Then."), LATER)
    texts = (answer, "Then.", "In Rome.", "Rome, then.", "Nobody.", "Then!")
    requests = (ASKED, held, ASKED, other, called, later)
    path = logged(tmp_path / "records.db", *map(said, requests, texts))
    with Log(path) as log:
        assert log.holders([1]) == (2, 6)
        assert log.holders([3]) == (4,)


def test_an_empty_message_holds_nothing_and_a_later_question_is_no_answer(tmp_path: Path) -> None:
    requests = (ASKED, (*ASKED, Message("assistant", " "), LATER), (*ASKED, Message("user", "Paris")))
    path = logged(tmp_path / "records.db", *(said(request, "Paris") for request in requests))
    with Log(path) as log:
        assert log.holders([1]) == ()


def test_a_sibling_of_a_continuation_stays(tmp_path: Path) -> None:
    begun = (*ASKED, Message("assistant", "Par"))
    whole = (*ASKED, Message("assistant", "Paris"), LATER)
    requests = (ASKED, begun, begun, whole)
    path = logged(tmp_path / "records.db", *map(said, requests, ("Par", "is", "ma", "Then.")))
    with Log(path) as log:
        assert log.holders([1]) == (2, 3, 4)
        assert log.holders([2]) == (4,)


def test_a_chat_without_its_oldest_turns_is_known_within_its_session(tmp_path: Path) -> None:
    first = (*ASKED, Message("assistant", "In Paris."), LATER)
    later = (LATER, Message("assistant", SECRET), Message("user", "Why?"))
    requests = (ASKED, first, later, later)
    texts, sessions = ("In Paris.", SECRET, "So.", "So!"), "aaab"
    path = logged(tmp_path / "records.db", *map(said, requests, texts, sessions))
    with Log(path) as log:
        assert log.holders([2]) == (3,)


def test_a_raw_text_that_continues_an_answer_holds_it(tmp_path: Path) -> None:
    prompts = (
        "Once upon ",
        f"Once upon a {SECRET}.\n\nThen",
        f"Once upona {SECRET}. So",
        "Once upon ",
        "Once upon a time",
    )
    answers = (f" a {SECRET}. \n", " it", " on", " a time", " it")
    said = [generation(asked=prompt, text=text, raw=True) for prompt, text in zip(prompts, answers, strict=True)]
    path = logged(tmp_path / "records.db", *said, generation(asked="Once upon ", text=""))
    with Log(path) as log:
        assert log.holders([1]) == (2, 3)
        assert log.holders([4]) == (5,)


def test_a_session_is_counted_and_deleted_with_what_holds_it_in_other_sessions(tmp_path: Path) -> None:
    held = (*ASKED, Message("assistant", f"Paris {SECRET}"), LATER)
    other = (*ASKED, Message("assistant", "In Rome."), LATER)
    requests = (ASKED, ASKED, held, other)
    texts = (THOUGHTS[0], "In Rome.", "Then.", "Then.")
    path = logged(tmp_path / "records.db", *map(said, requests, texts, ("a1", "r", "b2", "r")))
    with Log(path) as log:
        assert log.count(session="a1") == log.purge(session="a1") == 2
        assert [one.id for one in log.generations()] == [2, 4]
    assert SECRET.encode() not in b"".join(file.read_bytes() for file in tmp_path.iterdir())


def test_of_a_session_what_is_older_goes_with_what_is_older_of_its_chats_in_other_sessions(tmp_path: Path) -> None:
    held = (*ASKED, Message("assistant", f"Paris {SECRET}"), LATER)
    ages = (("a1", ASKED, 50), ("b2", held, 40), ("r", (LATER,), 40), ("a1", held, 10), ("b2", held, 10))
    answers = [
        replace(said(chat, f"Paris {SECRET}", name), created=time.time() - 86400 * days) for name, chat, days in ages
    ]
    with Log(logged(tmp_path / "records.db", *answers)) as log:
        assert log.count(session="a1", older_than_s=86400 * 30) == 2
        assert log.purge(session="a1", older_than_s=86400 * 30) == 2
        assert [one.id for one in log.generations()] == [3, 4, 5]


def test_a_damaged_request_that_may_hold_the_answer_goes_with_it(tmp_path: Path) -> None:
    held = (*ASKED, Message("assistant", SECRET), LATER)
    path = logged(tmp_path / "records.db", said(ASKED, SECRET), said(held, "So."), said((LATER,), "No.", "b"))
    connect(path).execute("UPDATE generations SET messages = substr(messages, 1, length(messages) - 1) WHERE id > 1")
    with Log(path) as log:
        assert log.holders([1]) == (2,)


def test_short_and_long_questions_of_the_same_beginning_are_told_apart(tmp_path: Path) -> None:
    long = "Where, [1, 2], is it, " * 20
    ends = [f"{'x' * length}, ]" for length in range(150, 172)]  # where the comparison ends
    questions = ("Where, [", f"{long}1?", f"{long}2?", *ends)
    chats = [(Message("system", '{"role": "user"}'), Message("user", question)) for question in questions]
    held = [(*chat[1:], Message("assistant", "There."), LATER) for chat in chats]
    path = logged(tmp_path / "records.db", *(said(chat, "There.", str(n)) for n, chat in enumerate((*chats, *held))))
    with Log(path) as log:
        count = len(chats)
        assert [log.holders([number]) for number in range(1, count + 1)] == [(count + n,) for n in range(1, count + 1)]


def test_many_answers_are_looked_for_in_one_pass(tmp_path: Path) -> None:
    chats = [(Message("user", f"question {number}"),) for number in range(400)]
    held = [(*chats[number], Message("assistant", f"answer {number}"), LATER) for number in (7, 399)]
    answers = [said(chat, f"answer {number}", "a") for number, chat in enumerate(chats)]
    path = logged(tmp_path / "records.db", *answers, *(said(chat, "So.", "b") for chat in held))
    with Log(path) as log:
        assert log.holders(range(1, 401)) == (401, 402)
        assert log.count(session="a") == 402


@pytest.mark.thorough
def test_the_answers_of_a_long_chat_are_held_without_repeating_what_each_of_them_repeats(tmp_path: Path) -> None:
    """A server holds those that were deleted until its end."""
    chat = tuple(Message(("user", "assistant")[i % 2], f"message {i} {SECRET * 60}") for i in range(240))
    answers = [said(chat[:count], chat[count].content) for count in range(1, len(chat), 2)]
    path = logged(tmp_path / "records.db", *answers)
    with Log(path) as log:
        ids = log.ids()
        gc.collect()
        tracemalloc.start()
        held = log.held(ids)
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert held.holds(Asked("another", (*chat, LATER), ""))
    assert taken < 4 * sum(len(message.content) for message in chat)


def test_a_purge_that_meets_a_reader_still_deletes_what_is_beside_the_log(
    tmp_path: Path, adaptive: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaptive.records.schema.BUSY_S", 0.1)
    state = open_state(tmp_path / "home", "big--small-1234")
    features = Features.of(generation(1).supervision.logprobs.astype("float32"))  # type: ignore[union-attr]
    with LogWriter(state.records, spool=FeatureSpool(state.features, 10**9)) as writer:
        for number in (1, 2):
            writer.write(generation(number, session=f"s{number}", created=time.time()), features)
    state.caches.mkdir()
    aside = state.records.with_name("records.db.damaged")
    for file in (state.caches / "1", aside):
        file.write_bytes(b"what was said")
    reader = connect(state.records)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM generations").fetchone()
    status, _, err = adaptive("records", "purge", "--session", "s2", "--yes")
    assert (status, "then purge again" in err) == (2, True)
    assert [file.name for file in state.features.iterdir()] == ["1.safetensors"]
    assert not state.caches.exists()
    assert not aside.exists()
    reader.execute("COMMIT")
    assert adaptive("records", "purge", "--session", "s2", "--yes")[0] == 0
    assert Log(state.records).count() == 1
