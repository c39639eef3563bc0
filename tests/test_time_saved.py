"""Time saved against plain decoding: zero where nothing was drafted, and the true saving elsewhere."""

from __future__ import annotations

import random
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from records_factory import generation

from adaptive.records.log import Log
from adaptive.records.saved import Saved, Spent, saved_in_words, time_saved
from adaptive.records.schema import MIGRATIONS, connect
from adaptive.records.writer import LogWriter
from adaptive.types import Round


def plain_answer(number: int, rng: random.Random, pace: float, tokens: int = 50) -> Spent:
    """An answer without drafting: 2 ms a token and 0.1 ms between two, times ``pace``."""
    steps = sum(pace * 0.002 * rng.lognormvariate(0, 0.3) for _ in range(tokens))
    return Spent(number, tokens, steps + tokens * pace * 0.0001, tokens, steps, tokens, steps)


def drafted_answer(number: int, rng: random.Random, pace: float, plain: int, round_s: float = 0.003) -> Spent:
    """An answer of 50 tokens: ``plain`` plain steps, and the rest in rounds of two tokens that take ``round_s``."""
    tokens = 50
    steps = sum(pace * 0.002 * rng.lognormvariate(0, 0.3) for _ in range(plain))
    rounds = (tokens - plain) // 2
    drafted = sum(pace * round_s * rng.lognormvariate(0, 0.3) for _ in range(rounds))
    between = tokens * pace * 0.0001
    return Spent(number, tokens, steps + drafted + between, plain + rounds, steps + drafted, plain, steps)


def test_three_hundred_plain_answers_save_exactly_nothing() -> None:
    rng = random.Random(1)
    assert time_saved([plain_answer(n, rng, rng.uniform(1, 4)) for n in range(300)]) == Saved(0.0, 0.0, 0.0, 0, 0)


def test_without_plain_rounds_nothing_is_claimed() -> None:
    rng = random.Random(2)
    assert time_saved([drafted_answer(n, rng, 1.0, 0) for n in range(50)]) is None
    assert time_saved([]) == Saved(0.0, 0.0, 0.0, 0, 0)


def test_a_machine_that_is_busy_for_a_while_is_no_saving() -> None:
    """Drafting is as fast as plain decoding, on a machine that is four times slower in the second half."""
    rng = random.Random(3)
    spent = []
    for number in range(600):
        pace = 1.0 if number < 300 else 4.0
        spent.append(drafted_answer(number, rng, pace, 2, 0.004) if number % 3 else plain_answer(number, rng, pace))
    found = time_saved(spent)
    assert found is not None
    assert abs(found.seconds) < 0.02 * sum(one.seconds for one in spent)


def test_an_answer_is_not_held_against_plain_rounds_of_another_pace() -> None:
    """Drafted answers without plain rounds on a quiet machine, then plain ones on a machine ten times slower."""
    rng = random.Random(6)
    fast = [drafted_answer(n, rng, 1.0, 0) for n in range(100)]
    assert time_saved([*fast, *(plain_answer(n, rng, 10.0) for n in range(100, 120))]) is None
    slow = [drafted_answer(n, rng, 10.0, 10) for n in range(120, 150)]
    found = time_saved([*fast, *slow])
    assert found is not None
    assert (found.answers, found.drafted) == (30, 130)
    assert found.seconds == pytest.approx(30 * 40 * 0.005, rel=0.3)


@pytest.mark.thorough(but="2")
@pytest.mark.parametrize("plain", [2, 10])
def test_what_was_saved_is_known_within_its_interval(plain: int) -> None:
    """The interval holds the truth in at least 85 of 100 sessions, and each estimate is within 20% of it."""
    inside, off = 0, []
    for seed in range(100):
        rng = random.Random(seed)
        spent = [drafted_answer(n, rng, 1.0, plain) for n in range(200)]
        # 1.046 is the mean of the log-normal, exp(0.3 ** 2 / 2).
        truth = 200 * (50 - plain) * 0.002 * 1.046 - sum(one.rounds_s - one.plain_s for one in spent)
        found = time_saved(spent)
        assert found is not None
        inside += found.low <= truth <= found.high
        off.append(abs(found.seconds / truth - 1))
    assert inside >= 85
    assert max(off) < 0.2


def test_answers_that_shared_passes_are_not_compared() -> None:
    """Most of their time belonged to the others, so that drafting would seem to save hardly anything."""
    rng = random.Random(8)
    alone = [drafted_answer(n, rng, 1.0, 10) for n in range(200)]
    shared = [one._replace(id=200 + one.id, seconds=4 * one.seconds, shared=one.rounds) for one in alone]
    found, wanted = time_saved([*alone, *shared]), time_saved(alone)
    assert found is not None
    assert wanted is not None
    assert found == replace(wanted, drafted=400)
    assert time_saved(shared) is None


def test_tries_of_a_useless_draft_cost_what_they_took() -> None:
    rng = random.Random(5)
    spent = [plain_answer(n, rng, 1.0) for n in range(300)]
    tried = [
        one._replace(rounds=51, tokens=51, rounds_s=one.rounds_s + 0.004, seconds=one.seconds + 0.0041) for one in spent
    ]
    found = time_saved(tried)
    assert found is not None
    assert found.answers == 300
    assert found.seconds == pytest.approx(300 * -0.002, rel=0.15)
    assert abs(found.seconds) < 0.02 * sum(one.seconds for one in tried)


ROUNDS = (
    Round("none", 0, 0, 0.0, 0.03),  # at the start: may be slower, too
    Round("none", 0, 0, 0.0, 0.05),
    Round("model", 2, 1, 0.01, 0.05, shared=2),
    Round("none", 0, 0, 0.0, 0.09),  # right after a drafting round: may be slower than plain decoding
    Round("none", 0, 0, 0.0, 0.04),
    Round("none", 0, 0, 0.3, 0.05),  # the draft read the prompt, and then proposed nothing
    Round("none", 0, 0, 0.0, 0.09),
)
PLAIN = (*(Round("none", 0, 0, 0.0, 0.05) for _ in range(8)), *(Round("none", 0, 0, 0.0, 0.03) for _ in range(32)))


def test_the_log_sums_up_rounds_as_they_are_written_and_older_logs_are_brought_up_to_it(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with LogWriter(path) as writer:
        writer.write(generation(rounds=ROUNDS, tokens=9, seconds=0.9))
        writer.write(generation(rounds=(), tokens=1))
        writer.write(generation(rounds=ROUNDS[2:4], tokens=4, seconds=0.2))
        writer.write(generation(rounds=PLAIN, tokens=41, seconds=2.0))
    with Log(path) as log:
        fresh = log.spent()
    assert fresh == (
        # The first two passes take 0.08 s, two later ones without drafted tokens 0.135 s.
        Spent(1, 8, pytest.approx(0.9 + 0.055), 7, pytest.approx(0.71 + 0.055), 1, pytest.approx(0.04), 1),
        Spent(3, 3, pytest.approx(0.2), 2, pytest.approx(0.15), 0, 0.0, 1),
        Spent(4, 40, pytest.approx(2.0 - 0.16), 40, pytest.approx(1.2), 40, pytest.approx(1.2), 0),
    )
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE round_times")
    connection.execute(f"PRAGMA user_version={[m.__name__ for m in MIGRATIONS].index('add_round_times')}")
    connection.commit()
    connection.close()
    connect(path).close()
    with Log(path) as log:
        assert log.spent() == tuple(pytest.approx(one) for one in fresh)
        assert log.purge(everything=True) == 4
        assert log.spent() == ()


@pytest.mark.parametrize("start", [0.0, 0.0015])
def test_slow_passes_at_the_start_of_answers_are_no_saving(tmp_path: Path, start: float) -> None:
    """Tries of the draft, and so plain rounds, are mostly among the first rounds, where every pass takes longer."""
    rng, truth = random.Random(9), 0.0
    path = tmp_path / "records.db"
    with LogWriter(path) as writer:
        for _ in range(100):
            kinds = [False, *(rng.random() < 0.6 for _ in range(7)), *(rng.random() < 0.9 for _ in range(22))]
            rounds = [
                Round("model", 1, 1, 0.0002, 0.0014 + start * (place < 8))
                if drafts
                else Round("none", 0, 0, 0.0, 0.001 + start * (place < 8))
                for place, drafts in enumerate(kinds)
            ]
            tokens = 30 + sum(kinds)
            seconds = sum(r.draft_s + r.verify_s for r in rounds)
            truth += 0.001 * tokens + 8 * start - seconds
            writer.write(generation(rounds=tuple(rounds), tokens=tokens + 1, seconds=seconds))
    with Log(path) as log:
        found = time_saved(log.spent())
    assert found is not None
    assert found.seconds == pytest.approx(truth, rel=0.2)


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        (Saved(12.2, 9.1, 15.3, 40, 40), "12 s (9 to 15 s)"),
        (Saved(1.26, 0.9, 1.6, 4, 4), "1.3 s (0.9 to 1.6 s)"),
        (Saved(-3.2, -8.8, 2.4, 9, 9), "−3 s (−9 to 2 s)"),
        (Saved(7200.0, 5400.0, 9000.0, 900, 900), "2.0 h (1.5 to 2.5 h)"),
        (Saved(0.0, 0.0, 0.0, 0, 0), "0 s"),
    ],
)
def test_time_saved_is_told_with_its_interval(saved: Saved, text: str) -> None:
    assert saved.text == text


@pytest.mark.parametrize(
    ("saved", "training_s", "words"),
    [
        (
            None,
            0.0,
            "time saved is not known: no answer can be compared with enough plain decoding; nothing was trained",
        ),
        (
            Saved(12.2, 9.1, 15.3, 4, 5),
            119.0,
            "saved 12 s (9 to 15 s) against plain decoding, in 4 of 5 answers that drafted; training took 119 s",
        ),
        (
            Saved(1.26, 0.9, 1.6, 1, 1),
            8100.0,
            "saved 1.3 s (0.9 to 1.6 s) against plain decoding, in 1 answer that drafted; training took 2 h",
        ),
    ],
)
def test_saved_time_and_training_in_words(saved: Saved | None, training_s: float, words: str) -> None:
    assert saved_in_words(saved, training_s) == words
