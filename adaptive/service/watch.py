"""Live acceptance after a swap, against what it was before: a draft that really got worse goes back.

In: the accepted tokens of every round, with the adapter that drafted. Out: a reason to roll back, or None.
The figure is accepted tokens a round, over all rounds, those without a draft included: a draft that is
so bad that the controller stops asking it has lost just as much as one whose tokens are rejected.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable
from statistics import fmean, pvariance

from checkpoints.manifest import Manifest

# Rounds of the draft before that are the measure. Fewer are too noisy, more reach back into other work.
BASELINE_ROUNDS = 600
# Rounds under the new draft before anything is said: the controller tries itself out after a swap.
FEWEST_ROUNDS = 60
# Rounds under the new draft that count, the newest ones.
WINDOW_ROUNDS = 300
# Standard errors between the two means. Rounds of one answer are alike, so that the true error is larger
# than the computed one: 3 would roll back a good draft about once in a hundred swaps.
CERTAINTY = 5.0
# Share of the acceptance before that must be lost. Less is within what a change of subject does.
REAL_DROP = 0.15


class Watch:
    """Rounds by adapter. One thread reports them; ``verdict`` may be asked by another."""

    def __init__(self) -> None:
        self._adapter: str | None = None
        self._before: tuple[float, float, int] | None = None  # mean, variance, rounds
        self._accepted: deque[int] = deque(maxlen=BASELINE_ROUNDS)
        self._lock = threading.Lock()

    def observe(self, adapter: str | None, accepted: Iterable[int]) -> None:
        """Accepted tokens of each round of one answer. Another adapter than before is a swap."""
        with self._lock:
            if adapter != self._adapter:
                values = list(self._accepted)
                if len(values) >= FEWEST_ROUNDS:  # else what was before that stays the measure
                    self._before = fmean(values), pvariance(values), len(values)
                self._adapter = adapter
                self._accepted.clear()
            self._accepted.extend(accepted)

    def rolled_back(self) -> None:
        """The adapter has gone back. Should it return, only what it does from then on counts."""
        with self._lock:
            self._accepted.clear()

    def forgive(self) -> None:
        """What was before is no measure any more: it was other text."""
        with self._lock:
            self._before = None

    def verdict(self, manifest: Manifest | None) -> str | None:
        """Why the adapter in use must go, or None. ``manifest`` is its own."""
        with self._lock:
            now, adapter, measure = list(self._accepted)[-WINDOW_ROUNDS:], self._adapter, self._before
        if manifest is None or manifest.id != adapter or measure is None or len(now) < FEWEST_ROUNDS:
            return None
        mean, variance, count = measure
        error = math.sqrt(variance / count + pvariance(now) / len(now))
        lost = mean - fmean(now)
        if lost <= REAL_DROP * mean or lost <= CERTAINTY * error:
            return None
        return (
            f"live acceptance fell from {mean:.2f} to {fmean(now):.2f} accepted tokens a round over {len(now)} rounds; "
            f"{_promise(manifest)}"
        )


def _promise(manifest: Manifest) -> str:
    """What the gate had said."""
    if manifest.recent is None:
        return "the gate had not judged it"
    before, after = manifest.recent.mean_acceptance_length_before, manifest.recent.mean_acceptance_length_after
    return f"the gate had promised {after.mean:.2f} tokens a round after {before.mean:.2f}"
