"""A draft on another machine whose proposals come too late in part, and other policies beside history and others."""

from __future__ import annotations

import random

import pytest
from test_control import TABLE, Clock, World
from test_control_shared import Place, Shared, always

from adaptive.control.acceptance import Acceptance
from adaptive.control.costs import LONGEST
from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import FixedLength, Lead, Scope
from adaptive.types import Round

# Seconds of which the loop waits for a proposal that does not come, in passes of the target.
WAIT = 1.5


class Late(World):
    """A share of the proposals does not come in time: the round waited for it, and is plain."""

    def round_late(self, acceptance: list[float], late: float) -> None:
        if self.random.random() >= late:
            self.round(acceptance)
            return
        length = self.policy.next_length(1000, self.waiting, 100)
        waited = WAIT if length else 0.0
        self.policy.observe(Round("none", 0, 0, waited, self.table.verify_s[0]))
        seconds = waited + self.table.verify_s[0] + self.table.overhead_s + self.table.token_s
        self.clock.now += seconds
        self.seconds += seconds
        self.waiting += 1
        self.tokens += 1


@pytest.mark.parametrize(("late", "accepted"), [(0.3, 0.5), (0.5, 0.6), (0.5, 0.95), (0.0, 0.8)])
def test_waiting_in_vain_is_a_price_of_drafting(late: float, accepted: float) -> None:
    """The policy is as fast as plain decoding where that is faster, and as drafting where that is."""
    speeds = []
    for policy in (GoodputLength(TABLE, attentive=False, clock=(clock := Clock())), FixedLength(0), FixedLength(4)):
        world = Late(policy, clock, seed=3)
        for _ in range(4000):
            world.round_late([accepted] * 16, late)
        speeds.append(world.tokens / world.seconds)
    assert speeds[0] > 0.97 * max(speeds[1:])


def test_a_fixed_length_prefers_history_only_where_it_brings_more() -> None:
    policy = FixedLength(4)
    assert policy.lead([0.15], 4, 100) == Lead(0, 4)  # a weak match, before the draft was seen
    assert policy.lead([0.9, 0.8, 0.7, 0.6], 4, 100) == Lead(4, 0)
    assert policy.lead([0.15], 0, 100) == Lead(1, 0)  # the draft cannot draft now
    for _ in range(100):
        policy.observe(Round("model", 4, 0, 0.1, 1.0))
    assert policy.lead([0.15], 4, 100) == Lead(1, 0)
    assert not FixedLength(0).among(Scope("", 0.7)).worth_looking()


def test_an_answer_that_is_alone_again_is_no_new_one() -> None:
    """What is expected of the rest of it decides whether a draft is to read a long text."""
    clock, rng = Clock(), random.Random(1)
    policy = GoodputLength(TABLE, clock=clock)
    for _ in range(20):
        policy.begin(Scope("s", 0.7))
        for _ in range(100):
            policy.next_length(100)
            policy.observe(Round("none", 0, 0, 0.0, 1.0 + 0.01 * rng.random()))
        policy.ended(100)
    policy.begin(Scope("s", 0.7))
    new = policy._tokens_left(1000)
    policy.begin(Scope("s", 0.7), 90)
    assert policy._tokens_left(1000) < new


def test_answers_under_way_beside_others_begin_anew_with_a_swapped_draft() -> None:
    known = Acceptance()
    beside = known.beside("s", "model", 0.7)
    for _ in range(200):
        beside.observe([Round("model", 1, 0, 0.0, 0.0)])
    assert beside.estimate()[0] < 0.1
    known.swapped([0.8] * LONGEST)
    assert beside.estimate()[0] > 0.7


class LateShared(Shared):
    """The same for answers that share rounds: all of them wait for each proposal that does not come."""

    late = 0.5

    def round(self, place: Place) -> list[int]:
        found, waited = [], 0.0
        for answer in self.answers:
            length = answer.lead([], answer.next_length(1000, self.number, 0), 1000).model
            accepted = 0
            if length and self.dice.random() < self.late:
                found.append((answer, 0, 0, WAIT))
            else:
                while accepted < length and self.dice.random() < place(self.dice)[1]:
                    accepted += 1
                found.append((answer, length, accepted, self.table.draft_s * length))
            waited += found[-1][3]
        pass_s = 1 + 0.03 * (sum(1 + drafted for _, drafted, *_ in found) - 1)
        for answer, drafted, accepted, draft_s in found:
            answer.observe(Round("model" if drafted else "none", drafted, accepted, draft_s, pass_s / self.number))
            self.tokens += 1 + accepted
        self.seconds += waited + pass_s + self.number * self.table.overhead_s
        return []


def test_all_answers_wait_for_a_proposal_that_does_not_come() -> None:
    shared = LateShared(GoodputLength(TABLE, attentive=False), 3)
    shared.rounds(1500, always(0.5, 0.6))
    assert shared.speed_up > 0.95
