"""Describes how decoding works at present, and why, in one sentence that every front end shows.

In: the rounds of the last answer, which the sentence describes, and the draft-length policy's own estimate. Out:
``Speculation``, as data and in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength
from adaptive.drafting.model import drafter_name
from adaptive.engines.protocol import ReadsFeatures
from adaptive.pair import Pair
from adaptive.records.stats import RoundCount, count_rounds
from adaptive.types import REMOTE, Round

# Share of an answer's rounds that must have drafted for it to count as drafted. A controller that decodes plainly tries
# the draft in a few percent of the rounds; one that drafts decodes a few percent plainly.
MOSTLY = 0.5
# Speed-ups this near to 1 are given with two digits: 0.96 is not shown as 1.0.
NEARLY_ONE = 0.1


@dataclass(frozen=True)
class Speculation:
    """How the last answer was decoded. ``rounds``: all of its rounds; ``drafting_rounds``: those that drafted
    something, history's too; ``drafted``: their tokens; all are 0 before the first answer, and for one of a single
    token (``answered``), which the prompt's pass gives. ``draft``: there is a draft. ``switched_off``: the settings ask
    for a draft length of 0. ``expected_speed_up`` over plain decoding: if the answer was drafted, that of recent
    rounds, else the policy's expectation of drafting now; None if unknown, or if no draft can draft now. ``growing``:
    the draft is a head that has not been trained yet. ``away``: a draft server drafts, and does not answer."""

    draft: bool
    switched_off: bool
    rounds: int
    drafting_rounds: int
    drafted: int
    expected_speed_up: float | None
    growing: bool = False
    away: bool = False
    answered: bool = False

    @property
    def drafting(self) -> bool:
        """Whether most of the answer was drafted."""
        return self.drafting_rounds > 0 and self.drafting_rounds >= MOSTLY * self.rounds

    @property
    def tokens_ahead(self) -> float:
        """Mean drafted tokens of the rounds that drafted; 0 if none did."""
        return self.drafted / self.drafting_rounds if self.drafting_rounds else 0.0

    @property
    def sentence(self) -> str:
        """How the last answer was decoded, and why."""
        if self.draft and not self.rounds and not self.answered:
            return "nothing decoded yet"
        share = f"{self.drafting_rounds} of {self.rounds} rounds"
        if self.drafting:
            where = f" in {share}" if self.drafting_rounds < self.rounds else ""
            return f"drafting {self.tokens_ahead:.1f} tokens ahead{where}{self._how_fast()}"
        return f"plain{f', but for {share}' if self.drafting_rounds else ''}: {self._why_plain()}"

    def _how_fast(self) -> str:
        speed = self.expected_speed_up
        return "" if speed is None else f", {_times(speed)} times as fast as plain"

    def _why_plain(self) -> str:
        if not self.draft:
            return "no draft model"
        if not self.rounds:
            return "one token, which the prompt's own pass gave"
        if self.growing:
            return "the head that is grown here has not been trained yet"
        if self.switched_off:
            return "the draft length is set to 0"
        if self.away:
            return "the draft server does not answer"
        if self.expected_speed_up is None:
            return "what drafting would bring is not known yet"
        expected = f"drafting would be {_times(self.expected_speed_up)}x here"
        return f"{expected}, and comes next" if self.expected_speed_up > 1 else expected

    def as_object(self) -> dict[str, Any]:
        """The description for the server's JSON."""
        return {
            "sentence": self.sentence,
            "mode": "drafting" if self.drafting else "plain",
            "rounds": self.rounds,
            "drafting_rounds": self.drafting_rounds,
            "tokens_ahead": self.tokens_ahead,
            "expected_speed_up": self.expected_speed_up,
        }


def speculation(assistant: Assistant, rounds: Sequence[Round] | None = None) -> Speculation:
    """The description of ``assistant``'s decoding in ``rounds``, by default those of the answer that began last."""
    last, policy, pair = assistant.last, assistant.policy, assistant.pair
    if rounds is None:
        rounds = () if last is None else last.rounds
    draft = who_drafts(pair) is not None
    untrained, away = growing(pair), pair.remote is not None and not pair.remote.connected
    found = of_counts(
        count_rounds(rounds),
        draft=draft,
        switched_off=isinstance(policy, FixedLength) and policy.length == 0,
        expected_speed_up=policy.expected_speed_up if draft and not untrained and not away else None,
        growing=untrained,
        away=away,
        answered=last is not None and len(last.output) > 0,
    )
    return replace(found, expected_speed_up=policy.present_speed_up) if found.drafting else found


def who_drafts(pair: Pair) -> str | None:
    """The name in rounds of the drafter besides history and grammars; None if there is none."""
    if pair.remote is not None:
        return REMOTE
    return None if pair.draft is None else drafter_name(pair.draft)


def growing(pair: Pair) -> bool:
    """Whether the draft is a head that has not been trained yet."""
    return isinstance(pair.draft, ReadsFeatures) and not pair.draft.ready


def of_counts(
    counts: Iterable[RoundCount],
    *,
    draft: bool,
    switched_off: bool = False,
    expected_speed_up: float | None = None,
    growing: bool = False,
    away: bool = False,
    answered: bool = False,
) -> Speculation:
    """The description of rounds that are already summed up."""
    rounds = list(counts)
    return Speculation(
        draft=draft,
        switched_off=switched_off,
        rounds=sum(count.rounds for count in rounds),
        drafting_rounds=sum(count.rounds for count in rounds if count.drafted),
        drafted=sum(count.drafted * count.rounds for count in rounds),
        expected_speed_up=expected_speed_up,
        growing=growing,
        away=away,
        answered=answered,
    )


def _times(speed: float) -> str:
    return f"{speed:.{2 if abs(speed - 1) < NEARLY_ONE else 1}f}"
