"""The HTML report of ``adaptive history``: one file that needs no network, plotted by plotly."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptive.errors import AdaptiveError
from adaptive.printable import printable_line
from adaptive.records.history import History
from cli.cells import COLUMNS, POSITION_COLUMNS, cells, position_cells

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>adaptive: {pair}</title>
<style>
body {{ font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; margin: 1rem 0 2rem; }}
th, td {{ padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }}
</style>
</head>
<body>
<h1>{pair}</h1>
<p>{summary}</p>
{plot}
<h2>By {by}</h2>
{rows}
<h2>By draft position</h2>
<p>Rounds that drafted exactly so many tokens (0: plain decoding), and the acceptance of each token of a draft,
given that all before it were accepted.</p>
{positions}
</body>
</html>
"""


def write_report(found: History, pair: str, by: str, file: Path) -> None:
    """Write the report of ``pair``, its rows grouped ``by``, to ``file`` (0600).

    Raises AdaptiveError where that cannot be done.
    """
    totals = found.totals
    page = PAGE.format(
        pair=html.escape(pair),
        by=by,
        summary=f"{totals.generations} generations, {totals.tokens} tokens; written {time.strftime('%Y-%m-%d %H:%M')}",
        plot=_plot(found).to_html(full_html=False, include_plotlyjs=True, default_height="820px"),
        rows=_table(
            (by, *COLUMNS),
            [(row.key, *cells(row)) for row in (*found.rows, totals)],
        ),
        positions=_table(POSITION_COLUMNS, position_cells(found)),
    )
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
            out.write(page)
    except OSError as error:
        raise AdaptiveError(f"report {file} cannot be written ({error.strerror}); choose another place") from error


def _plot(found: History) -> Any:
    from plotly.subplots import make_subplots

    panels = (
        ("acceptance rate", [p.acceptance_rate for p in found.series]),
        ("tokens a round, plain ones included", [p.tokens_per_round for p in found.series]),
        ("tokens drafted a round", [p.mean_draft_length for p in found.series]),
        ("tokens per second", [p.tokens_per_second for p in found.series]),
    )
    titles = [title for title, _ in panels]
    figure = make_subplots(rows=len(panels), shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.07)
    about = [
        f"generations {p.first_id} to {p.last_id}<br>adapter {html.escape(p.adapter or 'none')}" for p in found.series
    ]
    for row, (title, values) in enumerate(panels, start=1):
        figure.add_scatter(
            x=[p.last_id for p in found.series],
            y=values,
            text=about,
            mode="lines+markers",
            name=title,
            row=row,
            col=1,
        )
        figure.update_yaxes(rangemode="tozero", row=row, col=1)
    figure.add_scatter(
        x=[p.last_id for p in found.series],
        y=[p.expected_tokens_per_second for p in found.series],
        mode="lines",
        line_dash="dot",
        name="expected by the controller",
        row=len(panels),
        col=1,
    )
    for swap in found.swaps:
        label = html.escape(swap.after or "none")
        figure.add_vline(x=swap.generation - 0.5, line_dash="dot", line_color="#888")
        figure.add_annotation(
            x=swap.generation - 0.5, y=1, yref="paper", xanchor="left", yanchor="top", text=label, showarrow=False
        )
    figure.update_xaxes(title_text="generation", row=len(panels), col=1)
    figure.update_layout(showlegend=False, template="plotly_white", margin={"t": 60})
    return figure


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(printable_line(cell))}</{tag}>" for cell in cells) + "</tr>"

    return "<table>\n" + "\n".join((line(heads, "th"), *(line(row, "td") for row in rows))) + "\n</table>"
