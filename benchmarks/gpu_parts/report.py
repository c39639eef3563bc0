"""The results of ``gpu.py`` as JSON and as Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from gpu_parts.work import Figures, Result

# Parts with tables of their own; the figures of the others are listed.
IN_TABLES = {"plain", "verification", "breakdown", "speculation", "nf4", "int8", "mixture", "hybrid"}
Row = Sequence[object]
STRETCHES = ("propose", "verify", "commit", "whole")
# The columns for a way of decoding: their heads, and the names of the figures.
RACED = {
    "tokens/s": "tokens a second",
    "times plain": "times plain",
    "tokens a round": "tokens a round",
    "share of what passes allow": "share of that",
    "same answers": "same answers as plain",
}


def write(results: Sequence[Result], folder: Path) -> Path:
    """Write ``gpu.json`` and ``gpu.md``. Returns the path of the latter."""
    first = results[0]
    about = {"device": first.device, "scale": first.scale, "torch": torch.__version__}
    about["transformers"] = transformers.__version__
    whole = {**about, "parts": [asdict(result) for result in results]}
    (folder / "gpu.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
    page = folder / "gpu.md"
    page.write_text(markdown(results, about), encoding="utf-8")
    return page


def markdown(results: Sequence[Result], about: dict[str, str]) -> str:
    """The page with all tables."""
    done = {result.part: result.figures for result in results if result.problem is None}
    said = ", ".join(f"{name} {value}" for name, value in about.items())
    outcomes = [
        (f"`{r.part}`", r.problem or "done", f"{r.seconds:.1f}", "" if r.peak is None else f"{r.peak / 1e9:.2f}")
        for r in results
    ]
    parts = [f"# {said}", table(("part", "outcome", "seconds", "GB at most"), outcomes)]
    parts += list(_plain(done))
    parts += list(_passes(done))
    parts += list(_rounds(done.get("breakdown")))
    parts += list(_speculation(done))
    for name, figures in done.items():
        if name not in IN_TABLES:
            parts += [f"## {name}", table(("", ""), [(key, shown(value)) for key, value in flat(figures)])]
    return "\n\n".join(parts) + "\n"


def table(head: Row, rows: Iterable[Row]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |" for line in lines)


def shown(value: object) -> str:
    """A figure as text, with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def flat(figures: Figures, before: str = "") -> Iterable[tuple[str, object]]:
    """The figures of nested mappings, each with the path of its names."""
    for name, value in figures.items():
        path = f"{before}, {name}" if before else name
        if isinstance(value, dict):
            yield from flat(value, path)
        else:
            yield path, value


def _plain(done: dict[str, Figures]) -> Iterable[str]:
    rows = [
        (
            part,
            way,
            one["weights"],
            f"{one['tokens a second']:.1f}",
            f"{one['bytes a token'] / 1e9:.3f}",
            f"{one['share of the limit']:.1%}",
            f"{one['seconds of the first token']:.1f}",
        )
        for part, figures in done.items()
        for way in ("eager", "recorded")
        if isinstance(one := figures.get(way), dict)
    ]
    if rows:
        yield "## Decoding without a draft"
        columns = ("tokens/s", "GB a token", "share of the bandwidth limit", "s of the first token ever")
        yield table(("model", "passes", "weights", *columns), rows)


def _passes(done: dict[str, Figures]) -> Iterable[str]:
    found: dict[str, dict[str, Any]] = {}
    for part, figures in done.items():
        passes = figures.get("target" if part == "verification" else "passes")
        if isinstance(passes, dict):
            found[part] = passes
    if found:
        counts = sorted({int(count) for passes in found.values() for count in passes})
        yield "## Passes over several tokens, milliseconds (and times one)"
        rows = [(part, *(_pass(passes.get(str(count))) for count in counts)) for part, passes in found.items()]
        yield table(("target", *counts), rows)


def _pass(one: dict[str, float] | None) -> str:
    return "" if one is None else f"{one['seconds'] * 1e3:.3f} ({one['times one']:.2f})"


def _rounds(figures: Figures | None) -> Iterable[str]:
    if figures is None:
        return
    yield f"## A round of {figures['draft length']} drafted tokens, milliseconds"
    rows = []
    for name in ("greedy", "temperature 0.7"):
        for clock in ("program", "device"):
            one = figures[name].get(clock)
            if one is not None:
                rows.append((name, clock, *(f"{one[key] * 1e3:.3f}" for key in STRETCHES)))
        if "kernels" in figures[name]:
            said = f"{figures[name]['gaps'] * 1e3:.3f} ({figures[name]['share of gaps']:.1%})"
            rows.append((name, "kernels alone", "", "", "", f"{figures[name]['kernels'] * 1e3:.3f}, gaps {said}"))
    yield table(("", "clock", *STRETCHES), rows)


def _speculation(done: dict[str, Figures]) -> Iterable[str]:
    rows = []
    for part, figures in done.items():
        given = figures if part == "speculation" else figures.get("speculation")
        if not isinstance(given, dict):
            continue
        for name in ("greedy", "temperature 0.7"):
            for row in given[name]:
                values = (row.get(key) for key in RACED.values())
                rows.append((part, name, row["contender"], *("" if one is None else shown(one) for one in values)))
    if rows:
        yield "## With a draft"
        yield table(("model", "sampling", "", *RACED), rows)
