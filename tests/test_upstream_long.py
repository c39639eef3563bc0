"""Long requests and answers pass through the proxy without being held, and their reading stops no other request."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_upstream_proxy import ASK, CHAT, FIRST, Make, logprobs, say, stage
from test_upstream_surgery import choices, values
from upstream_server import CLOSE, Heard, plain, until

from adaptive.upstream.asking import read, with_logprobs
from adaptive.upstream.events import MOST_HELD, Passage
from adaptive.upstream.kinds import LLAMA_SERVER, VLLM, Kind
from adaptive.upstream.pieces import Cutter
from adaptive.upstream.proxy import _rest
from adaptive.upstream.surgery import cut

__all__ = ["stage"]  # a fixture


def answer(tokens: int, more: bool, shown: int = 1) -> bytes:
    """An answer in one object, with log-probabilities or without."""
    choice: dict[str, Any] = {"index": 0, "message": {"content": "n" * shown}}
    if more:
        entry = json.loads(logprobs(FIRST, *range(40)))["content"][0]
        choice["logprobs"] = {"content": [entry] * tokens}
    return json.dumps({"choices": [{**choice, "finish_reason": "stop"}], "object": "x"}).encode()


def passage_of(kind: Kind) -> Passage:
    asked = read(b"{}", chat=True)
    assert asked is not None
    return Passage(with_logprobs(asked, kind, 20), kind, streamed=False)


@pytest.mark.parametrize("own", [False, True])
def test_an_answer_that_is_too_long_passes_without_being_held(
    stage: Make, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """The client gets no log-probabilities that it did not ask for."""

    def script(heard: Heard, connection: socket.socket) -> None:
        connection.sendall(plain(answer(60, bool(json.loads(heard.body).get("logprobs"))), more=CLOSE))

    here = stage(script)
    body = {**ASK, "logprobs": True} if own else ASK
    monkeypatch.setattr("adaptive.upstream.events.MOST_HELD", 70_000)
    direct, through = (httpx.post(url + CHAT, json=body) for url in (here.server.url, here.url))
    assert through.content == direct.content
    assert (b"logprobs" in through.content) == own
    assert ("content-length" in through.headers) == own
    until(lambda: here.book.counts["missed"] == 1)
    monkeypatch.undo()
    httpx.post(here.url + CHAT, json=body)
    until(lambda: here.book.counts["missed"] + here.book.counts["logged"] == 2)
    assert here.book.problems["it is too long to be held in memory"] == 1


@pytest.mark.parametrize("kind", [LLAMA_SERVER, VLLM], ids=lambda kind: kind.name)
def test_no_more_than_a_limit_is_held(kind: Kind) -> None:
    piece = answer(1, more=True)[:-15] + b"," + b" " * 65536
    passage, passed, sent = passage_of(kind), 0, 0
    while sent < 2 * MOST_HELD:
        passed += len(passage.feed(piece if not sent else b" " * 65536))
        sent += 65536
        assert passage.held <= MOST_HELD
    assert passed > MOST_HELD
    assert not passage.collected.choices


@pytest.mark.thorough
def test_other_requests_go_on_while_a_long_answer_is_read() -> None:
    async def turns() -> int:
        passage = passage_of(LLAMA_SERVER)
        data = answer(2000, more=True)
        for at in range(0, len(data), 65536):
            assert passage.feed(data[at : at + 65536]) == b""
        reading, count = asyncio.create_task(_rest(passage)), 0
        while not reading.done():
            await asyncio.sleep(0.001)
            count += 1
        assert reading.result() == answer(2000, more=False)
        assert passage.ended
        assert len(passage.collected.choices[0].reports) == 2000
        return count

    assert asyncio.run(turns()) > 2


def test_a_request_of_unknown_length_passes_without_being_held(stage: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    here = stage(say)
    body = json.dumps({**ASK, "user": "u" * 3000}).encode()
    pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)]
    monkeypatch.setattr("adaptive.upstream.proxy.MOST_READ", 2000)
    assert httpx.post(here.url + CHAT, content=iter(pieces)).status_code == 200
    assert here.server.asked(CHAT)[0].body == body
    monkeypatch.undo()
    assert httpx.post(here.url + CHAT, content=iter(pieces)).status_code == 200
    assert b"top_logprobs" in here.server.asked(CHAT)[1].body
    assert len(here.logged(1)) == 1


# As all servers write them: null, or an object.
held = choices.filter(lambda c: c.get("logprobs") is None or isinstance(c["logprobs"], (dict, list)))


@given(
    st.lists(held, max_size=3),
    st.dictionaries(st.text(max_size=5), values, max_size=3),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 9),
)
def test_in_pieces_the_same_is_removed_as_at_once(
    said: list[dict[str, Any]], more: dict[str, Any], indent: int | None, ascii_only: bool, absent: bool, size: int
) -> None:
    text = json.dumps({**more, "choices": said, "logprobs": {"a": 1}}, indent=indent, ensure_ascii=ascii_only)
    data, cutter = text.encode(), Cutter(absent)
    out = b"".join(cutter.feed(data[at : at + size]) for at in range(0, len(data), size)) + cutter.rest()
    assert out.decode() == cut(text, absent).text


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize(
    "choice",
    [
        r'{ "logprobs" : {"a":"}\"]\\"} , "b":"\\\"" }',
        '{ "logprobs" : {"a":1} }',
        '{"index":0, "logprobs":{"a":[1,{}]} ,"text":"logprobs"}',
        " { } ",
        '{"x":{"logprobs":{"a":1}},"logprobs":null}',
    ],
)
def test_in_pieces_odd_spaces_and_texts_are_no_hindrance(choice: str, absent: bool) -> None:
    text = f'{{"logprobs":{{"x":1}},"choices":[{choice} , {choice}],"more":{{"choices":[{{"logprobs":[1]}}]}}}}'
    for size in (1, 2, 5, 1000):
        data, cutter = text.encode(), Cutter(absent)
        out = b"".join(cutter.feed(data[at : at + size]) for at in range(0, len(data), size)) + cutter.rest()
        assert out.decode() == cut(text, absent).text
