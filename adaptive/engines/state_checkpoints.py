"""Chooses the recurrent states of a text that are kept for a rollback beyond its last passes: a few, far apart."""

from __future__ import annotations

# Checkpoints per text. Too low: more of the text is computed again where a conversation branches. Too high: memory;
# each one holds the recurrent states of all layers.
CHECKPOINTS = 4
# Tokens before a prompt's end at which recurrent states are kept, for another answer to the prompt, or to one with a
# different end (templates end a prompt with a few tokens of their own). These last tokens take a pass of their own.
REMEMBER_BEFORE = 16


def crowded(lengths: list[int]) -> int | None:
    """The index of the checkpoint to drop: the one whose neighbours are nearest to each other. ``lengths`` are the
    checkpoints' token counts, in order. None if there are not too many. The newest is never dropped."""
    if len(lengths) <= CHECKPOINTS:
        return None
    places = [0, *lengths]
    gaps = [after - before for before, after in zip(places, places[2:], strict=False)]
    return gaps.index(min(gaps))
