"""The effect of a promotion is predicted from the gate's replay and the costs, and checked against later answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from records_factory import generation
from shortages import replaced_by_a_folder
from store_factory import NEW, published, write
from test_trainer import write_log
from test_worker import Taught, let_it_look, taught, training, until

from adaptive.control.costs import LONGEST, CostTable
from adaptive.errors import AdaptiveError
from adaptive.promotions import (
    Promotion,
    checked,
    expected_speed,
    keep,
    load,
    perfect_speed_up,
    seconds_a_token,
)
from adaptive.records.log import Log
from adaptive.service.gains import Gains, why_not
from adaptive.types import Generation, Round
from checkpoints import files
from checkpoints.manifest import HeldOut, Interval
from checkpoints.store import AdapterStore

__all__ = ["taught"]

# A plain step takes 10 ms, a drafted token 0.5 ms plus 0.2 ms to verify.
COSTS = CostTable(0.0, 0.0005, 0.0, tuple(0.01 + 0.0002 * k for k in range(LONGEST + 1)), 0.0, 1e-9, 0.0, 0)
# A draft step as slow as the target's, so that no draft pays.
USELESS = CostTable(0.0, 0.012, 0.0, tuple(0.01 + 0.001 * k for k in range(LONGEST + 1)), 0.0, 1e-9, 0.0, 0)


def exactly(mean: float) -> Interval:
    return Interval(mean, mean, mean)


def held_out(before: tuple[float, float], after: tuple[float, float]) -> HeldOut:
    """Acceptance and mean acceptance length at draft length 4, before and after."""
    (rate, length), (rate_after, length_after) = before, after
    gain = exactly(rate_after - rate)
    lengths = exactly(length), exactly(length_after)
    return HeldOut(30, 1000, 4, exactly(rate), exactly(rate_after), gain, *lengths)


def test_the_speed_expected_is_that_of_the_best_length_worked_by_hand() -> None:
    # Half of first tokens are accepted and no second ones: a round of one drafted token yields 1.5 in 10.7 ms.
    assert seconds_a_token([0.5, 0.0], COSTS) == pytest.approx(0.0107 / 1.5, rel=1e-4)
    assert seconds_a_token([0.01], COSTS) == pytest.approx(0.01, rel=1e-4)  # plain decoding
    faster, over_plain = expected_speed(held_out((0.01, 1.01), (0.5, 1.5)), COSTS)
    assert faster == pytest.approx(over_plain)
    assert over_plain == pytest.approx(1.5 / 1.07, rel=1e-3)
    assert expected_speed(held_out((0.5, 1.9), (0.5, 1.9)), COSTS)[0] == pytest.approx(1.0)


@pytest.mark.thorough
def test_where_even_a_perfect_draft_does_not_pay_training_waits_and_says_so_once(
    taught: Taught, caplog: pytest.LogCaptureFixture
) -> None:
    assert perfect_speed_up(USELESS) == 1.0
    assert perfect_speed_up(COSTS) > 7
    assert why_not(None) is None
    assert why_not(COSTS) is None
    with training(taught, distill_after=50) as trainer:
        trainer.costs = lambda: USELESS
        trainer.idle()
        until(lambda: "training waits" in trainer.status.reason, trainer)
        let_it_look(trainer)
        assert trainer.status.activity == "waiting"
        assert trainer.runs == 0
        trainer.costs = lambda: COSTS
        until(lambda: trainer.status.activity == "training", trainer)
    assert sum("training waits" in record.getMessage() for record in caplog.records) == 1


def answered(number: int, adapter: str | None, round_s: float) -> Generation:
    """Thirty tokens in rounds of two and ten plain steps of 10 ms, nine of which show how long plain decoding takes."""
    drafted = tuple(Round("model", 1, 1, 0.0, round_s) for _ in range(10))
    rounds = (*drafted, *(Round("none", 0, 0, 0.0, 0.01) for _ in range(10)))
    return generation(number, adapter=adapter, rounds=rounds, tokens=31, seconds=0.1 + 10 * round_s)


@pytest.mark.thorough
def test_a_promotion_is_foreseen_and_checked_and_both_are_kept(
    taught: Taught, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    store = AdapterStore(taught.state.adapters)
    recent = held_out((0.01, 1.01), (0.5, 1.5))
    adapter = store.publish(write, replace(NEW, recent=recent)).id
    write_log(taught.state.records, [answered(n, None, 0.02) for n in range(40)])
    with training(taught, distill="off") as trainer:
        trainer.costs = lambda: COSTS
        store.promote(adapter, "better on held-out records")
        until(lambda: bool(load(taught.state.promotions)), trainer)
        (foreseen,) = load(taught.state.promotions)
        assert foreseen.expected == pytest.approx(1.5 / 1.07, rel=1e-3)
        assert "not measured yet" in foreseen.text
    # A restart in between changes nothing, and makes no new prediction.
    write_log(taught.state.records, [answered(n, adapter, 0.01) for n in range(40, 80)])
    with training(taught, distill="off") as trainer:
        until(lambda: load(taught.state.promotions)[-1].came is not None, trainer)
    (found,) = load(taught.state.promotions)
    assert found.expected == foreseen.expected
    assert found.came == pytest.approx(0.3 / 0.2, rel=0.02)  # rounds of 20 ms, then of 10 ms
    said = [record.getMessage() for record in caplog.records]
    assert any("1.40 times as fast as before, by replay" in line for line in said)
    assert any("measured 1.50 times (" in line for line in said)


def test_an_adapter_that_comes_back_after_a_rollback_is_no_promotion(taught: Taught) -> None:
    store = AdapterStore(taught.state.adapters)
    new = replace(NEW, recent=held_out((0.01, 1.01), (0.5, 1.5)))
    first, second = (store.publish(write, new).id for _ in range(2))
    write_log(taught.state.records, [answered(n, None, 0.02) for n in range(40)])
    with Log(taught.state.records) as log:
        for _ in range(2):  # the second time, as after a restart
            gains = Gains(taught.state)
            for in_use in (first, second, first):
                gains.look(log, store.show(in_use), lambda: COSTS)
            assert [promotion.adapter for promotion in load(taught.state.promotions)] == [first, second]


def test_an_adapter_that_was_in_use_before_anybody_looked_is_judged_from_its_first_answer(taught: Taught) -> None:
    """`adaptive distill` promoted it, and `adaptive generate` used it, before a server was started."""
    store = published(taught.state.adapters, 1, promote=1)
    write_log(taught.state.records, [answered(n, None, 0.02) for n in range(40)])
    write_log(taught.state.records, [answered(n, "0001", 0.01) for n in range(40, 60)])
    with Log(taught.state.records) as log:
        Gains(taught.state).look(log, store.current(), lambda: COSTS)
        assert load(taught.state.promotions)[0].answer == log.last_id() - 20


def test_a_promotion_during_which_the_log_cannot_be_read_is_noted_later(taught: Taught) -> None:
    store = published(taught.state.adapters, 1, promote=1)
    gains = Gains(taught.state)
    with Log(taught.state.records) as log:
        with replaced_by_a_folder(taught.state.records), pytest.raises(AdaptiveError):
            gains.look(log, store.current(), lambda: COSTS)
        for _ in range(2):
            gains.look(log, store.current(), lambda: COSTS)
    assert [promotion.adapter for promotion in load(taught.state.promotions)] == ["0001"]


def test_what_came_is_told_by_the_adapters_own_answers(tmp_path: Path) -> None:
    """It was rolled back after ten answers, and came back after forty."""
    path = tmp_path / "records.db"
    rounds = [(None, 0.02)] * 60 + [("0002", 0.01)] * 10 + [(None, 0.02)] * 40 + [("0002", 0.01)] * 40
    write_log(path, [answered(n, adapter, round_s) for n, (adapter, round_s) in enumerate(rounds)])
    with Log(path) as log:
        found = checked(Promotion("0002", 0.0, 60, 1.5, 1.5), log.spent(), log.ids_under("0002"))
    assert found is not None
    assert found.came == pytest.approx(0.3 / 0.2, rel=0.02)
    assert found.answers == 40


def beside(answer: Generation, others: int) -> Generation:
    """The same answer in passes shared with ``others``: they take as much longer, and it has a share of each."""
    answers = 1 + others
    whole = (
        sum(r.draft_s + r.verify_s for r in answer.rounds) * answers / 2
    )  # a pass over two takes as long as over one
    rounds = tuple(r.stretched(0.5)._replace(shared=others) for r in answer.rounds)
    return replace(answer, rounds=rounds, timings=replace(answer.timings, predicted_s=whole))


def test_answers_that_shared_passes_do_not_tell_what_came(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    said = [answered(n, None, 0.02) for n in range(60)]
    said += [beside(answered(n, None, 0.02), 1) for n in range(60, 120)]
    said += [beside(answered(n, "0002", 0.01), 1) for n in range(120, 180)]
    write_log(path, said)
    promotion = Promotion("0002", 0.0, 120, 1.5, 1.5)
    with Log(path) as log:
        assert checked(promotion, log.spent(), range(121, 400)) is None
    write_log(path, [answered(n, "0002", 0.01) for n in range(180, 220)])
    with Log(path) as log:
        found = checked(promotion, log.spent(), range(121, 400))
    assert found is not None
    assert found.came == pytest.approx(0.3 / 0.2, rel=0.02)
    assert found.answers == 40


def test_what_to_expect_of_a_head_is_told_by_what_its_own_steps_take(taught: Taught) -> None:
    store, path = AdapterStore(taught.state.adapters), taught.state.records

    def write_head(folder: Path) -> None:
        write(folder)
        (folder / "adapter_model.safetensors").rename(folder / "model.safetensors")
        (folder / "adapter_config.json").rename(folder / "config.json")

    head = store.publish(write_head, replace(NEW, kind="head", recent=held_out((0.01, 1.01), (0.5, 1.5)))).id
    write_log(path, [answered(n, None, 0.02) for n in range(40)])
    gains, dear = Gains(taught.state), replace(COSTS, draft_s=0.01)  # a step over all tokens
    with Log(path) as log:
        gains.look(log, store.show(head), lambda: dear)
        assert load(taught.state.promotions)[-1].expected is None
        write_log(path, [answered(n, head, 0.01) for n in range(40, 45)])
        gains.look(log, store.show(head), lambda: COSTS)
    assert load(taught.state.promotions)[-1].expected == pytest.approx(1.5 / 1.07, rel=1e-3)


def test_a_slower_machine_is_not_a_worse_adapter(tmp_path: Path) -> None:
    """Under the adapter everything takes twice as long, plain steps too, so the adapter did not slow answers down."""
    path = tmp_path / "records.db"
    slow = [answered(n, "0001", 0.015) for n in range(60, 120)]
    slow = [
        generation(
            n,
            adapter="0001",
            rounds=tuple(r._replace(verify_s=2 * r.verify_s) for r in one.rounds),
            tokens=31,
            seconds=2 * one.timings.predicted_s,
        )
        for n, one in enumerate(slow)
    ]
    write_log(path, [*(answered(n, None, 0.015) for n in range(60)), *slow])
    with Log(path) as log:
        found = checked(Promotion("0001", 0.0, 60, 1.0, 1.0), log.spent(), range(61, 121))
    assert found is not None
    assert found.came == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("content", ["", "{", "[1]", '[{"adapter": "0001"}]', '[{"adapter": "1", "at": "x"}]', "{}"])
def test_a_damaged_file_of_promotions_is_an_empty_one(tmp_path: Path, content: str) -> None:
    file = tmp_path / "promotions.json"
    file.write_text(content, encoding="utf-8")
    assert load(file) == []
    known = [Promotion("0001", 1.0, 5, 1.2, 1.4), Promotion("0002", 2.0, 9, None, None, 1.1, 0.9, 1.3, 40)]
    assert keep(file, known) == known
    assert load(file) == known


def test_what_two_processes_keep_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "promotions.json"
    first, second = Promotion("0001", 1.0, 5, None, None), Promotion("0002", 2.0, 9, 1.1, 1.3)
    measured = replace(first, came=1.2, low=1.1, high=1.3, answers=40)
    assert keep(file, [first]) == [first]
    assert keep(file, [second]) == [first, second]  # who has not read the first one
    assert keep(file, [measured, second]) == [measured, second]
    assert keep(file, [replace(first, at=3.0)]) == [measured, second]  # who does not know what was measured
    assert load(file) == [measured, second]


def test_a_file_whose_lock_another_process_holds_stays_as_it_is(
    taught: Taught, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "CHANGE_S", 0.05)
    store, file = published(taught.state.adapters, 1, promote=1), taught.state.promotions
    with files.changing(file), Log(taught.state.records) as log:
        Gains(taught.state).look(log, store.current(), lambda: COSTS)
    assert f"{file} cannot be written (another process holds its lock)" in caplog.text
    assert not file.exists()


def test_a_promotion_that_another_process_noted_is_noted_once(taught: Taught) -> None:
    store = published(taught.state.adapters, 1)
    one, other = Gains(taught.state), Gains(taught.state)
    store.promote("0001", "better on held-out records")
    with Log(taught.state.records) as log:
        one.look(log, store.current(), lambda: COSTS)
        (noted,) = load(taught.state.promotions)
        other.look(log, store.current(), lambda: COSTS)
    assert load(taught.state.promotions) == [noted]
