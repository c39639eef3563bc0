"""The HTML of the dashboard, of the chat page and of the report of ``adaptive history``.

All are plain files in this folder, which load nothing from other sites. Dashboard and report share the style, the plots
(``plots.js``) and the figures (``figures.html``, ``figures.js``).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

# Content types of the files that the pages load, by suffix.
TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
ASSETS = frozenset(file.name for file in FOLDER.iterdir() if file.suffix in TYPES)


@functools.cache
def part(name: str) -> str:
    """The text of one file of this folder."""
    return (FOLDER / name).read_text(encoding="utf-8")


@functools.cache
def dashboard() -> str:
    """The page at ``/``."""
    button = '<button id="rollback" disabled>Roll back</button>'
    figures = part("figures.html").replace("<!-- rollback -->", button)
    return part("dashboard.html").replace(
        "<!-- figures -->", figures.replace("<!-- between -->", part("training.html"))
    )


def report(texts: Mapping[str, str], data: Mapping[str, Any]) -> str:
    """The report as one HTML page. ``texts``: HTML for its placeholders (pair, written, by, rows, positions). ``data``:
    ``history``, ``adapters`` and ``storage`` as the server returns them, for its script."""
    script = "\n".join(part(name) for name in ("plots.js", "figures.js"))
    # A logged text may contain "</script>", so every "<" of the JSON is escaped.
    written = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    written = written.encode("utf-8", "replace").decode("utf-8")
    filled = {**texts, "style": part("style.css"), "script": script, "data": written}
    page = part("report.html").replace("<!-- figures -->", part("figures.html"))
    pieces = page.split("{")  # one pass: braces in the inserted texts are not placeholders
    found = [pieces[0]]
    for piece in pieces[1:]:
        name, closed, rest = piece.partition("}")
        found.append(filled[name] + rest if closed and name in filled else "{" + piece)
    return "".join(found)
