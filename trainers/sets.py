"""The records of a training run: the training set, the validation set, and the gate's sets."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from adaptive.printable import counted
from adaptive.records.log import Log
from checkpoints.manifest import BaseDraft, Manifest
from trainers import processes
from trainers.dataset import (
    VALIDATION_SHARE,
    Example,
    Stopped,
    TooLittleError,
    examples,
    from_rows,
    gate_share,
    held,
    join,
    read_log,
    split,
)
from trainers.gate import MIN_GENERATIONS, MIN_POSITIONS
from trainers.recipe import Recipe
from trainers.resume import TrainingState

if TYPE_CHECKING:
    from datasets import Dataset

    from adaptive.records.features import FeatureSpool

# With fewer, the draft learns the wording of a few answers and nothing general.
MIN_TRAIN = 16

# Prompts. With fewer, the choice of the best weights is random. That is acceptable, since the gate still decides.
MIN_VALIDATION = 2

# Prompts of new held-out generations from which on these are judged separately from the older ones. Too low: only a
# very large gain is certain. Too high: an adapter for a new kind of use waits longer.
ENOUGH_RECENT = 12

# Most generations replayed. Twice as many would narrow the gate's intervals by a third and take
# as much additional time as the training of a small run.
MOST_VALIDATION = 48
MOST_RECENT = 128
MOST_OLDER = 64
# Most generations of validation or gate that answer one prompt, the newest, since the gate's unit of evidence is a
# prompt. Too high: MOST_RECENT steps of an agent are a few of its tasks, too few to judge by, and MOST_VALIDATION are a
# single one. Too low: each task is measured less well.
MOST_OF_ONE = 8


@dataclass(frozen=True)
class Sets:
    """The records of a run, up to id ``until`` of the log. ``recent`` and ``older`` are the gate's; ``damaged`` could
    not be read. ``digest``: that of all records to train on and to choose the weights by, and of their split, whether
    their features are there or not."""

    train: list[Example]
    validation: list[Example]
    recent: list[Example]
    older: list[Example]
    damaged: frozenset[int] = frozenset()
    until: int = 0
    digest: str = ""

    @property
    def gate(self) -> list[Example]:
        return self.recent + self.older


def gather(
    log: Path | None,
    extra: Dataset | None,
    in_use: Manifest | None,
    recipe: Recipe,
    base: BaseDraft,
    longest: int,
    kept: TrainingState | None,
    spool: FeatureSpool | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> tuple[Sets, bool]:
    """The records of this run, and whether it continues an interrupted run. With a ``spool``, only records with
    features in it. An interrupted run of which too few are left is forgotten.

    Raises TooLittleError, and Stopped (in all processes) if ``should_stop`` returns True meanwhile.
    """

    def read(until: int) -> Sets:
        one = partial(_read, log, extra, in_use, recipe, longest, spool, should_stop, until)
        return processes.in_all(one, Stopped)

    made_of = (recipe.to_json(), base.weights, in_use.id if in_use else None)
    begun_with = kept.last_id() if kept else None
    if kept is not None and begun_with is not None:
        sets = read(begun_with)
        interrupted = kept.begin((*made_of, sets.digest), begun_with)
        if processes.everywhere(interrupted and not _missing(sets, in_use is None)):
            return sets, True
        if interrupted:
            kept.forget()
    newest = _newest(log)
    sets = read(newest)
    where = "the log" if extra is None else "the data"
    _check_enough(sets, in_use is None, where if spool is None else f"{where}, where hidden states were kept,")
    if kept is not None:
        kept.begin((*made_of, sets.digest), newest)
    return sets, False


def _newest(log: Path | None) -> int:
    """The id of the newest record, the same one in all processes."""
    there = log is not None and log.exists() and processes.first()
    return int(processes.total([Log(log).last_id() if log is not None and there else 0])[0])


def _read(
    log: Path | None,
    extra: Dataset | None,
    in_use: Manifest | None,
    recipe: Recipe,
    longest: int,
    spool: FeatureSpool | None,
    should_stop: Callable[[], bool] | None,
    until: int,
) -> Sets:
    """Read the records up to id ``until`` and split them. Raises Stopped."""
    rows = from_rows([])
    damaged: set[int] = set()
    if log is not None and (log.exists() or extra is None):
        rows = read_log(log, recipe.buffer, until, damaged, should_stop)
    if extra is not None:
        rows = join(rows, extra)
    parts = split(rows, first=in_use is None)
    train, validation, gate = (
        examples(part, longest, spool, should_stop) for part in (parts.train, parts.validation, parts.gate)
    )
    validation, gate = (newest_of_each(distinct(e for e in part if e.replayable)) for part in (validation, gate))
    recent, older = _recent_and_older(gate, in_use, extra is not None)
    validation, recent, older = (held(part, should_stop) for part in (validation[-MOST_VALIDATION:], recent, older))
    return Sets(train, validation, recent, older, frozenset(damaged), until, _digest(parts.train, parts.validation))


def _digest(*parts: Dataset) -> str:
    """A digest of the records in ``parts``, by their ids, tokens and folds, and of which part each is in."""
    rows = [list(zip(part["id"], part["tokens"], part["fold"], strict=True)) for part in parts]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def distinct(found: Iterable[Example]) -> list[Example]:
    """``found`` without repeated answers to the same prompt, which are no new evidence. The last one is kept."""
    kept, seen = [], set()
    for example in reversed(list(found)):
        said = (example.prompt.tobytes(), example.output.tobytes())
        if said not in seen:
            seen.add(said)
            kept.append(example)
    return kept[::-1]


def newest_of_each(found: Sequence[Example]) -> list[Example]:
    """``found`` without all but the last MOST_OF_ONE of each prompt, in the same order."""
    kept: list[Example] = []
    count: Counter[float] = Counter()
    for example in reversed(found):
        count[example.fold] += 1
        if count[example.fold] <= MOST_OF_ONE:
            kept.append(example)
    return kept[::-1]


def _prompts(found: Sequence[Example]) -> int:
    """How many different prompts there are among those of ``found``."""
    return len({example.fold for example in found})


def _positions(found: Sequence[Example]) -> int:
    """The number of output positions of ``found`` at which a token may be drafted."""
    return sum(len(example.output) - 1 for example in found)


def _recent_and_older(
    gate: Sequence[Example], in_use: Manifest | None, from_file: bool
) -> tuple[list[Example], list[Example]]:
    """The gate's two sets, from examples in the order of the log.

    Recent are the rows of a file if one was given, else the records after those on which the adapter
    in use was trained. If these are too few to detect a gain, all are judged as one set.
    """
    if from_file:
        recent, older = [e for e in gate if e.id < 0], [e for e in gate if e.id >= 0]
    else:
        last = (in_use.trained_on.last_id or 0) if in_use else 0
        recent, older = [e for e in gate if e.id > last], [e for e in gate if e.id <= last]
        if _prompts(recent) < ENOUGH_RECENT or _positions(recent) < MIN_POSITIONS:
            recent, older = list(gate), []
    stride = max(1, -(-len(older) // MOST_OLDER))  # evenly over the past
    return recent[-MOST_RECENT:], older[::stride]


def _missing(sets: Sets, first: bool) -> int:
    """About how many more answers are needed for sets that are large enough; 0 if they are."""
    train, validation, gate = len(sets.train), len(sets.validation), len(sets.recent)
    prompts, positions = _prompts(sets.recent), _positions(sets.recent)
    of_each = max(1.0, (train + validation + gate) / max(1, _prompts(sets.train + sets.validation + sets.recent)))
    share = gate_share(train + validation + gate, first)
    needs = (
        (MIN_TRAIN - train, 1 - share - VALIDATION_SHARE),
        ((MIN_VALIDATION - _prompts(sets.validation)) * of_each, VALIDATION_SHARE),
        ((MIN_GENERATIONS - prompts) * of_each, share),
        ((MIN_POSITIONS - positions) * gate / max(1, positions), share),
    )
    return max(0, *(math.ceil(missing / share) for missing, share in needs))


def _check_enough(sets: Sets, first: bool, where: str) -> None:
    """Raise TooLittleError if a set is too small; the message states what is present, needed and missing."""
    more = _missing(sets, first)
    if more > 0:
        train, validation, gate = len(sets.train), len(sets.validation), len(sets.recent)
        chosen_by, judged_by = (counted(_prompts(part), "prompt") for part in (sets.validation, sets.recent))
        raise TooLittleError(
            f"too little to distil from: {where} has {train + validation + gate} usable answers: {train} to train "
            f"on, {validation} to choose weights by, of {chosen_by}, and {gate} for the gate, of {judged_by} and with "
            f"{counted(_positions(sets.recent), 'position')} ({MIN_TRAIN}, {MIN_VALIDATION} and {MIN_GENERATIONS} are "
            f"needed, the latter two of as many prompts, and the gate's with {MIN_POSITIONS} positions); about {more} "
            "more will do",
            more,
        )
