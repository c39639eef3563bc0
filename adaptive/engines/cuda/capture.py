"""Capturing operations on a CUDA device as a graph."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def captured(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Capture what the block launches as ``graph``, on ``stream``, with memory of ``pool``.

    Meanwhile Python collects no garbage: freeing another graph on this thread would end the capture. After an error the
    current stream is what it was; torch would leave its own current.
    """
    here, collects = torch.cuda.current_stream(), gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        torch.cuda.set_stream(here)
        if collects:
            gc.enable()
