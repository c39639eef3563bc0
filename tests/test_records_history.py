"""The figures of history, against examples worked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from records_factory import generation

from adaptive.records.history import GenerationFigures, grouped, history, series, swaps
from adaptive.records.log import Log
from adaptive.records.stats import RoundCount, acceptance_by_position, count_rounds, speculative_stats
from adaptive.records.writer import LogWriter
from adaptive.types import Round


def rounds(*pairs: tuple[int, int]) -> tuple[Round, ...]:
    return tuple(Round("model", drafted, accepted, 0.01, 0.02) for drafted, accepted in pairs)


def figures(
    number: int, adapter: str | None = None, *pairs: tuple[int, int], seconds: float = 1.0
) -> GenerationFigures:
    return GenerationFigures(
        number, "s", float(number), adapter, 11, seconds, 2 * seconds, count_rounds(rounds(*pairs))
    )


def test_figures_of_a_worked_example() -> None:
    # Four speculative rounds accept 3 + 0 + 1 + 2 = 6 of 3 + 3 + 1 + 4 = 11; two rounds are plain steps.
    stats = speculative_stats(rounds((3, 3), (0, 0), (3, 0), (1, 1), (0, 0), (4, 2)))
    assert stats.num_spec_steps == 4
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (11, 6)
    assert stats.mean_acceptance_length == 1 + 6 / 4
    assert stats.draft_acceptance_rate == 6 / 11
    assert stats.acceptance_histogram == (1, 1, 1, 1, 0)


def test_without_a_drafting_round_nothing_is_claimed() -> None:
    stats = speculative_stats(rounds((0, 0), (0, 0)))
    assert (stats.mean_acceptance_length, stats.draft_acceptance_rate, stats.num_spec_steps) == (1.0, 0.0, 0)
    assert stats.acceptance_histogram == ()
    assert acceptance_by_position(count_rounds(rounds((0, 0)))) == ()


def test_a_position_after_a_rejection_is_unobserved_not_rejected() -> None:
    # (3, 0) says nothing of positions 2 and 3, (3, 1) nothing of 3, (1, 1) nothing beyond its only token.
    found = acceptance_by_position(count_rounds(rounds((3, 0), (3, 1), (3, 3), (1, 1), (3, 2), (0, 0))))
    assert [(p.position, p.observed, p.accepted) for p in found] == [(1, 5, 4), (2, 3, 2), (3, 2, 1)]
    assert [p.acceptance for p in found] == [4 / 5, 2 / 3, 1 / 2]
    (_, never) = acceptance_by_position([RoundCount(2, 0, 7)])
    assert (never.observed, never.acceptance) == (0, None)


def test_chosen_lengths_and_the_forecast_stand_beside_what_came_of_them() -> None:
    # Ten timed tokens in a second each, of which the controller expected two seconds.
    found = history([figures(1, None, (0, 0), (3, 1)), figures(2, None, (1, 1), (0, 0))])
    assert found.lengths == (2, 1, 0, 1)
    assert [p.mean_draft_length for p in found.series] == [1.5, 0.5]
    assert (found.totals.tokens_per_second, found.totals.expected_tokens_per_second) == (10.0, 5.0)
    assert found.totals.mean_draft_length == 1.0


def test_rows_tell_the_base_draft_from_no_draft_at_all() -> None:
    rows = grouped([figures(1, None, (0, 0)), figures(2, None, (2, 1)), figures(3, "0001", (2, 2))], "adapter")
    assert [(r.key, r.generations) for r in rows] == [("no draft", 1), ("base draft", 1), ("0001", 1)]
    assert [r.speculation.mean_acceptance_length for r in rows] == [1.0, 2.0, 3.0]


def test_a_point_of_the_series_never_mixes_two_adapters() -> None:
    said = [figures(i, "0001" if i > 5 else None, (2, 2 if i > 5 else 1), seconds=2.0) for i in range(1, 9)]
    points = series(said, points=2)
    assert [(p.first_id, p.last_id, p.adapter) for p in points] == [(1, 4, None), (5, 5, None), (6, 8, "0001")]
    assert [p.acceptance_rate for p in points] == [0.5, 0.5, 1.0]
    assert {p.tokens_per_second for p in points} == {5.0}  # the first token belongs to the prompt's time
    (swap,) = swaps(said)
    assert (swap.generation, swap.before, swap.after) == (6, None, "0001")


def test_the_log_gives_the_same_figures_as_the_rounds_themselves(tmp_path: Path) -> None:
    said = [
        generation(0, session="a", rounds=rounds((4, 4), (4, 0), (2, 1)), tokens=8, seconds=0.7),
        generation(1, session="b", rounds=rounds((4, 3), (0, 0)), adapter="0001", tokens=5, seconds=0.4),
        generation(2, session="b", rounds=(), tokens=1, seconds=0.0),
    ]
    with LogWriter(tmp_path / "records.db") as writer:
        for g in said:
            writer.write(g)
    found = history(Log(tmp_path / "records.db").figures(), "session")
    assert found.totals.speculation == speculative_stats(r for g in said for r in g.rounds)
    assert [r.speculation for r in found.rows] == [
        speculative_stats(said[0].rounds),
        speculative_stats(said[1].rounds),
    ]
    assert (found.totals.generations, found.totals.tokens) == (3, 14)
    assert found.totals.tokens_per_second == pytest.approx((7 + 4) / (0.7 + 0.4))
    assert found.rows[0].tokens_per_second == pytest.approx(said[0].timings.per_second)
    assert [(s.generation, s.after) for s in found.swaps] == [(2, "0001"), (3, None)]
