"""The pages: the dashboard, the chat, and what the report of ``adaptive history`` is made of.

Each is plain files in this folder, without anything from elsewhere; dashboard and report share the style, the plots
(``plots.js``) and what they show (``figures.html``, ``figures.js``).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

# What the pages load, and its type.
TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
ASSETS = frozenset(file.name for file in FOLDER.iterdir() if file.suffix in TYPES)


@functools.cache
def part(name: str) -> str:
    """One file of this folder."""
    return (FOLDER / name).read_text(encoding="utf-8")


@functools.cache
def dashboard() -> str:
    """The page at ``/``."""
    button = '<button id="rollback">Roll back</button>'
    figures = part("figures.html").replace("<!-- rollback -->", button)
    return part("dashboard.html").replace(
        "<!-- figures -->", figures.replace("<!-- between -->", part("training.html"))
    )


def report(texts: Mapping[str, str], data: Mapping[str, Any]) -> str:
    """The report: ``texts`` are HTML for its places (pair, written, by, rows, positions), ``data`` what its script
    shows: ``history``, ``adapters`` and ``storage`` as the server has them."""
    script = "\n".join(part(name) for name in ("plots.js", "figures.js"))
    # A text that somebody typed may hold "</script>"; within JSON every "<" may be written otherwise.
    written = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    written = written.encode("utf-8", "replace").decode("utf-8")
    filled = {**texts, "style": part("style.css"), "script": script, "data": written}
    page = part("report.html").replace("<!-- figures -->", part("figures.html"))
    pieces = page.split("{")  # each place is filled once, whatever stands in what fills it
    found = [pieces[0]]
    for piece in pieces[1:]:
        name, closed, rest = piece.partition("}")
        found.append(filled[name] + rest if closed and name in filled else "{" + piece)
    return "".join(found)
