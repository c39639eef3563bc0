"""Draft-length policies of other software and of the literature, for comparison.

None of them takes the costs of drafting and verifying into account.
"""

from __future__ import annotations

import math

from adaptive.control.policy import Advice, Adviser, LengthPolicy
from adaptive.types import Round


class AdditiveLength(LengthPolicy):
    """transformers' ``heuristic`` schedule: two more tokens after a wholly accepted draft, else one less.

    It starts from 5 tokens and never drafts fewer than 1, so it cannot stop speculating.
    """

    name = "aimd"

    def __init__(self, longest: int, start: int = 5) -> None:
        self.longest = longest
        self.length = start

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """The current length."""
        return min(self.length, limit)

    def observe(self, outcome: Round) -> None:
        """Up by two or down by one."""
        if outcome.drafted:
            step = 2 if outcome.accepted == outcome.drafted else -1
            self.length = min(self.longest, max(1, self.length + step))


class ThresholdLength(LengthPolicy):
    """transformers' default: as many tokens as allowed, until the draft's own probability of a token falls
    below a constant (``assistant_confidence_threshold``, 0.4 there)."""

    def __init__(self, longest: int, threshold: float = 0.4) -> None:
        self.name = f"threshold:{threshold}"
        self.longest = longest
        self.threshold = threshold

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """Always the longest."""
        return min(self.longest, limit)

    @property
    def adviser(self) -> Adviser:
        """The token below the threshold is still proposed, and is the last one."""
        return self._advise

    def _advise(self, position: int, confidence: float) -> Advice:
        return Advice.MORE if confidence >= self.threshold else Advice.LAST

    def observe(self, outcome: Round) -> None:
        """Nothing to learn."""


class AverageLength(LengthPolicy):
    """exllamav3's ``dynamic_draft_tokens``: just above a moving average of accepted tokens.

    A wholly accepted draft counts as one token more than were accepted. Drafting pauses while the average is
    under ``SKIP``, with a probe every ``PROBE_EVERY`` rounds.
    """

    name = "ema"
    # The defaults published with exllamav3: the average overshoots on the way up and lags on the way down.
    UP, DOWN, SKIP, PROBE_EVERY = 1.30, 0.65, 0.3, 16

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.average = longest / 2
        self.idle = 0

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """One more than the average, rounded down; 0 while the average is too low, except for a probe of one token."""
        if self.average < self.SKIP:
            self.idle += 1
            if self.idle < self.PROBE_EVERY:
                return 0
            self.idle = 0
            return min(1, limit)
        return min(math.floor(self.average) + 1, self.longest, limit)

    def observe(self, outcome: Round) -> None:
        """Move the average towards what was accepted."""
        if outcome.drafted:
            seen = outcome.accepted + (outcome.accepted == outcome.drafted)
            weight = self.UP if seen > self.average else self.DOWN
            self.average = min(float(self.longest), max(0.0, self.average + weight * (seen - self.average)))


class BanditLength(LengthPolicy):
    """UCB1 over the lengths 0 to ``longest``; the reward of a round is its tokens per second.

    Means are discounted (Garivier and Moulines 2011), so that the policy can follow a change. Rewards are
    scaled by the largest one seen. The mean over rounds of tokens per second is not the overall tokens per
    second, in which longer rounds count for more. That is a property of the policy, not an error here.
    """

    name = "ucb"
    # Remembers about 1,000 rounds. Lower: exploring the lengths never ends. Higher: changes are missed.
    DISCOUNT = 0.999
    # Width of the confidence bound. UCB1's own is sqrt(2), which never stops exploring on rewards this noisy.
    WIDTH = 0.3

    def __init__(self, longest: int) -> None:
        self.counts = [0.0] * (longest + 1)
        self.rewards = [0.0] * (longest + 1)
        self.best = 1e-9
        self.chosen = 0

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """The length with the highest upper bound."""
        total = sum(self.counts)
        bounds = [
            self.rewards[k] / n / self.best + self.WIDTH * math.sqrt(math.log(1 + total) / n) if n > 1e-3 else math.inf
            for k, n in enumerate(self.counts)
        ]
        self.chosen = max(range(len(bounds)), key=bounds.__getitem__)
        return min(self.chosen, limit)

    def observe(self, outcome: Round) -> None:
        """Credit the length that was drafted, even if the limit made it shorter than the chosen one."""
        reward = (outcome.accepted + 1) / max(outcome.draft_s + outcome.verify_s, 1e-9)
        self.best = max(self.best, reward)
        self.counts = [n * self.DISCOUNT for n in self.counts]
        self.rewards = [r * self.DISCOUNT for r in self.rewards]
        arm = min(outcome.drafted, len(self.counts) - 1)
        self.counts[arm] += 1
        self.rewards[arm] += reward
