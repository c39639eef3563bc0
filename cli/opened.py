"""Opens a pair for a command: loads the models behind a progress bar and prints warnings in yellow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console

from adaptive.printable import printable_line
from cli.state import show_migrations

if TYPE_CHECKING:
    from adaptive.opened import OpenedPair
    from adaptive.pair import Pair
    from adaptive.settings import Settings


def load_with_progress(settings: Settings, console: Console) -> Pair:
    """Load the pair behind one progress bar, and print its warnings."""
    with _bar(console) as show:
        from adaptive.pair import load_pair

        pair = load_pair(settings, show)
    from rich.markup import escape

    for warning in pair.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}")
    return pair


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[Callable[[str, float], None]]:
    """A bar that names the part being loaded; yields a function that sets the part's name and its share, 0 to 1."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("loading {task.description:10}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as progress:
        task = progress.add_task("models", total=1.0)
        yield lambda what, share: progress.update(task, description=what, completed=share)


@contextlib.contextmanager
def open_pair(
    settings: Settings, console: Console, cache_bytes: int = 0, warn: Callable[[str], None] | None = None
) -> Iterator[OpenedPair]:
    """Load a pair and open it; see ``adaptive.opened``. Warnings are printed unless there is a ``warn``."""
    with _bar(console):  # shown before torch and transformers are imported, since that takes seconds
        from adaptive.pair import pair_identity
        from adaptive.state import open_state

    # Errors that can be found without the weights are raised before these are read. Outside the bar: if this downloads
    # a model, the hub shows its own.
    open_state(settings.state_dir, pair_identity(settings).id)
    pair = load_with_progress(settings, console)

    from adaptive.opened import opened

    def shown(text: str) -> None:
        console.print(printable_line(text), style="yellow", markup=False)

    show_migrations()
    measuring = console.status("measuring what a round costs here, once")
    with opened(settings, pair, cache_bytes, warn or shown, measuring) as ready:
        yield ready
