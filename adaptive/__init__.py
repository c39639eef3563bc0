"""Speculative decoding of a target with a draft that learns from it. ``Assistant`` is what Python programs use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adaptive.api import Assistant

__all__ = ["Assistant"]


def __getattr__(name: str) -> object:
    """Imports ``Assistant`` on first access, because it imports torch, which takes seconds."""
    if name == "Assistant":
        from adaptive.api import Assistant

        return Assistant
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
