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


def load_with_progress(settings: Settings, console: Console) -> Pair:
    """Load the pair behind one progress bar; prints what the user should know about the pair."""
    with _bar(console) as show:
        from adaptive.pair import load_pair

        pair = load_pair(settings, show)
    for warning in pair.warnings:
        console.print(f"[yellow]warning:[/] {warning}")
    return pair


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[Callable[[str, float], None]]:
    """A bar that says what is being loaded; yields what moves it, by the part's name and its share, 0 to 1."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("loading {task.description:10}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as progress:
        task = progress.add_task("models", total=1.0)
        yield lambda what, share: progress.update(task, description=what, completed=share)


@contextlib.contextmanager
def open_pair(settings: Settings, console: Console, cache_bytes: int = 0) -> Iterator[OpenedPair]:
    """Load a pair and open it; see ``adaptive.opened``."""
    with _bar(console):  # which stands before torch and transformers are imported, since that takes seconds
        from adaptive.pair import pair_identity
        from adaptive.state import open_state

    # Whatever can be wrong without the weights is found before they are read. Without the bar: where this fetches a
    # model, the hub shows its own.
    open_state(settings.state_dir, pair_identity(settings).id)
    pair = load_with_progress(settings, console)

    from adaptive.opened import opened

    def warn(text: str) -> None:
        console.print(text, style="yellow", markup=False)

    show_migrations()
    measuring = console.status("measuring what a round costs here, once")
    with opened(settings, pair, cache_bytes, warn, measuring) as ready:
        yield ready
