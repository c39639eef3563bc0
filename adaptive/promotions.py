"""The speed expected of a promotion, from the gate's replay and this machine's costs, and the speed measured later.

In: the gate's figures for an adapter (``HeldOut``), the costs of a round (``CostTable``), and the time of answers
before and after (``Spent``). Out: ``Promotion``, kept in ``promotions.json`` beside the log, oldest first.
Several processes may use one file, such as a server and a chat; it is changed under a lock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from adaptive.control.acceptance import by_position
from adaptive.control.costs import LONGEST, CostTable
from adaptive.records.saved import Spent, speed_change
from checkpoints import files
from checkpoints.manifest import HeldOut

# Answers under an adapter that the expected speed is compared with, and as many before it. Too low: the ratio is mostly
# chance. Too high: the answers are about other work.
CHECKED = 40


@dataclass(frozen=True)
class Promotion:
    """One promotion, ``at`` seconds since the epoch, when the newest answer in the log had the id ``answer``.

    ``expected`` is the ratio of decoding speed after to before, by replay, and ``over_plain`` the ratio to plain
    decoding; None if unknown. ``came``, between ``low`` and ``high`` at 95%, is the measured ratio over the first
    ``answers`` answers; None until there are enough of them.
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
        """The expected and the measured ratio, in one line."""
        said = "no speed was predicted"
        if self.expected is not None:
            said = f"{self.expected:.2f} times as fast as before, by replay"
        if self.came is None:
            return f"{said}; not measured yet"
        return f"{said}; measured {self.came:.2f} times ({self.low:.2f} to {self.high:.2f}, {self.answers} answers)"


def seconds_a_token(acceptance: Sequence[float], costs: CostTable) -> float:
    """Seconds per token at the best draft length for these conditional acceptances; 0 (plain decoding) is included."""
    best, reach, tokens = costs.plain_step_s + costs.overhead_s, 1.0, 1.0
    for length, accepted in enumerate(acceptance, 1):
        reach *= accepted
        tokens += reach
        round_s = costs.start_s + length * costs.draft_s + costs.verify_s[length] + costs.overhead_s
        best = min(best, round_s / tokens)
    return best + costs.token_s


def expected_speed(held: HeldOut, costs: CostTable) -> tuple[float, float]:
    """The decoding speed with an adapter by the gate's replay, relative to the draft before it and to plain
    decoding."""
    before, after = (
        seconds_a_token(by_position(acceptance.mean, length.mean, held.draft_length), costs)
        for acceptance, length in (
            (held.acceptance_before, held.mean_acceptance_length_before),
            (held.acceptance_after, held.mean_acceptance_length_after),
        )
    )
    return before / after, seconds_a_token((), costs) / after


def perfect_speed_up(costs: CostTable) -> float:
    """The speed of a draft whose tokens are all accepted, relative to plain decoding; 1 if even that does not pay."""
    return seconds_a_token((), costs) / seconds_a_token([1.0] * LONGEST, costs)


def checked(promotion: Promotion, spent: Sequence[Spent], own: Collection[int]) -> Promotion | None:
    """``promotion`` with its measured ratio; None if there are too few answers, or too few plain rounds, to tell.
    ``own``: the ids of all answers that its adapter drafted; it may have been out of use for a while. Answers that
    shared passes do not count: beside others, a better draft changes the speed of an answer by less."""
    alone = [one for one in spent if not one.shared]
    before = [one for one in alone if one.id <= promotion.answer][-CHECKED:]
    after = [one for one in alone if one.id > promotion.answer and one.id in own][:CHECKED]
    if min(len(before), len(after)) < CHECKED:
        return None
    change = speed_change(spent, {one.id for one in before}, {one.id for one in after})
    if change is None:
        return None
    came, low, high = change
    return replace(promotion, came=came, low=low, high=high, answers=len(after))


_FILE = TypeAdapter(list[Promotion])


def load(file: Path) -> list[Promotion]:
    """The promotions in ``file``, oldest first; empty if it is missing or cannot be read."""
    try:
        return _FILE.validate_json(file.read_bytes())
    except (OSError, ValueError):  # pydantic's error is a ValueError
        return []


def keep(file: Path, promotions: Sequence[Promotion]) -> list[Promotion]:
    """Add ``promotions`` to those in ``file``, to which another process may have added some, and return them all. Of
    two of one adapter the one that tells more is kept. Raises OSError if that fails; the file is then unchanged."""
    with files.changing(file):
        every = merged(load(file), promotions)
        files.replace_text(file.parent, file, _FILE.dump_json(every, indent=1).decode())
    return every


def merged(some: Sequence[Promotion], others: Sequence[Promotion]) -> list[Promotion]:
    """The promotions of both, oldest first; of two of one adapter the one that tells more."""
    found: dict[str, Promotion] = {}
    for one in (*some, *others):
        known = found.get(one.adapter)
        if known is None or _told(one) > _told(known):
            found[one.adapter] = one
    return sorted(found.values(), key=lambda one: (one.answer, one.at))


def _told(promotion: Promotion) -> tuple[bool, bool]:
    return promotion.came is not None, promotion.expected is not None
