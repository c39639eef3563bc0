"""The exceptions that are shown to users. They are defined in ``checkpoints``, which raises them and imports no other
package."""

from checkpoints.errors import (
    AdaptiveError,
    ContextFullError,
    NoMemoryError,
    first_line,
    out_of_memory,
    true_error,
    why_unread,
)

__all__ = [
    "AdaptiveError",
    "ContextFullError",
    "NoMemoryError",
    "first_line",
    "out_of_memory",
    "true_error",
    "why_unread",
]
