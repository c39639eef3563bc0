"""The controller on a busy machine, after a promotion, and beside another process of the same pair."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest
from controller import Recorded
from records_factory import generation
from test_control import TABLE, Clock, World, slower

from adaptive.control.acceptance import by_position
from adaptive.control.blocks import Blocks
from adaptive.control.costs import LONGEST, CostModel, CostTable
from adaptive.control.goodput import GoodputLength
from adaptive.control.memory import DAY, Memory, keeping, load, remembered, save
from adaptive.control.policy import Scope
from adaptive.control.rate import SeenTimes
from adaptive.control.tries import ON_TRIAL, ON_TRIAL_HERE
from adaptive.records.writer import LogWriter
from adaptive.types import Round

GOOD, USELESS = [0.8] * LONGEST, [0.02] * LONGEST


class Stalls(World):
    """A world in which some passes, of any length, wait for a core that another program uses."""

    share, seconds_each = 0.25, 10.0

    def round(self, acceptance: list[float], limit: int = 1000):  # type: ignore[no-untyped-def]
        """Run one round; a stall adds to the time of the pass."""
        stalled = self.random.random() < self.share
        usual = self.table
        if stalled:
            slow = tuple(seconds + self.seconds_each for seconds in usual.verify_s)
            self.table, self.plain_after_plain = dataclasses.replace(usual, verify_s=slow), 1.0 + self.seconds_each
        try:
            return super().round(acceptance, limit)
        finally:
            self.table, self.plain_after_plain = usual, 1.0


class Sleepers(World):
    """A pair of small models with rounds of about a millisecond. After a switch between plain and drafted rounds the
    first rounds take ``asleep_s`` longer, while a sleeping thread wakes up."""

    asleep_s, wakes = 1e-3, 3
    table_s = CostTable(
        start_s=0.03e-3,
        draft_s=0.1e-3,
        catch_up_s=0.005e-3,
        verify_s=tuple((1 + 0.03 * k) * 1e-3 for k in range(LONGEST + 1)),
        overhead_s=0.02e-3,
        token_s=0.01e-3,
        context_s=0.0,
        context=0,
        plain_s=0.75e-3,
    )
    in_a_row = 0

    @classmethod
    def as_seen_asleep(cls) -> CostTable:
        """The costs measured when each round follows one of the other kind."""
        slow = tuple(seconds + cls.asleep_s for seconds in cls.table_s.verify_s)
        return dataclasses.replace(cls.table_s, verify_s=slow, plain_s=slow[0])

    def round(self, acceptance: list[float], limit: int = 1000):  # type: ignore[no-untyped-def]
        """Run one round, whose time depends on the rounds before it."""
        assert self.table_s.plain_s is not None
        awake, was_plain = self.in_a_row >= self.wakes, self.plain
        slow = tuple(seconds + self.asleep_s for seconds in self.table_s.verify_s)
        self.table = dataclasses.replace(
            self.table_s, verify_s=self.table_s.verify_s if awake and not was_plain else slow
        )
        self.plain_after_plain = self.table_s.plain_s + (0.0 if awake and was_plain else self.asleep_s)
        outcome = super().round(acceptance, limit)
        self.in_a_row = self.in_a_row + 1 if self.plain is was_plain else 0
        return outcome


def in_world(kind: type[World], believed: CostTable = TABLE, table: CostTable = TABLE) -> tuple[GoodputLength, World]:
    """A policy that starts from the table ``believed``, in a world that follows ``table``."""
    clock = Clock()
    policy = GoodputLength(believed, clock=clock)
    return policy, kind(policy, clock, table=table)


def drafted_share(world: World, acceptance: list[float], rounds: int) -> float:
    """Run ``rounds`` rounds. Returns the share that drafted."""
    return sum(world.round(acceptance).drafted > 0 for _ in range(rounds)) / rounds


class SlowToDecide(GoodputLength):
    """Each decision takes a fifth of a plain round, as next to passes of half a millisecond."""

    def _decide(self, context: int, waiting: int) -> None:
        super()._decide(context, waiting)
        assert isinstance(self.clock, Clock)
        self.clock.now += 0.2


def test_the_time_of_decisions_counts_as_that_of_tries() -> None:
    clock = Clock()
    world = World(SlowToDecide(TABLE, clock=clock), clock)
    for _ in range(3000):
        world.round([0.02] * 16)
    assert world.tokens / clock.now > 0.978 / (TABLE.verify_s[0] + TABLE.overhead_s + TABLE.token_s)


def test_rounds_that_wait_for_a_core_count_by_their_mean() -> None:
    """A plain step usually takes 1 second and a drafted round 2.2 for 1.8 tokens, so that drafting loses.

    Where every fourth pass takes 10 seconds longer, a round takes 3.5 or 4.7 on average, and drafting wins.
    """
    dear = dataclasses.replace(TABLE, verify_s=(1.0, *[2.1] * LONGEST))
    acceptance = [0.6, 0.3, *[0.0] * (LONGEST - 2)]
    _, quiet = in_world(World, dear, dear)
    assert drafted_share(quiet, acceptance, 4000) < 0.2
    shares = []
    for seed in range(16):  # with one seed the result depends on when it stalled last
        _, busy = in_world(Stalls, dear, dear)
        busy.random.seed(seed)
        drafted_share(busy, acceptance, 6000)
        shares.append(drafted_share(busy, acceptance, 2000))
    assert sum(shares) / len(shares) > 0.5, shares


@pytest.mark.parametrize(
    ("believed", "acceptance", "drafting"),
    [
        (dataclasses.replace(Sleepers.table_s, plain_s=1.75e-3), [0.3] * LONGEST, False),
        (Sleepers.table_s, [0.3] * LONGEST, False),
        (dataclasses.replace(Sleepers.as_seen_asleep(), plain_s=0.75e-3), GOOD, True),
        (Sleepers.as_seen_asleep(), GOOD, True),
    ],
)
def test_both_ways_are_compared_as_they_are_in_a_row(
    believed: CostTable, acceptance: list[float], drafting: bool
) -> None:
    """A single round of the other kind takes up to three times as long, and must not decide: plain decoding must not
    look slow while the draft is in use, nor drafting while it is not."""
    _, world = in_world(Sleepers, believed, Sleepers.table_s)
    drafted_share(world, acceptance, 5000)
    share = drafted_share(world, acceptance, 4000)
    assert share > 0.95 if drafting else share < 0.05


def test_a_promoted_draft_that_cannot_be_asked_yet_is_tried_in_a_row_as_soon_as_it_can() -> None:
    policy, world = in_world(Sleepers, Sleepers.table_s, Sleepers.table_s)
    drafted_share(world, USELESS, 3000)
    policy.swapped()
    assert all(world.round(GOOD, limit=0).drafted == 0 for _ in range(20))
    assert drafted_share(world, GOOD, 20) > 0.8


def test_the_first_plain_step_of_an_answer_follows_a_prompt_and_no_plain_step() -> None:
    """On an engine that rebuilds its graph for another number of tokens, that step takes longer than the next."""
    blocks = Blocks()
    for _ in range(2):
        blocks.answer()
        assert [blocks.passed(False)[1] for _ in range(3)] == [False, True, True]


@pytest.mark.parametrize("speculating", [True, False])
def test_blocks_lose_no_more_than_their_share(speculating: bool) -> None:
    blocks, plain_s, drafted_s, rate = Blocks(), 1e-3, 1.5e-3, 1200.0 if speculating else 500.0
    lost = total = 0.0
    for _ in range(100_000):
        blocks.plan(speculating, plain_s, drafted_s, rate, 1e-5)
        if not blocks.left and blocks.until_next <= 0:
            blocks.begin()
        drafted = speculating is not (blocks.left > 0)
        seconds = drafted_s if drafted else plain_s
        fastest = max(rate, 1 / plain_s)
        lost += seconds - (drafted_s * rate if drafted else 1.0) / fastest
        total += seconds
        blocks.passed(drafted)
    assert 0.003 < lost / total < 0.006


def test_what_may_be_chance_is_not_believed() -> None:
    times, rng = SeenTimes(), random.Random(5)
    ratios = []
    for _ in range(4000):
        times.observe(rng.random() < 0.1, rng.lognormvariate(0.0, 0.3), 1.0, 1.0)
        ratios.append(times.ratio(1.0))
    assert all(0.8 < ratio < 1.25 for ratio in ratios[200:])
    assert sum(0.99 < ratio < 1.01 for ratio in ratios[200:]) > 0.5 * len(ratios)


def test_a_promoted_draft_is_used_at_once_where_replay_promises_that_it_pays() -> None:
    policy, world = in_world(World)
    for _ in range(3000):
        world.round(USELESS)
    assert drafted_share(world, USELESS, 200) < 0.1
    policy.swapped(by_position(0.8, 3.4, 4))
    assert drafted_share(world, GOOD, 20) > 0.8


def test_a_promoted_draft_of_which_nothing_is_promised_is_not_trusted_either() -> None:
    shares = []
    for seed in range(8):  # one token in fifty is accepted even so, which brings drafting back for some rounds
        clock = Clock()
        policy = GoodputLength(TABLE, clock=clock)
        world = World(policy, clock, seed)
        drafted_share(world, GOOD, 500)
        policy.swapped(by_position(0.05, 1.05, 4))
        shares.append(drafted_share(world, USELESS, 60))
    assert sum(shares) / len(shares) < 0.3


def test_a_new_draft_is_judged_within_a_few_answers_whatever_is_expected_of_it_and_then_left_alone() -> None:
    """The trial lets live acceptance show that the draft is harmful. Tokens of one answer are correlated, so each
    answer contributes few rounds."""
    policy, world = in_world(World)
    drafted_share(world, GOOD, 500)
    policy.swapped(by_position(0.05, 1.05, 4))
    judged, answers = [], math.ceil(ON_TRIAL / ON_TRIAL_HERE)
    for _ in range(answers + 10):
        policy.begin(Scope("s", 0.7))
        judged.append(sum(world.round(USELESS).drafted > 0 for _ in range(60)))
    assert sum(judged[:answers]) >= ON_TRIAL
    assert all(ON_TRIAL_HERE <= n <= ON_TRIAL_HERE + 4 for n in judged[1 : answers - 2])
    assert sum(judged[answers:]) < 0.05 * 600


def test_a_draft_for_which_answers_are_too_short_is_tried_all_the_same() -> None:
    """The draft is expected to pay, except for the time to read the prompt. Unless it is tried, nothing shows that it
    does not pay at all. Reading the prompt is charged to the budget of tries."""
    dear = dataclasses.replace(TABLE, catch_up_s=0.05)  # a plain step takes 1 second
    policy = GoodputLength(dear, clock=Clock())
    policy.swapped(by_position(0.6, 2.0, 4))
    policy.tries.on_trial = 0
    assert policy.speculating
    caught_up, plain_s, catching_up_s = 0, 0.0, 0.0
    for _ in range(300):
        policy.begin(Scope("s", 0.7))
        waiting = 100
        for said in range(12):
            length = policy.next_length(12 - said, waiting, 100)
            policy.tries.on_trial_here = 0
            plain_s += dear.verify_s[0]
            if not length:
                policy.observe(Round("none", 0, 0, 0.0, dear.verify_s[0]))
                waiting += 1
                continue
            catching_up_s += waiting * dear.catch_up_s
            caught_up += waiting > 100 - 1
            policy.stopping(1, 0.9)
            draft_s = dear.start_s + dear.draft_s + waiting * dear.catch_up_s
            policy.observe(Round("model", 1, 0, draft_s, dear.verify_s[1]))
            waiting = 0
    assert caught_up > 0
    assert not policy.speculating
    assert catching_up_s < 0.03 * plain_s


@pytest.mark.parametrize(("first", "later", "length"), [(0.6, 0.8, 4), (0.3, 0.3, 1), (0.9, 0.5, 8), (0.0, 0.0, 4)])
def test_acceptance_by_position_gives_back_the_mean_length(first: float, later: float, length: int) -> None:
    mean = 1 + first * sum(later**i for i in range(length))
    found = by_position(first, mean, length)
    assert len(found) == LONGEST
    assert found[0] == first
    assert len(set(found[1:])) == 1
    reach, tokens = 1.0, 1.0
    for acceptance in found[:length]:
        reach *= acceptance
        tokens += reach
    assert tokens == pytest.approx(mean, abs=1e-6)


def test_costs_of_a_busy_machine_are_kept_apart_from_those_of_a_quiet_one() -> None:
    policy, world = in_world(World)
    drafted_share(world, GOOD, 200)
    policy.settle()
    quiet = policy.costs.table()
    policy.machine(busy=True)
    world.slower = 6.0
    drafted_share(world, GOOD, 400)
    assert policy.costs.table().plain_step_s > 3 * quiet.plain_step_s
    assert policy.quiet_costs.table() == quiet, "and it is these that the next session starts from"
    policy.machine(busy=False)
    assert policy.costs.table() == quiet


def test_costs_measured_on_a_busy_machine_do_not_replace_those_of_a_quiet_one() -> None:
    policy, _ = in_world(World)
    poisoned = dataclasses.replace(TABLE, verify_s=(1.0, *[3.2] * LONGEST))
    policy.remeasured(poisoned, busy=True)
    assert policy.quiet_costs.table() == CostModel(TABLE).table()
    policy.machine(busy=True)
    assert policy.costs.verify(1) == pytest.approx(3.2)


def test_costs_measured_on_a_busy_machine_are_better_than_a_guess() -> None:
    policy = GoodputLength(None)
    policy.remeasured(TABLE, busy=True)
    assert policy.costs.table() == CostModel(TABLE).table()


@pytest.mark.parametrize("busy", [False, True])
def test_costs_in_which_every_second_is_three_leave_the_speed_of_drafting_as_it_was(busy: bool) -> None:
    policy, world = in_world(World)
    drafted_share(world, GOOD, 200)
    policy.settle()
    policy.next_length(1000, context=100)
    before = policy.expected_speed_up
    policy.remeasured(slower(TABLE, 3.0), busy)
    for is_busy in (busy, False):
        policy.machine(is_busy)
        policy.next_length(1000, context=100)
        assert policy.expected_speed_up == pytest.approx(before, rel=0.02)


def test_costs_are_stale_after_a_day_on_another_machine_and_where_it_was_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000_000.0
    monkeypatch.setattr("time.time", lambda: now)
    policy = GoodputLength(TABLE)

    def kept(measured: float) -> Memory:
        save(tmp_path / "controller.json", remembered(policy, "cpu", "this one", measured, None))
        return load(tmp_path / "controller.json", "cpu")

    assert not kept(now - 60).stale("this one")
    assert kept(now - 60).stale("another one")
    assert kept(now - DAY - 1).stale("this one")
    assert kept(0.0).stale("this one")
    assert kept(now + 3600).stale("this one"), "the clock was put back"


def test_one_process_of_a_pair_keeps_what_the_controller_learned(tmp_path: Path) -> None:
    with keeping(tmp_path / "controller.json") as first:
        assert first
        with keeping(tmp_path / "controller.json") as second:
            assert not second
    with keeping(tmp_path / "controller.json") as third:
        assert third


def test_a_machine_is_replayed_from_the_log_of_a_session_that_was_lived_on_it(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    rounds = tuple(Round("none", 0, 0, 0.0, 0.002 if number % 2 else 0.001) for number in range(40))
    with LogWriter(path) as log:
        log.write(generation(rounds=rounds))
    machine = Recorded(path, TABLE)
    assert machine.at(0.0) == pytest.approx(1.0, rel=0.01)
    assert machine.at(1.5 * TABLE.plain_step_s) == pytest.approx(2.0, rel=0.01)
