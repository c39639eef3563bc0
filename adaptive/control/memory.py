"""``controller.json``: what the controller learned of a pair, stored from one session to the next.

It holds costs in seconds, and acceptance counts by position, by confidence and by match. A new file is written beside
the old one and moved over it, so a killed process leaves one of them whole. If the file cannot be read, the controller
starts without it. If several processes use a pair, the first one writes the file (``keeping``) and the others only read
it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from adaptive.control.acceptance import Acceptance, Counts
from adaptive.control.confidence import CENTRES, FOLLOW_STEP, Calibration
from adaptive.control.costs import LONGEST, CostTable
from adaptive.control.goodput import GoodputLength
from adaptive.control.matches import PRIORS, Bins, Matches
from adaptive.control.policy import LengthPolicy
from adaptive.control.sources import GoodputWithHistory
from checkpoints import files

# Seconds after which costs are measured again in a quiet moment: updates, other programs or a move may change them.
DAY = 86_400.0

Count = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ByPosition = Annotated[list[Count], Field(min_length=LONGEST, max_length=LONGEST)]
ByConfidence = Annotated[list[Count], Field(min_length=len(CENTRES), max_length=len(CENTRES))]
ByMatch = Annotated[list[Count], Field(min_length=len(PRIORS), max_length=len(PRIORS))]


class _Costs(BaseModel):
    start_s: Count
    draft_s: Seconds
    catch_up_s: Count
    verify_s: Annotated[tuple[Seconds, ...], Field(min_length=LONGEST + 1, max_length=LONGEST + 1)]
    overhead_s: Seconds
    token_s: Seconds
    context_s: Count
    context: int
    plain_s: Seconds | None


class _Counts(BaseModel):
    accepted: ByPosition
    rejected: ByPosition

    def counts(self, keep: float) -> Counts:
        return Counts(keep, self.accepted, self.rejected)


class _Acceptance(BaseModel):
    all: _Counts
    kinds: dict[str, _Counts]


class _Calibration(BaseModel):
    accepted: ByConfidence
    rejected: ByConfidence
    follow: ByConfidence


class _Matches(BaseModel):
    accepted: ByMatch
    rejected: ByMatch


class _File(BaseModel):
    """The file. A file of another version is not read."""

    version: Literal[4] = 4
    device: str
    machine: str
    measured: float
    adapter: str | None
    costs: _Costs | None
    acceptance: _Acceptance
    calibration: _Calibration
    matches: dict[str, _Matches] = {}


@dataclass(frozen=True)
class Memory:
    """What one session leaves to the next.

    ``device`` names the devices and dtypes for which the costs hold; ``machine`` the machine and its power state on
    which they were measured (``adaptive.machine.identity``); ``measured`` the time, in seconds since the epoch (0: the
    machine was not quiet); ``adapter`` the draft whose acceptance is stored. ``costs`` is None if nothing was measured.
    ``matches`` is the calibration of matches in earlier text.
    """

    device: str
    machine: str
    measured: float
    adapter: str | None
    costs: CostTable | None
    acceptance: Acceptance
    calibration: Calibration
    matches: Matches = field(default_factory=Matches)

    def policy(
        self, attentive: bool, history: bool = False, clock: Callable[[], float] = time.perf_counter
    ) -> GoodputLength:
        """The default policy, starting from this memory. ``history``: whether there is history to draft from."""
        kind = GoodputWithHistory if history else GoodputLength
        return kind(self.costs, self.acceptance, self.calibration, attentive=attentive, clock=clock)

    def stale(self, machine: str) -> bool:
        """Whether the costs should be measured again when no request waits: they are a day old, or were measured beside
        other programs, on another machine or with another power supply."""
        return self.costs is None or machine != self.machine or not 0 <= time.time() - self.measured < DAY


def remembered(
    policy: GoodputLength,
    device: str,
    machine: str,
    measured: float,
    adapter: str | None,
    matches: Matches | None = None,
) -> Memory:
    """The current memory: the state of ``policy`` and the calibration of history's ``matches``."""
    policy.settle()
    costs = policy.quiet_costs
    table = costs.table() if costs.measured else None
    known = policy.acceptance, policy.calibration, matches or Matches()
    return Memory(device, machine, measured, adapter, table, *known)


def save(file: Path, memory: Memory) -> None:
    """Write the whole file atomically, unless it says the same already. Raises OSError if that fails; the file is then
    unchanged."""
    acceptance, calibration = memory.acceptance, memory.calibration
    content = _File(
        device=memory.device,
        machine=memory.machine,
        measured=memory.measured,
        adapter=memory.adapter,
        costs=None if memory.costs is None else _Costs(**asdict(memory.costs)),
        acceptance=_Acceptance(
            all=_stored(acceptance.everything),
            kinds={name: _stored(counts) for name, counts in acceptance.kinds.items()},
        ),
        calibration=_Calibration(
            accepted=calibration.accepted, rejected=calibration.rejected, follow=calibration.follow
        ),
        matches={
            kind: _Matches(accepted=list(bins.accepted), rejected=list(bins.rejected))
            for kind, bins in memory.matches.kinds.items()
        },
    )
    text = content.model_dump_json(indent=1)
    with contextlib.suppress(OSError):
        if file.read_bytes() == text.encode():
            return
    files.replace_text(file.parent, file, text)


def _stored(counts: Counts) -> _Counts:
    return _Counts(accepted=counts.accepted, rejected=counts.rejected)


def load(file: Path, device: str) -> Memory:
    """The memory in ``file``; an empty one if the file is missing or unusable.

    Costs of other devices are dropped.
    """
    try:
        found = _File.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return Memory(device, "", 0.0, None, None, Acceptance(), Calibration())
    acceptance, calibration = Acceptance(), Calibration()
    keep = acceptance.everything.keep
    acceptance.everything = found.acceptance.all.counts(keep)
    acceptance.kinds = {name: counts.counts(keep) for name, counts in found.acceptance.kinds.items()}
    calibration.accepted, calibration.rejected = found.calibration.accepted, found.calibration.rejected
    calibration.follow = found.calibration.follow
    calibration.followed = [1 / FOLLOW_STEP] * len(CENTRES)  # with full weight
    calibration.calibrate()
    matches = Matches()
    matches.kinds = {kind: Bins(bins.accepted, bins.rejected) for kind, bins in found.matches.items()}
    here = found.costs is not None and found.device == device
    costs = CostTable(**found.costs.model_dump()) if found.costs is not None and here else None
    measured = found.measured if here else 0.0
    return Memory(device, found.machine, measured, found.adapter, costs, acceptance, calibration, matches)


def current_costs(policy: LengthPolicy | None, file: Path) -> CostTable | None:
    """The current costs of a round by ``policy``; ``last_costs`` if it has measured none or uses no costs."""
    if isinstance(policy, GoodputLength) and policy.costs.measured:
        return policy.costs.table()
    return last_costs(file)


def last_costs(file: Path) -> CostTable | None:
    """The costs of a round in the last session, on any device; None if nothing was measured."""
    try:
        found = _File.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None
    return None if found.costs is None else CostTable(**found.costs.model_dump())


@contextlib.contextmanager
def keeping(file: Path) -> Iterator[bool]:
    """Whether this process is the one that writes ``file``, for the time of the context: the first process that asks.
    The system releases the lock of a killed process."""
    from filelock import FileLock, Timeout

    lock = FileLock(file.with_suffix(".lock"), mode=0o600)
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
