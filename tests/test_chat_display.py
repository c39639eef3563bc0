"""How ``adaptive chat`` shows an answer while it comes: block by block, as Markdown."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from cli import chat_display
from cli.chat_display import MarkdownDisplay, as_markdown, last_block

MARKDOWN = """# Fruits

Three of **them**, as `code`
on two lines:

1. apple
2. <b>pear</b>

```python
def eat(fruit):
    return f"{fruit} is eaten, by somebody who was hungry enough to eat more than one of them"
```

Done."""


def shown(text: str, width: int, pieces: int) -> str:
    """The text on a terminal of this width after an answer arrived in ``pieces`` pieces, without colours."""
    out = io.StringIO()
    display = MarkdownDisplay(Console(file=out, force_terminal=True, width=width, height=12, color_system=None))
    size = -(-len(text) // pieces)
    for start in range(0, len(text), size):
        display._drawn = 0.0  # draw after every piece, however fast they come
        display.feed(text[start : start + size])
    display.close()
    return as_seen(out.getvalue())


def as_seen(written: str) -> str:
    """The lines on a terminal after it has executed the control sequences for cursor up and clear line."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", written):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row - len(lines) + 1)
        elif part == "\r":
            column = 0
        elif part.endswith("A"):
            row -= int(part[2:-1] or 1)
        elif part.endswith("K"):
            lines[row] = ""
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return "\n".join(line.rstrip() for line in lines).strip("\n")


@pytest.mark.parametrize("width", [40, 60, 200])
@pytest.mark.parametrize("pieces", [1, 7, 400])
def test_markdown_that_comes_in_pieces_looks_as_it_does_whole(width: int, pieces: int) -> None:
    whole = Console(file=io.StringIO(), width=width, color_system=None)
    for block in (MARKDOWN[: last_block(MARKDOWN)], MARKDOWN[last_block(MARKDOWN) :]):
        whole.print(as_markdown(block))
    expected = [line.rstrip() for line in whole.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    said = shown(MARKDOWN, width, pieces).splitlines()
    # Blocks printed separately lack the empty line that would be between them.
    assert [line for line in said if line] == [line for line in expected if line]
    assert all(len(line) <= width for line in said)
    assert any("<b>pear</b>" in line for line in said)


def test_only_the_last_block_can_still_change() -> None:
    for end in range(1, len(MARKDOWN)):
        begins = last_block(MARKDOWN[:end])
        assert MARKDOWN[:begins] + MARKDOWN[begins:end] == MARKDOWN[:end]
        assert "```" not in MARKDOWN[:begins] or MARKDOWN[:begins].count("```") == 2, "a fence was cut in two"


def test_a_block_higher_than_the_screen_leaves_nothing_behind() -> None:
    long = "```\n" + "\n".join(f"line {number}" for number in range(60)) + "\n```"
    said = [line.strip() for line in shown(long, 80, 50).splitlines() if line.strip()]
    assert said == [f"line {number}" for number in range(60)]


@pytest.mark.parametrize("every", [1, 7, 60])
def test_an_answer_looks_the_same_however_slowly_it_comes(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = ["# A plan", "Begin *here*.", "- one\n- two", "---", "> so it is", "```\ncode\n```"]
    text = "\n\n".join([*blocks, "| a | b |\n|---|---|\n| 1 | 2 |", "1. first\n2. second", "End."])
    monkeypatch.setattr(chat_display, "DRAWN_EVERY_S", 0.0)
    monkeypatch.setattr(chat_display, "DRAWINGS_APART", 0.0)
    at_once, slowly = io.StringIO(), io.StringIO()
    Console(file=at_once, width=40).print(as_markdown(text))
    display = MarkdownDisplay(Console(file=slowly, width=40))
    for begin in range(0, len(text), every):
        display.feed(text[begin : begin + every])
    display.close()
    assert slowly.getvalue() == at_once.getvalue()


CODE = "```python\n" + "\n".join("" if i % 7 == 3 else f"value_{i} = compute({i})  # again" for i in range(100))
NUMBERED = "4. first\n" + "\n".join(f"7. The **item** {i}\n\n   more of it\n   - and within" for i in range(100))
BULLETS = "\n".join(f"- The **item** {i}" if i % 5 else "-" for i in range(100))


BLOCKS = {
    "code": CODE,
    "blank": CODE + "\n\n\n",
    "closed": CODE + "\n```\n",
    "numbered": NUMBERED,
    "bullets": BULLETS,
    "short": "- a\n- b",
    "several": MARKDOWN,
}


@pytest.mark.parametrize("text", BLOCKS.values(), ids=list(BLOCKS))
def test_the_end_of_a_long_block_looks_the_same_without_its_beginning(text: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=60, height=12)
    whole, end = (console.render_lines(as_markdown(text, last)) for last in (None, 10))
    assert end[-10:] == whole[-10:]
    if len(text.splitlines()) >= 100:
        assert len(end) < len(whole) / 2, "all of it was rendered"


class SlowTerminal(io.StringIO):
    """A terminal on which every drawing takes ``seconds``, by its own clock."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.now, self.drawing = seconds, 100.0, 0.0

    def flush(self) -> None:
        self.now += self.seconds
        self.drawing += self.seconds


@pytest.mark.parametrize("seconds", [0.001, 0.25])
def test_drawings_take_a_tenth_of_the_time_at_most(seconds: float) -> None:
    terminal = SlowTerminal(seconds)
    display = MarkdownDisplay(Console(file=terminal, force_terminal=True, width=60), clock=lambda: terminal.now)
    began = terminal.now
    terminal.drawing = 0.0
    for word in range(1000):
        terminal.now += 0.01  # the time of a token
        display.feed(f"word {word} ")
    assert 0.0 < terminal.drawing < 0.12 * (terminal.now - began)
    display.close()


def test_a_link_in_reference_style_keeps_its_address() -> None:
    text = "Read [the manual][1] first.\n\nThen begin.\n\n[1]: https://example.org/manual\n[2]: https://example.org/two"
    said = shown(text, 60, 20)
    assert "[the manual][1]" in said
    assert "[1]: https://example.org/manual\n[2]: https://example.org/two" in said
