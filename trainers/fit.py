"""The training loop. In: batches. Out: the adapter state with the best held-out acceptance.

Nothing is written here, except through a ``TrainingState``. ``should_stop`` is called before every pass through the
draft; it may block, which pauses the training. ``clock`` stands still during pauses.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel

from adaptive.engines.head.module import Head
from trainers import processes
from trainers.dataset import Example, Stopped, TooLittleError
from trainers.lora import AdapterState
from trainers.recipe import Recipe
from trainers.resume import Standing, TrainingState
from trainers.students import Student, student_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Length of a run if none is requested: DEFAULT_EPOCHS passes over the training set, and at least DEFAULT_STEPS
# steps, because a dozen passes over a hundred generations are too few steps to learn them.
# Longer runs gain little (and stop by themselves once held-out acceptance falls). If the answers have fewer than LONG
# tokens on average, as tool calls do, each step learns from fewer: they are passed over more often, up to MOST_TIMES
# as often.
DEFAULT_EPOCHS = 12
DEFAULT_STEPS = 240
LONG, MOST_TIMES = 100, 3.0
# Share of a run in which the learning rate rises, and the largest gradient norm: common values, not tuned.
WARM_UP = 0.05
CLIP = 1.0
# A run is saved after its first step, and then when this many times the seconds that writing took have passed. Too
# low: writing takes time. Too high: a killed run on a slow machine loses much, and one that is killed each time gets
# nowhere.
SAVED_AFTER = 20.0

# What is counted in a run, once training has begun.
STEPS = "steps"


@dataclass(frozen=True)
class Progress:
    """The state of a training run. ``loss`` is a running mean in nats per token; ``held_out_acceptance`` is from
    the last evaluation (nan before the first); ``seconds_left`` is an upper bound at the present pace.
    ``counted``: what is counted; before the steps, texts are written or read."""

    step: int
    steps: int
    loss: float
    held_out_acceptance: float
    seconds_left: float
    counted: str = STEPS


@dataclass(frozen=True)
class Fit:
    """The result of training. ``best`` is the state with the highest held-out ``acceptance``; ``stopped`` is True if
    the run was stopped early. ``earlier``: it was found before the run was interrupted and continued. ``best`` is None
    if nothing was evaluated yet, or if a continued run was stopped before it found a better state than that."""

    best: AdapterState | None
    acceptance: float
    best_step: int
    steps: int
    seconds: float
    stopped: bool
    earlier: bool = False


def fit(
    model: PeftModel | PreTrainedModel | Head | Student,
    train: Sequence[Example],
    evaluate: Callable[[int], float],
    recipe: Recipe,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    state: TrainingState | None = None,
    own: Sequence[Example] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> Fit:
    """Train the parameters of ``model`` that require a gradient: its adapter, or all of a plain draft or of a head.

    ``evaluate`` returns held-out acceptance after a step, by which the best weights are kept, and may raise Stopped.
    With a ``state``, the run is saved at each evaluation, between them (SAVED_AFTER) and when it is stopped, and an
    interrupted run that the state holds is continued. ``own`` is text of the draft itself (``trainers.rehearsal``), of
    which ``recipe.rehearsed`` join each batch. ``clock`` measures the seconds of training. Raises TooLittleError if
    ``train`` is empty.
    """
    if not train:
        raise TooLittleError("there is no record to train on")
    stop = should_stop or (lambda: False)
    student = student_of(model, recipe) if isinstance(model, torch.nn.Module) else model
    weights = [p for p in student.module.parameters() if p.requires_grad]
    rate = recipe.learning_rate or student.learning_rate()
    optimizer = torch.optim.AdamW(_groups(student.module, recipe), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    begun = state.load(weights, optimizer) if state else None
    now = begun or Standing(next_evaluation=1 / recipe.evaluations)
    budget, stopped = _Budget(recipe, _steps(train, recipe), now, clock), False
    known = now.best_step if begun else None  # of a run that is continued, the state that the last one left
    first, saved, took = now.step, clock(), 0.0

    def judged() -> bool:
        """Evaluate the present weights if it is time to; returns whether it was."""
        if budget.share < min(1.0, now.next_evaluation) or now.evaluated == now.step:
            return False
        now.acceptance, now.evaluated = evaluate(now.step), now.step
        now.next_evaluation = budget.share + 1 / recipe.evaluations - 1e-9
        now.fruitless = 0 if now.acceptance > now.best_acceptance else now.fruitless + 1
        if now.acceptance > now.best_acceptance:
            now.best, now.best_acceptance, now.best_step = student.snapshot(), now.acceptance, now.step
        return True

    def over() -> bool:
        return budget.share >= 1 or now.fruitless >= recipe.patience

    try:
        processes.in_all(partial(student.begin, train, stop, resumed=begun is not None), Stopped)
        batches = zip(_batches(train, recipe.batch, recipe.seed), _rehearsed(own, recipe), strict=True)
        if judged() and state is not None:  # a run that was stopped in an evaluation
            state.save(now, weights, optimizer)
        for batch, rehearsed in islice(batches, now.step, now.step if over() else None):
            for group in optimizer.param_groups:
                group["lr"] = rate * group["factor"] * _schedule(budget.share)
            value = _step(student, optimizer, weights, (batch, rehearsed), recipe, stop)
            now.loss = value if now.loss is None else 0.9 * now.loss + 0.1 * value
            budget.tick()
            evaluated = judged()
            if state is not None and (evaluated or clock() - saved >= SAVED_AFTER * took):
                saved = clock()
                state.save(now, weights, optimizer)
                took = clock() - saved
            if on_progress is not None:
                on_progress(Progress(now.step, budget.steps, now.loss, now.acceptance, budget.seconds_left))
            if over():
                break
    except Stopped:
        stopped = True
        if state is not None and now.step > first:  # the weights are those after the last whole step
            state.save(now, weights, optimizer)
    earlier = now.best_step == known
    best = None if stopped and earlier else now.best
    return Fit(best, now.best_acceptance, now.best_step, now.step, budget.elapsed, stopped, earlier)


def _groups(model: torch.nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """The trained parameters, in groups whose learning rate is multiplied by ``factor``."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    outer = [p for name, p in trained if "lora_B" in name]
    inner = [p for name, p in trained if "lora_B" not in name]
    groups = [{"params": inner, "factor": 1.0}, {"params": outer, "factor": recipe.b_factor}]
    return [group for group in groups if group["params"]]


def _steps(train: Sequence[Example], recipe: Recipe) -> int:
    """Number of updates of a run over these generations."""
    once = math.ceil(len(train) / recipe.batch)
    if recipe.epochs is not None:
        return max(1, math.ceil(recipe.epochs * once))
    tokens = sum(len(example.output) for example in train) / len(train)
    times = min(max(1.0, LONG / max(1.0, tokens)), MOST_TIMES)
    return max(DEFAULT_STEPS, math.ceil(DEFAULT_EPOCHS * times * once))


class _Budget:
    """The used share of the budget (steps or seconds); the same value in every process."""

    def __init__(self, recipe: Recipe, steps: int, standing: Standing, clock: Callable[[], float]) -> None:
        self.steps, self._standing, self._clock = steps, standing, clock
        self._seconds = recipe.max_seconds or math.inf
        self._began = clock() - standing.seconds

    def tick(self) -> None:
        """Count one finished step. Seconds include evaluations."""
        self._standing.step += 1
        (seconds,) = processes.total([self.elapsed])
        self._standing.seconds = seconds / processes.count()

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, measured in this process."""
        return self._clock() - self._began

    @property
    def share(self) -> float:
        """The used share of the budget; the run ends at 1 or more."""
        return max(self._standing.step / self.steps, self._standing.seconds / self._seconds)

    @property
    def seconds_left(self) -> float:
        """Seconds left at the present pace."""
        return max(0.0, self._standing.seconds * (1 / self.share - 1)) if self.share > 0 else math.inf


def _schedule(share: float) -> float:
    """Factor of the learning rate: linear warm-up, then cosine to a tenth."""
    if share < WARM_UP:
        return max(share / WARM_UP, 0.1)
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (share - WARM_UP) / (1 - WARM_UP)))


def _rehearsed(own: Sequence[Example], recipe: Recipe) -> Iterator[list[Example]]:
    """What of ``own`` joins each batch; nothing where there is nothing."""
    return _batches(own, recipe.rehearsed, recipe.seed) if own and recipe.rehearsed else repeat([])


def _batches(train: Sequence[Example], size: int, seed: int) -> Iterator[list[Example]]:
    """Endless batches in seeded random order; within a window of 8 batches, similar lengths are grouped. Nothing
    if ``train`` is empty."""
    rng = random.Random(seed)
    window = 8 * size
    while train:
        order = rng.sample(train, len(train))
        batches = []
        for start in range(0, len(order), window):
            near = sorted(order[start : start + window], key=lambda e: len(e.prompt) + len(e.output))
            batches += [near[i : i + size] for i in range(0, len(near), size)]
        rng.shuffle(batches)
        yield from batches


def _step(
    student: Student,
    optimizer: torch.optim.Optimizer,
    weights: list[torch.nn.Parameter],
    batch: tuple[list[Example], list[Example]],
    recipe: Recipe,
    stop: Callable[[], bool],
) -> float:
    """One update on one batch, records and the draft's own text, in as many passes as memory requires; returns the mean
    loss of the records. Raises Stopped.

    With several processes, each takes its part of the batch; the losses are divided by the positions of all.
    """
    value, stopped = 0.0, False
    student.module.train()
    optimizer.zero_grad(set_to_none=True)
    # Forward KL for the draft's own text: it begins at 0, where the gradient of the KL-TV mixture is all noise.
    for part, by in zip(batch, (recipe, replace(recipe, loss="forward-kl")), strict=True):
        positions = sum(len(e.output) for e in part)
        for group in student.passes(processes.share(part)):
            stopped = stopped or stop()
            if stopped:
                break
            loss = _losses(student, group, by, weights[0].device).sum() / positions
            loss.backward()
            value += loss.item() if by is recipe else 0.0
    value, anyone_stopped = processes.total([value, stopped])
    if anyone_stopped:
        raise Stopped
    processes.sum_gradients(weights)
    torch.nn.utils.clip_grad_norm_(weights, CLIP)
    optimizer.step()
    return value


def _losses(student: Student, group: list[Example], recipe: Recipe, device: torch.device) -> torch.Tensor:
    """Losses of one pass, in the precision of ``_precision``. Models whose own code adds bfloat16 products to float32
    tensors (dbrx's experts), which torch refuses, are computed in float32."""
    try:
        with _precision(device):
            return student.losses(group, recipe)
    except RuntimeError as error:
        if "same scalar type" not in str(error):
            raise
        return student.losses(group, recipe)


def _precision(device: torch.device) -> AbstractContextManager[object]:
    """A context with bfloat16 matrix products where they are faster; weights, loss and optimiser stay float32.

    On a processor with bfloat16 instructions, a step takes a half (width 256) to a third (width
    896) of its time in float32; without them bfloat16 is emulated and slower.
    """
    wanted = False
    if device.type == "cuda":
        wanted = torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
        wanted = any(check() for check in checks if check is not None)
    return torch.autocast(device.type, torch.bfloat16) if wanted else nullcontext()
