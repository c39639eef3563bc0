"""A server with several slots: every text equals that of a lone request, whatever else arrives, ends or is swapped."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_server import Server
from test_service_learning import JSON, publish_random_adapter

from adaptive.engines.cpu import kernels
from adaptive.records.log import Log
from checkpoints.store import AdapterStore

# One xdist worker runs these tests, since it starts one server.
pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group("service_slots")]

PATIENCE_S = 120.0


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Four slots, in float32 and in the kernels' bfloat16, where a row does not depend on those beside it."""
    if request.param == "bfloat16" and kernels.library() is None:
        pytest.skip("the kernels are not built, or not for this processor")
    options = ("--slots", "4", "--queue", "8", "--distill", "off", "--dtype", request.param)
    one = Server(tmp_path_factory.mktemp("slots"), *options).wait_until_ready()
    try:
        yield one
    finally:
        one.stop()


def body(number: int, tokens: int = 72) -> dict[str, Any]:
    """A request of client ``number``, greedy or under a seed."""
    how = {"temperature": 0} if number % 2 == 0 else {"temperature": 0.8, "seed": number}
    ends = {"max_tokens": tokens, "ignore_eos": True, "user": f"client {number}"}
    return {"prompt": f"Once upon a time there were {number} boats, and the oldest of them", **how, **ends}


def whole(server: Server, asked: dict[str, Any]) -> str:
    answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def stream(server: Server, asked: dict[str, Any], each: Callable[[int], bool] = lambda pieces: True) -> str:
    """The text of a streamed answer, read until ``each`` returns false for the number of pieces so far."""
    text, pieces = "", 0
    with (
        httpx.Client(timeout=PATIENCE_S) as http,
        http.stream("POST", f"{server.url}/v1/completions", json={**asked, "stream": True}) as answer,
    ):
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["text"]
                pieces += 1
                if not each(pieces):
                    break
    return text


def get(server: Server, path: str) -> Any:
    return httpx.get(server.url + path, timeout=PATIENCE_S).json()


def until_idle(server: Server) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(slot["is_processing"] for slot in get(server, "/slots")) or get(server, "/slots")[0]["waiting"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def logged(server: Server) -> Counter[tuple[str, str, str]]:
    """Prompt, text and finish reason of every record."""
    with Log(server.records) as log:
        found = [entry.generation for entry in log.generations(with_supervision=False)]
    return Counter((g.prompt_text, g.text, g.finish_reason) for g in found)


def until_seen_busy(server: Server, slots: int, *asked: dict[str, Any]) -> None:
    """Stream long answers until exactly ``slots`` slots are busy with them, then disconnect."""
    seen = threading.Event()
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [pool.submit(stream, server, one, lambda pieces: not seen.is_set()) for one in asked]
        busy = 0
        while busy < slots and not all(answer.done() for answer in answers):
            busy = sum(slot["is_processing"] for slot in get(server, "/slots"))
        seen.set()
        for answer in answers:
            answer.result()
    assert busy == slots
    until_idle(server)


def test_eight_streams_at_once_say_what_each_says_alone(server: Server) -> None:
    asked = [body(number) for number in range(8)]
    alone = [whole(server, one) for one in asked]
    before = logged(server)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda one: stream(server, one), asked))
    assert together == alone
    new = logged(server) - before
    assert new == Counter((one["prompt"], text, "length") for one, text in zip(asked, alone, strict=True))
    assert len(get(server, "/slots")) == get(server, "/props")["total_slots"] == 4
    metrics = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
    assert "adaptive:slots 4.0" in metrics
    assert "adaptive:num_requests_running 0.0" in metrics
    assert get(server, "/health")["slots"] == {"total": 4, "busy": 0, "why_not_more": None}


def test_a_short_one_that_comes_later_is_answered_before_a_long_one_ends(server: Server) -> None:
    long, short = body(10, tokens=500), body(11, tokens=8)
    wanted = whole(server, long), whole(server, short)
    found: list[str] = []
    ends: list[str] = []

    def each(pieces: int) -> bool:
        if pieces == 20:
            found.append(whole(server, short))
            ends.append("short")
        return True

    text = stream(server, long, each)
    assert (text, *found) == wanted
    states = []

    def look(pieces: int) -> bool:
        if pieces == 20:
            beside = threading.Thread(target=whole, args=(server, short))
            beside.start()
            beside.join()
            states.append([slot["predicted_tokens"] for slot in get(server, "/slots") if slot["is_processing"]])
        return True

    stream(server, long, look)
    assert ends == ["short"]
    assert states
    assert all(0 < tokens < 900 for state in states for tokens in state)
    assert len(states[0]) == 1, "the long one had ended before the short one was answered"


def test_who_goes_away_costs_the_others_nothing_and_frees_a_slot(server: Server) -> None:
    asked = [body(number, tokens=200) for number in range(20, 28)]
    alone = {number: whole(server, asked[number]) for number in (0, 3, 5)}
    before = logged(server)
    with ThreadPoolExecutor(8) as pool:
        answers = {
            number: pool.submit(
                stream, server, one, lambda pieces, number=number: number in alone or pieces < 3 + number
            )
            for number, one in enumerate(asked)
        }
        texts = {number: answer.result() for number, answer in answers.items()}
    until_idle(server)
    assert {number: texts[number] for number in alone} == alone
    new = logged(server) - before
    finished = {(asked[number]["prompt"], text, "length"): 1 for number, text in alone.items()}
    assert {key: count for key, count in new.items() if key[2] != "cancelled"} == finished
    cut = Counter(prompt for prompt, _, ended in new.elements() if ended == "cancelled")
    assert set(cut) <= {asked[number]["prompt"] for number in range(8) if number not in alone}
    assert set(cut.values()) <= {1}


def test_several_answers_of_one_request_logprobs_and_formats_are_served_beside_others(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    kinds: list[dict[str, Any]] = [
        {**body(31, 30), "n": 3},
        {**body(32, 30), "logprobs": 2},
        {
            **body(34, 30),
            "ignore_eos": False,
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        },
        {**body(36, 60), "stop": [" the"]},
        {**body(37, 30), "frequency_penalty": 0.5, "logit_bias": {"5": 2}},
    ]

    def ask(asked: dict[str, Any]) -> list[Any]:
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return [
            [c["text"], c["finish_reason"], c["logprobs"] and c["logprobs"]["tokens"]] for c in answer.json()["choices"]
        ]

    alone = [ask(one) for one in kinds]
    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(ask, kinds))
    assert together == alone
    assert len(alone[0]) == 3


def test_more_than_slots_and_queue_hold_are_told_429(server: Server) -> None:
    endless = {"max_tokens": 1500}
    going = [threading.Event() for _ in range(4)]
    over = threading.Event()

    def run(number: int) -> None:
        def each(pieces: int) -> bool:
            going[number].set()
            return not over.is_set()

        stream(server, {**body(40 + number), **endless}, each)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for event in going:
        assert event.wait(PATIENCE_S)
    with ThreadPoolExecutor(12) as pool:
        url = f"{server.url}/v1/completions"
        answers = [pool.submit(httpx.post, url, json=body(50 + n, 2), timeout=PATIENCE_S) for n in range(12)]
        deadline = time.monotonic() + PATIENCE_S
        while sum(answer.done() for answer in answers) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        over.set()
        assert sorted(answer.result().status_code for answer in answers) == [200] * 8 + [429] * 4
    for thread in threads:
        thread.join()
    until_idle(server)


def test_a_swap_while_several_are_under_way_changes_no_text(server: Server, tmp_path: Path) -> None:
    asked = [body(number, tokens=500) for number in range(60, 64)]
    alone = [whole(server, one) for one in asked]
    store = AdapterStore(server.records.parent / "adapters")
    name = publish_random_adapter(store, tmp_path / "adapter")

    def promote(pieces: int) -> bool:
        if pieces == 20:
            url = f"{server.url}/adaptive/adapters/{name}/promote"
            assert httpx.post(url, headers=JSON, timeout=PATIENCE_S).status_code == 200
        return True

    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(stream, server, one) for one in asked[1:]]
        first = stream(server, asked[0], promote)
        texts = [first, *(other.result() for other in others)]
    assert texts == alone
    assert f"now drafting with adapter {name}" in server.said
    assert get(server, "/props")["adapter"] == name


def kill_with_four_under_way(home: Path, turn: int) -> Counter[tuple[str, str, str]]:
    """Start a server and kill it while four long answers stream, at a random moment after four short ones have ended.
    Returns the short ones as the log must hold them."""
    rng = random.Random(turn)
    one = Server(home, "--slots", "4", "--distill", "off").wait_until_ready()
    finished: list[tuple[str, str, str]] = []
    try:
        under_way = [threading.Event() for _ in range(4)]

        def forever(number: int) -> None:
            def each(pieces: int) -> bool:
                under_way[number].set()
                return True

            try:
                stream(one, body(70 + number, tokens=1800), each)
            except httpx.HTTPError:
                return

        with ThreadPoolExecutor(8) as pool:
            short = [body(100 * turn + number, tokens=12) for number in range(80, 84)]
            long = [pool.submit(forever, number) for number in range(3)]
            for asked, text in zip(short, pool.map(lambda asked: stream(one, asked), short), strict=True):
                finished.append((asked["prompt"], text, "length"))
            long.append(pool.submit(forever, 3))
            for event in under_way:
                assert event.wait(PATIENCE_S)
            assert sum(slot["is_processing"] for slot in get(one, "/slots")) == 4
            time.sleep(rng.uniform(0, 0.3))
            one.kill()
    finally:
        one.kill()
    return Counter(finished)


def kill_repeatedly(home: Path, times: int) -> None:
    """After every kill the log holds all answers finished so far, each record complete; finally a server still
    answers."""
    finished: Counter[tuple[str, str, str]] = Counter()
    for turn in range(times):
        finished += kill_with_four_under_way(home, turn)
        (records,) = home.glob("*/records.db")
        with Log(records) as log:
            found = [entry.generation for entry in log.generations()]
        assert not finished - Counter((g.prompt_text, g.text, g.finish_reason) for g in found)
        for g in found:
            assert g.supervision is not None
            assert len(g.supervision.ids) == len(g.output) == g.timings.predicted_n
        print(f"kill {turn + 1}: {finished.total()} answers finished, {len(found)} records, all whole", flush=True)
    again = Server(home, "--slots", "4", "--distill", "off").wait_until_ready()
    try:
        asked = body(80, tokens=12)
        assert (asked["prompt"], whole(again, asked), "length") in finished
    finally:
        assert again.stop() == 0


def test_a_kill_with_four_under_way_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    kill_repeatedly(tmp_path / "home", 1)


@pytest.mark.long
def test_twenty_kills_with_four_under_way_lose_nothing_that_was_finished(tmp_path: Path) -> None:
    kill_repeatedly(tmp_path / "home", 20)


def test_where_no_joint_passes_are_made_there_is_one_slot_and_it_is_said(tmp_path: Path) -> None:
    """float64 uses torch's operations, one text at a time."""
    one = Server(tmp_path / "home", "--slots", "auto", "--distill", "off", "--dtype", "float64").wait_until_ready()
    try:
        slots = get(one, "/health")["slots"]
        assert slots["total"] == len(get(one, "/slots")) == 1
        assert "no passes over several texts" in slots["why_not_more"]
        assert slots["why_not_more"] in one.said
    finally:
        assert one.stop() == 0


def test_several_answers_to_one_request_are_made_at_once_where_slots_are_free(server: Server) -> None:
    """They share the prompt that the first has read, and equal answers made one after another."""
    asked = {**body(1), "n": 3}
    one_by_one = [whole(server, {**body(1), "seed": 1 + number}) for number in range(3)]
    until_idle(server)
    before = logged(server)
    answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=PATIENCE_S).json()
    assert [choice["text"] for choice in answer["choices"]] == one_by_one
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert sum((logged(server) - before).values()) == 3
    until_seen_busy(server, 3, {**body(1, tokens=1500), "n": 3})


def test_as_many_are_answered_at_once_as_there_are_slots(server: Server) -> None:
    until_seen_busy(server, 4, *(body(number, tokens=1500) for number in range(90, 95)))
