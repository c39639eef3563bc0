"""How the threads of torch wait for each other, which has to be said before torch is imported.

libgomp's threads spin for milliseconds before they sleep. Where another program holds a core, each waits so
for one that is not running: two threads on two cores, one of them busy, took 1 to 4 s for a prompt of 150
tokens that took 0.08 s on one thread. Threads that sleep at once are never slow like this, and slower on an
idle machine.
"""

from __future__ import annotations

import os

# On that busy machine a prompt took 0.2 to 0.4 s with this; on an idle one no pass took longer than by default.
# With a thousand prompts were as fast as on one thread, and idle passes of a 340M model took a third longer.
SPINS = 10_000

_chosen: str | None = None


def wait(spins: int = SPINS) -> None:
    """Spin so often, then sleep; from the import of torch on. What the user says in the environment stays."""
    global _chosen
    if "OMP_WAIT_POLICY" in os.environ or os.environ.get("GOMP_SPINCOUNT") != _chosen:
        return
    os.environ["GOMP_SPINCOUNT"] = _chosen = str(spins)
