"""``adaptive history``: acceptance and speed over time, and by adapter."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, cast

import typer

from adaptive.errors import AdaptiveError
from cli.cells import COLUMNS, POSITION_COLUMNS, cells, or_dash, position_cells, print_table
from cli.options import PAIR, shared_options
from cli.output import print_json, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from adaptive.records.history import By, History
    from adaptive.records.stats import Drafted
    from adaptive.settings import Settings
    from adaptive.state import PairState

# Rows of the table: with a year of days or sessions, the plot would scroll away. --json and --csv have all rows.
TABLE_ROWS = 30
# Columns that are left out on a narrow terminal, in this order.
LEAST = ("first", "drafted", "tokens")
# Promotions whose speed is shown below the table.
SHOWN_PROMOTIONS = 5


class Grouping(StrEnum):
    """The unit of one table row."""

    adapter = "adapter"
    day = "day"
    session = "session"
    position = "position"

    @property
    def of_rows(self) -> By:
        """How generations are grouped; the table by position uses the grouping by adapter."""
        return "adapter" if self is Grouping.position else cast("By", self.value)


@shared_options(*PAIR)
def history(
    settings: Settings,
    by: Annotated[Grouping, typer.Option(help="What one row of the table is.")] = Grouping.adapter,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV.")] = False,
    html: Annotated[
        Optional[Path], typer.Option(help="Write a report to this file, which is replaced; it needs no network.")
    ] = None,
) -> None:
    """Show acceptance and speed over time, and the changes of the draft's adapter.

    Without --target and --draft, the pair used last.

    Example: adaptive history --by day

    Example: adaptive history --html report.html
    """
    if as_json and as_csv:
        raise AdaptiveError("--json and --csv exclude each other; choose one")
    from cli.state import find_state

    state = find_state(settings)
    if html is not None:
        from adaptive.service.overview import overview
        from cli.report import write_report

        write_report(overview(state, by.of_rows), state.root.name, by.of_rows, html)
        rows = "rows by adapter, and the positions below them" if by is Grouping.position else f"rows by {by.value}"
        typer.echo(f"adaptive: wrote {html} ({rows})", err=True)
        if not (as_json or as_csv):
            return
    from adaptive.promotions import load
    from adaptive.records.history import history as history_of
    from adaptive.records.log import Log
    from adaptive.records.saved import saved_in_words, time_saved
    from checkpoints.store import AdapterStore, training_seconds

    with Log(state.records) as log:
        found = history_of(log.figures(), by.of_rows)
        saved, training_s = time_saved(log.spent()), training_seconds(AdapterStore(state.adapters))
        drafters = log.by_drafter()
    if as_json:
        known = [asdict(one) for one in load(state.promotions)]
        spent = {"saved": None if saved is None else asdict(saved), "training_seconds": training_s, "promotions": known}
        spent["drafters"] = {name: asdict(one) for name, one in drafters.items()}
        _print_json(found, state.root.name, by, spent)
    elif as_csv:
        _print_csv(found, by)
    else:
        from rich.console import Console

        console = Console(highlight=False)
        _show(found, state.root.name, by, console)
        if found.totals.generations:
            console.print(drafters_in_words(drafters), markup=False)
            console.print(saved_in_words(saved, training_s))
            for promotion in load(state.promotions)[-SHOWN_PROMOTIONS:]:
                console.print(f"adapter {promotion.adapter}: {promotion.text}", markup=False)


def print_summary(state: PairState, console: Console, session: str | None = None) -> None:
    """Print one session (or none) of the log of ``state``: its table by adapter, drafted and accepted tokens
    by position, and chosen lengths and speed over time; below it the whole log's table and the time saved."""
    from adaptive.records.history import history as history_of
    from adaptive.records.log import Log
    from adaptive.records.saved import saved_in_words, time_saved
    from checkpoints.store import AdapterStore, training_seconds

    with Log(state.records) as log:
        figures, spent, drafters = log.figures(), log.spent(), log.by_drafter()
    if session is not None:
        of_session = [g for g in figures if g.session == session]
        if of_session:
            _show(history_of(of_session), f"session {session}", Grouping.position, console)
            print_table(console, _table_of_rows(history_of(of_session), f"session {session}", Grouping.adapter), *LEAST)
        else:
            console.print("this session has no answers in the log yet")
    if figures:
        print_table(console, _table_of_rows(history_of(figures), "the whole log", Grouping.adapter), *LEAST)
        console.print(drafters_in_words(drafters), markup=False)
        console.print(saved_in_words(time_saved(spent), training_seconds(AdapterStore(state.adapters))))


def drafters_in_words(drafters: dict[str, Drafted]) -> str:
    """The tokens of each drafter and its acceptance, in one line."""
    from adaptive.printable import counted

    said = (
        f"{who} {counted(one.drafted, 'token')}, {one.accepted / one.drafted:.0%} accepted"
        for who, one in drafters.items()
    )
    return f"drafted by: {'; '.join(said)}" if drafters else "drafted by: nobody"


def _show(found: History, pair: str, by: Grouping, console: Console) -> None:
    from cli.plots import LENGTH_PANELS, PANELS, has_colour, plot_history

    if not found.totals.generations:
        console.print(f"the log of {pair} is empty: talk to it with `adaptive chat`, or see it all in `adaptive demo`")
        return
    if by is Grouping.position:
        console.print(_table_of_positions(found, pair))
        console.print(f"[dim]{_about_positions(found)}[/]")
    else:
        print_table(console, _table_of_rows(found, pair, by), *LEAST)
    panels = LENGTH_PANELS if by is Grouping.position else PANELS
    plot = plot_history(found.series, found.swaps, console.width, colour=has_colour(console), panels=panels)
    if plot:
        # Written directly: rich would wrap and restyle the text that plotext has laid out.
        console.file.write(plot + "\n")


def _table(title: str, key: str, columns: Sequence[str]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from adaptive.printable import printable_line

    # No lines and little space between columns, so that the table fits a terminal of 80 columns.
    table = Table(
        title=escape(printable_line(title)),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column(key, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _table_of_rows(found: History, title: str, by: Grouping) -> Table:
    from rich.markup import escape

    from adaptive.printable import printable_line

    table = _table(title, by.value, COLUMNS)
    for row in found.rows[-TABLE_ROWS:]:
        table.add_row(escape(printable_line(row.key)), *cells(row))
    if len(found.rows) > 1:
        table.add_section()
        table.add_row("all", *cells(found.totals))
    if len(found.rows) > TABLE_ROWS:
        table.caption = f"the last {TABLE_ROWS} of {len(found.rows)}; --json and --csv have all"
    return table


def _table_of_positions(found: History, title: str) -> Table:
    table = _table(title, *POSITION_COLUMNS[:1], POSITION_COLUMNS[1:])
    for cells_of_row in position_cells(found):
        table.add_row(*cells_of_row)
    return table


def _about_positions(found: History) -> str:
    totals = found.totals
    return (
        "chosen: rounds that drafted so many tokens (0: plain decoding)\n"
        "acceptance: given that all before it were accepted\n"
        f"{or_dash(totals.mean_draft_length, '.2f')} tokens drafted a round; "
        f"{or_dash(totals.tokens_per_second, '.1f')} tokens/s, "
        f"{or_dash(totals.expected_tokens_per_second, '.1f')} expected by the controller"
    )


def _print_json(found: History, pair: str, by: Grouping, spent: dict[str, Any]) -> None:
    from adaptive.records.history import as_object

    value = {"pair": pair, "by": by.value, **as_object(found), **spent}
    if by is Grouping.position:
        value["rows"] = value["positions"]
    print_json(value)


def _print_csv(found: History, by: Grouping) -> None:
    import csv
    import io

    from adaptive.records.history import as_object

    if by is Grouping.position:
        names = ["position", "observed", "accepted", "acceptance", "rounds"]
        rows = as_object(found)["positions"]
    else:
        names = [
            "generations",
            "tokens",
            "tokens_per_second",
            "expected_tokens_per_second",
            "mean_draft_length",
            "tokens_per_round",
            "first",
            "last",
        ]
        of_speculation = [
            "mean_acceptance_length",
            "draft_acceptance_rate",
            "num_spec_steps",
            "num_draft_tokens",
            "num_accepted_draft_tokens",
        ]
        rows = []
        for row in as_object(found)["rows"]:
            figures = row["speculative_decoding"]
            rows.append({by.value: row["key"], **{n: row[n] for n in names}, **{n: figures[n] for n in of_speculation}})
        names = [by.value, *names, *of_speculation]
    table = io.StringIO()
    writer = csv.DictWriter(table, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    print(shown(table.getvalue()), end="")
