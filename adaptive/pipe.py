"""The line protocol between a program that answers and its training process.

To the worker's standard input: first an ``Order``, then ``busy``, ``idle`` and ``stop`` at any time; the end of the
input means that the program has ended. From its standard output: ``Report`` lines.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from adaptive import isolated

BUSY, IDLE, STOP = "busy", "idle", "stop"

# done: the run is over, whatever the gate decided. refused: there was too little to learn from or to compare, and more
# records will change that. failed: something else was wrong, such as a full disk. stopped: it was ordered to end early.
# memory: it ended because other programs needed the memory. taken: another process trains this pair.
Stage = Literal["loading", "training", "done", "refused", "failed", "stopped", "memory", "taken"]

LAST: tuple[Stage, ...] = ("done", "refused", "failed", "stopped", "memory", "taken")
# Ends after which the same may succeed later.
FAILED: tuple[Stage, ...] = ("failed", "memory")


@dataclass(frozen=True)
class Order:
    """One training run: the settings as plain JSON values, the folder of the pair's state, and whether to begin paused.

    ``review``: instead of training, compare the draft in use with the plain one and with the adapter ``doubted``.
    ``models`` are the resolved names of hub
    models (``adaptive.hub.resolved``).
    """

    settings: dict[str, Any]
    state: str
    paused: bool
    review: bool = False
    doubted: str | None = None
    models: list[tuple[str, str | None, str]] = field(default_factory=list)

    def line(self) -> str:
        """One line of JSON. Raises ValueError for a number that JSON does not have (nan): a page could not read it."""
        return json.dumps(asdict(self), allow_nan=False) + "\n"

    @classmethod
    def of(cls, line: str) -> Order:
        """The inverse of ``line``."""
        return cls(**json.loads(line))


@dataclass(frozen=True)
class Report:
    """The state of a training run: ``share`` is the completed share, 0 to 1; ``adapter`` the adapter it has made;
    ``until`` the newest record that it has read, if that is known; ``more`` the number of answers that one that was
    refused lacks, about, if that is known. Of a review: ``adapter`` is that of the best draft,
    None for the plain one; ``better``: than the adapter ``compared``, which was in use when it began."""

    stage: Stage
    message: str
    share: float = 0.0
    loss: float | None = None
    acceptance: float | None = None
    adapter: str | None = None
    promoted: bool = False
    until: int | None = None
    more: int | None = None
    better: bool = False
    compared: str | None = None

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of(cls, line: str) -> Report:
        """The inverse of ``line``. Raises ValueError or TypeError for anything else."""
        return cls(**json.loads(line))


def start_worker(errors: Path) -> subprocess.Popen[str]:
    """Start the training process, which waits for its ``Order``. Its standard error is written to ``errors``."""
    with errors.open("w") as stream:
        return subprocess.Popen(
            isolated.command("trainers.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            encoding="utf-8",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # ctrl-C reaches only this process, which then tells the worker
        )
