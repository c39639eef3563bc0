"""The lock that allows one training process per pair: two would overwrite each other's training state and adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from adaptive.errors import AdaptiveError
from adaptive.state import PairState


class AnotherTrainerError(AdaptiveError):
    """Another process is training this pair."""


@contextlib.contextmanager
def only_trainer(state: PairState) -> Iterator[None]:
    """Hold the pair's ``trainer.lock``, which the operating system releases when the process is killed.

    Raises AnotherTrainerError where another process holds it.
    """
    from filelock import FileLock, Timeout

    try:
        with FileLock(state.root / "trainer.lock", timeout=0, mode=0o600):
            yield
    except Timeout as error:
        raise AnotherTrainerError("another process is distilling this pair; try again when it has ended") from error
