"""The exceptions whose text is shown to users: the problem, its place and the remedy, on one line."""

from __future__ import annotations

import errno
import os

# The text of safetensors' error for a file that it cannot open, before the file's path.
NO_FILE = "No such file or directory: "


class AdaptiveError(Exception):
    """An error that the user can correct. The command line prints its text on one line and exits with 2."""


class NoMemoryError(AdaptiveError):
    """There is no memory for what was asked, on the machine or on the device of a model."""


class ContextFullError(AdaptiveError):
    """A conversation or text is longer than the model's context."""


def true_error(error: BaseException) -> BaseException:
    """The error itself, or the true one if safetensors could not open a file: whatever the reason, such as too many
    open files, it reports that there is no such file."""
    path = str(error).removeprefix(NO_FILE)
    if not isinstance(error, FileNotFoundError) or error.errno or path == str(error) or not os.path.exists(path):
        return error
    try:
        with open(path, "rb"):
            return OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)  # the reason has passed
    except OSError as reason:
        return reason


def out_of_memory(error: BaseException) -> bool:
    """Whether this error means that memory has run out; torch has an exception of its own for that of a device."""
    return isinstance(error, MemoryError | NoMemoryError) or type(error).__name__ == "OutOfMemoryError"


def first_line(error: BaseException) -> str:
    """The first line of an exception's text (``true_error``), or the exception's type if the text is empty."""
    text = str(true_error(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__


def why_unread(error: OSError | UnicodeDecodeError) -> str:
    """Why a text file could not be read, in words, without the file's name."""
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror or first_line(error)
