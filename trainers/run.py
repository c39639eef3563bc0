"""One training run, from the log to a judged adapter: the function behind ``adaptive distill``.

log -> dataset -> split by prompt -> train on one part -> choose the best weights on the second ->
publish as candidate with its figures on the third -> gate -> promoted or rejected.

If the process is killed at any moment, the log is unchanged (it is only read) and the store is valid (an adapter is
published whole or not at all; one that was not judged yet stays a candidate).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from adaptive.engines.head.foreign import ForeignHead
from adaptive.errors import AdaptiveError
from adaptive.printable import counted
from adaptive.state import PairState
from checkpoints.manifest import NOT_JUDGED, BaseDraft, HeldOut, Manifest, TrainedOn
from checkpoints.store import AdapterStore, InUseChanged, NewAdapter
from trainers import processes
from trainers.dataset import Example, Stopped, domains
from trainers.fit import Fit, Progress, fit
from trainers.gate import Verdict, held_out, judge
from trainers.recipe import Recipe
from trainers.replay import Replay
from trainers.replayed import IN_USE, KeptReplays
from trainers.resume import TrainingState
from trainers.sets import Sets, gather
from trainers.students import DraftStudents, Student, Students, students_of

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

    from adaptive.engines.head.module import Head
    from adaptive.records.features import FeatureSpool
    from trainers.rehearsal import Rehearsal

Promotion = Literal["gate", "never", "force"]

# In acceptance on the validation prompts: how far a candidate may be below the draft in use and still reach the gate.
# The draft in use was itself the best of many checkpoints on these prompts, so it looks better there than it is: with
# 0, twice the records made no better adapter. Too high: the gate judges candidates that cannot pass.
VALIDATION_SLACK = 0.03
# Seconds for which a judged candidate stays, however many runs follow: a person asked for it (``--no-promote``). Too
# low: it is gone before it was looked at. Too high: a command that makes one every night fills the disk.
ASKED_FOR_S = 30 * 86400.0


@dataclass(frozen=True)
class Attempt:
    """One recipe of a run and the result of its training; ``fit.acceptance`` is on the validation prompts."""

    recipe: Recipe
    fit: Fit


@dataclass(frozen=True)
class DistillOutcome:
    """The result of a run.

    ``manifest`` is the adapter as it is now in the store, None if none was worth keeping.
    ``verdict`` is None if the gate did not judge (no better weights, or stopped early).
    ``message`` is one sentence that describes the result. ``train_seconds`` is training with its evaluations and
    without its pauses, ``seconds`` the whole run. ``until`` is the id of the newest record that was read, an older one
    in a run that was continued, 0 in one that was stopped while it read. ``notes`` are lines for the user, such as a
    damaged adapter that was set aside. ``attempts`` are the recipes that were tried, the requested one first.
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
    until: int = 0
    notes: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = ()

    @property
    def promoted(self) -> str | None:
        """The id of the adapter, if this run has put it into use."""
        return self.manifest.id if self.manifest is not None and self.manifest.status == "promoted" else None


def distill(
    log: Path | None,
    store: AdapterStore,
    base: BaseDraft,
    draft: PreTrainedModel | Head | ForeignHead,
    recipe: Recipe,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    extra: Dataset | None = None,
    promotion: Promotion = "gate",
    state: Path | None = None,
    rivals: Sequence[Recipe] = (),
    spool: FeatureSpool | None = None,
    rehearsal: Rehearsal | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> DistillOutcome:
    """Train an adapter for ``draft`` on the log (and ``extra`` rows) and let the gate decide.

    ``draft`` is a fresh float32 copy on the training device; its weights are not changed, except those of a head that
    is trained here from scratch. Heads learn from the records whose features are in ``spool``. With
    ``extra``, its held-out rows are the gate's recent set and held-out records of the log the older
    one. ``log`` None trains on ``extra`` alone. ``should_stop`` is called while records are read and between passes,
    and may block. When it returns True, the best weights so far are kept as a candidate that was not judged.
    ``promotion`` never leaves the adapter a candidate, force promotes it whatever the verdict.
    ``state`` is the file from which an interrupted run is continued (``trainers.resume``).
    ``rivals`` are trained as well, one after the other, and the gate judges the one that is best on the validation
    prompts; such a run cannot be continued. ``rehearsal`` gives the draft's own text, on which an adapter keeps what
    the draft knows; heads do without. ``clock`` measures the seconds of training; it stands still during pauses.

    Raises TooLittleError if there are too few records to learn from or to judge by, and AdaptiveError if something else
    is wrong, such as a full disk, or an adapter in use that cannot be read.
    """
    began = time.perf_counter()
    in_use, notes = adapter_in_use(store, base)
    current = store.current_id()  # may be an adapter of other weights, which is not used
    kept = TrainingState(state) if state is not None and not rivals else None
    students = students_of(draft)
    spool = spool if students.reads_features else None
    if extra is not None and students.reads_features:
        raise AdaptiveError(
            "a head learns from the target's hidden states, which a file of chat messages does not hold; let the "
            "target answer prompts with --prompts, or learn from the log"
        )
    sets, resumed = Sets([], [], [], []), False
    run: _Run | None = None
    # Without an adapter in use, "parent" equals "zero", so rivals with the other start are left out.
    recipes = [recipe, *(r for r in rivals if in_use is not None or r.start == recipe.start)]
    try:
        sets, resumed = gather(log, extra, in_use, recipe, base, students.longest_output, kept, spool, should_stop)
        if kept is not None and not resumed:
            kept.mark()
        replays = KeptReplays(kept if processes.count() == 1 else None)
        run = _Run(students, store, base, in_use, sets, replays, should_stop)
        own = partial(_own, students, rehearsal, recipe, len(sets.train), on_progress, should_stop)
        attempts, stopped = run.attempts(recipes, processes.in_all(own, Stopped), kept, on_progress, clock)
    except Stopped:
        attempts, stopped = [], True
    manifest, verdict = None, None
    best = max(attempts, key=lambda a: a.fit.acceptance, default=Attempt(recipe, Fit(None, 0.0, 0, 0, 0.0, stopped)))
    result = replace(best.fit, seconds=sum(a.fit.seconds for a in attempts), stopped=stopped)
    if run is not None and result.best is not None and processes.first():
        figures, result = run.figures(best.recipe, result)
        if figures is not None or not result.earlier:  # else the run before has left these weights as a candidate
            manifest = run.publish(best.recipe, result, figures, promotion)
            if figures is not None:
                verdict = judge(*figures, streak=_streak(store, manifest))
            manifest = _settle(store, manifest, verdict, promotion, current)
    elif not result.stopped and processes.first():
        with suppress(AdaptiveError):  # the result does not depend on it
            store.kept_nothing(result.seconds)
    if kept is not None and not result.stopped:
        kept.forget()
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
        until=sets.until,
        notes=(*notes, *_notes(resumed, len(sets.damaged), kept.problem if kept else None)),
        attempts=tuple(attempts),
    )


def adapter_in_use(store: AdapterStore, base: BaseDraft) -> tuple[Manifest | None, list[str]]:
    """The adapter in use, None for the plain draft, and notes for the user (``AdapterStore.usable``). Raises
    UnreadableAdapter while it cannot be read: it may be better than the draft that is used in its place, so nothing may
    be judged by that one."""
    in_use, notes = store.usable(base) if store.root.is_dir() else (None, [])
    if (problem := store.unreadable(in_use)) is not None:
        raise problem
    return in_use, notes


def _notes(resumed: bool, damaged: int, unkept: str | None) -> list[str]:
    """Notes for the user on how the run came about."""
    notes = ["going on with the run that was interrupted"] if resumed else []
    if unkept:
        notes.append(f"where the training stood could not be kept ({unkept}); interrupted, it would have begun anew")
    if damaged:
        records = "a damaged record is" if damaged == 1 else f"{damaged} damaged records are"
        notes.append(f"{records} left out; `adaptive records check` names what is damaged")
    return notes


def _own(
    students: Students,
    rehearsal: Rehearsal | None,
    recipe: Recipe,
    records: int,
    on_progress: Callable[[Progress], None] | None,
    should_stop: Callable[[], bool] | None,
) -> list[Example]:
    """The draft's own text for a run that learns from so many ``records``, none for a head. Raises Stopped."""
    if rehearsal is None or not recipe.rehearsed or not isinstance(students, DraftStudents):
        return []
    if isinstance(students.draft, ForeignHead):
        return []

    def tell(written: int, texts: int) -> None:
        if on_progress is not None:
            on_progress(Progress(written, texts, math.nan, math.nan, math.inf, "texts to keep"))

    return rehearsal.texts(students.draft, records, should_stop or (lambda: False), tell)


@dataclass(frozen=True)
class _Run:
    """What the steps of a run share: who learns from what, the adapter ``in_use`` in the ``store`` (None for the plain
    draft), and the replays that an interrupted run has left."""

    students: Students
    store: AdapterStore
    base: BaseDraft
    in_use: Manifest | None
    sets: Sets
    replays: KeptReplays
    should_stop: Callable[[], bool] | None

    def attempts(
        self,
        recipes: Sequence[Recipe],
        own: list[Example],
        kept: TrainingState | None,
        on_progress: Callable[[Progress], None] | None,
        clock: Callable[[], float],
    ) -> tuple[list[Attempt], bool]:
        """Train by each recipe, one after the other. Also returns whether this was stopped early. Raises Stopped before
        the first one."""
        attempts: list[Attempt] = []
        with self.students.in_use(self._folder, recipes[0]) as student:
            in_use_acceptance = self._acceptance(IN_USE, student)
        for tried in recipes:
            with self.students.trainable(self._parent(tried), tried) as student:

                def evaluate(step: int, student: Student = student) -> float:
                    return self._acceptance(f"step {step}", student)

                found = fit(student, self.sets.train, evaluate, tried, on_progress, self.should_stop, kept, own, clock)
            worse = found.acceptance < in_use_acceptance - VALIDATION_SLACK
            attempts.append(Attempt(tried, replace(found, best=None) if worse else found))
            if found.stopped:
                return attempts, True
        return attempts, False

    def _acceptance(self, name: str, student: Student) -> float:
        """Acceptance on the validation set, of which every process replays a part. Raises Stopped in all if it is
        raised in one."""
        replays: list[Replay] = []
        stopped = False
        try:
            part = processes.share(self.sets.validation)
            replays = self.replays.replay(f"{name}, validation", student, part, self.should_stop)
        except Stopped:
            stopped = True
        accepted = sum(r.rate * r.positions for r in replays)
        drafted = sum(r.positions for r in replays)
        accepted, positions, anyone_stopped = processes.total([accepted, drafted, stopped])
        if anyone_stopped:
            raise Stopped
        return accepted / positions

    def figures(self, recipe: Recipe, result: Fit) -> tuple[tuple[HeldOut, HeldOut | None] | None, Fit]:
        """Figures of the gate's recent and older set, or None and a result with ``stopped`` set."""
        assert result.best is not None
        if result.stopped:
            return None, result
        gate = self.sets.gate
        try:
            with self.students.in_use(self._folder, recipe) as student:
                before = self.replays.replay(f"{IN_USE}, gate", student, gate, self.should_stop)
            with self.students.trainable(self._parent(recipe), recipe) as student:
                student.restore(result.best)
                after = self.replays.replay(f"step {result.best_step}, gate", student, gate, self.should_stop)
        except Stopped:
            return None, replace(result, stopped=True)
        recent, length = len(self.sets.recent), recipe.draft_length
        older = held_out(before[recent:], after[recent:], length) if before[recent:] else None
        return (held_out(before[:recent], after[:recent], length), older), result

    def publish(
        self, recipe: Recipe, result: Fit, figures: tuple[HeldOut, HeldOut | None] | None, promotion: Promotion
    ) -> Manifest:
        """Publish the best weights as a candidate in the store."""
        state, train = result.best, self.sets.train
        assert state is not None
        reason = "kept as a candidate, as asked" if promotion == "never" else NOT_JUDGED
        ids = [e.id for e in train if e.id > 0]
        parent = self._parent(recipe)
        new = NewAdapter(
            base=self.base,
            trained_on=TrainedOn(
                first_id=min(ids, default=None),
                last_id=max(ids, default=None),
                generations=len(train),
                tokens=sum(len(e.output) for e in train),
                domains=domains(train),
            ),
            kind=self.students.kind,
            parent=self.in_use.id if self.in_use and parent else None,
            hyperparameters={
                **recipe.to_json(),
                "steps": result.steps,
                "best_step": result.best_step,
                **self.students.notes(state, self.sets.gate),
            },
            train_seconds=result.seconds,
            device=str(self.students.device),
            recent=figures[0] if figures else None,
            older=figures[1] if figures else None,
            reason=reason if figures else f"stopped at step {result.steps}, not judged",
        )
        with self.students.trainable(parent, recipe) as student:
            return self.store.publish(lambda folder: student.write(state, folder), new)

    @property
    def _folder(self) -> Path | None:
        return None if self.in_use is None else self.store.path(self.in_use.id)

    def _parent(self, recipe: Recipe) -> Path | None:
        """The folder that training continues from. A head always continues the one in use, since it takes long to
        train."""
        return self._folder if recipe.start == "parent" or self.students.kind == "head" else None


def _streak(store: AdapterStore, candidate: Manifest) -> int:
    """The number (from 1) of this candidate since the last one that was promoted, whether that is still in use or not.
    Candidates that were stopped and not judged do not count; pruned ones do."""
    earlier = [one for one in store.trained() if int(one.id) < int(candidate.id)]
    before = max((int(one.id) for one in earlier if one.promoted), default=0)
    unjudged = sum(not one.judged for one in earlier if int(one.id) > before)
    return int(candidate.id) - before - unjudged


def _settle(
    store: AdapterStore, candidate: Manifest, verdict: Verdict | None, promotion: Promotion, current: str | None
) -> Manifest:
    """Promote or reject the candidate by ``promotion`` and the verdict, which compares it with ``current``."""
    if verdict is None or promotion == "never":
        return candidate
    if promotion == "force":
        by_hand = "" if verdict.promote else "promoted by hand, though the gate said: "
        return store.promote(candidate.id, by_hand + verdict.reason)
    if not verdict.promote:
        return store.reject(candidate.id, verdict.reason)
    try:
        return store.promote(candidate.id, verdict.reason, over=(current, candidate.id))
    except InUseChanged:  # by the user, or by the watch over live acceptance
        return store.reject(candidate.id, "another draft has come into use since it was compared with the one before")


def tidy(store: AdapterStore, state: PairState, keep: int) -> list[str]:
    """Delete old adapters after a run, so that the store does not grow without bound. Returns lines for the user.

    Besides those that ``AdapterStore.prune`` keeps stay: the one that is to be judged again, and for a month those that
    a person asked to keep.
    """
    doubted = _in_doubt(state)

    def spare(manifest: Manifest) -> bool:
        asked_for = manifest.status == "candidate" and manifest.judged
        return manifest.id == doubted or (asked_for and time.time() - manifest.created < ASKED_FOR_S)

    try:
        deleted = store.prune(keep, spare) if processes.first() else ()
    except AdaptiveError as error:
        return [f"old adapters could not be deleted: {error}"]
    return [f"deleted old adapters: {', '.join(deleted)} (keep_adapters is {keep})"] if deleted else []


def _in_doubt(state: PairState) -> str | None:
    """The adapter that ``adaptive.service.doubts`` has noted, which is to be judged again."""
    try:
        said = json.loads(state.doubts.read_bytes())["adapter"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return said if isinstance(said, str) else None


def _message(manifest: Manifest | None, verdict: Verdict | None, result: Fit, validation: int) -> str:
    """One sentence for the user."""
    stopped = f"Stopped after {counted(result.steps, 'step')}"
    if manifest is None and result.stopped:
        return f"{stopped}, before any better draft was found; log and adapters are as they were."
    if manifest is None:
        return (
            f"No state of training was as good as the draft in use on {counted(validation, 'validation answer')}; "
            "nothing was kept, and the draft in use stays."
        )
    if verdict is None:
        return (
            f"{stopped}; the best draft so far (step {result.best_step}) is kept as candidate {manifest.id}, not "
            "judged and not in use."
        )
    if manifest.status == "promoted":
        forced = "" if verdict.promote else " by hand, against the gate"
        return f"Adapter {manifest.id} is promoted{forced}: {verdict.reason}."
    if manifest.status == "candidate":
        return f"Adapter {manifest.id} is kept as a candidate, as asked; the gate says: {verdict.reason}."
    return f"Adapter {manifest.id} is rejected and the draft in use stays: {manifest.reason}."
