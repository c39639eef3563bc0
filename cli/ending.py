"""Ends a command in order when it is ended from outside: by SIGTERM, or by the SIGHUP of a terminal that is closed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

# What ends a program from outside; Windows has no SIGHUP.
ENDS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """In the block the first of the signals ENDS raises SystemExit, with the status that a shell reports for it. Later
    ones do nothing, since some senders repeat it, and what is done at the end must not be cut. A signal that is
    ignored, as under nohup, or has another handler, stays as it is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ended = False

    def end(number: int, frame: object) -> None:
        nonlocal ended
        if not ended:
            ended = True
            raise SystemExit(128 + number)

    ours = [one for one in ENDS if signal.getsignal(one) is signal.SIG_DFL]
    for one in ours:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one in ours:
            signal.signal(one, signal.SIG_DFL)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """ctrl-C or a signal of ENDS within the block takes effect at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []
    before = {one: handler for one in (signal.SIGINT, *ENDS) if callable(handler := signal.getsignal(one))}
    for one in before:
        signal.signal(one, lambda number, _: asked.append(number))
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if asked:
        signal.raise_signal(asked[0])
