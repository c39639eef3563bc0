"""Makes text from outside (a model, a client, a name in the log) safe to write to a terminal or a log.

In: any text. Out: the same text with terminal controls made visible, so that it can neither move the cursor, nor set a
title or the clipboard, nor forge a line.
"""

from __future__ import annotations

from urllib.parse import urlsplit

# From U+2400 on: a picture for each ASCII control character (ESC is shown as one sign).
_PICTURES = 0x2400
_CONTROLS = {code: chr(_PICTURES + code) for code in range(0x20)} | {0x7F: "\u2421"}
# Terminals read U+009B as ESC [ and U+009D as ESC ]. A lone surrogate cannot be written as UTF-8.
_UNSHOWN = dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], "\ufffd")
# CR LF is a line break; after a bare CR, further text would overwrite the line.
_TEXT = {**_CONTROLS, **_UNSHOWN, ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}
# In a name, line and paragraph separators could forge a line, and direction overrides would reorder adjacent text.
_LINE = {
    **_CONTROLS,
    **_UNSHOWN,
    **dict.fromkeys([0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd"),
}


def printable(text: str) -> str:
    """``text`` of any number of lines. It may come in pieces: each character is converted by itself."""
    return text.translate(_TEXT)


def printable_line(text: str) -> str:
    """``text`` on one line: line breaks and tabs are made visible as well."""
    return text.translate(_LINE)


def without_login(address: str) -> str:
    """The address of a server without the name and password in it."""
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def refused_address(address: str) -> str:
    """What is said of an address that cannot be used; it is not quoted if there may be a password in it."""
    return "no address" if "@" in address else repr(address)


def per_second(speed: float) -> str:
    """Tokens per second, for reading, as by ``rate`` of the pages: below 10 with a digit after the point, below 1 with
    two; 0 if nothing was timed."""
    digits = 2 if 0 < speed < 0.995 else 1 if 0 < speed < 9.95 else 0
    return f"{speed:.{digits}f}"


def counted(count: int, one: str) -> str:
    """A count and its noun, with an s for the plural: 1 session, 2 sessions."""
    return f"{count} {one}{'' if count == 1 else 's'}"
