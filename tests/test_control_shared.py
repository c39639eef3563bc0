"""The controller in rounds that several answers share: drafting that brings nothing is given up, and is tried again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from test_control import TABLE

from adaptive.control.among import TRY_EVERY
from adaptive.control.costs import LONGEST, CostTable
from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import Advice, Scope, SharedLength
from adaptive.control.sources import GoodputWithHistory
from adaptive.types import Round

POLICIES = [GoodputLength, GoodputWithHistory]
# The confidence at a place, and the probability that the token there is accepted.
Place = Callable[[random.Random], tuple[float, float]]


def always(confidence: float, accepted: float) -> Place:
    """The same everywhere."""
    return lambda dice: (confidence, accepted)


def seldom_sure(share: float) -> Place:
    """Sure, and right, at this share of the places; neither elsewhere."""
    return lambda dice: (0.9, 0.9) if dice.random() < share else (0.05, 0.05)


class Shared:
    """Answers that always share their rounds. A pass over n tokens takes what a lone one does; the drafts are made one
    after the other, or in one call (``at_once``), which takes the time of the longest. Before its first draft of an
    answer the draft reads the ``prompt``, a number of tokens."""

    def __init__(
        self, policy: GoodputLength, answers: int, table: CostTable = TABLE, at_once: bool = True, prompt: int = 0
    ) -> None:
        self.policy, self.table, self.at_once, self.dice = policy, table, at_once, random.Random(3)
        self.number, self.prompt = answers, prompt
        self.answers: list[SharedLength] = []
        self.waiting: dict[SharedLength, int] = {}  # tokens of each answer that the draft has not read
        self.tokens = self.seconds = 0.0

    def begin(self) -> None:
        """Start new answers."""
        scopes = [Scope(f"{self.dice.random()}", 0.0) for _ in range(self.number)]
        self.answers = [self.policy.among(scope) for scope in scopes]
        self.waiting = dict.fromkeys(self.answers, self.prompt)

    def rounds(self, count: int, place: Place, length: int = 100) -> list[int]:
        """``count`` rounds of every answer, each of ``length`` rounds. Returns the computed steps of every draft."""
        every = []
        for number in range(count):
            if number % length == 0:
                self.begin()
            every += self.round(place)
        return every

    def round(self, place: Place) -> list[int]:
        """One round of every answer, as ``Batch`` runs it. Returns the steps of their drafts."""
        found = [self.proposal(answer, place) for answer in self.answers]
        steps = [count for count, *_ in found if count]
        each_s = [
            self.table.start_s + self.table.draft_s * count + self.table.catch_up_s * self.waiting[answer]
            for answer, (count, *_) in zip(self.answers, found, strict=True)
            if count
        ]
        draft_s = (max if self.at_once else sum)(each_s or [0.0])
        rows = sum(1 + drafted for _, drafted, _ in found)
        pass_s = 1 + 0.03 * (rows - 1)
        if steps:
            self.policy.drafted(len(steps), sum(steps), draft_s)
        self.policy.shared(rows, pass_s)
        for answer, (count, drafted, accepted) in zip(self.answers, found, strict=True):
            self.waiting[answer] = max(0, 1 + accepted - count) if count else self.waiting[answer] + 1 + accepted
            share = draft_s / self.number, pass_s / self.number
            answer.observe(Round("model" if drafted else "none", drafted, accepted, *share))
            self.tokens += 1 + accepted
        self.seconds += draft_s + pass_s + self.number * self.table.overhead_s
        return [one[0] for one in found]

    def proposal(self, answer: SharedLength, place: Place) -> tuple[int, int, int]:
        """The steps of a draft, its proposed and its accepted tokens."""
        steps = drafted = accepted = 0
        length = answer.lead([], answer.next_length(1000, self.number, self.waiting[answer]), 1000).model
        while steps < length:
            confidence, right = place(self.dice)
            steps += 1
            advice = Advice.MORE if answer.adviser is None else answer.adviser(steps, confidence)
            if advice is Advice.DROP:
                break
            accepted += accepted == drafted and self.dice.random() < right
            drafted += 1
            if advice is Advice.LAST:
                break
        return steps, drafted, accepted

    @property
    def speed_up(self) -> float:
        """Tokens per second over those of plain decoding."""
        plain_s = (1 + 0.03 * (self.number - 1)) / self.number + self.table.overhead_s
        return self.tokens / self.seconds * plain_s


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("answers", [2, 4])
def test_a_draft_that_is_better_than_its_confidence_comes_into_use(kind: type[GoodputLength], answers: int) -> None:
    """At a high temperature the draft's distribution is flat, and so is the target's, which accepts most tokens."""
    shared = Shared(kind(TABLE), answers)
    shared.rounds(300, always(0.01, 0.7))
    shared.tokens = shared.seconds = 0.0
    shared.rounds(300, always(0.01, 0.7))
    assert shared.speed_up > 1.3


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("at_once", [True, False], ids=["one-call", "one-by-one"])
@pytest.mark.parametrize(
    "place", [always(0.05, 0.02), seldom_sure(0.06), always(0.8, 0.02)], ids=["unsure", "0.06", "sure"]
)
def test_a_draft_that_does_not_pay_costs_at_most_two_percent(
    kind: type[GoodputLength], at_once: bool, place: Place
) -> None:
    """Also if all of its tokens are dropped, or all but a few that are right: its time is lost in every round."""
    shared = Shared(kind(TABLE), 4, at_once=at_once)
    shared.rounds(200, place)
    shared.tokens = shared.seconds = 0.0
    shared.rounds(400, place)
    assert shared.speed_up > 0.98


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("answers", [2, 4])
@pytest.mark.parametrize("place", [always(0.05, 0.02), always(0.9, 0.9)], ids=["useless", "good"])
def test_a_long_text_is_read_for_a_draft_only_where_that_is_worth_it(
    kind: type[GoodputLength], answers: int, place: Place
) -> None:
    """Answers of 20 rounds behind conversations of 5,000 tokens, which take the draft the time of 25 passes."""
    shared = Shared(kind(TABLE), answers, prompt=5000)
    shared.rounds(200, place, 20)
    shared.tokens = shared.seconds = 0.0
    shared.rounds(4000, place, 20)
    assert shared.speed_up > 0.97


@pytest.mark.parametrize("kind", POLICIES)
def test_a_text_is_read_for_a_draft_that_saves_more(kind: type[GoodputLength]) -> None:
    shared = Shared(kind(TABLE), 2, prompt=400)
    drafted = shared.rounds(200, always(0.9, 0.9), 50)
    assert sum(steps > 0 for steps in drafted) > 0.95 * len(drafted)
    assert shared.speed_up > 1.3


def test_a_draft_that_is_sure_where_it_is_right_stays_in_use() -> None:
    """Tokens that are judged at any confidence are mostly rejected, which says nothing of those that are proposed."""
    cheap = replace(TABLE, start_s=0.01, draft_s=0.03)
    shared = Shared(GoodputLength(cheap), 2, cheap)
    shared.rounds(1000, seldom_sure(0.25))
    assert shared.speed_up > 1.12


@pytest.mark.parametrize("attentive", [True, False])
@pytest.mark.parametrize("length", [5, 40])
def test_short_answers_that_share_rounds_show_what_a_draft_is_worth(attentive: bool, length: int) -> None:
    """It is given up, and is tried all the same, although no answer has as many rounds as lie between two tries."""
    shared = Shared(GoodputLength(TABLE, attentive=attentive), 2)
    drafted = shared.rounds(200, always(0.9, 0.02), length)
    assert all(drafted[:6])
    assert 2 <= sum(steps > 0 for steps in drafted[-4 * TRY_EVERY :]) <= 5
    drafted = shared.rounds(800, always(0.9, 0.9), length)
    assert sum(steps > 0 for steps in drafted[-200:]) > 190


@pytest.mark.parametrize("answers", [2, 4])
def test_a_new_draft_is_not_given_up_for_what_the_old_one_brought(answers: int) -> None:
    shared = Shared(GoodputLength(TABLE), answers)
    shared.rounds(300, always(0.05, 0.02))
    shared.policy.swapped([0.4] * LONGEST)
    assert all(shared.rounds(8, always(0.4, 0.4)))


def test_what_drafting_brings_is_known_by_temperature() -> None:
    shared = Shared(GoodputLength(TABLE), 2)
    shared.rounds(300, always(0.05, 0.02))
    assert sum(shared.rounds(10, always(0.05, 0.02))) <= 1
    warmer = [shared.policy.among(Scope(name, 2.0)) for name in ("a", "b")]
    assert all(answer.next_length(1000, 2) for answer in warmer)


def test_what_drafting_brings_is_known_by_the_number_of_answers() -> None:
    """It pays with two answers and not with four, because the drafts are made one after the other."""
    four = Shared(GoodputLength(TABLE), 4, at_once=False)
    four.rounds(300, always(0.4, 0.4))
    drafted = four.rounds(100, always(0.4, 0.4))
    assert sum(steps > 0 for steps in drafted) < 0.2 * len(drafted)
    two = Shared(four.policy, 2, at_once=False)
    assert all(two.rounds(20, always(0.4, 0.4)))


@pytest.mark.parametrize("kind", POLICIES)
def test_what_is_expected_of_drafting_is_said_of_shared_rounds_while_answers_share_them(
    kind: type[GoodputLength],
) -> None:
    """Alone drafting pays. With four answers each further token makes the pass dearer, and their drafts are made one
    after the other."""
    table = replace(TABLE, start_s=0.02, draft_s=0.08, verify_s=tuple(1 + 0.22 * k for k in range(LONGEST + 1)))
    policy, dice = kind(table), random.Random(1)
    policy.begin(Scope("alone", 0.0))
    assert policy.expected_speed_up is not None
    assert policy.expected_speed_up > 1.1
    answers = [policy.among(Scope(str(number), 0.0)) for number in range(4)]
    drafted = []
    for _ in range(200):
        lengths = [min(1, answer.next_length(1000, 4)) for answer in answers]
        rows = 4 + sum(lengths)
        if sum(lengths):
            policy.drafted(sum(lengths), sum(lengths), 0.1 * sum(lengths))
        policy.shared(rows, 1 + 0.22 * (rows - 1))
        for answer, length in zip(answers, lengths, strict=True):
            accepted = int(length and dice.random() < 0.5)
            answer.observe(Round("model" if length else "none", length, accepted, 0.1 * length, 0.4))
        drafted += lengths
    assert sum(drafted[-200:]) < 20
    assert policy.expected_speed_up < 1.0
    policy.next_length(1000, 0, 100)
    assert policy.expected_speed_up > 1.1
