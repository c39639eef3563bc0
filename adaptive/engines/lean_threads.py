"""How many threads a model's short passes should use, found by trying.

A small matrix loses from a second thread: starting and joining it costs more than the half of the work
that it takes over, and where another program holds a core, every product waits for it. A draft and
a target therefore have each their own number.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from adaptive.engines.packed import PackedLinear

# Threads must win by this factor. In an answer they win by less than in the trial, since a pass is more than its
# products, and nothing where another program (the trainer is one) is on the other core: lower would buy some percent
# on an idle machine at the price of every product waiting for the slower core on a busy one.
WORTH = 1.5
# Bytes of weights from which no trial is made: one core cannot draw them at the memory's speed.
LARGE = 512_000_000
# Bytes of weights that are enough for a trial.
ENOUGH = 64_000_000
TRIALS = 7


def choose_threads(products: Sequence[PackedLinear], dtype: torch.dtype) -> int:
    """1, or all that torch was given, for passes made of these ``products``.

    Tried with inputs of ``dtype`` on the products of the first layers, as a pass has them one after the other, on one
    and five rows (what a draft and a verification do), in turn, by medians.
    """
    everything = torch.get_num_threads()
    if everything == 1 or sum(product.nbytes for product in products) >= LARGE:
        return everything
    tried, size = [], 0
    for product in products:
        tried.append(product)
        size += product.nbytes
        if size >= ENOUGH:
            break
    inputs = {n: [torch.ones(n, product.inputs, dtype=dtype) for product in tried] for n in (1, 5)}
    times: dict[tuple[int, int], list[float]] = {(threads, n): [] for threads in (1, everything) for n in inputs}
    try:
        for trial in range(TRIALS + 1):
            for (threads, n), found in times.items():
                torch.set_num_threads(threads)
                before = time.perf_counter()
                for product, x in zip(tried, inputs[n], strict=True):
                    product(x)
                if trial:  # the first warms up
                    found.append(time.perf_counter() - before)
    finally:
        torch.set_num_threads(everything)
    single, several = (sum(median(times[threads, n]) for n in (1, 5)) for threads in (1, everything))
    return everything if several * WORTH < single else 1
