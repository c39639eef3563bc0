"""Judges an adapter again that was rolled back because of its live acceptance.

In: the log, and the adapter that was rolled back. Out: it is promoted again or stays rolled back, and a
sentence with the reason.

Live acceptance falls when a draft is bad, but also when users begin to ask for another kind of text, which
any draft guesses worse. Only the same text under both drafts separates the two causes. Replay provides that: every
answer since the adapter came into use, which it was not trained on, is replayed by it and by the draft in use now.
The gate's own rule decides, so an adapter returns only if a gain is certain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adaptive.errors import AdaptiveError
from adaptive.records.log import Log
from checkpoints.manifest import BaseDraft, Manifest
from checkpoints.store import AdapterStore, InUseChanged
from trainers.dataset import Example, examples, held, read_log
from trainers.gate import held_out, judge
from trainers.recipe import Recipe
from trainers.replay import Replay
from trainers.students import Students, students_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from adaptive.engines.head.foreign import ForeignHead
    from adaptive.engines.head.module import Head
    from adaptive.records.features import FeatureSpool

# Most answers replayed, the newest. More narrow the interval and take longer.
MOST = 128


def reconsider(
    log: Path,
    store: AdapterStore,
    base: BaseDraft,
    draft: PreTrainedModel | Head | ForeignHead,
    name: str,
    should_stop: Callable[[], bool] | None = None,
    spool: FeatureSpool | None = None,
) -> tuple[Manifest, str]:
    """Replay the answers since adapter ``name`` came into use, by that adapter and by the draft in use now.

    Returns its manifest after the decision, and a sentence. Raises AdaptiveError if there is nothing
    to judge by or the adapter is in use again, and Stopped between passes when ``should_stop`` returns True.
    """
    in_use, _ = store.usable(base)
    current = store.current_id()
    if in_use is not None and in_use.id == name:
        raise AdaptiveError(f"adapter {name} is in use again; there is nothing to reconsider")
    since = Log(log).first_id(name)
    rows = read_log(log, Recipe().buffer)
    students = students_of(draft)
    known = examples(rows, students.longest_output, spool if students.reads_features else None)
    said = [e for e in known if e.replayable and since is not None and e.id >= since]
    if not said:
        raise AdaptiveError(f"nothing was said since adapter {name} came into use")
    said = held(said[-MOST:])
    before = _replayed(students, store, None if in_use is None else in_use.id, said, should_stop)
    after = _replayed(students, store, name, said, should_stop)
    verdict = judge(held_out(before, after, Recipe().draft_length), None, streak=1)
    if not verdict.promote:
        return store.show(name), f"Adapter {name} stays rolled back: {verdict.reason}."
    reason = f"back in use: on what was said since, it is the better draft ({verdict.reason})"
    try:
        return store.promote(name, reason, over=(current,)), f"Adapter {name} is {reason}."
    except InUseChanged:  # by another process, or the user
        return store.show(name), f"Adapter {name} stays rolled back: another adapter has come into use since."


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
