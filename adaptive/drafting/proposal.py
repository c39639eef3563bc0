"""What a drafter hands to verification."""

from __future__ import annotations

from typing import NamedTuple

from adaptive.tokens import Distributions, Ids


class Proposal(NamedTuple):
    """K drafted tokens, and the very distributions they were drawn from, over the draft's vocabulary.

    ``probs`` is None for a greedy proposal. ``drafter`` says who drafted.
    """

    drafter: str
    tokens: Ids
    probs: Distributions | None
