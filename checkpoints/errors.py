"""The exceptions that are shown to people: what is wrong, where, and what to do, on one line."""

from __future__ import annotations


class AdaptiveError(Exception):
    """A mistake the user can mend. The command line prints its text on one line and exits with 2."""


class ContextFullError(AdaptiveError):
    """A conversation or text is longer than the model's context."""


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, or its kind where it says nothing: for a message of one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
