"""The exceptions that are shown to people. They stand in ``checkpoints``, which raises them and imports nobody."""

from checkpoints.errors import AdaptiveError, ContextFullError, first_line

__all__ = ["AdaptiveError", "ContextFullError", "first_line"]
