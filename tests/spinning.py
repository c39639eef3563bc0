"""Processes that keep processor cores busy."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

# Hashes large buffers, which releases the interpreter's lock.
SPIN = "import hashlib\nwhile True: hashlib.sha256(bytes(2**20)).digest()"


@contextmanager
def spinning(count: int) -> Iterator[list[psutil.Process]]:
    """Start ``count`` processes that use all the processor time they get, and wait until they have used some."""
    started = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        found = [psutil.Process(process.pid) for process in started]
        until = time.monotonic() + 30
        while any(sum(process.cpu_times()[:2]) < 0.1 for process in found) and time.monotonic() < until:
            time.sleep(0.02)
        yield found
    finally:
        for process in started:
            process.kill()
            process.wait()


def taken(processes: list[psutil.Process]) -> float:
    """Processor seconds that the processes have used, in total."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)
