"""Log-probabilities are removed from an answer, and every other byte of it stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive.upstream.asking import read, with_logprobs
from adaptive.upstream.events import Passage
from adaptive.upstream.kinds import ADAPTIVE, LLAMA_SERVER, SGLANG, VLLM
from adaptive.upstream.surgery import cut

# JSON as none of our writers formats it: spaces, an escape, a number with zeros, a repeated name.
ODD = r'{ "id":"a\u0041", "choices" : [ {"index":0,"logprobs" : {"content":[{"token":"}"}]} ,"text":"\/" } ],"t":1.50 }'


def test_null_takes_the_place_and_nothing_else_changes() -> None:
    found = cut(ODD, absent=False)
    assert found.found
    assert found.text == ODD.replace('{"content":[{"token":"}"}]}', "null")
    assert found.whole["choices"][0]["logprobs"] == {"content": [{"token": "}"}]}


@pytest.mark.parametrize(
    ("choice", "left"),
    [
        ('{"logprobs":{"a":1},"index":0}', '{"index":0}'),
        ('{"index":0,"logprobs":{"a":[1,2]}}', '{"index":0}'),
        ('{"index":0, "logprobs":{"a":1}, "text":"x"}', '{"index":0, "text":"x"}'),
        ('{"logprobs":{"a":1}}', "{}"),
        ('{"index":0,"logprobs":null}', '{"index":0,"logprobs":null}'),
    ],
)
def test_the_key_goes_where_it_would_not_be_there(choice: str, left: str) -> None:
    assert cut(f'{{"choices":[{choice},{choice}]}}', absent=True).text == f'{{"choices":[{left},{left}]}}'


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
choices = st.fixed_dictionaries(
    {"index": st.integers(0, 3)}, optional={"logprobs": values, "delta": values, "": values}
)


@pytest.mark.thorough
@given(
    st.lists(choices, max_size=3),
    st.dictionaries(st.text(max_size=5), values, max_size=3),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.booleans(),
)
def test_what_is_left_reads_as_the_same_answer(
    said: list[dict[str, Any]], more: dict[str, Any], indent: int | None, ascii_only: bool, absent: bool
) -> None:
    answer = {**more, "choices": said}
    found = cut(json.dumps(answer, indent=indent, ensure_ascii=ascii_only), absent)
    expected = [
        {
            k: (None if k == "logprobs" else v)
            for k, v in c.items()
            if not (absent and k == "logprobs" and v is not None)
        }
        for c in said
    ]
    assert json.loads(found.text) == {**answer, "choices": expected}
    assert found.whole == answer


@pytest.mark.parametrize(
    "broken", ["", "[]", "{", '{"choices":[{"logprobs":', '{"a":1}x', '{"choices":[{]}', '{"a" 1}']
)
def test_what_is_no_answer_is_refused(broken: str) -> None:
    with pytest.raises(ValueError):
        cut(broken, absent=False)


def test_a_request_is_asked_for_more_at_its_end() -> None:
    asked = read(b' { "messages" : [ ] , "x":1.50 } ', chat=True)
    assert asked is not None
    assert with_logprobs(asked, LLAMA_SERVER, 32).body == (
        b' { "messages" : [ ] , "x":1.50 ,"logprobs": true, "top_logprobs": 32}'
    )
    empty = read(b"{}", chat=False)
    assert empty is not None
    assert json.loads(with_logprobs(empty, VLLM, 20).body) == {"logprobs": 20, "return_tokens_as_token_ids": True}


@pytest.mark.parametrize(
    "body",
    [
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": 0},
        {"echo": True},
        {"best_of": 2},
        {"stream": True, "tools": [{}]},
        {"n_probs": 3},
    ],
)
def test_what_a_client_asked_for_itself_is_left_alone(body: dict[str, Any]) -> None:
    asked = read(json.dumps(body).encode(), chat=body.get("logprobs") is True or "tools" in body)
    assert asked is not None
    assert with_logprobs(asked, LLAMA_SERVER, 32) is asked


def test_a_stream_cut_into_any_pieces_is_the_same_stream() -> None:
    reports = '{"content":[{"id":5,"token":"ö","logprob":-0.5,"top_logprobs":[{"id":5,"token":"ö","logprob":-0.5}]}]}'
    direct = (
        'data: {"choices":[{"index":0,"delta":{"content":"ö"},"finish_reason":null}]}\r\n\r\n: ping\n\ndata: [DONE]\n\n'
    )
    with_more = direct.replace('"finish_reason":null', f'"finish_reason":null,"logprobs":{reports}')
    asked = read(b'{"stream":true}', chat=True)
    assert asked is not None
    for size in (1, 2, 3, 7, 1000):
        passage = Passage(with_logprobs(asked, LLAMA_SERVER, 32), LLAMA_SERVER, streamed=True)
        data = with_more.encode()
        out = b"".join(passage.feed(data[i : i + size]) for i in range(0, len(data), size)) + passage.rest(whole=True)
        assert out == direct.encode()
        assert passage.ended
        (report,) = passage.collected.choices[0].reports
        assert report.token.id == 5


def test_an_event_that_was_cut_does_not_show_what_was_added() -> None:
    asked = read(b'{"stream":true}', chat=True)
    assert asked is not None
    passage = Passage(with_logprobs(asked, SGLANG, 32), SGLANG, streamed=True)
    assert passage.feed(b'data: {"choices":[{"logprobs":{"content":') == b""
    assert passage.rest(whole=False) == b""
    assert not passage.ended


def test_an_event_that_would_not_have_come_is_left_out() -> None:
    event = b'data: {"choices":[{"index":0,"delta":{},"logprobs":{"content":[]},"finish_reason":null}]}\n\n'
    asked = read(b'{"stream":true}', chat=True)
    assert asked is not None
    assert Passage(with_logprobs(asked, ADAPTIVE, 20), ADAPTIVE, streamed=True).feed(event) == b""
    assert b'"logprobs":null' in Passage(with_logprobs(asked, SGLANG, 20), SGLANG, streamed=True).feed(event)
