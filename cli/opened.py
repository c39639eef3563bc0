"""Opening a pair for a command: models with a progress bar, and what is wrong in yellow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console

from cli.state import show_migrations

if TYPE_CHECKING:
    from adaptive.opened import OpenedPair
    from adaptive.pair import Pair
    from adaptive.settings import Settings


def load_with_progress(settings: Settings, console: Console, check: Callable[[], object] | None = None) -> Pair:
    """Load the pair behind one progress bar, after ``check``; prints what the user should know about the pair."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("loading {task.description:10}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("models", total=1.0)
        if check is not None:
            check()
        # torch and transformers take seconds to import, so the bar stands before them.
        from adaptive.pair import load_pair

        pair = load_pair(settings, lambda what, share: progress.update(task, description=what, completed=share))
    for warning in pair.warnings:
        console.print(f"[yellow]warning:[/] {warning}")
    return pair


def _check(settings: Settings) -> None:
    """Find whatever can be wrong without the weights before they are read."""
    from adaptive.pair import pair_identity
    from adaptive.state import open_state

    open_state(settings.state_dir, pair_identity(settings).id)


@contextlib.contextmanager
def open_pair(settings: Settings, console: Console, cache_bytes: int = 0) -> Iterator[OpenedPair]:
    """Load a pair and open it; see ``adaptive.opened``."""
    pair = load_with_progress(settings, console, lambda: _check(settings))

    from adaptive.opened import opened

    def warn(text: str) -> None:
        console.print(text, style="yellow", markup=False)

    show_migrations()
    measuring = console.status("measuring what a round costs here, once")
    with opened(settings, pair, cache_bytes, warn, measuring) as ready:
        yield ready
