"""Figures of ``history`` against examples worked by hand."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from records_factory import DEFAULT_ROUNDS, generation

from adaptive.records import figures as columns
from adaptive.records import schema
from adaptive.records.drafters import BLOCK, DrafterFigures
from adaptive.records.figures import GenerationFigures
from adaptive.records.history import KEYS, grouped, history, series, swaps
from adaptive.records.log import Log
from adaptive.records.rows import insert
from adaptive.records.schema import MIGRATIONS, connect, sum_up_generations, tell_drafters_apart, transaction
from adaptive.records.stats import (
    Drafted,
    RoundCount,
    acceptance_by_position,
    by_drafter,
    count_rounds,
    speculative_stats,
)
from adaptive.records.writer import LogWriter
from adaptive.service.overview import Past
from adaptive.state import PairState
from adaptive.types import Round
from checkpoints.store import AdapterStore


def rounds(*pairs: tuple[int, int]) -> tuple[Round, ...]:
    return tuple(Round("model", drafted, accepted, 0.01, 0.02) for drafted, accepted in pairs)


def figures(
    number: int, adapter: str | None = None, *pairs: tuple[int, int], seconds: float = 1.0
) -> GenerationFigures:
    return GenerationFigures(
        number, "s", float(number), adapter, 11, seconds, 2 * seconds, count_rounds(rounds(*pairs))
    )


def test_the_history_is_read_without_the_rounds(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with LogWriter(path) as writer:
        for number in range(40):
            said = rounds(*((4, (number + i) % 5) for i in range(number % 7)))
            writer.write(generation(number, session=f"s{number // 5}", adapter=f"{number // 9:04d}", rounds=said))
    with Log(path) as log:
        before = [history(log.figures(), by) for by in KEYS]
        assert before[0].totals.speculation.num_spec_steps == sum(number % 7 for number in range(40))
    connection = connect(path)
    connection.execute("DELETE FROM rounds")
    connection.execute("UPDATE generations SET session = 'another', predicted_n = 0")
    connection.close()
    with Log(path) as log:
        assert [history(log.figures(), by) for by in KEYS] == before


def test_a_log_of_before_is_summed_up_once_and_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "records.db"
    with LogWriter(path) as writer:
        for number in range(300):
            writer.write(generation(number, rounds=DEFAULT_ROUNDS * (number % 3), supervised=False))
    with Log(path) as log:
        before = list(log.figures())
    connection = connect(path)
    connection.execute("DROP TABLE figures")
    connection.execute(f"PRAGMA user_version={MIGRATIONS.index(sum_up_generations)}")
    connection.close()
    shares: list[float] = []
    monkeypatch.setattr(schema, "on_migration", shares.append)
    for _ in range(2):
        with Log(path) as log:
            assert list(log.figures()) == before
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert shares.count(1.0) == 1


def test_a_migration_that_is_interrupted_ends_its_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.db"
    with LogWriter(path) as writer:
        for number in range(256):
            writer.write(generation(number, supervised=False))
    connection = connect(path)
    connection.execute("DROP TABLE figures")
    connection.execute(f"PRAGMA user_version={MIGRATIONS.index(sum_up_generations)}")
    connection.close()
    shares: list[float] = []

    def interrupted(share: float) -> None:
        shares.append(share)
        if share < 1 or len(shares) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(schema, "on_migration", interrupted)
    with pytest.raises(KeyboardInterrupt), Log(path) as log:
        log.figures()
    assert shares[-1] == 1.0
    assert len(shares) == 2


WITH_HISTORY = (
    Round("model", 4, 2, 0.0, 0.0),
    Round("history", 8, 8, 0.0, 0.0),
    Round("model+history", 7, 5, 0.0, 0.0, 3, 2),
    Round("history+model", 6, 5, 0.0, 0.0, 4),
    Round("history+model", 6, 1, 0.0, 0.0, 4),
    Round("none", 0, 0, 0.0, 0.0),
)


def test_an_adapters_acceptance_is_of_what_its_draft_drafted(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with LogWriter(path) as writer:
        writer.write(generation(1, adapter="0001", rounds=WITH_HISTORY))
        writer.write(generation(2, adapter="0001", rounds=rounds((4, 1))))
        writer.write(generation(3, rounds=(Round("history", 5, 2, 0.0, 0.0),)))
    with Log(path) as log:
        (first, *_), found, drafters = log.generations(), history(log.figures()), log.by_drafter()
    assert first.generation.rounds == WITH_HISTORY
    of_adapter, of_nobody = found.rows
    # Accepted tokens of the draft: 3 of 4, 3 of 3, 1 of 2; behind a rejected history token nothing counts.
    stats = of_adapter.speculation
    assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (4, 13, 7)
    assert of_adapter.tokens_per_round == 1 + 22 / 7  # over all rounds, whoever drafted
    assert (of_nobody.key, of_nobody.speculation.num_spec_steps, of_nobody.tokens_per_round) == ("no draft", 0, 3.0)
    assert found.positions[0].observed == 4
    drafted = {"model": (5, 15, 7), "history": (5, 25, 17)}
    assert {name: (one.rounds, one.drafted, one.accepted) for name, one in drafters.items()} == drafted
    assert by_drafter([*WITH_HISTORY, *rounds((4, 1)), Round("history", 5, 2, 0.0, 0.0)]) == drafters


def test_what_drafters_did_is_summed_up_anew_only_where_records_were_deleted(tmp_path: Path) -> None:
    path = tmp_path / "records.db"

    def write(*numbers: int) -> None:
        with LogWriter(path) as writer:
            for number in numbers:
                said = (*WITH_HISTORY, *rounds((4, number % 3))) if number % 2 else rounds((4, 1))
                writer.write(generation(number, rounds=said))

    def read(known: DrafterFigures, same: bool = True) -> DrafterFigures:
        with Log(path) as log:
            found = log.drafter_figures(known)
            assert (found == log.drafter_figures() and found.drafters == log.by_drafter()) == same
        return found

    empty = read(DrafterFigures())
    assert empty == DrafterFigures()
    write(2, 1, 3)
    first = read(empty)
    write(4, 5)
    second = read(first)
    assert list(second.drafters) == ["model", "history"]
    assert read(second) == second
    with Log(path) as log:
        log.purge(ids=[2, 5])
    third = read(second)
    assert third != second
    connection = connect(path)
    connection.execute("UPDATE rounds SET accepted = 0 WHERE generation = 3")
    connection.close()
    write(6)
    read(third, same=False)  # the rounds of known records are not read again
    path.unlink()
    write(7, 8, 9)  # as many records under the ids of others
    with Log(path) as log:
        assert log.last_id() == 3
    read(first)


def test_after_a_deletion_only_the_rounds_of_its_block_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    connection = connect(path)
    with transaction(connection):
        for number in range(1, 4 * BLOCK):
            insert(connection, generation(number, rounds=rounds((4, 1)), tokens=2, supervised=False))
    with Log(path) as log:
        known = log.drafter_figures()
        assert known.drafters == {"model": Drafted(4 * BLOCK - 1, 4 * (4 * BLOCK - 1), 4 * BLOCK - 1)}
        connection.execute("UPDATE rounds SET accepted = 2")
        connection.execute("DELETE FROM generations WHERE id = ?", (2 * BLOCK + 5,))
        found = log.drafter_figures(known)
        assert found.drafters["model"] == Drafted(4 * BLOCK - 2, 4 * (4 * BLOCK - 2), 3 * BLOCK - 1 + 2 * (BLOCK - 1))
        connection.execute("DELETE FROM generations WHERE id < ?", (BLOCK + 1,))
        connection.execute("DELETE FROM generations WHERE id >= ?", (3 * BLOCK,))
        assert log.drafter_figures(found) == log.drafter_figures()
    connection.close()


def test_the_dashboard_reads_rounds_once(tmp_path: Path) -> None:
    state = PairState(tmp_path)
    past = Past(state, AdapterStore(state.adapters))
    for total in (4, 8):
        with LogWriter(state.records) as writer:
            writer.write(generation(total, rounds=rounds((4, 1))))
        assert past.read("adapter")[1]["drafters"]["model"]["drafted"] == total
        connection = connect(state.records)
        connection.execute("UPDATE rounds SET drafted = 100")
        connection.close()


def test_a_log_in_which_history_counted_as_the_draft_is_summed_up_anew(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    said = [*WITH_HISTORY[:2], *rounds((3, 3)), Round("grammar", 2, 2, 0.0, 0.0)]
    with LogWriter(path) as writer:
        writer.write(generation(1, rounds=tuple(said)))
        writer.write(generation(2, rounds=rounds((4, 1), (0, 0))))
        writer.write(generation(3, rounds=(said[1],)))
    with Log(path) as log:
        before, drafters = list(log.figures()), log.by_drafter()
    assert [one.own is None for one in before] == [False, True, False]
    old = sqlite3.connect(path, isolation_level=None)  # as the previous version wrote it
    old.execute("ALTER TABLE rounds DROP COLUMN first")
    old.execute("ALTER TABLE figures DROP COLUMN own")
    old.execute(f"PRAGMA user_version={MIGRATIONS.index(tell_drafters_apart)}")
    old.close()
    with Log(path) as log:
        assert list(log.figures()) == before
        assert log.by_drafter() == drafters
        assert next(iter(log.generations())).generation.rounds == tuple(said)
    with LogWriter(path) as writer:
        writer.write(generation(4, rounds=WITH_HISTORY))
    with Log(path) as log:
        assert [one.generation.rounds for one in log.generations()][3] == WITH_HISTORY


def test_rounds_of_two_drafters_are_read_from_the_pages_of_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with LogWriter(path) as writer:
        writer.write(generation(1, rounds=WITH_HISTORY))
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    data = bytearray(path.read_bytes())
    data[:16] = b"no database here"
    path.write_bytes(bytes(data))
    with LogWriter(path) as writer:
        writer.write(generation(2))
    with Log(path) as log:
        assert next(iter(log.generations())).generation.rounds == WITH_HISTORY


def test_many_groups_are_summed_up_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [tuple(RoundCount(d, min(d, n % 4), 1 + n % 3) for d in range(n % 5)) for n in range(30)]
    said = [GenerationFigures(n, f"{n % 7}", 1.0 * n, None, 9, 1.0, 0.0, counts) for n, counts in enumerate(counted)]
    few = grouped(said, "session")
    monkeypatch.setattr(columns, "WHOLE", 0)
    assert grouped(said, "session") == few
    assert sum(row.speculation.num_spec_steps for row in few) == sum(
        c.rounds for counts in counted for c in counts if c.drafted
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
    # (3, 0) does not judge positions 2 and 3, (3, 1) not position 3, (1, 1) none beyond its only token.
    found = acceptance_by_position(count_rounds(rounds((3, 0), (3, 1), (3, 3), (1, 1), (3, 2), (0, 0))))
    assert [(p.position, p.observed, p.accepted) for p in found] == [(1, 5, 4), (2, 3, 2), (3, 2, 1)]
    assert [p.acceptance for p in found] == [4 / 5, 2 / 3, 1 / 2]
    (_, never) = acceptance_by_position([RoundCount(2, 0, 7)])
    assert (never.observed, never.acceptance) == (0, None)


def test_chosen_lengths_and_the_forecast_stand_beside_what_came_of_them() -> None:
    # Ten timed tokens in one second each, where the controller expected two seconds.
    found = history([figures(1, None, (0, 0), (3, 1)), figures(2, None, (1, 1), (0, 0))])
    assert found.lengths == (2, 1, 0, 1)
    assert [p.mean_draft_length for p in found.series] == [1.5, 0.5]
    assert (found.totals.tokens_per_second, found.totals.expected_tokens_per_second) == (10.0, 5.0)
    assert found.totals.mean_draft_length == 1.0


def test_rows_tell_the_base_draft_from_no_draft_at_all() -> None:
    rows = grouped([figures(1, None, (0, 0)), figures(2, None, (2, 1)), figures(3, "0001", (2, 2))], "adapter")
    assert [(r.key, r.generations) for r in rows] == [("no draft", 1), ("no adapter", 1), ("0001", 1)]
    assert [r.speculation.mean_acceptance_length for r in rows] == [1.0, 2.0, 3.0]


def test_a_point_of_the_series_never_mixes_two_adapters() -> None:
    said = [figures(i, "0001" if i > 5 else None, (2, 2 if i > 5 else 1), seconds=2.0) for i in range(1, 9)]
    points = series(said, points=2)
    assert [(p.first_id, p.last_id, p.adapter) for p in points] == [(1, 4, None), (5, 5, None), (6, 8, "0001")]
    assert [p.acceptance_rate for p in points] == [0.5, 0.5, 1.0]
    assert {p.tokens_per_second for p in points} == {5.0}  # the first token's time belongs to the prompt
    (swap,) = swaps(said)
    assert (swap.generation, swap.before, swap.after) == (6, None, "0001")


def begun(*answers: tuple[float, str, str]) -> list[GenerationFigures]:
    """Answers in the order of their ends: when each began, its adapter, its session."""
    return [
        replace(figures(number, adapter, (2, 1)), created=created, session=session)
        for number, (created, adapter, session) in enumerate(answers, start=1)
    ]


def test_an_answer_that_ends_late_under_the_adapter_before_is_no_change() -> None:
    said = begun((1, "0001", "a"), (3, "0002", "b"), (2, "0001", "c"), (4, "0002", "d"), (5, "0002", "c"))
    assert [(swap.generation, swap.before, swap.after) for swap in swaps(said)] == [(2, "0001", "0002")]
    assert [(p.first_id, p.last_id, p.generations) for p in series(said, 1)] == [(1, 3, 2), (2, 5, 3)]


def test_a_process_that_keeps_its_adapter_beside_another_shows_no_change() -> None:
    said = begun(
        (1, "0001", "generate"), (2, "0001", "a"), (3, "0002", "b"), (4, "0001", "generate"), (5, "0002", "c"),
        (6, "0001", "generate"), (7, "0002", "a"), (8, "0001", "d"), (9, "0001", "b"),
    )  # fmt: skip
    changes = [(swap.generation, swap.before, swap.after) for swap in swaps(said)]
    assert changes == [(3, "0001", "0002"), (8, "0002", "0001")]
    assert [(p.first_id, p.last_id, p.adapter, p.generations) for p in series(said, 1)] == [
        (1, 2, "0001", 2),
        (4, 6, "0001", 2),
        (3, 7, "0002", 3),
        (8, 9, "0001", 2),
    ]


def test_what_another_server_answered_is_no_change_of_adapter_but_has_a_speed() -> None:
    said = [figures(1, "0001", (2, 2)), figures(2, seconds=0.1), figures(3, "0001", (2, 1)), figures(4, "0002", (2, 1))]
    assert [(swap.generation, swap.before, swap.after) for swap in swaps(said)] == [(4, "0001", "0002")]
    assert [point.adapter for point in series(said)] == ["0001", None, "0001", "0002"]
    assert history(said).latest.generations == 4


def test_the_log_gives_the_same_figures_as_the_rounds_themselves(tmp_path: Path) -> None:
    said = [
        generation(0, session="a", rounds=rounds((4, 4), (4, 0), (2, 1)), tokens=8, seconds=0.7),
        generation(1, session="b", rounds=rounds((4, 3), (0, 0)), adapter="0001", tokens=5, seconds=0.4),
        generation(2, session="b", rounds=rounds((0, 0)), tokens=1, seconds=0.0),
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


def test_an_answer_of_one_token_has_no_speed() -> None:
    """Its token comes from the prompt's pass; the time until it is shown is not decoding time."""
    one = GenerationFigures(1, "s", 1.7e9, None, 1, 1e-6, 0.0, ())
    assert history([one]).totals.tokens_per_second is None
    assert series([one])[0].tokens_per_second is None
