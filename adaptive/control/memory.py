"""``controller.json``: what the controller learned of a pair, from one session to the next.

Costs in seconds, acceptance counts by position, calibration counts by confidence. Written beside the
old file and moved over it, so that a killed process leaves one or the other whole. A file that cannot
be read is no reason to stop: the controller then learns anew.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from adaptive.control.acceptance import Acceptance, Counts
from adaptive.control.confidence import FOLLOW_STEP, Calibration
from adaptive.control.costs import LONGEST, CostTable
from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import LengthPolicy
from checkpoints import files

# Version of the file's shape; another one is not read.
VERSION = 3
# Costs that are more, or less, than one number.
LISTED = ("verify_s", "plain_s")


@dataclasses.dataclass(frozen=True)
class Memory:
    """What one session leaves to the next.

    ``device`` says for which devices and dtypes the costs hold, ``adapter`` which draft the acceptance
    is that of. ``costs`` is None where nothing was measured there.
    """

    device: str
    adapter: str | None
    costs: CostTable | None
    acceptance: Acceptance
    calibration: Calibration

    def policy(self, attentive: bool) -> GoodputLength:
        """The default policy, starting from this memory."""
        return GoodputLength(self.costs, self.acceptance, self.calibration, attentive=attentive)


def remembered(policy: GoodputLength, device: str, adapter: str | None) -> Memory:
    """What ``policy`` knows now."""
    policy.settle()
    costs = policy.costs.table() if policy.costs.measured else None
    return Memory(device, adapter, costs, policy.acceptance, policy.calibration)


def save(file: Path, memory: Memory) -> None:
    """Write the whole file at once. Raises OSError where that cannot be; the file is then as it was."""
    acceptance, calibration = memory.acceptance, memory.calibration
    content = {
        "version": VERSION,
        "device": memory.device,
        "adapter": memory.adapter,
        "costs": dataclasses.asdict(memory.costs) if memory.costs else None,
        "acceptance": {
            "all": _counts(acceptance.everything),
            "kinds": {name: _counts(counts) for name, counts in acceptance.kinds.items()},
        },
        "calibration": {
            "accepted": calibration.accepted,
            "rejected": calibration.rejected,
            "follow": calibration.follow,
        },
    }
    files.replace_text(file.parent, file, json.dumps(content, indent=1))


def _counts(counts: Counts) -> dict[str, list[float]]:
    return {"accepted": counts.accepted, "rejected": counts.rejected}


def load(file: Path, device: str) -> Memory:
    """The memory in ``file``; an empty one where there is none, or none that can be used.

    Costs of other devices are left out.
    """
    empty = Memory(device, None, None, Acceptance(), Calibration())
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            return empty
        costs = _table(content["costs"]) if content["costs"] and content["device"] == device else None
        acceptance, calibration = Acceptance(), Calibration()
        _restore(acceptance.everything, content["acceptance"]["all"])
        for name, stored in content["acceptance"]["kinds"].items():
            counts = Counts(acceptance.everything.keep)
            _restore(counts, stored)
            acceptance.kinds[str(name)] = counts
        bins = len(calibration.table)
        for part in ("accepted", "rejected", "follow"):
            setattr(calibration, part, _numbers(content["calibration"][part], bins))
        calibration.followed = [1 / FOLLOW_STEP] * bins  # as settled as it was left
        calibration.calibrate()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return empty
    return Memory(device, content.get("adapter"), costs, acceptance, calibration)


def current_costs(policy: LengthPolicy | None, file: Path) -> CostTable | None:
    """What a round costs now, as ``policy`` knows; where it has measured nothing or does not ask, ``last_costs``."""
    if isinstance(policy, GoodputLength) and policy.costs.measured:
        return policy.costs.table()
    return last_costs(file)


def last_costs(file: Path) -> CostTable | None:
    """What a round cost in the last session, wherever it ran; None where nothing was measured."""
    try:
        device = str(json.loads(file.read_text(encoding="utf-8"))["device"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return load(file, device).costs


def _restore(counts: Counts, stored: dict[str, Any]) -> None:
    counts.accepted = _numbers(stored["accepted"], LONGEST)
    counts.rejected = _numbers(stored["rejected"], LONGEST)


def _table(stored: dict[str, Any]) -> CostTable:
    single = {f.name: float(stored[f.name]) for f in dataclasses.fields(CostTable) if f.name not in LISTED}
    verify = tuple(_numbers(stored["verify_s"], LONGEST + 1))
    plain_s = None if stored["plain_s"] is None else float(stored["plain_s"])
    if (
        min(
            *verify,
            single["draft_s"],
            single["overhead_s"],
            single["token_s"],
            verify[0] if plain_s is None else plain_s,
        )
        <= 0
    ):
        raise ValueError("costs must be positive")
    whole = {**single, "context": int(single["context"]), "plain_s": plain_s}
    return CostTable(verify_s=verify, **whole)  # type: ignore[arg-type]


def _numbers(stored: list[Any], count: int) -> list[float]:
    """Exactly ``count`` finite numbers that are not negative; ValueError otherwise."""
    numbers = [float(n) for n in stored]
    if len(numbers) != count or not all(0 <= n < float("inf") for n in numbers):
        raise ValueError("damaged numbers")
    return numbers
