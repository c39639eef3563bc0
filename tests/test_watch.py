"""A draft is rolled back only on evidence from judged draft tokens, and an open doubt outlives a restart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from records_factory import generation
from store_factory import NEW, write
from test_review import SAMPLED, said_under
from test_trainer import SHORT, small_draft, speak, target, write_log
from test_worker import Taught, let_it_look, live, taught, training, until

from adaptive.control.goodput import GoodputLength
from adaptive.pair import pair_identity
from adaptive.records.log import Log
from adaptive.records.stats import JudgedTokens, RoundCount, count_rounds, judged_tokens
from adaptive.service.doubts import Doubt
from adaptive.service.watch import Watch
from adaptive.types import Round, SamplingParams
from checkpoints.manifest import HeldOut, Interval, Manifest
from checkpoints.store import AdapterStore
from trainers.run import distill

__all__ = ["taught"]


def answers(rng: random.Random, count: int, rate: float, rounds: int, drafted: int = 4) -> Iterator[list[RoundCount]]:
    """Answers with ``drafted`` tokens a round, whose own acceptance rates vary around ``rate`` as in real ones."""
    for _ in range(count):
        own = rng.betavariate(19 * rate, 19 * (1 - rate))  # gives two tokens of one answer a correlation of 0.05
        accepted = []
        for _ in range(rounds):
            run = 0
            while run < drafted and rng.random() < own:
                run += 1
            accepted.append(run)
        yield [RoundCount(drafted, n, 1) for n in accepted] + [RoundCount(0, 0, rounds)]


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """The manifest of an adapter that the gate has not judged."""
    return AdapterStore(tmp_path / "adapters").publish(write, NEW)


def seen(rng: random.Random, manifest: Manifest, before: float, after: Iterator[list[RoundCount]]) -> tuple[Watch, int]:
    """The watch after these answers, and the number of answers after which it condemned the adapter; 0 for never."""
    watch = Watch()
    for one in answers(rng, 40, before, 20):
        watch.observe(None, one)
    for number, one in enumerate(after, 1):
        watch.observe(manifest.id, one)
        if watch.verdict(manifest) is not None:
            return watch, number
    return watch, 0


def test_what_is_behind_a_rejection_was_not_judged() -> None:
    assert judged_tokens([RoundCount(4, 0, 3), RoundCount(4, 4, 2), RoundCount(4, 2, 1), RoundCount(0, 0, 50)]) == (
        JudgedTokens(accepted=10, judged=3 + 8 + 3)
    )


def test_an_adapter_that_is_not_drafted_with_is_never_judged(manifest: Manifest) -> None:
    plain = ([RoundCount(0, 0, 60)] for _ in range(300))
    watch, gone = seen(random.Random(1), manifest, 0.6, plain)
    assert gone == 0
    assert watch.state(manifest) == "not judged: not drafting"


def test_answers_of_one_token_say_nothing_of_the_draft(manifest: Manifest) -> None:
    rng = random.Random(2)
    watch, _ = seen(rng, manifest, 0.6, answers(rng, 8, 0.6, 20))
    said = watch.state(manifest)
    assert "of the drafted tokens accepted" in said
    for _ in range(5):
        watch.observe(manifest.id, ())
    assert watch.state(manifest) == said


def test_rounds_without_a_draft_among_others_say_nothing(manifest: Manifest) -> None:
    rng = random.Random(2)
    tried = ([RoundCount(0, 0, 99), *one] for one in answers(rng, 200, 0.6, 1, drafted=1))
    assert seen(rng, manifest, 0.6, tried)[1] == 0


@pytest.mark.thorough
@pytest.mark.parametrize(("rounds", "drafted"), [(20, 4), (1, 1)])
def test_a_good_draft_stays_through_many_answers(manifest: Manifest, rounds: int, drafted: int) -> None:
    """None of 60 drafts as good as the one before is condemned, with a check after each of 150 answers."""
    rng = random.Random(3)
    gone = [seen(rng, manifest, 0.5, answers(rng, 150, 0.5, rounds, drafted))[1] for _ in range(60)]
    assert not any(gone)


@pytest.mark.parametrize(("rounds", "drafted", "within"), [(20, 4, 5), (1, 1, 30)])
def test_a_useless_draft_goes_within_thirty_answers_also_where_each_tries_it_once(
    manifest: Manifest, rounds: int, drafted: int, within: int
) -> None:
    rng = random.Random(4)
    gone = [seen(rng, manifest, 0.6, answers(rng, 60, 0.02, rounds, drafted))[1] for _ in range(40)]
    assert all(0 < number <= within for number in gone), sorted(gone)


def test_of_what_the_gate_judged_no_more_is_asked_than_it_promised(manifest: Manifest) -> None:
    """Before the swap only confident tokens were drafted, nearly all of them accepted; after it every token."""
    promise = Interval(0.5, 0.45, 0.55)
    recent = HeldOut(30, 1000, 4, Interval(0.3, 0.25, 0.35), promise, Interval(0.2, 0.1, 0.3), promise, promise)
    rng = random.Random(5)
    assert seen(rng, replace(manifest, recent=recent), 0.9, answers(rng, 150, 0.5, 20))[1] == 0
    assert seen(rng, manifest, 0.9, answers(rng, 150, 0.5, 20))[1] > 0


@pytest.mark.parametrize("late", [None, "0007"], ids=["the-plain-draft", "another-adapter"])
def test_answers_of_the_draft_before_that_end_late_are_no_swap_back(manifest: Manifest, late: str | None) -> None:
    """Where several are decoded at once; else the adapter would be compared with its own answers."""
    rng, watch = random.Random(6), Watch()
    for one in answers(rng, 40, 0.6, 20):
        watch.observe(late, one)
    for number, one in enumerate(answers(rng, 60, 0.2, 20)):
        watch.observe(manifest.id, one)
        if number % 6 == 5 and watch.verdict(manifest) is None:
            watch.observe(late, next(answers(rng, 1, 0.6, 20)))
            watch.observe("imported", [])
    assert watch.verdict(manifest) is not None


def test_what_an_adapter_said_before_a_rollback_is_forgotten(manifest: Manifest) -> None:
    rng, watch = random.Random(7), Watch()
    for rate, adapter in ((0.6, None), (0.1, manifest.id)):
        for one in answers(rng, 40, rate, 20):
            watch.observe(adapter, one)
    assert watch.verdict(manifest) is not None
    watch.rolled_back(manifest.id)
    assert watch.state(manifest) == "not judged: no answer yet"
    for one in answers(rng, 20, 0.6, 20):
        watch.observe(None, one)
    watch.observe(manifest.id, next(answers(rng, 1, 0.6, 20)))
    assert watch.verdict(manifest) is None
    assert "goes back where" in watch.state(manifest)


def test_plain_answers_after_a_restart_do_not_roll_the_adapter_back(taught: Taught) -> None:
    """As after ``--draft-length 0`` and some answers: earlier acceptance is in the log, and nothing is drafted now."""
    store = AdapterStore(taught.state.adapters)
    store.publish(write, NEW)
    with training(taught, distill="off") as trainer:
        live(trainer, None, 0.6, 400, seed=1)
        store.promote("0001", "better on held-out records")
        for _ in range(60):
            trainer.answered("0001", (Round("none", 0, 0, 0.0, 0.02),) * 20)
        let_it_look(trainer)
        assert store.current_id() == "0001"
        assert trainer.status.watch == "not judged: not drafting"


@pytest.mark.parametrize(("under_seed", "goes"), [(7, False), (None, True)])
def test_answers_under_a_seed_say_nothing_after_a_restart_either(
    taught: Taught, under_seed: int | None, goes: bool
) -> None:
    """Under a seed fewer draft tokens are accepted, which is not the adapter's fault."""
    store = AdapterStore(taught.state.adapters)
    store.publish(write, NEW)
    store.promote("0001", "better on held-out records")
    sampling = replace(SAMPLED, seed=under_seed)
    plain, new = (None, (Round("model", 4, 4, 0.01, 0.02),) * 20), ("0001", (Round("model", 4, 0, 0.01, 0.02),) * 20)
    said = speak(target(), 40, sampling, seed=3)
    answers = [replace(one, adapter=a, rounds=r) for one, (a, r) in zip(said, [plain] * 20 + [new] * 20, strict=True)]
    write_log(taught.state.records, answers)
    with training(taught, distill="off") as trainer:
        let_it_look(trainer)
        assert (store.current_id() is None) is goes
        if not goes:
            assert trainer.status.watch == "not judged: no answer yet"


def test_the_draft_before_is_known_after_a_restart_however_long_the_log_is(tmp_path: Path, manifest: Manifest) -> None:
    """An adapter in use for long; one that came into use before many imported records; one after a draft that answered
    twice; and answers that a rollback has used, or that drew under a seed."""
    before, after = (Round("model", 4, 3, 0.01, 0.02),) * 20, (Round("model", 4, 2, 0.01, 0.02),) * 20
    drawn = SamplingParams(temperature=0.7, seed=7)

    def restored(*said: tuple[int, str | None, tuple[Round, ...]], settled: int = 0, seeded: bool = False) -> Watch:
        adapters = [(adapter, rounds) for count, adapter, rounds in said for _ in range(count)]
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.db"
        params = drawn if seeded else replace(drawn, seed=None)
        one = replace(generation(supervised=False), sampling=params)
        write_log(path, [replace(one, adapter=adapter, rounds=rounds) for adapter, rounds in adapters])
        watch = Watch()
        with Log(path) as log:
            watch.restore(log, manifest.id, settled)
        return watch

    known = restored((10, None, before), (260, manifest.id, after)).state(manifest)
    assert known.startswith("0.67 of the drafted tokens accepted, 3600 of them in 60 answers; goes back where")
    assert restored((10, None, before), (2, "0009", after), (260, manifest.id, after)).state(manifest) == known
    plain = (Round("none", 0, 0, 0.0, 0.02),)
    assert restored((10, None, before), (9, manifest.id, after), (8, manifest.id, plain)).state(manifest) == (
        "not judged: not drafting"
    )
    new = restored((10, None, before), (260, None, ()))
    for one in answers(random.Random(8), 5, 0.02, 20):
        new.observe(manifest.id, one)
    assert new.verdict(manifest) is not None
    assert "nothing is known" in restored((10, None, before), (9, manifest.id, after), settled=10).state(manifest)
    assert restored((10, None, before), (90, manifest.id, after), seeded=True).state(manifest) == (
        "not judged: no answer yet"
    )


@pytest.mark.thorough
def test_what_is_in_doubt_is_judged_once_more_after_a_restart(taught: Taught) -> None:
    store = AdapterStore(taught.state.adapters)
    base = pair_identity(taught.settings).base
    learned = distill(taught.state.records, store, base, small_draft(), SHORT).manifest
    assert learned is not None
    store.rollback("the test begins without it")
    with training(taught, distill="off") as trainer:
        live(trainer, None, 0.6, 400, seed=1)
        store.promote(learned.id, "better on held-out records")
        write_log(taught.state.records, said_under(learned.id, seed=9, count=20))
        live(trainer, learned.id, 0.3, 300, seed=2)
        until(lambda: store.current_id() is None, trainer)
    write_log(taught.state.records, said_under(learned.id, seed=10, count=20))
    with training(taught, distill_after=10**6) as trainer:
        trainer.idle()
        until(lambda: store.current_id() == learned.id, trainer)
        until(lambda: Doubt.load(taught.state.doubts).adapter is None, trainer)
    # As if killed before the result was saved: that the adapter is in use shows the result.
    Doubt(learned.id, 100).save(taught.state.doubts)
    # A third start must not count the earlier answers against the adapter again.
    with training(taught, distill="off") as trainer:
        let_it_look(trainer)
        assert store.current_id() == learned.id
    assert Doubt.load(taught.state.doubts) == Doubt(settled=120)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"adapter": "0001"}', '{"adapter": 1, "settled": "x"}'])
def test_damaged_doubts_are_none(tmp_path: Path, content: str) -> None:
    file = tmp_path / "doubts.json"
    file.write_text(content, encoding="utf-8")
    assert Doubt.load(file) == Doubt()
    kept = Doubt("0007", 40, 60)
    kept.save(file)
    assert Doubt.load(file) == kept


def test_counted_rounds_are_judged_as_the_rounds_themselves() -> None:
    rounds = [Round("model", 3, n, 0.01, 0.02) for n in (0, 3, 1, 1)]
    assert judged_tokens(count_rounds(rounds)) == JudgedTokens(5, 1 + 3 + 2 + 2)


def test_a_policy_that_has_measured_nothing_promises_no_speed() -> None:
    assert GoodputLength().expected_speed_up is None
