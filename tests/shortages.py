"""A process that runs short of memory, of file descriptors or of threads, or cannot read a file, for the length of a
``with`` block."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short_of_memory(left: int) -> Iterator[None]:
    """Limit the process to ``left`` more bytes of memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def short_of_files(left: int) -> Iterator[None]:
    """Let the process open ``left`` more files at once."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    most = max(map(int, os.listdir("/dev/fd"))) + left + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        while True:
            try:
                held.append(os.dup(held[0]))
            except OSError:
                break
        for _ in range(left):
            os.close(held.pop())
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def short_of_threads() -> Iterator[None]:
    """Let no thread begin."""
    before = threading.stack_size(1 << 46)  # more than there is address space
    try:
        yield
    finally:
        threading.stack_size(before)


@contextmanager
def replaced_by_a_folder(file: Path) -> Iterator[None]:
    """A file that cannot be read, which is an error that even the superuser gets."""
    away = file.with_name("away")
    file.rename(away)
    file.mkdir()
    try:
        yield
    finally:
        file.rmdir()
        away.rename(file)
