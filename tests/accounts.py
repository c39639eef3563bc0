"""A load meter whose operating system is made up: some cores, of which other programs use some."""

from __future__ import annotations

from adaptive import machine


class Accounts(machine.LoadMeter):
    """The meter of ``cores`` cores whose time passes by ``passed`` alone."""

    def __init__(self, cores: float = 2.0) -> None:
        self.at = self.idle = self.ours = 0.0
        super().__init__()
        self.cores = cores

    def now(self) -> float:  # type: ignore[override]
        """Seconds that have passed."""
        return self.at

    def passed(self, seconds: float, threads: float, others: float) -> None:
        """So many of the process's own ``threads`` and so many ``others`` were at work for so long."""
        self.at += seconds
        self.ours += threads * seconds
        self.idle += max(0.0, self.cores - threads - others) * seconds

    def _accounts(self) -> machine._Accounts:
        return machine._Accounts(self.at, self.idle, 0.0, self.ours)
