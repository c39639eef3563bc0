"""A load meter on a simulated machine whose cores are shared with other programs."""

from __future__ import annotations

from adaptive import machine


class Accounts(machine.LoadMeter):
    """A load meter of ``cores`` cores. Time advances only by calls of ``passed``."""

    def __init__(self, cores: float = 2.0) -> None:
        self.at = self.idle = self.ours = 0.0
        super().__init__()
        self.cores = cores

    def now(self) -> float:  # type: ignore[override]
        """The simulated time in seconds."""
        return self.at

    def passed(self, seconds: float, threads: float, others: float) -> None:
        """Advance by ``seconds`` in which ``threads`` threads of this process and ``others`` of other programs ran."""
        self.at += seconds
        self.ours += threads * seconds
        self.idle += max(0.0, self.cores - threads - others) * seconds

    def _accounts(self) -> machine._Accounts:
        return machine._Accounts(self.at, self.idle, 0.0, self.ours)
