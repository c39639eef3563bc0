"""The HTML report of ``adaptive history``: one file that needs no network, with the dashboard's style and plots."""

from __future__ import annotations

import html
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from adaptive.errors import AdaptiveError
from adaptive.printable import printable_line
from adaptive.records.history import By
from adaptive.service.overview import Overview
from adaptive.service.pages import report
from cli.cells import COLUMNS, POSITION_COLUMNS, cells, position_cells


def write_report(overview: Overview, pair: str, by: By, file: Path) -> None:
    """Write the report of ``pair``, its rows grouped ``by``, to ``file`` (0600).

    Raises AdaptiveError if it cannot be written.
    """
    found = overview.found
    rows = [(row.key, *cells(row)) for row in found.rows]
    texts = {
        "pair": html.escape(printable_line(pair)),
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "by": by,
        "rows": _table((by, *COLUMNS), [*rows, ("all", *cells(found.totals))], "Appears with the first answer."),
        "positions": _table(
            POSITION_COLUMNS, position_cells(found), "Appears with the first answer of two tokens or more."
        ),
    }
    data = {
        "history": overview.history,
        "adapters": overview.adapters,
        "storage": asdict(overview.storage),
    }
    page = report(texts, data)
    place = file.resolve()
    try:
        if place.exists() and not place.is_file():
            place.write_text(page, encoding="utf-8")  # a pipe, or the terminal
        else:
            _replace(place, page)
    except OSError as error:
        raise AdaptiveError(f"report {file} cannot be written ({error.strerror}); choose another place") from error


def _replace(place: Path, page: str) -> None:
    """Write a private file (0600) whole; an earlier one stays until then. No lock file is left in the user's folder, as
    ``files.replace_text`` needs one. Raises OSError."""
    descriptor, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as out:
            out.write(page)
        os.replace(temporary, place)
    except BaseException:
        os.unlink(temporary)
        raise


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(printable_line(cell))}</{tag}>" for cell in cells) + "</tr>"

    if not rows or (len(rows) == 1 and rows[0][0] == "all"):
        return f'<p class="empty">{empty}</p>'
    return "<table>\n" + "\n".join((line(heads, "th"), *(line(row, "td") for row in rows))) + "\n</table>"
