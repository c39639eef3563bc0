"""Terminal plots, by plotext. In: points and swaps of the history. Out: lines of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adaptive.records.history import Point, Swap

if TYPE_CHECKING:
    from rich.console import Console

# Rows of both panels together. Too low: flat curves. Too high: the table scrolls off a usual terminal.
HEIGHT = 24

# Widest plot, in columns; a wider one is not clearer.
WIDTH = 110


Figure = Callable[[Point], float | None]


@dataclass(frozen=True)
class Panel:
    """One of the stacked plots: a figure of every point as a line, and optionally another as dots.

    The axis ends somewhat above the largest figure, and between ``least`` and ``most``.
    """

    title: str
    line: Figure
    dots: Figure | None = None
    least: float = 0.0
    most: float = math.inf


PANELS = (
    Panel("acceptance, %", lambda p: None if p.acceptance_rate is None else 100 * p.acceptance_rate, most=100.0),
    Panel("tokens per second", lambda p: p.tokens_per_second),
)
LENGTH_PANELS = (
    Panel("tokens drafted a round", lambda p: p.mean_draft_length, least=1.0),
    Panel(
        "tokens per second (dots: as expected by the controller)",
        lambda p: p.tokens_per_second,
        lambda p: p.expected_tokens_per_second,
    ),
)


def has_colour(console: Console) -> bool:
    """Whether the console shows colours: a file or a dumb terminal has none, and NO_COLOR turns them off."""
    return console.color_system is not None and not console.no_color


def plot_history(
    points: Sequence[Point],
    swaps: Sequence[Swap],
    width: int,
    colour: bool = True,
    panels: Sequence[Panel] = PANELS,
) -> str:
    """``panels`` one above the other, over generations, with a vertical line at each swap.

    Empty for fewer than two points. ``width`` counts characters.
    """
    if len(points) < 2:
        return ""
    import plotext

    drawn = [panel for panel in panels if _values(panel.line, points)]
    if not drawn:
        return ""
    plotext.terminal.limit(False, False)  # the caller gives the width; there may be no terminal to ask
    figure = plotext.figure
    figure.clear()
    figure.plot_size(min(width, WIDTH), HEIGHT)
    figure.theme("simple" if colour else "colorless")
    if len(drawn) > 1:  # plotext does not divide a figure into one part; a single panel is the figure itself
        figure.subplots(len(drawn), 1)
    for number, panel in enumerate(drawn, start=1):
        plot = figure.subplot(number, 1) if len(drawn) > 1 else figure
        plot.title(panel.title)
        _draw(plot, panel, points, swaps)
    plot.label("answer", "x")
    text: str = figure.build().string(colorless=not colour)
    return text.rstrip("\n")


def _values(figure: Figure, points: Sequence[Point]) -> list[tuple[int, float]]:
    return [(p.last_id, value) for p in points if (value := figure(p)) is not None]


def _draw(plot: Any, panel: Panel, points: Sequence[Point], swaps: Sequence[Swap]) -> None:
    line = _values(panel.line, points)
    dots = _values(panel.dots, points) if panel.dots else []
    plot.draw(plot.signal([x for x, _ in line], [y for _, y in line], marker="hd").lines())
    if dots:
        plot.draw(plot.signal([x for x, _ in dots], [y for _, y in dots], marker="•"))
    first, last = points[0].last_id, points[-1].last_id
    ticks = sorted({round(first + (last - first) * step / 6) for step in range(7)})
    plot.ruler("x").ticks(ticks, labels=[str(tick) for tick in ticks])
    plot.ruler("x").lim(first, last)
    top = min(panel.most, max(panel.least, max(y for _, y in (*line, *dots)) * 1.15)) or 1.0
    plot.ruler("y").lim(0, top)
    heights = [top * step / 4 for step in range(5)]
    plot.ruler("y").ticks(heights, labels=[f"{height:.0f}" if top > 20 else f"{height:.1f}" for height in heights])
    for swap in swaps:
        # A swap inside the first bucket would be left of the first point, outside the plot.
        x = max(first, swap.generation - 0.5)
        plot.line(x, "vertical")
        plot.draw(
            plot.text(x, top, f" {swap.after or 'none'}", alignment="right" if x > (first + last) / 2 else "left")
        )
