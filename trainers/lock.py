"""One trainer a pair: what it keeps and decides would be another's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from adaptive.errors import AdaptiveError
from adaptive.state import PairState


class AnotherTrainerError(AdaptiveError):
    """Somebody else distils this pair now."""


@contextlib.contextmanager
def only_trainer(state: PairState) -> Iterator[None]:
    """Hold the pair's ``trainer.lock``, which the system frees when a process is killed.

    Raises AnotherTrainerError where another process holds it.
    """
    from filelock import FileLock, Timeout

    try:
        with FileLock(state.root / "trainer.lock", timeout=0, mode=0o600):
            yield
    except Timeout as error:
        raise AnotherTrainerError("another process is distilling this pair; try again when it has ended") from error
