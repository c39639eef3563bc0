"""Records promotions: at each the expected change of speed, and later the measured one. Used by the trainer's thread.

In: the adapter in use, the log, the costs of a round. Out: ``promotions.json``, and lines in the server's log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from adaptive.control.costs import CostTable
from adaptive.promotions import CHECKED, Promotion, checked, expected_speed, keep, load, merged, perfect_speed_up
from adaptive.records.log import Log
from adaptive.state import PairState
from checkpoints.manifest import Manifest

logger = logging.getLogger("adaptive.trainer")

# Answers after which a check is repeated that had too little data.
AGAIN = 20
# Answers after a head's promotion whose costs tell what to expect. A head may draft among other tokens than the one
# before it, an untrained one drafts among all, and what a step takes follows from their number.
MEASURED = 5


class Gains:
    """The promotions of one pair."""

    def __init__(self, state: PairState) -> None:
        self._file = state.promotions
        self._known = load(self._file)
        self._check_at = self._known[-1].answer + CHECKED if self._known else 0

    def look(self, log: Log, in_use: Manifest | None, costs: Callable[[], CostTable | None]) -> None:
        """Record a promotion if the adapter is a new one, or check the last one if there are enough answers since. An
        adapter that comes back (after a rollback of the next one) is no promotion. Raises AdaptiveError if the log
        cannot be read; the next look does then what this one has not done."""
        if in_use is None:
            return
        if self._is_new(in_use):  # another process may have noted it
            self._known = merged(load(self._file), self._known)
        if self._is_new(in_use):
            own = log.ids_under(in_use.id)  # it may have been in use before anybody looked
            self._promoted(in_use, own[0] - 1 if own else log.last_id(), costs())
            return
        last = self._known[-1]
        if last.adapter != in_use.id or last.came is not None:
            return
        newest = log.last_id()
        if in_use.kind == "head" and last.expected is None and newest >= last.answer + MEASURED:
            foreseen = self._foreseen(last, in_use, costs())
            if foreseen != last:
                self._keep([*self._known[:-1], foreseen])
        if newest >= self._check_at:
            self._check(log)

    def _is_new(self, adapter: Manifest) -> bool:
        return all(promotion.adapter != adapter.id for promotion in self._known)

    def _promoted(self, manifest: Manifest, newest: int, costs: CostTable | None) -> None:
        self._check_at = newest + CHECKED
        promotion = Promotion(manifest.id, time.time(), newest, None, None)
        if manifest.kind != "head":
            promotion = self._foreseen(promotion, manifest, costs)
        self._keep([*self._known, promotion])

    def _foreseen(self, promotion: Promotion, manifest: Manifest, costs: CostTable | None) -> Promotion:
        """The promotion with the speed that the gate's replay and these costs promise, if both are known."""
        if manifest.recent is None or costs is None:
            return promotion
        expected, over_plain = expected_speed(manifest.recent, costs)
        logger.info(
            "adapter %s: %.2f times as fast as before, by replay, and %.2f times as fast as plain decoding",
            *(manifest.id, expected, over_plain),
        )
        return replace(promotion, expected=expected, over_plain=over_plain)

    def _check(self, log: Log) -> None:
        self._check_at = log.last_id() + AGAIN
        promotion = self._known[-1]
        found = checked(promotion, log.spent(), frozenset(log.ids_under(promotion.adapter)))
        if found is not None:
            logger.info("adapter %s: %s", found.adapter, found.text)
            self._keep([*self._known[:-1], found])

    def _keep(self, known: list[Promotion]) -> None:
        self._known = known
        try:
            self._known = keep(self._file, known)
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s); what came of a promotion is not kept", self._file, error.strerror
            )


def why_not(costs: CostTable | None) -> str | None:
    """The reason why training is useless for this pair on this machine, or None if it may be useful."""
    best = None if costs is None else perfect_speed_up(costs)
    if best is None or best > 1:
        return None
    return (
        "not even a draft that is always right would be faster here than plain decoding, by the costs of a round; "
        "training waits until that changes"
    )
