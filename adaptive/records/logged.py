"""What ``Log`` returns: records, sessions, and the contents of a whole log, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from adaptive.types import Generation


@dataclass(frozen=True)
class LoggedGeneration:
    """A generation and its id in the log. Ids grow with time and are never reused."""

    id: int
    generation: Generation


@dataclass(frozen=True)
class LoggedText:
    """The token ids of a record, prompt and answer together, with its session and owner."""

    id: int
    session: str
    owner: str
    tokens: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Session:
    """One session: ``first`` and ``last`` are the times of its first and last generation (seconds since the epoch),
    ``opening`` is the user's first message."""

    id: str
    generations: int
    first: float
    last: float
    opening: str


@dataclass(frozen=True)
class Share:
    """Generations and output tokens of one domain or adapter (None: without a domain or adapter)."""

    name: str | None
    generations: int
    tokens: int


@dataclass(frozen=True)
class LogStats:
    """The contents of the log. ``positions`` are output tokens with supervision; ``size`` is bytes on
    disk, the WAL included; ``first`` and ``last`` are seconds since the epoch."""

    generations: int
    sessions: int
    tokens: int
    positions: int
    size: int
    first: float | None
    last: float | None
    by_domain: tuple[Share, ...]
    by_adapter: tuple[Share, ...]
