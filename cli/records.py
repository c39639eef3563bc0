"""``adaptive records``: show the log's contents, export them, and delete them for good."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from adaptive.errors import AdaptiveError
from adaptive.printable import counted, printable_line
from cli.cells import moment, size
from cli.groups import group
from cli.options import PAIR, shared_options
from cli.output import print_json

if TYPE_CHECKING:
    from adaptive.records.check import Findings, Repairs
    from adaptive.records.logged import LogStats
    from adaptive.settings import Settings

app = group(
    "The log of prompts and answers: statistics, export, import, check, deletion.\n\nExample: adaptive records stats"
)

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@app.command()
@shared_options(*PAIR)
def stats(
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Count what the log holds.

    Example: adaptive records stats --json
    """
    from dataclasses import asdict

    from adaptive.records.log import Log
    from cli.state import find_state

    state = find_state(settings)
    with Log(state.records) as log:
        found = log.stats()
    if as_json:
        print_json({"pair": state.root.name, "path": str(state.records), **asdict(found)})
    elif not found.generations:
        print(f"the log of {state.root.name} is empty: talk to it with `adaptive chat`, or try `adaptive demo`")
    else:
        _print_stats(found, state.records)


@app.command()
@shared_options(*PAIR)
def export(
    settings: Settings,
    file: Annotated[Path, typer.Argument(help="FILE.jsonl, FILE.parquet, or - for JSON lines on standard output.")],
    supervision: Annotated[
        bool, typer.Option("--supervision", help="With the target's distributions (Parquet only).")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Export the log: chat messages as JSON lines, or every column as Parquet.

    Example: adaptive records export log.jsonl

    Example: adaptive records export log.parquet --supervision
    """
    from adaptive.records.export import export_jsonl, export_parquet
    from adaptive.records.log import Log
    from cli.export import check_free
    from cli.state import find_state, working

    to_output = str(file) == "-"
    kind = "jsonl" if to_output else file.suffix.lower().lstrip(".")
    if kind not in ("jsonl", "parquet"):
        raise AdaptiveError(f"cannot tell the format of {file}; name it .jsonl or .parquet")
    if supervision and kind != "parquet":
        raise AdaptiveError("--supervision needs a .parquet file: JSON lines hold chat messages only")
    if not to_output:
        check_free(file, force)
    path = find_state(settings).records
    with nullcontext() if to_output else working("reading the log"), Log(path) as log:
        there = log.count()
        if kind == "parquet":
            written = export_parquet(log, file, supervision)
        else:
            written = export_jsonl(log, sys.stdout if to_output else file)
    damaged = counted(there - written, "damaged record")
    left_out = f"; {damaged} left out (`adaptive records check`)" if there > written else ""
    to = "" if to_output else f" to {file}"
    typer.echo(f"adaptive: exported {counted(written, 'record')}{to}{left_out}", err=True)


@app.command()
@shared_options(*PAIR)
def purge(
    settings: Settings,
    older_than: Annotated[Optional[str], typer.Option(help="Delete what is older, say 30d, 12h or 2w.")] = None,
    session: Annotated[
        Optional[str],
        typer.Option(help="Delete one session, and the answers of other sessions that continue its chats."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete the whole log.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete records for good: the file is rewritten without them. Adapters trained on them stay.

    Without --target and --draft it is the pair used last; where several pairs have a log, --yes needs both.
    With --older-than and --session only what is older of the session and its chats is deleted.

    Example: adaptive records purge --older-than 30d

    Example: adaptive records purge --session holiday-plans --yes
    """
    from adaptive.records.deletion import delete_answers
    from adaptive.records.log import Log
    from cli.state import find_state, may_be_another, working

    if everything == (older_than is not None or session is not None):
        raise AdaptiveError("say what to delete: --older-than AGE and/or --session NAME, or --all")
    age = None if older_than is None else seconds_of(older_than)
    state, guessed = find_state(settings), may_be_another(settings)
    with Log(state.records) as log:
        ids: frozenset[int] = frozenset()
        try:
            ids = log.ids(older_than_s=age, session=session)
            chosen, what = len(ids), f"{len(ids)} of {counted(log.count(), 'record')} of {state.root.name}"
        except AdaptiveError:
            if not everything:
                raise
            chosen, what = 1, f"the whole log of {state.root.name}, which cannot be read now,"  # or the disk is full
        if chosen and yes and guessed:
            raise AdaptiveError(
                f"{guessed} pairs have a log here, and {state.root.name} is only the one used last; name the pair with "
                "--target and --draft, or leave --yes out and be asked"
            )
        if chosen and not yes:
            typer.confirm(f"Delete {what} for good?", abort=True, err=True)
        # Also if nothing is chosen: an earlier purge that met a reader has left traces to erase.
        with working("deleting"):
            deleted, gone = delete_answers(state, log, ids, everything)
        try:
            left = f"{log.count()} left, {size(log.stats().size)} on disk"
        except AdaptiveError as error:
            left = str(error)
        print(f"deleted {counted(deleted, 'record')}; {left}")
    if gone:
        print(f"deleted with them: {', '.join(gone)}")


@app.command("import")
@shared_options(*PAIR, "trust_remote_code")
def import_(
    settings: Settings,
    logs: Annotated[list[Path], typer.Argument(help="A records.db, or the folder that it is in; several.")],
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Import the records of other logs, such as those of a team or of another machine. None is imported twice.

    Example: adaptive records import laptop/records.db desktop/records.db --target ./target --draft ./draft
    """
    from dataclasses import asdict

    from adaptive.pair import load_tokenizer, pair_identity
    from adaptive.records.merge import merge
    from adaptive.state import open_state
    from checkpoints.store import AdapterStore
    from cli.state import working

    with working("reading the logs"):
        tokenizer = load_tokenizer(settings)
        state = open_state(settings.state_dir, pair_identity(settings).id)

        def decode(ids: list[int]) -> str:
            return str(tokenizer.decode(ids))

        done = merge(state, logs, decode, AdapterStore(state.adapters).last_record())
    if as_json:
        print_json({"pair": state.root.name, **asdict(done)})
        return
    damaged = f"; {done.damaged} damaged and left out" if done.damaged else ""
    print(f"{counted(done.taken, 'new record')} in {state.root.name}, {done.known} known already{damaged}")


@app.command()
@shared_options(*PAIR)
def check(
    settings: Settings,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Keep what is undamaged of records with an undamaged text; delete the rest."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Read the whole log and name what is damaged. Exit status 1 if some of it was not repaired.

    Example: adaptive records check --repair
    """
    from dataclasses import asdict

    from adaptive.records import check as checking
    from cli.state import find_state, working

    path = find_state(settings).records
    with working("reading the log"):
        found = checking.check(path)
        wrong = bool(found.damaged) or found.file is not None
        done = checking.repair(path, found) if repair and wrong else None
    if as_json:
        print_json({"path": str(path), **asdict(found), "repaired": done and asdict(done)})
    else:
        _print_findings(found, done)
    if wrong and not repair:
        raise typer.Exit(1)


def seconds_of(age: str) -> float:
    """Seconds of an age like 30d, 12h, 45m, 2w or 90s. Raises AdaptiveError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", age.strip().lower())
    if match is None:
        raise AdaptiveError(f"age {age!r} is not understood; write a number and s, m, h, d or w, say 30d")
    return float(match[1]) * SECONDS[match[2]]


def _print_findings(found: Findings, done: Repairs | None) -> None:
    if found.file is not None:
        print(printable_line(f"the file is damaged: {found.file}"))
    else:
        print(f"{counted(found.records, 'record')}, {len(found.damaged) or 'none'} damaged; the file is sound")
    for said in found.damaged.values():
        print(printable_line(said))
    if done is None:
        if found.damaged or found.file:
            print("`adaptive records check --repair` keeps what is whole")
    elif done.file is not None:
        print(printable_line(done.file))
    else:
        print(f"repaired: {done.mended} lost what was damaged and keep their text, {done.deleted} deleted")


def _print_stats(found: LogStats, path: Path) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")  # a truncated path would be useless
    for name, value in (
        ("records", f"{found.generations} in {counted(found.sessions, 'session')}"),
        ("tokens", f"{counted(found.tokens, 'output token')}, {found.positions} with the target's distribution"),
        ("on disk", f"{size(found.size)} in {path}"),
        ("from", moment(found.first)),
        ("to", moment(found.last)),
        ("domains", ", ".join(f"{s.name or 'none'} {s.generations}" for s in found.by_domain)),
        ("adapters", ", ".join(f"{s.name or 'none'} {s.generations}" for s in found.by_adapter)),
    ):
        table.add_row(name, escape(printable_line(value)))
    console.print(table)
