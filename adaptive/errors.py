"""The one exception that is shown to people. It stands in ``checkpoints``, which raises it and imports nobody."""

from checkpoints.errors import AdaptiveError, first_line

__all__ = ["AdaptiveError", "first_line"]
