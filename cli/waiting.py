"""Sets how torch's threads wait for each other; this must be done before torch is imported.

libgomp's threads spin for milliseconds before they sleep. If another program occupies a core, they spin while the
thread they wait for is not running: two threads on two cores, one of them busy, took 1 to 4 s for a prompt of 150
tokens that took 0.08 s on one thread. Threads that sleep at once avoid this, but are slower on an
idle machine.
"""

from __future__ import annotations

import os

# On that busy machine a prompt took 0.2 to 0.4 s with this; on an idle one no pass took longer than by default.
# With 1,000, prompts were as fast as on one thread, but passes of a 340M model on an idle machine took a third longer.
SPINS = 10_000

_chosen: str | None = None


def wait(spins: int = SPINS) -> None:
    """Have threads spin ``spins`` times, then sleep, once torch is imported. The user's own environment wins."""
    global _chosen
    if "OMP_WAIT_POLICY" in os.environ or os.environ.get("GOMP_SPINCOUNT") != _chosen:
        return
    os.environ["GOMP_SPINCOUNT"] = _chosen = str(spins)
