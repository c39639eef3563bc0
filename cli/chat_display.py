"""Shows an answer while it is decoded: as plain text, or as Markdown on a capable terminal.

Markdown is shown block by block. Complete blocks are printed once; the last, growing block is redrawn
below them at most a few times a second, limited to the lines that fit the screen.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Protocol

from adaptive.printable import printable

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_core import StateCore
    from markdown_it.token import Token
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.markdown import Markdown
    from rich.text import Text

# Least seconds between two drawings of the growing block, each of which delays the next token by some milliseconds.
DRAWN_EVERY_S = 0.1
# Least time between two drawings, as a multiple of the time that the last one took. Too low: a block that is slow to
# draw, such as a large table, slows the answer. Too high: it is drawn seldom.
DRAWINGS_APART = 10.0
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

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` returns seconds."""
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="visible")
        self._above = ""  # a short block in place of the last one that was printed
        self._growing = ""  # the part of the answer that may still change
        self._clock = clock
        self._drawn, self._cost = 0.0, 0.0  # when the last drawing ended, and the seconds it took
        self._live.start()

    def feed(self, text: str) -> None:
        self._growing += printable(text)
        if self._clock() - self._drawn >= max(DRAWN_EVERY_S, DRAWINGS_APART * self._cost):
            self._draw()

    def _draw(self) -> None:
        rest = last_block(self._growing)
        done, self._growing = self._growing[:rest], self._growing[rest:]
        self._print(done)
        began = self._clock()
        self._live.update(_Below(self._above, self._growing, fits=True), refresh=True)
        self._drawn = self._clock()
        self._cost = self._drawn - began

    def close(self) -> None:
        self._live.stop()
        self._print(self._growing)

    def _print(self, text: str) -> None:
        if text.strip():
            self._console.print(_Below(self._above, text), end="")
            self._above = _in_place_of(text)


class Answer:
    """Shows an answer part by part: its thinking dim on the ``console``, and its text in a ``display``."""

    def __init__(self, console: Console, display: Callable[[], Display]) -> None:
        self._console = console
        self._display = display
        self._open: Display | None = None
        self._thinks = False  # whether the line on the console has not ended
        self._empty = True

    def think(self, text: str) -> None:
        """Add to the thinking."""
        self._close()
        self._console.print(
            printable(text), style="dim", end="", markup=False, highlight=False, emoji=False, soft_wrap=True
        )
        self._thinks = True

    def feed(self, text: str) -> None:
        """Add to the text."""
        self._end_line()
        if self._open is None:
            self._open, self._empty = self._display(), False
        self._open.feed(text)

    def close(self) -> None:
        """End the answer."""
        self._end_line()
        if self._empty:
            self._open = self._display()
        self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _end_line(self) -> None:
        if self._thinks:
            self._console.print()
            self._thinks = False


def as_markdown(text: str, last: int | None = None) -> Markdown:
    """``text`` rendered as Markdown: line breaks are kept, HTML is shown as text, and links show their address.

    With ``last``, only the last ``last`` lines of what is shown matter, and lines above them may be missing, so that a
    long block is rendered in little time. The colours of code may then differ where a text in quotes began above.
    """
    from rich.markdown import Markdown

    drawn = Markdown("", code_theme=CODE_THEME, hyperlinks=False)
    drawn.markup, drawn.parsed = text, _parser().parse(text, {"last": last})
    for block in drawn.parsed:
        for part in block.children or ():
            if part.type == "softbreak":
                part.type = "hardbreak"
    return drawn


def last_block(text: str) -> int:
    """Offset of the last block of a Markdown text, the only block that more text can change."""
    begins = [token.map[0] for token in _blocks(text) if token.level == 0 and token.map]
    lines = text.split("\n")
    return sum(len(line) + 1 for line in lines[: begins[-1]]) if begins else 0


def _in_place_of(text: str) -> str:
    """A short block below which rich leaves as many blank lines as below ``text``: only a rule at its end matters."""
    return "---" if [token.type for token in _blocks(text)][-1:] == ["hr"] else "text"


def _blocks(text: str) -> list[Token]:
    """The tokens of the blocks; what is within their lines is not parsed, which takes most of the time."""
    tokens: list[Token] = []
    _parser().block.parse(text, _parser(), {}, tokens)
    return tokens


@cache
def _parser() -> MarkdownIt:
    """The parser. A definition of a link, which rich does not show, and uses of it are shown as they are written, since
    the definition may come after the blocks that use it."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("reference")
    parser.core.ruler.after("block", "last", _leave_out)
    return parser


def _leave_out(state: StateCore) -> None:
    """Leave out the beginning of a code block or a list that is alone and longer than the lines that matter."""
    last: int | None = state.env.get("last")
    blocks = [token for token in state.tokens if token.level == 0 and token.nesting >= 0]
    if last is None or len(blocks) != 1:
        return
    block, tokens = blocks[0], state.tokens
    if block.type == "fence":
        block.content = "\n".join(block.content.rstrip().split("\n")[-last:])
    elif block.type in ("bullet_list_open", "ordered_list_open"):
        items = [i for i, token in enumerate(tokens) if token.type == "list_item_open" and token.level == 1]
        high = [i for i in items if tokens[i + 1].type != "list_item_close"]  # an empty item takes no line
        if len(high) > last:
            begin = high[-last]
            if block.type == "ordered_list_open":
                block.attrs["start"] = int(block.attrs.get("start", 1)) + items.index(begin)
            state.tokens = [block, *tokens[begin:]]


class _Below:
    """A Markdown ``text`` as it is drawn below the block ``above`` it, with the blank line between them, if any. With
    ``fits`` only its last lines, if it is too high for the screen."""

    def __init__(self, above: str, text: str, fits: bool = False) -> None:
        self._above, self._text, self._fits = above, text, fits

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        most = max(1, console.size.height - 2) if self._fits else None
        above, both = as_markdown(self._above), as_markdown(self._text, most)
        both.parsed = above.parsed + both.parsed
        skipped = len(console.render_lines(above, options, pad=False))
        lines = console.render_lines(both, options, pad=False)[skipped:]
        for line in lines if most is None else lines[-most:]:
            yield from line
            yield Segment.line()


def titled(title: str, text: str, style: str = "") -> Text:
    """One line that is shown literally, brackets included."""
    from rich.text import Text

    from adaptive.printable import printable_line

    return Text.assemble((printable_line(title), "bold"), "  ", (printable_line(text), style))
