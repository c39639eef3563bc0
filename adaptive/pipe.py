"""What the server and the training process say to each other, one line at a time.

To the worker's standard input: first an ``Order``, then ``busy``, ``idle`` and ``stop`` as they come;
the end of the input means that the server is no more. From its standard output: ``Report`` lines.
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

# done: the run is over, whatever the gate said. refused: it could not be tried, for a reason that
# more records will mend. stopped: it was asked to end early. memory: it ended because others needed
# the memory. taken: another process distils this pair.
Stage = Literal["loading", "training", "done", "refused", "stopped", "memory", "taken"]

LAST: tuple[Stage, ...] = ("done", "refused", "stopped", "memory", "taken")


@dataclass(frozen=True)
class Order:
    """One training run: the settings as plain JSON values, the folder of the pair's state, and whether to begin paused.

    ``reconsider`` names an adapter to judge once more, instead of training one. ``models`` is what names of the hub
    mean (``adaptive.hub.resolved``).
    """

    settings: dict[str, Any]
    state: str
    paused: bool
    reconsider: str | None = None
    models: list[tuple[str, str | None, str]] = field(default_factory=list)

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of(cls, line: str) -> Order:
        """The inverse of ``line``."""
        return cls(**json.loads(line))


@dataclass(frozen=True)
class Report:
    """Where a training run stands. ``share`` is how much of it is done, 0 to 1; ``adapter`` the one it made."""

    stage: Stage
    message: str
    share: float = 0.0
    loss: float | None = None
    acceptance: float | None = None
    adapter: str | None = None
    promoted: bool = False

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of(cls, line: str) -> Report:
        """The inverse of ``line``. Raises ValueError or TypeError for anything else."""
        return cls(**json.loads(line))


def start_worker(errors: Path) -> subprocess.Popen[str]:
    """The training process, which waits for its ``Order``; what it writes to its standard error goes to a file."""
    with errors.open("w") as stream:
        return subprocess.Popen(
            isolated.command("trainers.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            encoding="utf-8",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # ctrl-C is for us, and we tell it
        )
