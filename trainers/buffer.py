"""Which records are retained for training when the log holds more than a round can take.

``newest`` keeps the newest. ``kinds`` keeps every kind of text that was ever said: each domain label has an
equal share (a rare kind, all of it); half of a share is its newest records, the other half a sample of its
older ones, in which those that the draft predicted badly are more likely. What is sampled changes little
from round to round: each record's luck is a hash of its id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from adaptive.records.log import Outline
from trainers.recipe import Retain

# Share of a kind's records that are simply its newest. Smaller answers a change within a kind later, larger
# forgets what the kind was.
NEWEST_SHARE = 0.5
# Weight in the sample of a record of which everything was accepted, beside 1 + this of one with nothing. Smaller
# drops what is known by heart, which is then forgotten; larger makes the sample uniform.
LEAST_WEIGHT = 0.25


def retained(known: Sequence[Outline], size: int, retain: Retain) -> list[int]:
    """The ids of the at most ``size`` records that stay, in order. ``known`` is in the order of the log."""
    if retain == "newest" or len(known) <= size:
        return [o.id for o in known[-size:]]
    kinds: dict[str | None, list[Outline]] = {}
    for one in known:
        kinds.setdefault(one.domain, []).append(one)
    kept: list[int] = []
    left = size
    for place, kind in enumerate(sorted(kinds.values(), key=len)):
        share = min(len(kind), left // (len(kinds) - place))
        left -= share
        newest = len(kind) - (share if share == len(kind) else round(share * NEWEST_SHARE))
        older = sorted(kind[:newest], key=_luck, reverse=True)[: share - (len(kind) - newest)]
        kept += [o.id for o in (*older, *kind[newest:])]
    return sorted(kept)


def _luck(one: Outline) -> float:
    """Records with the highest values are a weighted sample (Efraimidis and Spirakis 2006): u^(1/w)."""
    uniform = int.from_bytes(hashlib.sha256(str(one.id).encode()).digest()[:8], "big") / 2**64
    rejected = 1 - one.accepted / one.drafted if one.drafted else 0.5
    return float(uniform ** (1 / (LEAST_WEIGHT + rejected)))


def runs(known: Sequence[Outline], ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """``ids`` (a part of ``known``'s, in order) as stretches of records without a gap: first id and how many."""
    wanted, first, count = set(ids), 0, 0
    for one in known:
        if one.id in wanted:
            first, count = (first if count else one.id), count + 1
        elif count:
            yield first, count
            count = 0
    if count:
        yield first, count
