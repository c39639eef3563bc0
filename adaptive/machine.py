"""The load of other programs on this machine, what this process may use of it, and the machine's identity.

In: the operating system's accounts of processor time and memory. Out: the cores that other programs used since the last
read (``LoadMeter``, ``LoadWatch``), the limits of this process (``quota``, ``memory``), and a string that changes when
measured costs no longer hold (``identity``). Also returns freed memory to the system. Imports no other module of this
program.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

# Cores that other programs must use before the machine counts as busy: a share of the usable cores, but at most
# BUSY_CORES. Too low: a desktop at rest, which uses 0.1 to 0.2, counts as busy. Too high: on two cores, passes whose
# threads wait for each other are slower already beside a third of a core.
BUSY_SHARE, BUSY_CORES = 0.15, 0.75
# Share of the cores used by other programs from which threads on all cores can no longer run at the same time. Each of
# the hundred waits of a pass for another thread can then last as long as a scheduler's time slice.
CROWDED_SHARE = 0.35
# Core-seconds that other programs must also use: a shorter load is over already.
MOMENT_S = 0.08
# Shortest time in seconds between two reads that gives a meaningful load: the accounts have steps of 10 ms a core.
LEAST_S = 0.1
# Consecutive reads that must find the machine busy before it counts as busy. For crowded cores one read is enough,
# because passes on all threads then take many times as long at once.
BUSY_READS = 2
# Seconds without load after which the load counts as over. Too low: every gap of a program that compiles or runs tests
# looks like its end. Too high: the answers after a load still use one thread and the costs of the busy machine.
CALM_S = 0.5
# Seconds of the longest pause between answers whose load counts for the next one. In longer pauses a trainer may run.
PAUSE_S = 4.0
# Seconds after which the number of usable cores is read again.
CORES_HOLD_S = 10.0

# The control groups of this process (Linux), the folder of all groups, and the settings of the first core.
MEMBERSHIP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
CPUFREQ = Path("/sys/devices/system/cpu/cpufreq/policy0")


@dataclass(frozen=True)
class Load:
    """The use of the processor over ``seconds``, in cores (1.0 is one core all the time).

    ``others``: cores used by other programs, of the ``cores`` that this process may use, or taken by a hypervisor
    (steal). ``ours``: cores used by all threads of this process. Processes that this one has started count as others.
    """

    seconds: float
    others: float
    ours: float
    cores: float

    @property
    def busy(self) -> bool:
        """Whether other programs used enough to slow passes down, and for more than a moment."""
        return self.others > min(BUSY_SHARE * self.cores, BUSY_CORES) and self.others * self.seconds > MOMENT_S

    @property
    def crowded(self) -> bool:
        """Whether other programs used so much that one thread per core is too many."""
        return self.busy and self.others > CROWDED_SHARE * self.cores

    def __str__(self) -> str:
        return f"{self.others:.1f} of {self.cores:g} cores"


class _Accounts(NamedTuple):
    """Processor seconds since the start of the machine, or of the process (``ours``); ``at`` is the time of reading."""

    at: float
    idle: float
    steal: float
    ours: float


class LoadMeter:
    """Measures the load between two reads. One read takes some 30 us."""

    def __init__(self) -> None:
        self._mine = _allowed()
        self.cores = _cores(self._mine)
        self._cores_at = time.monotonic()
        self._last = self._accounts()

    @staticmethod
    def now() -> float:
        """The wall-clock time, in seconds, over which loads are measured."""
        return time.monotonic()

    def read(self) -> Load | None:
        """The load since the last read. None, without a new read, if that was less than ``LEAST_S`` ago, or if the
        accounts cannot be read now."""
        try:
            now = self._accounts()
        except OSError:  # out of file descriptors, say
            return None
        seconds = now.at - self._last.at
        if seconds < LEAST_S:
            return None
        idle, steal, ours = (
            max(0.0, later - before) / seconds for later, before in zip(now[1:], self._last[1:], strict=True)
        )
        if now.at - self._cores_at > CORES_HOLD_S:
            self._cores_at = now.at
            self._mine = _allowed()
            self.cores = _cores(self._mine)
        self._last = now
        # Time that is neither idle nor ours is other programs'. With a quota, more cores may be idle than are usable.
        return Load(seconds, min(self.cores, max(self.cores - idle - ours, steal)), ours, self.cores)

    def _accounts(self) -> _Accounts:
        if self._mine is None:
            kept = [psutil.cpu_times()]
        else:
            every = psutil.cpu_times(percpu=True)
            kept = [every[core] for core in self._mine if core < len(every)]
        # A core that waits for a disk is usable.
        idle = sum(times.idle + getattr(times, "iowait", 0.0) for times in kept)
        steal = sum(getattr(times, "steal", 0.0) for times in kept)
        return _Accounts(self.now(), idle, steal, time.process_time())


class LoadWatch:
    """Whether other programs use the machine now: ``busy`` and ``crowded`` mean the same as in ``Load``.

    ``look`` is called while passes run and reads the load at most every ``LEAST_S`` seconds of wall-clock time. Seconds
    of passes would be too slow a clock: an answer of a small model has less than ``LEAST_S`` of them, so that a load
    would still count for many answers after its end.
    """

    def __init__(self, meter: LoadMeter) -> None:
        self._meter = meter
        self.busy = self.crowded = False
        self._read_at = meter.now()
        self._busy_reads = 0  # in a row
        self._calm_s = self._free_s = 0.0  # since the machine was last found busy, and since it was crowded

    def look(self, worked: float = math.inf) -> bool:
        """Update both flags. Returns whether the load was read. ``worked``: seconds of passes since the last read; the
        rest of the time was a pause between answers."""
        if self._meter.now() - self._read_at < LEAST_S:
            return False
        load = self._meter.read()
        if load is None:
            return False
        self._read_at = self._meter.now()
        if load.seconds - worked > PAUSE_S:
            self.crowded, self._free_s = False, CALM_S
            return True
        self._busy_reads = self._busy_reads + 1 if load.busy else 0
        self._calm_s = 0.0 if load.busy else self._calm_s + load.seconds
        self._free_s = 0.0 if load.crowded else self._free_s + load.seconds
        self.busy = self._busy_reads >= BUSY_READS or (self.busy and self._calm_s < CALM_S)
        self.crowded = load.crowded or (self.crowded and self._free_s < CALM_S)
        return True


def identity() -> str:
    """The machine and how it is run, as far as costs depend on it: processor, cores, power, governor."""
    return f"{processor_name()}; {_cores(_allowed()):g} cores; {_power()}{_governor()}"


def processor_name() -> str:
    """The processor's name, as its maker gives it."""
    try:
        if sys.platform == "darwin":
            asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return platform.processor() or platform.machine()


def _allowed() -> list[int] | None:
    """The cores that this process may run on; None for all cores."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    mine = sorted(os.sched_getaffinity(0))
    return None if len(mine) >= (os.cpu_count() or 1) else mine


def _cores(mine: list[int] | None) -> float:
    """The number of cores whose time this process may use."""
    cores = float(len(mine) if mine else os.cpu_count() or 1)
    return min(cores, quota())


def quota() -> float:
    """Cores that the control groups of this process allow; infinite without a limit."""
    return min(map(_core_limit, _groups("cpu")), default=float("inf"))


class Memory(NamedTuple):
    """Bytes of memory that this process could still allocate, and of all memory that it may use."""

    available: int
    total: int


def memory() -> Memory:
    """The machine's memory, or less if a control group of this process has a limit. The system ends a process that
    exceeds such a limit, without an error."""
    machine = psutil.virtual_memory()
    found = [Memory(int(machine.available), int(machine.total))]
    found += [limit for limit in map(_memory_limit, _groups("memory")) if limit is not None]
    return Memory(min(one.available for one in found), min(one.total for one in found))


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the control groups whose limits of ``controller`` hold for this process (Linux, versions 1 and
    2)."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = CGROUPS / controllers if controllers else CGROUPS
        folder = top / path.lstrip("/")
        # A limit holds for all groups below it. In a container the path may be one that only the host can see.
        yield from (group for group in (folder, *folder.parents) if group.is_relative_to(top))


def _core_limit(group: Path) -> float:
    """Cores that one control group itself allows; infinite without a limit."""
    try:
        if (group / "cpu.max").is_file():
            allowed, period = (group / "cpu.max").read_text().split()
        else:
            allowed, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float(allowed) / float(period) if allowed != "max" and float(allowed) > 0 else float("inf")
    except (OSError, ValueError):
        return float("inf")


def _memory_limit(group: Path) -> Memory | None:
    """The memory that one control group itself allows; None without a limit. Pages of files count as used in it, but
    the system drops them when memory is needed."""
    two = (group / "memory.max").is_file()
    names = ("memory.max", "memory.current") if two else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        most, used = (int((group / name).read_text()) for name in names)
        said = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = sum(int(said[f"{'' if two else 'total_'}{kind}_file"]) for kind in ("active", "inactive"))
    except (OSError, ValueError, KeyError):  # "max" is no number
        return None
    return Memory(max(0, most - max(0, used - files)), most)


def _power() -> str:
    try:
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    except (OSError, RuntimeError, NotImplementedError):
        battery = None
    if battery is None or battery.power_plugged is None:
        return "power unknown"
    return "on mains" if battery.power_plugged else "on battery"


def _governor(folder: Path = CPUFREQ) -> str:
    """The processor's frequency governor and energy preference, if they can be read (Linux)."""
    said = []
    for name in ("scaling_governor", "energy_performance_preference"):
        try:
            said.append((folder / name).read_text().strip())
        except OSError:
            continue
    return f"; {', '.join(said)}" if said else ""


def give_memory_back() -> None:
    """Return freed memory that the C library holds to the system. Large blocks come and go, and glibc never returns the
    holes between small blocks that stay."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
