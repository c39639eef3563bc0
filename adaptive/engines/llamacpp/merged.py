"""Merges an adapter into a copy of a GGUF file's weights, while no model computes.

In: an open model and the folder of a PEFT adapter. Out: a second model with the sums, which costs nothing per token.
llama.cpp's own adapters compute two thin products beside every weight, which makes a step of a 340M draft 1.4 times as
long (docs/notes/2026-11-llamacpp.md). Computing the sums takes seconds for such a draft, so a thread does it, tensor by
tensor, and only while no model computes.
"""

from __future__ import annotations

import logging
import math
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from adaptive.engines.llamacpp.lora import Low, low_rank
from adaptive.engines.llamacpp.model import OWN_SHARE, LlamaModel, rewrite
from adaptive.errors import AdaptiveError
from adaptive.machine import memory

logger = logging.getLogger("adaptive.engines")

# Seconds without a pass of any model before merging goes on. Too low: tensors are merged between two passes of one
# answer. Too high: a chat with quick turns never gets the merged model.
QUIET = 0.3
# Seconds between two checks of that.
LOOK = 0.05


class Passes:
    """The time of this process's last pass of a llama.cpp model."""

    def __init__(self) -> None:
        self.last = -math.inf  # seconds of ``time.perf_counter``; infinity during a pass

    def quiet(self) -> bool:
        """Whether the last pass ended more than ``QUIET`` seconds ago."""
        return time.perf_counter() - self.last > QUIET


PASSES = Passes()


class GivenUpError(Exception):
    """The adapter is not wanted any more, or the program is ending."""


def merged(base: LlamaModel, folder: Path, proceed: Callable[[], None]) -> LlamaModel:
    """A copy of ``base`` with the adapter in ``folder`` added to its weights, in the encoding of its file.

    ``proceed`` is called before every tensor and may wait, or raise to give up. Raises AdaptiveError if a weight to
    change has fewer than 8 bits, because rounding would remove an adapter's small changes, or if there is no room for
    the copy.
    """
    changes = low_rank(folder, base)

    def change(name: str, kind: int, stored: np.ndarray) -> np.ndarray | None:
        proceed()
        low = changes.get(name)
        return None if low is None else _added(stored, kind, low, f"{base.path}: {name}")

    with tempfile.TemporaryDirectory(prefix="adaptive-", ignore_cleanup_errors=True) as scratch:
        file = Path(scratch) / base.path.name
        try:
            rewrite(base.path, file, change)
        except OSError as error:
            raise AdaptiveError(f"no room for a merged copy of {base.path} in {scratch} ({error.strerror})") from error
        model = LlamaModel(file, gpu=base.gpu)  # normally read into memory, not mapped; see ``Merging.begin``
    model.path = base.path
    return model


def _added(stored: np.ndarray, kind: int, low: Low, title: str) -> np.ndarray:
    """The bytes of a weight plus ``low.b @ low.a``, in the same encoding."""
    from gguf import GGMLQuantizationType as Kind

    rows, columns = low.b.shape[0], low.a.shape[1]
    types = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
    if kind in types:
        weight = torch.frombuffer(bytearray(stored), dtype=types[Kind(kind)]).view(rows, columns)
        total = torch.addmm(weight.float(), low.b, low.a).to(weight.dtype)
        return total.view(torch.uint8).numpy()
    if kind == Kind.Q8_0:
        from gguf.quants import dequantize, quantize

        weight = torch.from_numpy(dequantize(stored.reshape(rows, -1), Kind.Q8_0))
        return np.ascontiguousarray(quantize(torch.addmm(weight, low.b, low.a).numpy(), Kind.Q8_0))
    raise AdaptiveError(f"{title} is in {Kind(kind).name}, into which an adapter is not merged")


class Merging:
    """Merges the active adapter on a thread, which then calls ``on_ready`` with the merged model.

    ``begin`` and ``give_up`` must be called from one thread only, not from the merging thread.
    """

    def __init__(self, base: LlamaModel, on_ready: Callable[[LlamaModel], None]) -> None:
        self.base = base
        self.on_ready = on_ready
        self._wanted: Path | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, folder: Path) -> None:
        """Start merging the adapter in ``folder``, if there is memory for it. The merging itself waits until no model
        computes."""
        if self.base.size > OWN_SHARE * memory().available:
            logger.info("%s is used beside the weights: there is no memory to merge it", folder.name)
            return
        self._wanted = folder
        self._thread = threading.Thread(target=self._run, args=(folder,), name="merging")
        self._thread.start()

    def give_up(self) -> None:
        """Abandon the present merging, because its adapter is not active any more."""
        with self._lock:
            self._wanted = None

    def wait(self) -> None:
        """Wait for the end of the merging thread."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, folder: Path) -> None:
        began, waited = time.perf_counter(), 0.0

        def proceed() -> None:
            nonlocal waited
            asked = time.perf_counter()
            while not PASSES.quiet():
                self._check(folder)
                time.sleep(LOOK)
            waited += time.perf_counter() - asked
            self._check(folder)

        try:
            proceed()
            model = merged(self.base, folder, proceed)
        except GivenUpError:
            return
        except Exception as error:  # after any error the adapter stays in use beside the weights
            logger.info("%s is used beside the weights: %s", folder.name, error)
            return
        with self._lock:
            if self._wanted == folder:
                self.on_ready(model)
                took = time.perf_counter() - began - waited
                logger.info("%s is merged into the weights (%.1f s)", folder.name, took)

    def _check(self, folder: Path) -> None:
        # The thread is not a daemon, so that the interpreter does not exit during a call of the library. It gives up
        # when the main thread has ended.
        if self._wanted != folder or not threading.main_thread().is_alive():
            raise GivenUpError
