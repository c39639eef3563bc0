"""An adapter merged into the weights of a GGUF file, in memory, in quiet moments.

In: the model that is open and the folder of a PEFT adapter. Out: a second model with the sums, which costs
nothing a token, where llama.cpp's own way with adapters, two thin products beside every weight, makes a step of a
340M draft 1.4 times as long (docs/notes/2026-11-llamacpp.md). Computing the sums takes seconds for such a draft, so
that it is done on a thread, tensor by tensor, and only while no model is at work.
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
import psutil
import torch

from adaptive.engines.llamacpp.lora import Low, low_rank
from adaptive.engines.llamacpp.model import OWN_SHARE, LlamaModel, rewrite
from adaptive.errors import AdaptiveError

logger = logging.getLogger("adaptive.engines")

# Seconds without a pass of any model after which it is quiet. Shorter and sums are computed between two
# passes of one answer, longer and a chat of quick turns never has them.
QUIET = 0.3
# Seconds between two looks whether it is.
LOOK = 0.05


class Passes:
    """When a model of this process was last at work."""

    def __init__(self) -> None:
        self.last = -math.inf  # seconds of ``time.perf_counter``; infinity during a pass

    def quiet(self) -> bool:
        """Whether nothing has been at work for a while."""
        return time.perf_counter() - self.last > QUIET


PASSES = Passes()


class GivenUpError(Exception):
    """The adapter is not to be used any more, or the program ends."""


def merged(base: LlamaModel, folder: Path, proceed: Callable[[], None]) -> LlamaModel:
    """``base`` with the adapter in ``folder`` added to its weights, in the encoding of its file.

    ``proceed`` is called before every tensor and may wait, or raise to give up. Raises AdaptiveError where the file
    has weights in fewer than 8 bits, which would round an adapter's small changes away.
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
        model = LlamaModel(file, gpu=base.gpu)  # read into memory, where there was room for it
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
    """Merges the adapter in use on a thread; ``on_ready`` is then given the model, on that thread.

    ``begin`` and ``give_up`` are for one thread, which is not that one.
    """

    def __init__(self, base: LlamaModel, on_ready: Callable[[LlamaModel], None]) -> None:
        self.base = base
        self.on_ready = on_ready
        self._wanted: Path | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, folder: Path) -> None:
        """Merge the adapter in ``folder`` as soon as it is quiet, if there is memory for it."""
        if self.base.size > OWN_SHARE * psutil.virtual_memory().available:
            logger.info("%s is used beside the weights: there is no memory to merge it", folder.name)
            return
        self._wanted = folder
        self._thread = threading.Thread(target=self._run, args=(folder,), name="merging")
        self._thread.start()

    def give_up(self) -> None:
        """The adapter is not the one in use any more: what is not ready will not be."""
        with self._lock:
            self._wanted = None

    def wait(self) -> None:
        """Until the thread has come to its end, for tests."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, folder: Path) -> None:
        def proceed() -> None:
            while not PASSES.quiet():
                self._check(folder)
                time.sleep(LOOK)
            self._check(folder)

        began = time.perf_counter()
        try:
            proceed()
            model = merged(self.base, folder, proceed)
        except GivenUpError:
            return
        except Exception as error:  # whatever it is, the adapter goes on being used
            logger.info("%s is used beside the weights: %s", folder.name, error)
            return
        with self._lock:
            if self._wanted == folder:
                self.on_ready(model)
                logger.info("%s is merged into the weights (%.1f s)", folder.name, time.perf_counter() - began)

    def _check(self, folder: Path) -> None:
        # A thread that is not a daemon keeps the program from ending under the library; it ends when the program does.
        if self._wanted != folder or not threading.main_thread().is_alive():
            raise GivenUpError
