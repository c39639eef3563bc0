"""Which draft is best for what is said now: with the adapter in use, with the one in doubt, or without any.

In: the log and the adapters. Out: the best of these drafts, and a sentence with the reason. Nothing is changed here.

The gate judges an adapter once, on what was said until then, and live acceptance falls or rises with the kind of text
whatever the draft is. So neither sees that an adapter suits what is said now worse than the plain draft, nor that one
was taken out of use only because users began to ask for something harder. Only the same text under each draft tells.
Replay gives that: the newest answers, on which no adapter was trained, are replayed by each draft.

Another draft is chosen if it is surely better (the gate's rule, for the STREAK-th candidate, since this is asked again
and again) on the newest FEW answers, or on the newest MANY while it is no worse on the newest FEW.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adaptive.errors import AdaptiveError
from adaptive.printable import counted
from checkpoints.manifest import BaseDraft, HeldOut
from checkpoints.store import AdapterStore
from trainers.dataset import Example, TooLittleError, examples, held, read_log
from trainers.gate import MIN_GENERATIONS, held_out, judge
from trainers.recipe import Recipe
from trainers.replay import Replay
from trainers.sets import distinct, newest_of_each
from trainers.students import Students, students_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from adaptive.engines.head.foreign import ForeignHead
    from adaptive.engines.head.module import Head
    from adaptive.records.features import FeatureSpool

# Newest answers. Too few: only a large difference is certain. Too many: what was said before outweighs what is said
# now.
FEW, MANY = 24, 96
# Newest answers that are read to find these. Too few: the steps of one agent's task are all of them. Too many: reading
# takes long.
READ = 4 * MANY
# See ``gate.alpha``: a chance of 0.24% that a draft which is no better is chosen.
STREAK = 4
# Gain in acceptance that is worth a swap.
WORTH = 0.02


@dataclass(frozen=True)
class Review:
    """``best`` is the id of the adapter of the best draft, None for the plain draft; ``message`` says why."""

    best: str | None
    message: str


def review(
    log: Path,
    store: AdapterStore,
    base: BaseDraft,
    draft: PreTrainedModel | Head | ForeignHead,
    doubted: str | None,
    should_stop: Callable[[], bool] | None = None,
    spool: FeatureSpool | None = None,
) -> Review:
    """Compare the draft in use with the plain draft and with the adapter ``doubted`` on the newest answers.

    ``draft`` as for ``distill``. A head that is grown here has no plain draft. Raises TooLittleError if there is no
    other draft or too little to compare on, and Stopped when ``should_stop`` returns True.
    """
    students = students_of(draft)
    in_use, _ = store.usable(base)
    current = None if in_use is None else in_use.id
    others: list[str | None] = [] if students.kind == "head" else [None]
    with suppress(AdaptiveError):  # deleted or damaged since
        if doubted is not None and store.verify(doubted).base.weights == base.weights:
            others.append(doubted)
    others = [one for one in others if one != current]
    if not others:
        raise TooLittleError("there is no other draft to compare the one in use with")
    said = _unlearned(log, store, students, [one for one in (current, *others) if one is not None], spool, should_stop)
    before = _replayed(students, store, current, said, should_stop)
    best, reason, gain = current, "", 0.0
    for other in others:
        after = _replayed(students, store, other, said, should_stop)
        found = better(before, after)
        if found is not None and found.gain.mean > gain:
            best, gain = other, found.gain.mean
            reason = (
                f"on the newest answers, to {found.generations} prompts, {_named(other)} has an acceptance of "
                f"{found.acceptance_after.mean:.2f}, and {_named(current)} of {found.acceptance_before.mean:.2f}"
            )
    if best == current:
        return Review(current, f"{_named(current)} stays in use: no other draft is surely better on the newest answers")
    return Review(best, reason)


def _unlearned(
    log: Path,
    store: AdapterStore,
    students: Students,
    adapters: Sequence[str],
    spool: FeatureSpool | None,
    should_stop: Callable[[], bool] | None,
) -> list[Example]:
    """The newest answers on which none of ``adapters`` was trained, at most MANY, and few to any one prompt."""
    learned = max((store.show(one).trained_on.last_id or 0 for one in adapters), default=0)
    rows = read_log(log, READ, should_stop=should_stop)
    known = examples(rows, students.longest_output, spool if students.reads_features else None)
    said = held(newest_of_each(distinct(e for e in known if e.replayable and e.id > learned))[-MANY:])
    if len(said) < MIN_GENERATIONS:
        raise TooLittleError(
            f"too little was said since the last training to compare drafts on: {counted(len(said), 'answer')}"
        )
    return said


def better(before: Sequence[Replay], after: Sequence[Replay]) -> HeldOut | None:
    """The figures by which the draft of ``after`` is surely better than that of ``before``; None if it is not."""
    few = held_out(before[-FEW:], after[-FEW:], Recipe().draft_length)
    many = held_out(before, after, Recipe().draft_length)
    for figures in (few, many):
        if judge(figures, None, STREAK).promote and figures.gain.mean >= WORTH and few.gain.mean >= 0:
            return figures
    return None


def _named(adapter: str | None) -> str:
    return "the draft without an adapter" if adapter is None else f"adapter {adapter}"


def _replayed(
    students: Students,
    store: AdapterStore,
    name: str | None,
    said: Sequence[Example],
    should_stop: Callable[[], bool] | None,
) -> list[Replay]:
    """The replay of ``said`` by the draft with adapter ``name``, or by the plain draft (None)."""
    with students.in_use(None if name is None else store.path(name), Recipe()) as student:
        return student.replay(said, should_stop)
