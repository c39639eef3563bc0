"""Finds the drafter of every token of an answer: a pure function of its rounds."""

from __future__ import annotations

from collections.abc import Sequence

from adaptive.types import Round


def origins(rounds: Sequence[Round], tokens: int) -> list[str | None]:
    """The drafter of each of an answer's ``tokens`` tokens, None for the target's own.

    The first token comes from the prompt's pass; each round then adds the accepted tokens of its drafters and one token
    of the target. If a record lost its rounds, the remaining tokens are None, since their drafters are unknown.
    """
    found: list[str | None] = [None]
    for outcome in rounds:
        for part in outcome.parts:
            found += [part.drafter] * part.accepted
        found.append(None)
    return found[:tokens] + [None] * (tokens - len(found))
