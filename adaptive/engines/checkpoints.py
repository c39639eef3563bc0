"""Which states of a text are remembered, so that it can go back further than its last passes: a few, far apart."""

from __future__ import annotations

# Checkpoints of a text. Fewer compute more of the text anew where a conversation branches, each takes the memory of the
# recurrent states of all layers.
CHECKPOINTS = 4
# Tokens before a prompt's end at which recurrent states are remembered, for another answer to it or one that begins
# otherwise (templates end a prompt with a few tokens of their own). They take a pass of their own.
REMEMBER_BEFORE = 16


def crowded(lengths: list[int]) -> int | None:
    """Of checkpoints after so many tokens each, in order, the one to be forgotten, between the nearest two others; None
    where they are not too many. The newest is kept."""
    if len(lengths) <= CHECKPOINTS:
        return None
    places = [0, *lengths]
    gaps = [after - before for before, after in zip(places, places[2:], strict=False)]
    return gaps.index(min(gaps))
