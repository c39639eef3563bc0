"""Every place that describes decoding describes the last answer correctly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import BUNDLED
from service_server import Server

from adaptive.assistant import Assistant
from adaptive.control.costs import LONGEST, CostTable
from adaptive.control.sources import GoodputWithHistory
from adaptive.drafting.archive import History
from adaptive.pair import load_pair
from adaptive.records.log import Log
from adaptive.records.stats import RoundCount, in_words, tokens_per_round
from adaptive.settings import load_settings
from adaptive.speculation import of_counts, speculation
from adaptive.types import Message, SamplingParams, StopParams

PLAIN, DRAFTED = RoundCount(0, 0, 60), RoundCount(4, 2, 30)
# Costs under which drafting always pays.
CHEAP = CostTable(1e-5, 1e-6, 1e-6, tuple(1e-3 + 1e-6 * k for k in range(LONGEST + 1)), 1e-6, 1e-6, 0.0, 0)
UNTRAINED = "the head that is grown here has not been trained yet"


@pytest.mark.parametrize(
    ("counts", "said", "sentence"),
    [
        ((PLAIN,), {"draft": False}, "plain: no draft model"),
        (
            (DRAFTED,),
            {"draft": False, "expected_speed_up": 1.4},
            "drafting 4.0 tokens ahead, 1.4 times as fast as plain",
        ),
        ((PLAIN, RoundCount(6, 4, 24)), {"draft": False}, "plain, but for 24 of 84 rounds: no draft model"),
        ((), {"draft": True}, "nothing decoded yet"),
        ((), {"draft": True, "answered": True}, "plain: one token, which the prompt's own pass gave"),
        ((PLAIN,), {"draft": True, "growing": True}, f"plain: {UNTRAINED}"),
        (
            (PLAIN, RoundCount(6, 4, 5)),
            {"draft": True, "growing": True},
            f"plain, but for 5 of 65 rounds: {UNTRAINED}",
        ),
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


@pytest.mark.parametrize("draft", [None, str(BUNDLED / "draft")], ids=["target-alone", "pair"])
def test_nothing_is_promised_of_a_head_that_has_not_been_trained(draft: str | None) -> None:
    """Where drafting always pays. History drafts some of the rounds."""
    pair = load_pair(load_settings({"target": str(BUNDLED / "target"), "draft": draft, "dtype": "float32"}))
    policy = GoodputWithHistory(CHEAP)
    assistant = Assistant(pair, policy, None, history=History(None))
    assert speculation(assistant).sentence == "nothing decoded yet"

    def answer(tokens: int) -> str:
        asked = [Message("user", "Name three colours, three animals and three fruits.")]
        for _ in assistant.chat(asked, SamplingParams(temperature=0.0), StopParams(tokens, ignore_eos=True)):
            pass
        return speculation(assistant).sentence

    assert answer(1) == "plain: one token, which the prompt's own pass gave"
    sentence, said = answer(60), speculation(assistant)
    assert said.drafting_rounds > 0
    assert policy.expected_speed_up is not None
    if draft is None:
        assert said.expected_speed_up is None
        assert sentence == f"plain, but for {said.drafting_rounds} of {said.rounds} rounds: {UNTRAINED}"
    else:
        assert said.drafting
        assert said.expected_speed_up is not None


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
