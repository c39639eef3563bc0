"""The exceptions whose text is shown to users: the problem, its place and the remedy, on one line."""

from __future__ import annotations


class AdaptiveError(Exception):
    """An error that the user can correct. The command line prints its text on one line and exits with 2."""


class ContextFullError(AdaptiveError):
    """A conversation or text is longer than the model's context."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or the exception's type if the text is empty."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
