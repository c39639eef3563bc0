"""Sets the number of threads on which the models compute on a CPU, before they are loaded."""

from __future__ import annotations

import os

from adaptive.errors import AdaptiveError
from adaptive.machine import quota

# Most threads, more than the cores of any machine with one or two processors. Too high: the kernels' pool counts in 16
# bits (``native/pool.h``), and every thread takes memory.
MOST_THREADS = 1024


def threads_of(asked: int | None) -> int:
    """The number of threads for the calling thread's passes. ``asked`` is the user's number; for None it is torch's,
    which follows the cores that this process may run on, but not more than its processor quota allows. A number in
    OMP_NUM_THREADS is the user's, too. Raises AdaptiveError if ``asked`` is above MOST_THREADS."""
    import torch

    if asked is not None:
        if asked > MOST_THREADS:
            raise AdaptiveError(f"threads is {asked}; it must be at most {MOST_THREADS}")
        return asked
    given = min(torch.get_num_threads(), MOST_THREADS)
    return given if os.environ.get("OMP_NUM_THREADS") else int(min(given, max(1.0, quota())))


def set_threads(asked: int | None) -> None:
    """Set torch's number of threads, which is also that of our kernels, for the calling thread and for threads started
    later: ``threads_of``. Raises AdaptiveError as that."""
    import torch

    number = threads_of(asked)
    if number != torch.get_num_threads():
        torch.set_num_threads(number)
