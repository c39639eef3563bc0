"""The one exception that is shown to people: what is wrong, where, and what to do, on one line."""

from __future__ import annotations


class AdaptiveError(Exception):
    """A mistake the user can mend. The command line prints its text on one line and exits with 2."""
