"""The controller's guarantees: its estimates converge, it never gets stuck, and it never exceeds a limit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length_policies import AdditiveLength, AverageLength, BanditLength, ThresholdLength

from adaptive.control.acceptance import Acceptance
from adaptive.control.confidence import Calibration, bin_of
from adaptive.control.costs import LONGEST, CostModel, CostTable, Timed
from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import Advice, FixedLength, LengthPolicy, Scope
from adaptive.control.tries import BUDGET, DEBT, SHARE
from adaptive.types import Round

TABLE = CostTable(
    start_s=0.03,
    draft_s=0.1,
    catch_up_s=0.005,
    verify_s=tuple(1 + 0.03 * k for k in range(LONGEST + 1)),
    overhead_s=0.02,
    token_s=0.01,
    context_s=0.0,
    context=0,
)


def slower(table: CostTable, times: float) -> CostTable:
    """Costs of which every second takes ``times`` as long."""
    names = ("start_s", "draft_s", "catch_up_s", "overhead_s", "token_s")
    longer = {name: times * getattr(table, name) for name in names}
    return replace(table, **longer, verify_s=tuple(times * s for s in table.verify_s))


def judged(drafted: int, accepted: int) -> Round:
    """A round with this outcome and arbitrary times."""
    return Round("model", drafted, accepted, 0.0, 0.0)


class Clock:
    """Time that a test advances by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class World:
    """A simulated pair: the i-th drafted token is accepted with a given probability, and costs follow a table.

    The draft's confidence in a token equals the probability that the token is accepted.
    """

    def __init__(self, policy: LengthPolicy, clock: Clock, seed: int = 0, table: CostTable = TABLE) -> None:
        self.policy = policy
        self.table = table
        self.clock = clock
        self.random = random.Random(seed)
        self.waiting = 0
        self.slower = 1.0
        self.plain_after_plain = 1.0  # seconds of a plain pass that follows a plain pass
        self.plain = False  # whether the last round was plain
        self.tokens = self.seconds = 0.0

    def round(self, acceptance: list[float], limit: int = 1000) -> Round:
        """One round, as the loop and the drafter run it."""
        length = self.policy.next_length(limit, self.waiting, 100)
        assert 0 <= length <= limit
        steps, drafted, advise = 0, 0, self.policy.adviser
        while drafted < length:
            steps += 1
            advice = Advice.MORE if advise is None else advise(steps, acceptance[drafted])
            if advice is Advice.DROP:
                break
            drafted += 1
            if advice is Advice.LAST:
                break
        table, accepted = self.table, 0
        while accepted < drafted and self.random.random() < acceptance[accepted]:
            accepted += 1
        draft_s = table.start_s + steps * table.draft_s + self.waiting * table.catch_up_s if steps else 0.0
        verify_s = table.verify_s[drafted] if steps or not self.plain else self.plain_after_plain
        self.plain = not steps
        outcome = Round(
            "model" if drafted else "none", drafted, accepted, draft_s * self.slower, verify_s * self.slower
        )
        self.policy.observe(outcome)
        between = (table.overhead_s + table.token_s * (1 + accepted)) * self.slower
        self.clock.now += outcome.draft_s + outcome.verify_s + between
        self.waiting = max(0, 1 + accepted - steps) if steps else self.waiting + 1
        self.tokens += accepted + 1
        self.seconds += outcome.draft_s + outcome.verify_s + between
        return outcome


def goodput(attentive: bool = True) -> tuple[GoodputLength, World]:
    """A new policy and a world for it."""
    clock = Clock()
    policy = GoodputLength(TABLE, attentive=attentive, clock=clock)
    return policy, World(policy, clock)


@pytest.mark.parametrize("true", [[0.9] * 16, [0.3] * 16, [0.9, 0.7, 0.5, 0.3] + [0.1] * 12])
def test_acceptance_converges_to_the_true_conditional_one(true: list[float]) -> None:
    estimator, rng = Acceptance(), random.Random(3)
    sums = [0.0] * 4
    for number in range(4000):
        accepted = 0
        while accepted < 4 and rng.random() < true[accepted]:
            accepted += 1
        estimator.observe([judged(4, accepted)])
        if number >= 2000:  # compare the mean over time, since a discounted estimate keeps fluctuating
            sums = [s + e for s, e in zip(sums, estimator.estimate()[:4], strict=True)]
    for position in range(4):
        assert sums[position] / 2000 == pytest.approx(true[position], abs=0.05)


def test_a_position_after_a_rejection_is_unobserved() -> None:
    estimator = Acceptance()
    before = estimator.estimate()
    for _ in range(50):
        estimator.observe([judged(8, 1)])
    after = estimator.estimate()
    assert after[0] > 0.9
    assert after[1] < 0.2
    # The third position was never judged: its estimate follows the second's, and no rejection is counted.
    assert estimator.session.rejected[2] == 0
    assert before[2] > after[2]


def test_another_session_starts_from_what_all_have_in_common() -> None:
    estimator = Acceptance()
    estimator.begin("one", "model", 0.0)
    for _ in range(300):
        estimator.observe([judged(1, 1)])
    estimator.begin("two", "model", 0.0)
    assert estimator.estimate()[0] > 0.9
    for _ in range(30):
        estimator.observe([judged(1, 0)])
    assert estimator.estimate()[0] < 0.4


def test_calibration_learns_what_confidence_is_worth() -> None:
    """A draft that is overconfident at 0.85, where half of its tokens are accepted, and well calibrated at 0.15."""
    calibration, rng = Calibration(), random.Random(1)
    for _ in range(2000):
        sure = rng.choice([0.15, 0.85])
        hit = rng.random() < (0.5 if sure > 0.5 else 0.15)
        calibration.observe([bin_of(sure)], 1, int(hit))
        calibration.calibrate()
    assert calibration.table[bin_of(0.85)] == pytest.approx(0.5, abs=0.12)
    assert calibration.table[bin_of(0.15)] == pytest.approx(0.15, abs=0.1)
    assert calibration.table == sorted(calibration.table)


@pytest.mark.parametrize("attentive", [True, False])
def test_a_useless_draft_costs_at_most_two_percent(attentive: bool) -> None:
    _, world = goodput(attentive)
    for _ in range(3000):
        world.round([0.02] * 16)
    assert world.tokens / world.seconds > 0.98 / (TABLE.verify_s[0] + TABLE.overhead_s + TABLE.token_s)


@pytest.mark.parametrize("attentive", [True, False])
def test_a_noisy_clock_does_not_pay_for_tries(attentive: bool) -> None:
    """A try that seemed short by chance adds nothing to the budget."""
    clock, rng, plain = Clock(), random.Random(1), 0.0
    table = replace(TABLE, start_s=0.02, draft_s=0.02)
    world = World(GoodputLength(table, attentive=attentive, clock=clock), clock, table=table)
    for _ in range(6000):
        before = world.tokens
        world.slower = rng.lognormvariate(0.0, 0.15)
        world.round([0.02] * 16)
        plain += (table.verify_s[0] + table.overhead_s + table.token_s) * (world.tokens - before) * world.slower
    assert world.seconds < 1.015 * plain


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("attentive", [True, False])
def test_plain_decoding_is_held_against_what_it_costs_by_itself(attentive: bool, measured: bool) -> None:
    """On some engines a pass takes longer if the previous one had another number of tokens. Plain steps are therefore
    slow between speculative rounds, which must make neither speculation nor its tries look cheap."""
    clock = Clock()
    table = replace(TABLE, plain_s=0.7) if measured else TABLE
    policy = GoodputLength(table, attentive=attentive, clock=clock)
    world = World(policy, clock)
    world.plain_after_plain = 0.7
    if not measured:  # consecutive plain steps are observed now and then
        for _ in range(4000):
            world.round([0.5] * 16)
        assert policy.costs.plain() < 0.85 * policy.costs.verify(0)
        world.tokens = world.seconds = 0.0
    for _ in range(3000):
        world.round([0.5] * 16)
    assert not policy.speculating
    assert world.tokens / world.seconds > 0.97 / (0.7 + TABLE.overhead_s + TABLE.token_s)


@pytest.mark.thorough
@pytest.mark.parametrize("attentive", [True, False])
def test_a_draft_that_has_become_useful_is_found_where_tries_are_dear(attentive: bool) -> None:
    """Consecutive plain steps are cheap, and in each try the draft must catch up with the tokens since the last one.
    So a try comes only every 345 rounds, and two tries nearly always detect the change."""
    found = 0
    for seed in range(12):
        clock = Clock()
        policy = GoodputLength(TABLE, attentive=attentive, clock=clock)
        world = World(policy, clock, seed)
        world.plain_after_plain = 0.7
        for _ in range(5000):
            world.round([0.4] * 16)
        assert not policy.speculating
        for _ in range(700):
            world.round([0.95] * 16)
        found += policy.speculating
    assert found >= 10


@pytest.mark.parametrize("attentive", [True, False])
def test_a_first_token_that_is_dear_is_verified_for_the_sake_of_those_behind_it(attentive: bool) -> None:
    """On some engines a pass over two tokens takes 1.5 times as long as over one, and over five hardly more."""
    verify = tuple(1.0 if not k else 1.44 + 0.06 * k for k in range(LONGEST + 1))
    table = replace(TABLE, start_s=0.01, draft_s=0.02, verify_s=verify)
    speeds = []
    for policy in (GoodputLength(table, attentive=attentive), FixedLength(4)):
        clock = Clock()
        policy.clock = clock  # type: ignore[union-attr]
        world = World(policy, clock, table=table)
        for _ in range(3000):
            world.round([0.6] * 16)
        speeds.append(world.tokens / world.seconds)
    assert speeds[0] > 0.96 * speeds[1] > 1.1 / (1 + table.overhead_s + table.token_s)


@pytest.mark.parametrize("seed", range(4))
def test_a_length_that_was_measured_too_dear_by_less_than_mends_at_once_comes_into_use(seed: int) -> None:
    """Drafting one token beats none, and two beat one, but verifying two or more was measured 25% too expensive."""
    true = tuple(1.0 + 0.05 * k for k in range(LONGEST + 1))
    table = replace(TABLE, start_s=0.01, draft_s=0.01, verify_s=true)
    believed = replace(table, verify_s=tuple(v if k < 2 else 1.25 * v for k, v in enumerate(true)))
    clock = Clock()
    policy = GoodputLength(believed, clock=clock)
    world, rng = World(policy, clock, seed, table), random.Random(seed)
    drafted = []
    for _ in range(1200):
        world.slower = rng.lognormvariate(0.0, 0.08)
        drafted.append(world.round([0.35] * 16).drafted)
    assert sum(drafted[-300:]) / 300 > 1.5
    assert policy.costs.verify(2) == pytest.approx(true[2], rel=0.1)


@pytest.mark.parametrize("acceptance", [0.02, 0.5, 0.85])
@pytest.mark.parametrize("attentive", [True, False])
def test_the_speed_that_is_expected_is_the_speed_that_comes(attentive: bool, acceptance: float) -> None:
    policy, world = goodput(attentive)
    expected_s = 0.0
    for _ in range(2000):
        expected_s += (1 + world.round([acceptance] * 16).accepted) / policy.expected
    assert expected_s == pytest.approx(world.seconds, rel=0.1)


@pytest.mark.parametrize("attentive", [True, False])
def test_a_draft_that_becomes_useful_is_in_use_again(attentive: bool) -> None:
    _, world = goodput(attentive)
    for _ in range(1500):
        world.round([0.02] * 16)
    for _ in range(150):
        world.round([0.85] * 16)
    drafted = [world.round([0.85] * 16).drafted for _ in range(100)]
    assert sum(drafted) / len(drafted) > 2


def test_a_better_draft_is_tried_at_once_after_a_swap() -> None:
    policy, world = goodput()
    for _ in range(500):
        world.round([0.02] * 16)
    policy.swapped()
    drafted = [world.round([0.9] * 16).drafted for _ in range(40)]
    assert sum(drafted[:20]) > 20


@pytest.mark.parametrize("dear", [1.6, 3.2, 10.0])
@pytest.mark.parametrize("attentive", [True, False])
def test_verification_measured_in_a_bad_moment_does_not_forbid_speculation_for_long(
    attentive: bool, dear: float
) -> None:
    """Beside another program, verifying drafted tokens was measured ``dear`` times as expensive as it is."""
    verify = (TABLE.verify_s[0], *(seconds * dear for seconds in TABLE.verify_s[1:]))
    speeds = []
    for table in (TABLE, replace(TABLE, verify_s=verify)):
        clock, rng = Clock(), random.Random(1)
        world = World(GoodputLength(table, attentive=attentive, clock=clock), clock)
        for number in range(2500):
            if number == 1500:
                world.tokens = world.seconds = 0.0
            world.slower = rng.lognormvariate(0.0, 0.1)
            world.round([0.8, 0.7, 0.6, 0.5] + [0.4] * 12)
        speeds.append(world.tokens / world.seconds)
    assert speeds[1] > 0.95 * speeds[0] > 1.1 / (TABLE.verify_s[0] + TABLE.overhead_s + TABLE.token_s)


def test_a_draft_that_is_seldom_sure_is_used_where_verification_is_dear() -> None:
    """A try verifies a token that speculation would drop only until the cost of doing so is known. Otherwise
    speculation would seem to be worth nothing."""
    table = replace(TABLE, start_s=0.02, draft_s=0.05, verify_s=(1.0, *(2.0 + 0.1 * k for k in range(1, LONGEST + 1))))
    clock, rng = Clock(), random.Random(2)
    world = World(GoodputLength(table, clock=clock), clock, table=table)
    for number in range(6000):
        if number == 3000:
            world.tokens = world.seconds = 0.0
        world.round([0.98] * 8 + [0.1] * 8 if rng.random() < 0.2 else [0.1] * 16)
    assert world.tokens / world.seconds > 1.1 / (table.verify_s[0] + table.overhead_s + table.token_s)


def test_a_useless_draft_that_must_catch_up_with_long_prompts_costs_little() -> None:
    """Every answer begins with a prompt that takes the draft as long to read as twenty rounds."""
    _, world = goodput()
    for number in range(9000):
        if number % 100 == 0:
            world.waiting = 4000
        world.round([0.02] * 16)
    assert world.tokens / world.seconds > 0.97 / (TABLE.verify_s[0] + TABLE.overhead_s + TABLE.token_s)


def test_answers_that_others_join_and_leave_are_not_short_ones() -> None:
    """The policy begins anew each time that an answer is alone again."""
    policy, world = goodput()
    for _ in range(30):
        for _ in range(5):
            policy.begin(Scope("", 0.0))
            for _ in range(20):
                world.round([0.8] * 16)
        policy.ended(450)
    assert policy.answer_tokens == pytest.approx(450, rel=0.1)


def test_rounds_of_a_grammar_are_no_time_between_rounds() -> None:
    clock = Clock()
    policy = GoodputLength(TABLE, clock=clock)
    policy.begin(Scope("", 0.0))
    for _ in range(3000):
        policy.next_length(0, 0, 100)
        for outcome in (Round("none", 0, 0, 0.0, TABLE.verify_s[0]), Round("grammar", 3, 3, 0.0, 0.3)):
            clock.now += outcome.verify_s + TABLE.overhead_s
            (policy.observe_free if outcome.drafter == "grammar" else policy.observe)(outcome)
    assert policy.costs.round(0) - policy.costs.verify(0) < 2 * TABLE.overhead_s


def test_a_prompt_that_is_not_worth_reading_is_not_thought_of_in_every_round() -> None:
    policy, world = goodput()
    for _ in range(400):
        world.round([0.8] * 16)
    assert policy.speculating
    policy.begin(Scope("", 0.0))
    world.waiting = 10_000
    world.round([0.8] * 16, 20)  # a try that costs more than the budget holds
    policy.begin(Scope("", 0.0))
    assert policy.next_length(20, 10_000, 100) == 0
    assert policy.steady > 4


def test_a_pass_that_got_slower_does_not_make_the_others_cheap() -> None:
    model, rng = CostModel(TABLE), random.Random(4)

    def timed(drafted: int, slower: float) -> Timed:
        seconds = TABLE.verify_s[drafted] * slower * rng.lognormvariate(0.0, 0.05)
        return Timed(Round("model", drafted, 0, 0.03 + 0.1 * drafted, seconds), drafted, 0, again=not drafted)

    for _ in range(200):
        model.observe([timed(0, 1.0) for _ in range(7)] + [timed(1, 1.6)])
    assert model.plain() == pytest.approx(TABLE.verify_s[0], rel=0.1)
    assert model.verify(8) > 0.9 * TABLE.verify_s[8]


OUTCOMES = st.lists(
    st.tuples(
        st.integers(0, 40),  # limit
        st.integers(0, 40),  # accepted, cut to what was drafted
        st.floats(0.0, 1.0),  # confidence
        st.floats(1e-7, 1e3),  # draft seconds
        st.floats(1e-7, 1e3),  # verify seconds
        st.integers(0, 3000),  # waiting
        st.integers(0, 30),  # 0: a new session, 1: a swap
    ),
    max_size=150,
)


def put_through(policy: LengthPolicy, outcomes: list[tuple[int, int, float, float, float, int, int]]) -> None:
    """Feed a sequence of outcomes to the policy and check the limits."""
    for number, (limit, accepted, confidence, draft_s, verify_s, waiting, event) in enumerate(outcomes):
        if event == 0:
            policy.begin(Scope(f"s{number}", 0.7))
        if event == 1:
            policy.swapped()
        length = policy.next_length(limit, waiting, number)
        assert 0 <= length <= min(limit, LONGEST)
        drafted, advise = 0, policy.adviser
        while drafted < length:
            advice = Advice.MORE if advise is None else advise(drafted + 1, confidence)
            drafted += advice is not Advice.DROP
            if advice is not Advice.MORE:
                break
        policy.observe(Round("model", drafted, min(accepted, drafted), draft_s, verify_s))


@settings(max_examples=30, deadline=None)
@given(OUTCOMES, st.booleans(), st.booleans())
def test_no_sequence_of_outcomes_ends_exploration_or_breaks_a_limit(
    outcomes: list[tuple[int, int, float, float, float, int, int]], attentive: bool, measured: bool
) -> None:
    clock = Clock()
    policy = GoodputLength(TABLE if measured else None, attentive=attentive, clock=clock)
    put_through(policy, outcomes)
    world = World(policy, clock)
    # Whatever was learned, and however much the budget owes, both the draft and a plain round run again before long.
    steps, most = 0, round((BUDGET + DEBT) / SHARE)
    for _ in range(most + 1):
        before = world.seconds
        outcome = world.round([0.02] * 16)
        steps += outcome.draft_s > 0
        assert world.seconds > before
    assert steps > 0
    assert any(world.round([0.95] * 16).drafted == 0 for _ in range(600))


def test_a_block_of_rounds_that_became_longer_ends_in_its_time() -> None:
    """A block is planned while a round takes 10 us. Rounds of a second must not stretch it to forty minutes."""
    clock = Clock()
    policy = GoodputLength(None, attentive=False, clock=clock)
    put_through(policy, [(0, 0, 0.0, 1.0, 1e-5, 0, 1), (0, 0, 0.0, 1.0, 1.0, 0, 1)])
    world = World(policy, clock)
    assert any(world.round([0.02] * 16).draft_s for _ in range(600))


@settings(max_examples=30, deadline=None)
@given(OUTCOMES, st.sampled_from([AdditiveLength, AverageLength, BanditLength, ThresholdLength, FixedLength]))
def test_other_policies_keep_the_limits(
    outcomes: list[tuple[int, int, float, float, float, int, int]], kind: type[LengthPolicy]
) -> None:
    put_through(kind(12), outcomes)  # type: ignore[call-arg]
