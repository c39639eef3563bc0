"""What a promotion should bring in speed, from the gate's replay and the costs here, and what then came.

In: the gate's figures of an adapter (``HeldOut``), the costs of a round (``CostTable``), and what answers before and
after took (``Spent``). Out: ``Promotion``, kept in ``promotions.json`` beside the log, oldest first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from adaptive.control.costs import LONGEST, CostTable
from adaptive.records.saved import Spent, speed_change
from checkpoints import files
from checkpoints.manifest import HeldOut

# Answers under an adapter on which what it was expected to bring is checked, and as many before it. Fewer leave the
# ratio to chance, more bring in other work.
CHECKED = 40
# Steps of the bisection that finds the acceptance of later positions: to a billionth.
STEPS = 30


@dataclass(frozen=True)
class Promotion:
    """One promotion: ``at`` seconds since the epoch, when the newest answer of the log was ``answer`` (its id).

    ``expected`` is how many times as fast decoding was to become, by replay, and ``over_plain`` how many times as fast
    as plain decoding; None where nothing was known. ``came``, from ``low`` to ``high`` at 95%, is what became of the
    first ``answers`` answers under it; None until there are enough of them.
    """

    adapter: str
    at: float
    answer: int
    expected: float | None
    over_plain: float | None
    came: float | None = None
    low: float | None = None
    high: float | None = None
    answers: int = 0

    @property
    def text(self) -> str:
        """What was expected and what came, in one line."""
        said = "its speed was not foreseen"
        if self.expected is not None:
            said = f"{self.expected:.2f} times as fast as before, by replay"
        if self.came is None:
            return f"{said}; not checked yet"
        return f"{said}; {self.came:.2f} times came ({self.low:.2f} to {self.high:.2f}, {self.answers} answers)"


def by_position(acceptance: float, mean_length: float, length: int) -> list[float]:
    """Conditional acceptance at each of LONGEST positions: ``acceptance`` at the first, and behind it the constant
    that gives ``mean_length`` tokens a round at draft length ``length``."""
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        tokens = 1 + acceptance * math.fsum(middle**k for k in range(length))
        low, high = (middle, high) if tokens < mean_length else (low, middle)
    return [acceptance, *[(low + high) / 2] * (LONGEST - 1)]


def seconds_a_token(acceptance: Sequence[float], costs: CostTable) -> float:
    """Of decoding at the best draft length for these conditional acceptances, plain decoding being one of them."""
    best, reach, tokens = costs.plain_step_s + costs.overhead_s, 1.0, 1.0
    for length, accepted in enumerate(acceptance, 1):
        reach *= accepted
        tokens += reach
        round_s = costs.start_s + length * costs.draft_s + costs.verify_s[length] + costs.overhead_s
        best = min(best, round_s / tokens)
    return best + costs.token_s


def expected_speed(held: HeldOut, costs: CostTable) -> tuple[float, float]:
    """How many times as fast an adapter decodes as the draft before it, and as plain decoding, by the gate's replay."""
    before, after = (
        seconds_a_token(by_position(acceptance.mean, length.mean, held.draft_length), costs)
        for acceptance, length in (
            (held.acceptance_before, held.mean_acceptance_length_before),
            (held.acceptance_after, held.mean_acceptance_length_after),
        )
    )
    return before / after, seconds_a_token((), costs) / after


def perfect_speed_up(costs: CostTable) -> float:
    """How many times as fast as plain decoding a draft is here of which every token is accepted; 1 where even that
    does not pay."""
    return seconds_a_token((), costs) / seconds_a_token([1.0] * LONGEST, costs)


def checked(promotion: Promotion, spent: Sequence[Spent]) -> Promotion | None:
    """``promotion`` with what came of it; None where there are too few answers, or too few plain rounds, to say."""
    before = [one for one in spent if one.id <= promotion.answer][-CHECKED:]
    after = [one for one in spent if one.id > promotion.answer][:CHECKED]
    if min(len(before), len(after)) < CHECKED:
        return None
    change = speed_change(spent, {one.id for one in before}, {one.id for one in after})
    if change is None:
        return None
    came, low, high = change
    return replace(promotion, came=came, low=low, high=high, answers=len(after))


_FILE = TypeAdapter(list[Promotion])


def load(file: Path) -> list[Promotion]:
    """Those in ``file``, oldest first; none where it is not there or cannot be read."""
    try:
        return _FILE.validate_json(file.read_bytes())
    except (OSError, ValueError):  # pydantic's error is a ValueError
        return []


def save(file: Path, promotions: Sequence[Promotion]) -> None:
    """Replace ``file`` in one step. Raises OSError where that cannot be; it is then as it was."""
    files.replace_text(file.parent, file, _FILE.dump_json(list(promotions), indent=1).decode())
