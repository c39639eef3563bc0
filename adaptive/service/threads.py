"""Runs long work on threads, a few pieces at a time, so that the work of other requests always finds a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Found = TypeVar("Found")

# Pieces of long work at a time. Too many: the event loop's threads, four and one for each processor, are all in use.
MOST = 2


class Few:
    """Work for which there is no limit but the size of a request, such as counting the tokens of any text."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MOST)

    async def run(self, do: Callable[Given, Found], *given: Given.args, **named: Given.kwargs) -> Found:
        """The result of ``do``, called on a thread when there is room."""
        async with self._free:
            return await asyncio.to_thread(do, *given, **named)
