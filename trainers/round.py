"""One round of distillation, from the log to a judged adapter: the function behind ``adaptive distill``.

log -> dataset -> split by prompt -> train on one part -> choose the checkpoint on the second ->
publish as candidate with its figures on the third -> gate -> promoted or rejected.

Killed at any moment, the log is as it was (it is only read) and the store is valid (an adapter is
published whole or not at all; one that was not judged yet stays a candidate).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from adaptive.errors import AdaptiveError
from checkpoints.manifest import BaseDraft, HeldOut, Manifest, TrainedOn
from checkpoints.store import AdapterStore, NewAdapter
from trainers import lora
from trainers.batches import context_length
from trainers.dataset import GATE_SHARE, VALIDATION_SHARE, Example, domains, examples, from_rows, join, read_log, split
from trainers.fit import Fit, Progress, fit
from trainers.gate import MIN_GENERATIONS, Verdict, held_out, judge
from trainers.recipe import Recipe
from trainers.replay import Replay, Stopped, acceptance_rate, replay

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftModel
    from transformers import PreTrainedModel

Promotion = Literal["gate", "never", "force"]

# Fewer teach the draft the wording of a few answers and nothing of the kind.
MIN_TRAIN = 16

# Fewer leave the choice of the checkpoint to chance. It is no more than a choice: the gate still stands.
MIN_VALIDATION = 2

# New held-out generations from which on they are judged apart from the older ones. With fewer, only a
# very large gain would be certain; with more, an adapter for a new kind of use waits longer.
ENOUGH_RECENT = 12

# Generations replayed at most. Twice as many would narrow the gate's intervals by a third and take
# as long again as the training of a small round.
MOST_VALIDATION = 48
MOST_RECENT = 128
MOST_OLDER = 64


@dataclass(frozen=True)
class DistillOutcome:
    """What a round came to.

    ``manifest`` is the adapter as it now stands in the store, None where none was worth keeping.
    ``verdict`` is None where the gate was not asked (no better checkpoint, or stopped early).
    ``message`` says in one sentence what happened. ``train_seconds`` is training with its evaluations,
    ``seconds`` all of the round. ``notes`` are lines a person should see, such as a damaged adapter
    that was set aside.
    """

    manifest: Manifest | None
    verdict: Verdict | None
    message: str
    stopped: bool
    train_generations: int
    validation_generations: int
    gate_generations: int
    steps: int
    best_step: int
    train_seconds: float
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Sets:
    """The records of a round. ``recent`` and ``older`` are the gate's."""

    train: list[Example]
    validation: list[Example]
    recent: list[Example]
    older: list[Example]

    @property
    def gate(self) -> list[Example]:
        return self.recent + self.older


def distill(
    log: Path | None,
    store: AdapterStore,
    base: BaseDraft,
    draft: PreTrainedModel,
    recipe: Recipe,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    extra: Dataset | None = None,
    promotion: Promotion = "gate",
) -> DistillOutcome:
    """Train an adapter for ``draft`` on the log (and ``extra`` rows) and let the gate decide.

    ``draft`` is a fresh float32 copy on the training device; its weights are not changed. With
    ``extra``, held-out rows of it are the gate's recent set and held-out records of the log the older
    one. ``log`` None trains on ``extra`` alone. ``should_stop`` is asked between passes and may block.
    When it says stop, the best checkpoint so far is kept as a candidate that was not judged.
    ``promotion`` never leaves the adapter a candidate, force promotes it whatever the gate says.

    Raises AdaptiveError where there is too little to learn from or to judge by.
    """
    began = time.perf_counter()
    in_use, notes = store.usable(base) if store.root.is_dir() else (None, [])
    sets = _gather(log, extra, in_use, recipe, context_length(draft))
    result, manifest, verdict = Fit(None, 0.0, 0, 0, 0.0, stopped=False), None, None
    try:
        with _in_use(draft, store, in_use) as model:
            before = replay(model, sets.gate, should_stop)
            to_beat = acceptance_rate(replay(model, sets.validation, should_stop))
        with _trainable(draft, store, in_use, recipe) as model:

            def evaluate() -> float:
                return acceptance_rate(replay(model, sets.validation, should_stop))

            result = fit(model, sets.train, evaluate, to_beat, recipe, on_progress, should_stop)
            if result.best is not None:
                lora.restore(model, result.best)
                after, result = _judged(model, sets, result, should_stop)
                figures = _figures(before, after, len(sets.recent), recipe.draft_length)
                manifest = _publish(store, base, model, result, figures, sets, recipe, in_use)
                if figures is not None:
                    verdict = judge(*figures, streak=int(manifest.id) - int(in_use.id if in_use else 0))
                manifest = _settle(store, manifest, verdict, promotion)
    except Stopped:
        result = replace(result, stopped=True)
    return DistillOutcome(
        manifest=manifest,
        verdict=verdict,
        message=_message(manifest, verdict, result, len(sets.validation)),
        stopped=result.stopped,
        train_generations=len(sets.train),
        validation_generations=len(sets.validation),
        gate_generations=len(sets.gate),
        steps=result.steps,
        best_step=result.best_step,
        train_seconds=result.seconds,
        seconds=time.perf_counter() - began,
        notes=tuple(notes),
    )


def _gather(log: Path | None, extra: Dataset | None, in_use: Manifest | None, recipe: Recipe, context: int) -> _Sets:
    """Read, split and check. Raises AdaptiveError where there is too little."""
    rows = from_rows([])
    if log is not None and (log.exists() or extra is None):
        rows = read_log(log, recipe.buffer)
    if extra is not None:
        rows = join(rows, extra)
    parts = split(rows)
    train = examples(parts.train, context)
    validation = [e for e in examples(parts.validation, context) if e.replayable]
    gate = [e for e in examples(parts.gate, context) if e.replayable]
    recent, older = _recent_and_older(gate, in_use, extra is not None)
    _check_enough(len(train), len(validation), len(recent), where="the log" if extra is None else "the data")
    return _Sets(train, validation[-MOST_VALIDATION:], recent, older)


def _recent_and_older(
    gate: Sequence[Example], in_use: Manifest | None, from_file: bool
) -> tuple[list[Example], list[Example]]:
    """The gate's two sets, from examples in the order of the log.

    Recent are the rows of a file where one was given, else the records since those that the adapter
    in use was trained on. Where these are too few to see a gain on, all are judged as one set.
    """
    if from_file:
        recent, older = [e for e in gate if e.id < 0], [e for e in gate if e.id >= 0]
    else:
        last = (in_use.trained_on.last_id or 0) if in_use else 0
        recent, older = [e for e in gate if e.id > last], [e for e in gate if e.id <= last]
        if len(recent) < ENOUGH_RECENT:
            recent, older = list(gate), []
    stride = max(1, -(-len(older) // MOST_OLDER))  # evenly over the past
    return recent[-MOST_RECENT:], older[::stride]


def _check_enough(train: int, validation: int, gate: int, where: str) -> None:
    """Raise AdaptiveError saying how much there is, how much is needed, and about how much more that is."""
    needs = (
        (MIN_TRAIN - train, 1 - GATE_SHARE - VALIDATION_SHARE),
        (MIN_VALIDATION - validation, VALIDATION_SHARE),
        (MIN_GENERATIONS - gate, GATE_SHARE),
    )
    more = max(math.ceil(missing / share) for missing, share in needs)
    if more > 0:
        raise AdaptiveError(
            f"too little to distil from: {where} has {train + validation + gate} usable generations: {train} to train "
            f"on, {validation} to choose a checkpoint by and {gate} for the gate ({MIN_TRAIN}, {MIN_VALIDATION} and "
            f"{MIN_GENERATIONS} are needed); about {more} more will do"
        )


@contextmanager
def _in_use(
    draft: PreTrainedModel, store: AdapterStore, in_use: Manifest | None
) -> Iterator[PreTrainedModel | PeftModel]:
    """The draft as it is in use now."""
    if in_use is None:
        yield draft
        return
    model = lora.load(draft, store.path(in_use.id))
    try:
        yield model
    finally:
        lora.remove(model)


@contextmanager
def _trainable(
    draft: PreTrainedModel, store: AdapterStore, in_use: Manifest | None, recipe: Recipe
) -> Iterator[PeftModel]:
    """The draft with the adapter to train: a new one, or a copy of the one in use to go on from."""
    if recipe.start == "parent" and in_use is not None:
        model = lora.load(draft, store.path(in_use.id), trainable=True)
    else:
        model = lora.attach(draft, recipe)
    try:
        yield model
    finally:
        lora.remove(model)


def _judged(
    model: PeftModel, sets: _Sets, result: Fit, should_stop: Callable[[], bool] | None
) -> tuple[list[Replay] | None, Fit]:
    """Replays of the gate's sets by the candidate, or None and a result that says it was stopped."""
    if result.stopped:
        return None, result
    try:
        return replay(model, sets.gate, should_stop), result
    except Stopped:
        return None, replace(result, stopped=True)


def _figures(
    before: list[Replay], after: list[Replay] | None, recent: int, draft_length: int
) -> tuple[HeldOut, HeldOut | None] | None:
    """Figures of the recent and the older set, None where the candidate was not replayed."""
    if after is None:
        return None
    older = held_out(before[recent:], after[recent:], draft_length) if before[recent:] else None
    return held_out(before[:recent], after[:recent], draft_length), older


def _publish(
    store: AdapterStore,
    base: BaseDraft,
    model: PeftModel,
    result: Fit,
    figures: tuple[HeldOut, HeldOut | None] | None,
    sets: _Sets,
    recipe: Recipe,
    in_use: Manifest | None,
) -> Manifest:
    """The best checkpoint as a candidate in the store."""
    state = result.best
    assert state is not None
    ids = [e.id for e in sets.train if e.id > 0]
    new = NewAdapter(
        base=base,
        trained_on=TrainedOn(
            first_id=min(ids, default=None),
            last_id=max(ids, default=None),
            generations=len(sets.train),
            tokens=sum(len(e.output) for e in sets.train),
            domains=domains(sets.train),
        ),
        parent=in_use.id if in_use and recipe.start == "parent" else None,
        hyperparameters={**recipe.to_json(), "steps": result.steps, "best_step": result.best_step},
        train_seconds=result.seconds,
        device=str(next(model.parameters()).device),
        recent=figures[0] if figures else None,
        older=figures[1] if figures else None,
        reason="not judged yet" if figures else f"stopped at step {result.steps}, not judged",
    )
    return store.publish(lambda folder: lora.write(model, state, folder), new)


def _settle(store: AdapterStore, candidate: Manifest, verdict: Verdict | None, promotion: Promotion) -> Manifest:
    """Promote or reject the candidate, as the verdict and the caller say."""
    if verdict is None or promotion == "never":
        return candidate
    if verdict.promote:
        return store.promote(candidate.id, verdict.reason)
    if promotion == "force":
        return store.promote(candidate.id, f"promoted by hand, though the gate said: {verdict.reason}")
    return store.reject(candidate.id, verdict.reason)


def _message(manifest: Manifest | None, verdict: Verdict | None, result: Fit, validation: int) -> str:
    """One sentence for a person."""
    if manifest is None and result.stopped:
        return (
            f"Stopped after {result.steps} steps, before any better draft was found; log and adapters are as they were."
        )
    if manifest is None:
        return (
            f"No checkpoint was better than the draft in use on {validation} validation generations; "
            "nothing was kept, and the draft in use stays."
        )
    if verdict is None:
        return (
            f"Stopped after {result.steps} steps; the best draft so far (step {result.best_step}) is kept as candidate "
            f"{manifest.id}, not judged and not in use."
        )
    if manifest.status == "promoted":
        forced = "" if verdict.promote else " by hand, against the gate"
        return f"Adapter {manifest.id} is promoted{forced}: {verdict.reason}."
    if manifest.status == "candidate":
        return f"Adapter {manifest.id} is kept as a candidate, as asked; the gate says: {verdict.reason}."
    return f"Adapter {manifest.id} is rejected and the draft in use stays: {verdict.reason}."
