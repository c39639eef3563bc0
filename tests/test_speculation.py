"""Every place that describes decoding describes the last answer correctly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_server import Server

from adaptive.records.log import Log
from adaptive.records.stats import RoundCount, in_words, tokens_per_round
from adaptive.speculation import of_counts

PLAIN, DRAFTED = RoundCount(0, 0, 60), RoundCount(4, 2, 30)


@pytest.mark.parametrize(
    ("counts", "said", "sentence"),
    [
        ((PLAIN,), {"draft": False}, "plain: no draft"),
        (
            (DRAFTED,),
            {"draft": False, "expected_speed_up": 1.4},
            "drafting 4.0 tokens ahead, 1.4 times as fast as plain",
        ),
        ((), {"draft": True}, "nothing decoded yet"),
        ((PLAIN,), {"draft": True, "switched_off": True}, "plain: the draft length is set to 0"),
        ((PLAIN,), {"draft": True}, "plain: what drafting would bring is not known yet"),
        ((PLAIN,), {"draft": True, "expected_speed_up": 0.85}, "plain: drafting would be 0.8x here"),
        ((PLAIN,), {"draft": True, "expected_speed_up": 1.2}, "plain: drafting would be 1.2x here, and comes next"),
        (
            (PLAIN, RoundCount(2, 0, 3)),
            {"draft": True, "expected_speed_up": 0.96},
            "plain, but for 3 of 63 rounds: drafting would be 0.96x here",
        ),
        ((DRAFTED,), {"draft": True}, "drafting 4.0 tokens ahead"),
        (
            (DRAFTED, RoundCount(2, 2, 10)),
            {"draft": True, "expected_speed_up": 1.4},
            "drafting 3.5 tokens ahead, 1.4 times as fast as plain",
        ),
        (
            (DRAFTED, RoundCount(0, 0, 2)),
            {"draft": True, "expected_speed_up": 1.4},
            "drafting 4.0 tokens ahead in 30 of 32 rounds, 1.4 times as fast as plain",
        ),
    ],
)
def test_one_sentence_says_what_the_rounds_were_and_why(
    counts: tuple[RoundCount, ...], said: dict[str, Any], sentence: str
) -> None:
    assert of_counts(counts, **said).sentence == sentence


def test_tokens_a_round_count_plain_rounds_too() -> None:
    assert tokens_per_round(()) is None
    assert tokens_per_round([PLAIN]) == 1.0
    assert tokens_per_round([PLAIN, DRAFTED]) == 1 + 60 / 90
    assert in_words([PLAIN, DRAFTED]) == "1.67 tokens a round, 50% of 120 drafted tokens accepted"
    assert in_words([PLAIN]) == "1.00 tokens a round, nothing drafted"


def ask(http: httpx.Client, tokens: int, prompt: str) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": tokens, "seed": 1, "temperature": 0.7, "ignore_eos": True}
    found: dict[str, Any] = http.post("/v1/completions", json=body).json()
    return found


def held(server: Server, generation: int) -> dict[str, Any]:
    """The figures that ``/props`` must show after this answer, from its rounds in the log."""
    with Log(server.records) as log:
        counts = next(g.rounds for g in log.figures() if g.id == generation)
    drafting = [c for c in counts if c.drafted]
    rounds, steps = sum(c.rounds for c in counts), sum(c.rounds for c in drafting)
    tokens = sum(c.drafted * c.rounds for c in drafting)
    mode = "drafting" if steps and 2 * steps >= rounds else "plain"
    return {"rounds": rounds, "drafting_rounds": steps, "mode": mode, "tokens_ahead": tokens / steps if steps else 0.0}


@pytest.mark.thorough
def test_the_sentence_is_right_after_each_answer_of_a_session_that_drafts_and_does_not(tmp_path: Path) -> None:
    server = Server(tmp_path / "home", "--distill", "off").wait_until_ready()
    try:
        with server.http() as http:
            assert http.get("/props").json()["speculation"]["sentence"] == "nothing decoded yet"
            modes = set()
            for number in range(1, 13):
                # The second of two tokens ends the answer, so that nothing is left to draft.
                ask(http, 2 if number % 3 else 20 + number, f"Story {number}. Once upon a time")
                found = http.get("/props").json()["speculation"]
                assert http.get("/slots").json()[0]["speculation"] == found
                expected = held(server, number)
                assert {name: found[name] for name in expected} == expected
                assert found["sentence"].startswith(expected["mode"])
                if expected["mode"] == "drafting":
                    assert f"{expected['tokens_ahead']:.1f} tokens ahead" in found["sentence"]
                assert found["sentence"] in server.said
                modes.add(found["mode"])
            assert modes == {"drafting", "plain"}
            totals = http.get("/adaptive/history").json()["totals"]
            with Log(server.records) as log:
                counts = [count for g in log.figures() for count in g.rounds]
            assert math.isclose(totals["tokens_per_round"], tokens_per_round(counts) or 0)
            metrics = http.get("/metrics").text
            assert f"adaptive:decode_rounds_total {float(sum(c.rounds for c in counts))}" in metrics
    finally:
        server.stop()
