"""Measures the training of the draft: steps a second and memory, alone and while an answer is decoded."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import torch

from adaptive.control.policy import FixedLength
from adaptive.pair import Pair
from gpu_parts.saying import SAMPLED, Speaker, model_of, prompts
from gpu_parts.speed import answered
from gpu_parts.work import Bench, Budget, Figures
from trainers import lora
from trainers.dataset import Example
from trainers.fit import Fit, fit
from trainers.recipe import Recipe
from trainers.replay import acceptance_rate, replay

# Share of the part's time for answers to train on; of the rest, shares for training alone and beside decoding.
PREPARING, ALONE, BESIDE = 0.3, 0.45, 0.35
# Seconds for training at least, however long the preparations took; and answers to train on at least.
LEAST_S, LEAST_EXAMPLES = 1.0, 2


def examples(bench: Bench, pair: Pair) -> list[Example]:
    """Answers of the target with its distributions, as the trainer reads them from the log: as many as a part of the
    budget allows."""
    speaker, found, budget = Speaker(pair, FixedLength(0), SAMPLED), list[Example](), bench.budget.share(PREPARING)
    given = prompts(bench, pair)
    while len(found) < LEAST_EXAMPLES or (len(found) < bench.scale.examples and not budget.over):
        prompt = given[len(found) % len(given)]
        said = speaker.say(prompt, bench.scale.tokens, supervise=True)
        assert said.supervision is not None
        ids = [np.array(tokens, np.int32) for tokens in (prompt, said.output)]
        found.append(Example(len(found) + 1, "gpu", ids[0], ids[1], SAMPLED, True, said.supervision))
    return found


class Training:
    """Training of a new adapter on a float32 copy of the draft, as in the trainer's process."""

    def __init__(self, bench: Bench, pair: Pair, given: list[Example]) -> None:
        self.bench, self.given = bench, given
        self.before = _allocated(bench)
        self.model: Any = lora.attach(copy.deepcopy(model_of(pair.draft).model).float(), Recipe())
        self.stop = threading.Event()
        self.fit: Fit | None = None

    def run(self, seconds: float) -> Fit:
        """Train for ``seconds``, or until ``stop`` is set."""
        recipe = Recipe(max_seconds=seconds, epochs=1e6, batch=min(8, len(self.given)), evaluations=2, patience=1000)

        def evaluate(step: int) -> float:
            return acceptance_rate(replay(self.model, self.given))

        self.fit = fit(self.model, self.given, evaluate, recipe, should_stop=self.stop.is_set)
        return self.fit


def training(bench: Bench, kind: str) -> Figures:
    """Measure training alone, decoding alone, and both at once in threads of one program; and the device memory that
    training takes in addition to both models. (The service trains in another process, which pauses while a request is
    answered; this part shows the cost without the pause.)"""
    pair = bench.workshop.pair(kind)
    given = examples(bench, pair)
    work = Training(bench, pair, given)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
    seconds = max(LEAST_S, bench.budget.left)
    before = acceptance_rate(replay(work.model, given))
    alone = work.run(ALONE * seconds)
    found: Figures = {
        "examples": len(given),
        "tokens": sum(len(example.output) for example in given),
        "steps": alone.steps,
        "steps a second": alone.steps / alone.seconds,
        "acceptance before": before,
        "acceptance after": alone.acceptance,
        "bytes": _peak(bench, work.before),
        "tokens a second, not training": answered(bench, pair, Budget(0.1 * seconds), SAMPLED),
    }
    thread = threading.Thread(target=work.run, args=(BESIDE * seconds,))
    thread.start()
    try:
        found["tokens a second, training"] = answered(bench, pair, Budget(BESIDE * seconds), SAMPLED)
    finally:
        work.stop.set()
        thread.join()
    beside = work.fit
    assert beside is not None
    found["steps a second, decoding"] = beside.steps / max(beside.seconds, 1e-9)
    return found


def _allocated(bench: Bench) -> int | None:
    return torch.cuda.memory_allocated(bench.device) if bench.device.type == "cuda" else None


def _peak(bench: Bench, before: int | None) -> int | None:
    return None if before is None else torch.cuda.max_memory_allocated(bench.device) - before
