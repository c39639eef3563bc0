"""The exceptions that are shown to users. They are defined in ``checkpoints``, which raises them and imports no other
package."""

from checkpoints.errors import AdaptiveError, ContextFullError, first_line, true_error

__all__ = ["AdaptiveError", "ContextFullError", "first_line", "true_error"]
