"""Which token of an answer came from whom: pure functions of its rounds."""

from __future__ import annotations

from collections.abc import Sequence

from adaptive.types import Round


def origins(rounds: Sequence[Round], tokens: int) -> list[str | None]:
    """The drafter of each of an answer's ``tokens``, None for the target's own.

    The first token comes out of the prompt's pass; each round then brings the tokens of its drafter that were accepted
    and one of the target's. A record that lost its rounds has tokens beyond them, of which nobody knows better.
    """
    found: list[str | None] = [None]
    for outcome in rounds:
        for part in outcome.parts:
            found += [part.drafter] * part.accepted
        found.append(None)
    return found[:tokens] + [None] * (tokens - len(found))
