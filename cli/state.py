"""Finds the state of the pair that a command refers to, without loading a model.

``adapters``, ``history`` and ``records`` read the results of earlier runs; they take a ``PairState`` from here.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from adaptive.errors import AdaptiveError

if TYPE_CHECKING:
    from adaptive.settings import Settings
    from adaptive.state import PairState


def show_migrations() -> None:
    """Show a bar while a log of an older version is migrated, which takes seconds for a long one."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from adaptive.records import schema

    console = Console(stderr=True)
    columns = TextColumn("bringing the log up to date"), BarColumn(), TimeRemainingColumn()
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task("", total=1.0)

    def show(share: float) -> None:
        progress.start()
        progress.update(task, completed=share)
        if share >= 1.0:
            progress.stop()

    schema.on_migration = show


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal that ``what`` is done, or in its place a migration of the log. Nothing may be printed in it:
    rich would divert that to standard error."""
    from rich.console import Console

    from adaptive.records import schema

    before = schema.on_migration
    with Console(stderr=True).status(what) as status:
        schema.on_migration = lambda share: status.update(f"bringing the log up to date, {share:.0%}")
        try:
            yield
        finally:
            schema.on_migration = before


def find_state(settings: Settings) -> PairState:
    """The folder of the pair that ``settings`` names, else the most recently used one.

    The second choice is reported in one line on standard error, so that another pair's figures are not
    mistaken for this pair's (standard output has only the result, as ``--json`` needs).

    Raises AdaptiveError if the named pair has no state here, or no pair has.
    """
    from adaptive.state import PairState, existing_states

    show_migrations()
    state_dir = settings.state_dir
    if settings.target is not None or settings.draft is not None:
        from adaptive.pair import pair_identity

        state = PairState(state_dir / pair_identity(settings).id)
        tell_of_earlier_log(settings, state)
        if not state.root.is_dir():
            raise AdaptiveError(
                f"{state_dir} has no log or adapter of this pair yet; use `adaptive chat`, `adaptive generate` or "
                "`adaptive serve` first, or choose another folder with --state-dir"
            )
        return state
    found = existing_states(state_dir)
    if not found:
        raise AdaptiveError(
            f"{state_dir} has no log or adapter of any pair yet; use `adaptive chat`, `adaptive generate` or "
            "`adaptive serve` first, or choose another folder with --state-dir"
        )
    others = f", the last used of {len(found)}; choose with --target and --draft" if len(found) > 1 else ""
    typer.echo(f"adaptive: pair {found[0].root.name}{others}", err=True)
    return found[0]


def tell_of_earlier_log(settings: Settings, state: PairState) -> None:
    """Say in one line where the pair's log is, if ``state`` has none and there is one of before the target's weights
    were in its folder: `adaptive learn` needs config and tokenizer only."""
    from adaptive.pair import pair_identity
    from adaptive.state import PairState

    if _holds_records(state):
        return
    earlier = PairState(state.root.with_name(pair_identity(settings, thin=True).id))
    if earlier.root != state.root and _holds_records(earlier):
        log = shlex.quote(str(earlier.records))
        typer.echo(
            f"adaptive: no log of this pair yet, but one of before the target's weights were beside its config; "
            f"`adaptive records import {log}` with the same --target and --draft takes it over",
            err=True,
        )


def _holds_records(state: PairState) -> bool:
    from adaptive.records.log import Log

    try:
        with Log(state.records) as log:
            return log.count() > 0
    except AdaptiveError:  # there is no log, or it cannot be read now
        return state.records.exists()


def may_be_another(settings: Settings) -> int:
    """The number of pairs that ``find_state`` chose from without a name; 0 if only one was possible."""
    from adaptive.state import existing_states

    if settings.target is not None or settings.draft is not None:
        return 0
    found = len(existing_states(settings.state_dir))
    return found if found > 1 else 0
