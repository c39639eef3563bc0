"""The state from which an interrupted training run continues: one file beside the log, complete or absent.

A killed run is continued by the next run that would do the same: same recipe, same draft, same
adapter in use, and the records that it began with (newer ones are used by the run after), split in the same way.
Anything else, or a record that was deleted since, makes the next run start afresh. Hidden states that have left the
spool since do not, as long as enough are left: such records are left out for the rest of the run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from adaptive.errors import first_line
from trainers import processes
from trainers.tensors import replace_tensors


@dataclass
class Standing:
    """The progress of training. ``best`` is the state with the highest held-out acceptance so far; ``acceptance`` is
    from the last evaluation, after step ``evaluated``; ``loss`` is a running mean in nats per token; ``seconds`` are
    those of training."""

    best_acceptance: float = -1.0
    acceptance: float = math.nan
    step: int = 0
    seconds: float = 0.0
    best_step: int = 0
    fruitless: int = 0
    loss: float | None = None
    next_evaluation: float = 0.0
    evaluated: int = 0
    best: dict[str, torch.Tensor] | None = field(default=None, repr=False)


class TrainingState:
    """The state file of one pair. ``key`` identifies the run: its recipe, draft, parent and data. ``problem`` is the
    reason why the file could not be written, such as a full disk: the run then continues, but could not be resumed."""

    def __init__(self, path: Path) -> None:
        self.path, self.replays = path, path.with_suffix(".replays.json")  # the latter: see ``trainers.replayed``
        self.key, self._last_id = "", 0
        self.problem: str | None = None

    def last_id(self) -> int | None:
        """The last record id that the interrupted run read from the log; None if there is no run to continue."""
        meta = self._meta()
        return None if meta is None else meta["last_id"]

    def begin(self, made_of: Iterable[object], last_id: int) -> bool:
        """Set ``key`` from these choices and data, of a log that was read up to ``last_id``. Returns whether the file
        holds this very run, interrupted."""
        self.key, self._last_id = hashlib.sha256(repr(list(made_of)).encode()).hexdigest(), last_id
        meta = self._meta()
        return meta is not None and meta["key"] == self.key

    def load(self, weights: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Standing | None:
        """Restore weights and optimiser; None if the file has no state of this run, or one that is damaged or of
        other shapes (an earlier version's, say): nothing is restored then."""
        meta = self._meta()
        if meta is None or meta["key"] != self.key:
            return None
        parts: dict[str, dict[str, torch.Tensor]] = {"weight": {}, "optimizer": {}, "best": {}}
        try:
            with safe_open(self.path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    part, _, rest = name.partition("/")
                    parts[part][rest] = file.get_tensor(name)
            standing = Standing(**meta["standing"], best=parts["best"] or None)
            held = [parts["weight"][str(index)] for index in range(len(weights))]
            moments: dict[int, dict[str, torch.Tensor]] = {}
            for name, value in parts["optimizer"].items():
                number, _, moment = name.partition("/")
                moments.setdefault(int(number), {})[moment] = value
            # An optimiser numbers its parameters by group, not in the order of ``weights``.
            numbered = [weight for group in optimizer.param_groups for weight in group["params"]]
            of_weights = [(value, numbered[number]) for number, one in moments.items() for value in one.values()]
        except (OSError, SafetensorError, KeyError, ValueError, IndexError, TypeError):
            return None
        fits = all(one.shape == weight.shape for one, weight in zip(held, weights, strict=True))
        if not fits or any(value.dim() and value.shape != weight.shape for value, weight in of_weights):
            return None
        for weight, value in zip(weights, held, strict=True):
            weight.data.copy_(value)
        optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
        return standing

    def mark(self) -> None:
        """Note that this run has begun, so that the next one continues it even if no step was finished."""
        self._write({}, Standing())

    def save(self, standing: Standing, weights: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Replace the file atomically; with several processes, only the first one writes."""
        tensors = {f"weight/{i}": w.detach().cpu().contiguous() for i, w in enumerate(weights)}
        for number, moments in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{number}/{name}": value.detach().cpu() for name, value in moments.items()}
        tensors |= {f"best/{name}": value for name, value in (standing.best or {}).items()}
        self._write(tensors, standing)

    def _write(self, tensors: dict[str, torch.Tensor], standing: Standing) -> None:
        if not processes.first():
            return
        numbers = {name: value for name, value in vars(standing).items() if name != "best"}
        meta = {"key": self.key, "last_id": self._last_id, "standing": numbers}
        try:
            replace_tensors(self.path, tensors, {"round": json.dumps(meta)})
        except OSError as error:  # training itself needs no file
            self.problem = first_line(error)

    def forget(self) -> None:
        """Remove the files, since the run is finished or cannot go on."""
        if processes.first():
            for file in (self.path, self.replays):
                file.unlink(missing_ok=True)

    def _meta(self) -> dict[str, Any] | None:
        try:
            with safe_open(self.path, "pt") as file:
                meta: dict[str, Any] = json.loads((file.metadata() or {})["round"])
            return {"key": meta["key"], "last_id": int(meta["last_id"]), "standing": meta["standing"]}
        except (OSError, SafetensorError, KeyError, ValueError, TypeError):
            return None  # no run was interrupted, or its state is unusable
