"""Terminal plots, by plotext. In: points and swaps of the history. Out: lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from adaptive.records.history import Point, Swap

# Rows of both panels together; fewer flattens the curves, more pushes the table off a usual terminal.
HEIGHT = 24

# Widest plot, in columns: beyond it, lines get longer and nothing gets clearer.
WIDTH = 110


def plot_history(
    points: Sequence[Point], swaps: Sequence[Swap], width: int, height: int = HEIGHT, colour: bool = True
) -> str:
    """Acceptance above tokens per second, over generations, a vertical line at each swap.

    Empty where there are fewer than two points. ``width`` and ``height`` count characters.
    """
    if len(points) < 2:
        return ""
    import plotext

    acceptance = [(p.last_id, 100 * p.acceptance_rate) for p in points if p.acceptance_rate is not None]
    speed = [(p.last_id, p.tokens_per_second) for p in points if p.tokens_per_second is not None]
    panels = [("acceptance, %", acceptance), ("tokens per second", speed)]
    panels = [(title, values) for title, values in panels if values]
    if not panels:
        return ""
    plotext.terminal.limit(False, False)  # the caller knows the width, also where no terminal answers
    figure = plotext.figure
    figure.clear()
    figure.plot_size(min(width, WIDTH), height)
    figure.theme("simple" if colour else "colorless")
    figure.subplots(len(panels), 1)
    for number, (title, values) in enumerate(panels, start=1):
        panel = figure.subplot(number, 1)
        panel.title(title)
        _draw(panel, values, points, swaps)
    panel.label("generation", "x")
    text: str = figure.build().string(colorless=not colour)
    return text.rstrip("\n")


def _draw(panel: object, values: Sequence[tuple[int, float]], points: Sequence[Point], swaps: Sequence[Swap]) -> None:
    from typing import Any

    plot: Any = panel  # plotext has no types
    plot.draw(plot.signal([x for x, _ in values], [y for _, y in values], marker="hd").lines())
    first, last = points[0].last_id, points[-1].last_id
    ticks = sorted({round(first + (last - first) * step / 6) for step in range(7)})
    plot.ruler("x").ticks(ticks, labels=[str(tick) for tick in ticks])
    plot.ruler("x").lim(first, last)
    top = max(y for _, y in values) * 1.15 or 1.0
    plot.ruler("y").lim(0, top)
    for swap in swaps:
        # A swap inside the first bucket would stand left of the first point, outside the plot.
        x = max(first, swap.generation - 0.5)
        plot.line(x, "vertical")
        plot.draw(
            plot.text(x, top, f" {swap.after or 'none'}", alignment="right" if x > (first + last) / 2 else "left")
        )
