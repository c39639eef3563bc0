"""The cells of the history's tables, for the terminal and the report, figures in words, and printing of tables that
fit the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from adaptive.records.history import Figures, History

# Headings of the cells of ``cells``, after the row's key.
COLUMNS = ("answers", "tokens", "tokens/s", "tokens\na round", "accepted", "drafted", "first")
# Headings of the cells of ``position_cells``.
POSITION_COLUMNS = ("position", "chosen", "observed", "accepted", "acceptance")

# Wider than any table.
WIDEST = 10_000


def cells(row: Figures) -> tuple[str, ...]:
    """The cells of COLUMNS for one row; a dash if nothing was measured."""
    speculation = row.speculation
    drafted = speculation.num_spec_steps > 0
    return (
        f"{row.generations}",
        f"{row.tokens}",
        or_dash(row.tokens_per_second, ".1f"),
        or_dash(row.tokens_per_round, ".2f"),
        f"{speculation.draft_acceptance_rate:.1%}" if drafted else "–",
        f"{speculation.num_draft_tokens}",
        moment(row.first, "%Y-%m-%d"),
    )


def moment(seconds: object, form: str = "%Y-%m-%d %H:%M") -> str:
    """A time of the log in the format ``form``; a dash if there is none, or a damaged one."""
    from adaptive.records.log import plausible

    return time.strftime(form, time.localtime(seconds)) if plausible(seconds) else "–"  # type: ignore[arg-type]


def position_cells(found: History) -> list[tuple[str, ...]]:
    """The cells of POSITION_COLUMNS: plain decoding first, then every draft position."""
    rounds = sum(found.lengths)
    chosen = [f"{count / rounds:.1%}" for count in found.lengths]
    rows: list[tuple[str, ...]] = [("0", chosen[0], "–", "–", "–")] if chosen else []
    for p in found.positions:
        accepted = or_dash(p.acceptance, ".1%")
        rows.append((f"{p.position}", chosen[p.position], f"{p.observed}", f"{p.accepted}", accepted))
    return rows


def size(count: float) -> str:
    """Bytes as text."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def or_dash(value: float | None, form: str) -> str:
    """``value`` in the format ``form``, or a dash for None."""
    return "–" if value is None else format(value, form)


def print_table(console: Console, table: Table, *least: str) -> None:
    """Print a table. If the terminal is too narrow, leave out columns in the order ``least`` and list them below. A
    file gets all columns."""
    from rich.measure import Measurement

    def width() -> int:
        return Measurement.get(console, console.options.update(max_width=WIDEST), table).maximum

    left_out: list[str] = []
    if not console.is_terminal:
        console.width = max(console.width, width())
    for name in least:
        if width() <= console.width:
            break
        table.columns = [column for column in table.columns if column.header != name]
        left_out.append(name or "bars")
    console.print(table)
    if left_out:
        console.print(f"on a wider terminal: {', '.join(left_out)}", style="dim")
