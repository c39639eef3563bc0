"""Shows an answer while it is decoded: as plain text, or as Markdown on a capable terminal.

Markdown is shown block by block. Complete blocks are printed once; the last, growing block is redrawn
below them a few times a second, limited to the lines that fit the screen.
"""

from __future__ import annotations

import sys
import time
from functools import cache
from typing import TYPE_CHECKING, Protocol

from adaptive.printable import printable

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.markdown import Markdown
    from rich.text import Text

# Seconds between two drawings of the growing block. A drawing takes some milliseconds, which delay the next token.
DRAWN_EVERY_S = 0.1
# Colours of code, chosen from the terminal's own palette.
CODE_THEME = "ansi_dark"


class Display(Protocol):
    """Shows one answer."""

    def feed(self, text: str) -> None:
        """Add a part of the answer."""

    def close(self) -> None:
        """End the answer."""


class PlainDisplay:
    """The answer as plain text; on a terminal, without control sequences."""

    def __init__(self) -> None:
        self._shown = printable if sys.stdout.isatty() else str

    def feed(self, text: str) -> None:
        sys.stdout.write(self._shown(text))
        sys.stdout.flush()

    def close(self) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()


class MarkdownDisplay:
    """The answer as Markdown on a ``console`` that is a terminal."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="visible")
        self._above = ""  # the last block that was printed
        self._growing = ""  # the part of the answer that may still change
        self._drawn = 0.0
        self._live.start()

    def feed(self, text: str) -> None:
        self._growing += printable(text)
        now = time.perf_counter()
        if now - self._drawn >= DRAWN_EVERY_S:
            self._drawn = now
            self._draw()

    def _draw(self) -> None:
        rest = last_block(self._growing)
        done, self._growing = self._growing[:rest], self._growing[rest:]
        self._print(done)
        self._live.update(_Below(self._above, self._growing, fits=True), refresh=True)

    def close(self) -> None:
        self._live.stop()
        self._print(self._growing)

    def _print(self, text: str) -> None:
        if text.strip():
            self._console.print(_Below(self._above, text), end="")
            self._above = text[last_block(text) :]


def as_markdown(text: str) -> Markdown:
    """``text`` rendered as Markdown: line breaks are kept, HTML is shown as text, and links show their address."""
    from rich.markdown import Markdown

    drawn = Markdown("", code_theme=CODE_THEME, hyperlinks=False)
    drawn.markup, drawn.parsed = text, _parser().parse(text)
    for block in drawn.parsed:
        for part in block.children or ():
            if part.type == "softbreak":
                part.type = "hardbreak"
    return drawn


def last_block(text: str) -> int:
    """Offset of the last block of a Markdown text, the only block that more text can change."""
    begins = [token.map[0] for token in _parser().parse(text) if token.level == 0 and token.map]
    lines = text.split("\n")
    return sum(len(line) + 1 for line in lines[: begins[-1]]) if begins else 0


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


class _Below:
    """A Markdown ``text`` as it is drawn below the block ``above`` it, with the blank line between them, if any. With
    ``fits`` only its last lines, if it is too high for the screen."""

    def __init__(self, above: str, text: str, fits: bool = False) -> None:
        self._above, self._text, self._fits = above, text, fits

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        drawn = [
            console.render_lines(as_markdown(part), options, pad=False) if part.strip() else []
            for part in (self._above, self._above + self._text)
        ]
        lines = drawn[1][len(drawn[0]) :]
        for line in lines[-max(1, console.size.height - 2) :] if self._fits else lines:
            yield from line
            yield Segment.line()


def titled(title: str, text: str, style: str = "") -> Text:
    """One line that is shown literally, brackets included."""
    from rich.text import Text

    from adaptive.printable import printable_line

    return Text.assemble((printable_line(title), "bold"), "  ", (printable_line(text), style))
