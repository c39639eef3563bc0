"""The bar of work whose steps are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def counting_bar(console: Console, doing: str, hidden: bool = False) -> Progress:
    """A bar with the number of steps done, of all, on an interactive ``console``. ``doing`` names the activity. What is
    written to standard output meanwhile goes there."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = hidden or not console.is_interactive
    return Progress(*columns, console=console, transient=True, disable=hidden, redirect_stdout=False)
