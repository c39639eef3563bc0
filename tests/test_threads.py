"""The number of threads of short passes adapts to other load on the machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator

import pytest
from accounts import Accounts
from spinning import spinning

from adaptive.engines.threads import OwnClock, ThreadChoice, WorkClock

Seconds = Callable[[int], float]
shared_cores = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")


def passes(choice: ThreadChoice, count: int, seconds: Seconds, tokens: int = 1) -> list[int]:
    """The threads chosen for ``count`` passes that take ``seconds(threads)`` each."""
    chosen = []
    for _ in range(count):
        chosen.append(choice.choose(tokens))
        choice.observe(tokens, seconds(chosen[-1]))
    return chosen


def shared(rng: random.Random, one: float, all_: float, turn: float, share: float) -> Seconds:
    """Durations beside a program that occupies one core: a ``share`` of passes on all threads waits for its
    ``turn``."""
    return lambda threads: one if threads == 1 else all_ + (turn if rng.random() < share else 0.0)


def idle(threads: int) -> float:
    return {1: 1.5e-3, 2: 1.0e-3}[threads]


def test_threads_are_those_that_are_faster_now() -> None:
    busy = {1: 2e-3, 2: 0.3}
    choice = ThreadChoice(2)
    passes(choice, 50, idle)
    assert passes(choice, 1000, idle).count(2) > 980
    assert passes(choice, 200, busy.__getitem__).count(2) < 10
    assert choice.choose(512) == 1  # a prompt too
    tried = passes(choice, 20_000, busy.__getitem__).count(2)
    assert tried * busy[2] < 0.02 * 20_000 * busy[1]
    assert passes(choice, 30_000, idle)[-1000:].count(2) > 980
    choice.observe(1, 0.5)  # one slow moment
    assert choice.best(1) == 2
    assert passes(choice, 1000, idle).count(2) > 950


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [1.0, 0.05, 10.0])
def test_a_program_that_is_in_the_way_now_and_then_counts(size: float, seed: int) -> None:
    """Most passes are faster on all threads, but on average they are slower."""
    rng, one, all_ = random.Random(seed), 1.6e-3 * size, 1.0e-3 * size
    # A turn's length does not depend on the size of a pass; waiting for turns costs three times what threads gain.
    share = min(0.4, 1.8e-3 * size / 12e-3)
    turn = 1.8e-3 * size / share
    busy = shared(rng, one, all_, turn, share)
    choice = ThreadChoice(2)
    took = sum(busy(threads) for threads in passes(choice, 8000, busy))
    best = 8000 * one
    assert took < 1.1 * best
    # Where waiting costs less than threads gain, all threads stay.
    light = shared(rng, one, all_, turn / 9, share)
    passes(choice, 40_000, light)
    assert passes(choice, 4000, light).count(2) > 3600


def test_a_thread_that_has_to_be_woken_first_is_not_taken_for_a_slow_one() -> None:
    rng, choice, before, chosen = random.Random(0), ThreadChoice(2), 2, []
    for _ in range(40):  # the machine's speed changes too
        pace = rng.choice([1.0, 1.3, 1.7])
        for _ in range(rng.randrange(100, 500)):
            threads = choice.choose(1)
            asleep = 0.5e-3 if threads > before else 0.0
            choice.observe(1, pace * ({1: 1.3e-3, 2: 1.0e-3}[threads] + asleep) * rng.uniform(0.9, 1.1))
            before = threads
            chosen.append(threads)
    assert chosen.count(1) < 0.05 * len(chosen)


def test_trials_cost_next_to_nothing() -> None:
    rng = random.Random(0)
    for fast, slow in ((2, 1), (1, 2)):
        choice = ThreadChoice(2)
        seconds = {fast: 1.0e-3, slow: 1.7e-3}
        took = passes(choice, 20_000, lambda threads, seconds=seconds: seconds[threads] * rng.uniform(0.9, 1.1))  # type: ignore[misc]
        assert took[-10_000:].count(slow) < 0.02 * 10_000


def test_passes_over_other_numbers_of_tokens_begin_with_what_is_known() -> None:
    choice = ThreadChoice(2)
    passes(choice, 100, {1: 1e-3, 2: 20e-3}.__getitem__)
    assert choice.choose(5) == 1
    # Then they are judged by their own times.
    passes(choice, 2000, {1: 3e-3, 2: 2e-3}.__getitem__, tokens=5)
    assert (choice.best(1), choice.best(5)) == (1, 2)


def test_between_two_numbers_of_tokens_that_agree_a_trial_can_wait() -> None:
    """Drafts have many lengths: a trial of each one's first passes would be felt at the start of every session."""
    seconds = {1: 3e-3, 2: 2e-3}.__getitem__
    choice = ThreadChoice(2)
    for tokens in (1, 5, 9):
        passes(choice, 100, seconds, tokens)
    assert set(passes(choice, 200, seconds, tokens=7)) == {2}
    assert 1 in passes(choice, 100, seconds, tokens=12)
    # But a trial does come, since a machine changes.
    assert passes(choice, 2000, {1: 2e-3, 2: 3e-3}.__getitem__, tokens=7)[-500:].count(1) > 480
    passes(choice, 500, {1: 2e-3, 2: 20e-3}.__getitem__, tokens=1)
    assert (choice.best(1), choice.best(5)) == (1, 2)
    assert 2 in passes(choice, 100, seconds, tokens=3)


def test_single_steps_among_verifications_say_nothing_of_plain_decoding() -> None:
    """A thread that sleeps while the draft runs must be woken for a single step, so one thread is faster there. Plain
    decoding in a row, the baseline for drafting, is faster on both."""
    choice = ThreadChoice(2)
    passes(choice, 200, idle)
    for _ in range(3000):
        passes(choice, 1, {1: 1.3e-3, 2: 1.6e-3}.__getitem__, tokens=1)
        passes(choice, 1, {1: 1.3e-3, 2: 1.6e-3}.__getitem__, tokens=3)
    assert (choice.best(1), choice.best(3)) == (2, 1)
    assert passes(choice, 30, idle).count(2) == 30


def test_one_thread_needs_no_choice() -> None:
    assert passes(ThreadChoice(1), 20, lambda threads: 1e-3) == [1] * 20


def test_numbers_of_tokens_that_are_seldom_passed_go_along_when_the_machine_is_idle_again() -> None:
    """Beside another program one thread is best for all lengths. When the program ends, plain decoding finds out by its
    own passes; the rare drafted passes, too few for trials, must not stay on one thread."""
    choice, busy = ThreadChoice(2), True

    def passed(tokens: int) -> int:
        threads = choice.choose(tokens)
        choice.observe(tokens, (0.012 if busy else 0.0007) if threads == 2 else 0.0013)
        return threads

    for _ in range(3000):
        for tokens in (1, 1, 2, 3):
            passed(tokens)
    assert [choice.best(tokens) for tokens in (1, 2, 3)] == [1, 1, 1]
    busy = False
    for _ in range(60_000):  # plain decoding alone
        passed(1)
        if choice.best(1) == 2:
            break
    assert choice.best(1) == 2
    assert [passed(tokens) for tokens in (2, 3)] == [2, 2]


def test_one_number_of_tokens_does_not_stay_on_one_thread_where_all_do_well_for_the_others() -> None:
    """A short disturbance hit only passes over five tokens."""
    choice = ThreadChoice(2)
    for tokens in (1, 4, 5, 7):
        passes(choice, 100, idle, tokens)
    moment = {1: 1.5e-3, 2: 0.05}
    passes(choice, 60, moment.__getitem__, tokens=5)
    assert [choice.best(tokens) for tokens in (4, 5, 7)] == [2, 1, 2]
    others = [passes(choice, 5, idle, tokens) for _ in range(250) for tokens in (4, 5, 7)]
    assert len(others) == 750  # two and a half seconds
    assert choice.best(5) == 2
    # Where one thread is faster for five tokens, trials become rare.
    small = {1: 1e-3, 2: 1.3e-3}
    passes(choice, 500, small.__getitem__, tokens=5)
    assert choice.best(5) == 1
    tried = 0
    for _ in range(4000):
        passes(choice, 4, idle, tokens=4)
        tried += passes(choice, 1, small.__getitem__, tokens=5).count(2)
    assert choice.best(5) == 1
    assert tried < 400


@pytest.mark.parametrize("told", [True, False])
def test_when_other_programs_have_ended_all_threads_are_tried_at_once(told: bool) -> None:
    """Trials beside two other programs cost so much that the next one is due only after seconds of decoding."""
    accounts = Accounts(4.0)
    choice = ThreadChoice(2, accounts if told else None)

    def passed(count: int, seconds: Seconds, others: float) -> list[int]:
        chosen = []
        for _ in range(count):
            chosen += passes(choice, 1, seconds)
            accounts.passed(seconds(chosen[-1]), chosen[-1], others)
        return chosen

    passed(3000, {1: 2e-3, 2: 0.05}.__getitem__, others=1.0)
    assert choice.best(1) == 1
    after = passed(1000, {1: 2e-3, 2: 1e-3}.__getitem__, others=0.0)
    assert (after[400:].count(2) > 550) is told


def test_beside_programs_that_keep_the_cores_busy_all_threads_are_not_even_tried() -> None:
    """Beside two programs a pass on two threads took half a second, and one millisecond on one thread."""
    accounts = Accounts()
    choice = ThreadChoice(2, accounts)
    accounts.passed(0.5, 0, others=2.0)  # while the models were loaded

    def passed(count: int, tokens: tuple[int, ...], seconds: Seconds, others: float) -> list[int]:
        chosen = []
        for _ in range(count):
            for number in tokens:
                chosen += passes(choice, 1, seconds, number)
                accounts.passed(seconds(chosen[-1]), chosen[-1], others)
        return chosen

    assert set(passed(5000, (1, 1, 3, 40), {1: 1e-3, 2: 0.5}.__getitem__, others=1.0)) == {1}
    assert passed(1500, (1,), idle, others=0.0)[600:].count(2) > 850


def answered(choice: ThreadChoice, accounts: Accounts, others: float) -> list[int]:
    """The threads chosen for the 60 passes of an answer beside ``others`` busy cores."""
    chosen = []
    for _ in range(60):
        chosen += passes(choice, 1, idle)
        accounts.passed(idle(chosen[-1]), chosen[-1], others)
    return chosen


@pytest.mark.parametrize("crowded", [True, False])
def test_what_ran_in_a_pause_between_answers_says_nothing_of_the_next_one(crowded: bool) -> None:
    """A trainer kept all cores busy for half a minute and has ended: the next answers use all threads, even if one
    thread was best before."""
    accounts = Accounts()
    choice = ThreadChoice(2, accounts)

    def answer(others: float) -> list[int]:
        return answered(choice, accounts, others)

    accounts.passed(0.5, 0, 2.0 if crowded else 0.0)  # while the models were loaded
    for _ in range(20):
        answer(1.0 if crowded else 0.0)
    assert choice.crowded is crowded
    accounts.passed(30.0, 0, others=2.0)
    found = [answer(0.0) for _ in range(8)]
    assert [chosen.count(2) > 40 for chosen in found[3:]] == [True] * 5
    assert crowded or all(chosen.count(2) > 40 for chosen in found)


def test_after_a_load_short_answers_do_not_stay_on_one_thread() -> None:
    """An answer of a small model has less than a tenth of a second of passes, so the end of a load must be detected by
    wall-clock time."""
    accounts = Accounts()
    choice = ThreadChoice(2, accounts)

    def answer(others: float) -> list[int]:
        chosen = answered(choice, accounts, others)
        accounts.passed(0.3, 0, others)  # until the next question
        return chosen

    for _ in range(10):
        answer(1.0)
    assert choice.crowded
    answer(0.0)
    answer(0.0)
    assert answer(0.0).count(2) == 60


def test_passes_of_seconds_are_no_pause() -> None:
    """A target read from disk: other programs that keep the cores busy are still noticed."""
    accounts = Accounts()
    choice = ThreadChoice(2, accounts)
    for _ in range(3):
        for chosen in passes(choice, 1, {1: 6.0, 2: 6.0}.__getitem__):
            accounts.passed(6.0, 1 if chosen else 0, others=1.0)
    assert choice.crowded


def test_what_trials_take_longer_is_not_counted_as_what_passes_cost() -> None:
    choice = ThreadChoice(2)
    chosen = passes(choice, 400, idle, tokens=4)
    longer = sum(idle(threads) - idle(2) for threads in chosen)
    assert longer > 0
    assert choice.trials_s == pytest.approx(longer)
    clock = WorkClock(choice, ThreadChoice(0))
    before = clock()
    choice.trials_s += 1000.0
    assert clock() == pytest.approx(before - 1000.0, abs=100.0)


@contextlib.contextmanager
def on_a_shared_core() -> Iterator[None]:
    """Give this thread one core, which another program uses as well."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        with spinning(1):  # on the same core, which a process inherits
            yield
    finally:
        os.sched_setaffinity(0, mine)


def work(seconds: float, at_each: Callable[[], object]) -> None:
    """Compute for some wall-clock seconds, calling ``at_each`` a few times each millisecond."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(5_000))
        at_each()


@shared_cores
@pytest.mark.parametrize("counted", [True, False], ids=["kernel counts", "kernel does not count"])
def test_the_own_clock_is_the_threads_own_time_beside_other_programs(
    counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not counted:
        monkeypatch.setattr("adaptive.engines.threads.waited", lambda: None)
    clock = OwnClock()
    with on_a_shared_core():
        own, steps = (time.thread_time(), clock()), [clock()]
        work(0.5, lambda: steps.append(clock()))
        expected, seen = time.thread_time() - own[0], clock() - own[1]
    assert steps == sorted(steps)
    assert seen == pytest.approx(expected, abs=0.02)
    assert seen < 0.45


@shared_cores
def test_the_clock_of_rounds_stands_still_while_others_have_the_core_and_never_jumps() -> None:
    choice = ThreadChoice(2)
    clock = WorkClock(choice, ThreadChoice(0))
    with on_a_shared_core():
        times = [clock()]
        for alone in (False, True, False, True):
            choice.alone = alone
            times.append(clock())
            work(0.2, clock)
            times.append(clock())
    steps = [after - before for before, after in itertools.pairwise(times)]
    assert all(step >= 0 for step in steps)
    switched, worked = steps[::2], steps[1::2]
    assert max(switched) < 1.0  # the two clocks started at different moments
    assert min(worked[::2]) >= 0.2
    assert max(worked[1::2]) < 0.18
