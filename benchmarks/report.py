"""Prints the tables and the plot of ``adaptation.py`` from its JSON results: means over seeds, 95% intervals."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

from scipy.stats import t

from adaptive.control.costs import CostTable

# Tokens of a generation, the unit of break-even.
GENERATION = 200

Result = dict[str, Any]


def interval(values: list[float], digits: int = 3, sign: str = "") -> str:
    """The mean over seeds and the 95% interval by Student's t; only the mean if there is one seed."""
    if any(value == float("inf") for value in values):
        return "never"
    text = f"{mean(values):{sign}.{digits}f}"
    if len(values) < 2:
        return text
    half = t.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{text} ±{half:.{digits}f}"


def report(results: list[Result], costs: CostTable, plot: bool) -> None:
    """Print all results as Markdown."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result["stream"], result["recipe"]), []).append(result)
    for (stream, recipe), runs in groups.items():
        print(f"\n### {stream}, {recipe or 'default recipe'}, {len(runs)} seeds\n")
        table(runs, costs)
        summary(runs, costs)
        if stream.startswith("change:"):
            retention(runs, groups, recipe)
    if len({recipe for _, recipe in groups}) > 1:
        compare(groups)
    if plot:
        print("\n" + plotted(groups))


def speed(figures: dict[str, Any], costs: CostTable) -> float:
    """Tokens per second at the best fixed draft length, 0 (plain decoding) included."""
    seconds = [
        rounds
        * (
            (costs.start_s + length * costs.draft_s + costs.verify_s[length] if length else costs.plain_step_s)
            + costs.overhead_s
        )
        for length, rounds in enumerate(figures["rounds"])
    ]
    return float(figures["tokens"] / (min(seconds) + figures["tokens"] * costs.token_s))


def table(runs: list[Result], costs: CostTable) -> None:
    """Print a line for every round of training and kind."""
    print("| generations | kind | acceptance | tokens a round | predicted tokens/s | training, s | promoted | live |")
    print("|---|---|---|---|---|---|---|---|")
    for points in zip(*(run["points"] for run in runs), strict=True):
        for kind in points[0]["held_out"]:
            held = [point["held_out"][kind] for point in points]
            live = [point["live"]["acceptance"] for point in points if point["live"]]
            kept = sum(point["status"] in ("promoted", "kept") for point in points)
            print(
                f"| {points[0]['generations']} | {kind} | {interval([h['acceptance'] for h in held])} "
                f"| {interval([h['mean_acceptance_length'] for h in held], 2)} "
                f"| {interval([speed(h, costs) for h in held], 0)} "
                f"| {mean(point['train_s'] for point in points):.0f} "
                f"| {kept} of {len(points) if points[0]['generations'] else 0} "
                f"| {interval(live) if live else ''} |"
            )


def gain(run: Result, point: int = -1, kind: str | None = None) -> float:
    """Acceptance gained since before any training, on all of the stream's kinds or on one kind."""
    first, then = run["points"][0], run["points"][point]
    if kind is None:
        return float(then["all"]["acceptance"] - first["all"]["acceptance"])
    return float(then["held_out"][kind]["acceptance"] - first["held_out"][kind]["acceptance"])


def break_even(run: Result, costs: CostTable) -> float:
    """Generations of ``GENERATION`` tokens after which the seconds of the first promoted training are saved.

    The saving is relative to speculation with the undistilled draft at its own best length.
    """
    first = run["points"][0]["all"]
    for point in run["points"][1:]:
        if point["status"] in ("promoted", "kept"):
            saved = GENERATION * (1 / speed(first, costs) - 1 / speed(point["all"], costs))
            return float(point["train_s"] / saved) if saved > 0 else float("inf")
    return float("inf")


def summary(runs: list[Result], costs: CostTable) -> None:
    """Print the gain, the share of it after the first training, the growth of rounds, and break-even."""
    first, last = [[run["points"][i]["all"] for run in runs] for i in (0, -1)]
    longer = [b["mean_acceptance_length"] / a["mean_acceptance_length"] for a, b in zip(first, last, strict=True)]
    faster = [speed(b, costs) / speed(a, costs) for a, b in zip(first, last, strict=True)]
    print(f"\nGain in acceptance {interval([gain(run) for run in runs], sign='+')};", end=" ")
    print(f"tokens a round x{interval(longer, 2)}; predicted tokens/s x{interval(faster, 2)}.")
    shares = [100 * gain(run, 1) / gain(run) for run in runs if gain(run) > 0]
    if shares:
        print(f"After {runs[0]['points'][1]['generations']} generations, {interval(shares, 0)}% of it.")
    even = interval([break_even(run, costs) for run in runs], 0)
    print(f"Break-even of the first promoted round: {even} generations of {GENERATION} tokens.")


def retention(runs: list[Result], groups: dict[tuple[str, str], list[Result]], recipe: str) -> None:
    """After a change of kind, print the new kind's gain over its gain alone, and how much gain the old kind keeps."""
    before, after = runs[0]["stream"].split(":")[1].split(",")
    seen = [point["by_kind"] for point in runs[0]["points"]]
    change = max(i for i, by_kind in enumerate(seen) if not by_kind[after])
    kept = [100 * gain(run, kind=before) / gain(run, change, before) for run in runs if gain(run, change, before) > 0]
    if kept:
        print(f"{before} keeps {interval(kept, 0)}% of the gain it had before the change.")
    count, shares = seen[-1][after], []
    for run, alone in zip(runs, groups.get((f"stationary:{after}", recipe), []), strict=False):
        same = [i for i, point in enumerate(alone["points"]) if point["by_kind"][after] == count]
        shares += [100 * gain(run, kind=after) / gain(alone, at, after) for at in same if gain(alone, at, after) > 0]
    if shares:
        print(f"{after} gains {interval(shares, 0)}% of what as many generations of it alone gain.")


def compare(groups: dict[tuple[str, str], list[Result]]) -> None:
    """Print the recipes side by side at the end of each stream, and their gains over the first one, paired by seed."""
    for stream in dict.fromkeys(stream for stream, _ in groups):
        print(f"\n### Recipes on {stream}\n")
        print("| recipe | acceptance | against the first | tokens a round | training, s |")
        print("|---|---|---|---|---|")
        named = {recipe: runs for (one, recipe), runs in groups.items() if one == stream}
        reference = next(iter(named.values()))
        for recipe, runs in named.items():
            ends = [run["points"][-1] for run in runs]
            apart = [gain(run) - gain(other) for run, other in zip(runs, reference, strict=True)]
            print(
                f"| {recipe or 'default'} | {interval([e['all']['acceptance'] for e in ends])} "
                f"| {interval(apart, sign='+')} "
                f"| {interval([e['all']['mean_acceptance_length'] for e in ends], 2)} "
                f"| {mean(e['train_s'] for e in ends):.0f} |"
            )


def plotted(groups: dict[tuple[str, str], list[Result]]) -> str:
    """Held-out acceptance over generations, a curve for each stream, recipe and kind of the stream."""
    import plotext

    plotext.terminal.limit(False, False)
    figure = plotext.figure
    figure.clear()
    figure.plot_size(100, 24)
    figure.theme("colorless")
    figure.title("acceptance on prompts set aside, over generations seen")
    for (stream, recipe), runs in groups.items():
        for kind in runs[0]["points"][0]["by_kind"]:
            points = list(zip(*(run["points"] for run in runs), strict=True))
            xs = [p[0]["generations"] for p in points]
            ys = [mean(one["held_out"][kind]["acceptance"] for one in p) for p in points]
            curve = figure.signal(xs, ys, marker="hd").lines()
            figure.draw(curve)
            figure.draw(figure.text(xs[-1], ys[-1], f"{kind} ({stream.split(':')[0]} {recipe}) ", alignment="right"))
    text: str = figure.build().string(colorless=True)
    return text.rstrip("\n")
