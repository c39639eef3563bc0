"""The entry point of the installed ``adaptive``: ctrl-C while the modules load ends it at once, without a traceback."""

from __future__ import annotations

import signal


def start() -> None:
    """Load the command line and run it."""
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is signal.default_int_handler:  # not if it is ignored, as for a job in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cli.main import run

    signal.signal(signal.SIGINT, interrupted)
    run()
