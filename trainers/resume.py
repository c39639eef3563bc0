"""What an interrupted training run needs to go on where it stood: one file beside the log, whole or not there.

A run that was killed is finished by the next one that would do the same: same recipe, same draft, same
adapter in use, and the records that it began with (newer ones wait for the run after). Anything
else, and a record that was deleted since, makes the next run start afresh.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from adaptive.errors import first_line
from checkpoints import files
from trainers import processes
from trainers.dataset import Example


@dataclass
class Standing:
    """Where training stands. ``best`` is the state with the highest held-out acceptance so far; ``acceptance`` that
    of the last evaluation; ``loss`` is a running mean in nats per token; ``seconds`` of training."""

    best_acceptance: float = -1.0
    acceptance: float = math.nan
    step: int = 0
    seconds: float = 0.0
    best_step: int = 0
    fruitless: int = 0
    loss: float | None = None
    next_evaluation: float = 0.0
    best: dict[str, torch.Tensor] | None = field(default=None, repr=False)


class TrainingState:
    """The file of one pair. ``key`` names the run: what it trains, on what, and how. ``problem`` says why the file
    could not be written, a full disk say: the round then goes on, and could not be gone on with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key, self._last_id = "", 0
        self.problem: str | None = None

    def last_id(self) -> int | None:
        """Up to which record the run that was interrupted read the log; None where there is none to go on with."""
        meta = self._meta()
        return None if meta is None else int(meta["last_id"])

    def begin(self, made_of: Iterable[object], examples: Sequence[Example], last_id: int) -> bool:
        """This run is made of these choices and examples, of a log that was read up to ``last_id``; whether it is the
        one that was interrupted."""
        digest = hashlib.sha256(repr(list(made_of)).encode())
        for example in examples:
            digest.update(f"{example.id} ".encode() + example.prompt.tobytes() + example.output.tobytes())
        self.key, self._last_id = digest.hexdigest(), last_id
        meta = self._meta()
        return meta is not None and meta["key"] == self.key

    def load(self, weights: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Standing | None:
        """Put weights and optimiser back as they were; None where there is nothing of this run."""
        meta = self._meta()
        if meta is None or meta["key"] != self.key:
            return None
        state: dict[int, dict[str, torch.Tensor]] = {}
        best: dict[str, torch.Tensor] = {}
        with safe_open(self.path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                part, _, rest = name.partition("/")
                if part == "weight":
                    weights[int(rest)].data.copy_(file.get_tensor(name))
                elif part == "optimizer":
                    number, _, moment = rest.partition("/")
                    state.setdefault(int(number), {})[moment] = file.get_tensor(name)
                else:
                    best[rest] = file.get_tensor(name)
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        return Standing(**meta["standing"], best=best or None)

    def save(self, standing: Standing, weights: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Replace the file in one step; of several processes, only the first one writes."""
        if not processes.first():
            return
        tensors = {f"weight/{i}": w.detach().cpu().contiguous() for i, w in enumerate(weights)}
        for number, moments in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{number}/{name}": value.detach().cpu() for name, value in moments.items()}
        tensors |= {f"best/{name}": value for name, value in (standing.best or {}).items()}
        numbers = {name: value for name, value in vars(standing).items() if name != "best"}
        meta = {"key": self.key, "last_id": self._last_id, "standing": numbers}
        temporary = None
        try:
            temporary = files.unfinished(self.path.parent)
            save_file(tensors, temporary, metadata={"round": json.dumps(meta)})
            os.chmod(temporary, 0o600)
            files.flush(temporary)
            os.replace(temporary, self.path)
            files.flush(self.path.parent)
        except (OSError, SafetensorError) as error:  # the round itself needs no file
            self.problem = first_line(error)
        finally:
            if temporary is not None:
                files.finished(temporary)

    def forget(self) -> None:
        """The run is done."""
        if processes.first():
            self.path.unlink(missing_ok=True)

    def _meta(self) -> dict[str, Any] | None:
        try:
            with safe_open(self.path, "pt") as file:
                meta: dict[str, Any] = json.loads((file.metadata() or {})["round"])
        except (OSError, SafetensorError, KeyError, ValueError):
            return None  # no run was interrupted, or what it left is no use
        return meta
