"""Deletes answers with all that was made of them, also if the process ends in between.

Before the first record is deleted, a note beside the log names the records. It is removed when no trace of them is
left. So a deletion that was interrupted, or met a full disk or another reader, is finished by the next one, or at the
next start of a program that uses the pair (``finish``).
"""

from __future__ import annotations

import json
import logging
import secrets
import sqlite3
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from adaptive.errors import AdaptiveError
from adaptive.printable import counted
from adaptive.records.erase import erase_beside
from adaptive.records.log import Log
from adaptive.records.schema import DamagedLogError
from adaptive.state import PairState
from checkpoints import files

logger = logging.getLogger("adaptive.records")

# How the name of a note begins.
NOTE = "deletion-"


@dataclass(frozen=True)
class Deletion:
    """What is to be deleted: the records ``ids``, and if ``everything``, all up to the id ``until`` (None for a log
    that could not be read), the typed lines and the state of an interrupted training run."""

    ids: frozenset[int] = frozenset()
    everything: bool = False
    until: int | None = None


def delete_answers(
    state: PairState, log: Log, ids: Collection[int] = (), everything: bool = False
) -> tuple[int, list[str]]:
    """Delete the records ``ids``, or the whole log, and all that was made of them; also what earlier deletions left.
    Returns the number of records, and the names of other files that were removed.

    Raises AdaptiveError, as ``Log.purge``, if something of them stays in the log's file; the other files are removed
    then, too.
    """
    new = Deletion(frozenset(ids), everything, _newest(log) if everything else None)
    _note(state, new)
    known = _noted(state)
    doomed, whole = (new.ids, True) if everything else _doomed(log, (new, *known.values()))
    return _delete(state, log, known, doomed, whole)


def begun(state: PairState) -> frozenset[int]:
    """The ids of records whose deletion was begun and is not finished."""
    return frozenset[int]().union(*(deletion.ids for deletion in _noted(state).values()))


def finish(state: PairState) -> str | None:
    """Finish the deletions that were begun. Returns the reason, as a line for the user, if that is not possible now."""
    known = _noted(state)
    if not known:
        return None
    try:
        with Log(state.records) as log:
            doomed, whole = _doomed(log, known.values())
            deleted, _ = _delete(state, log, known, doomed, whole)
    except (AdaptiveError, OSError, sqlite3.Error) as error:
        return f"a deletion that was begun earlier cannot be finished now: {error}"
    logger.info("a deletion that was begun earlier is finished: %s", counted(deleted, "record"))
    return None


def _delete(
    state: PairState, log: Log, known: dict[Path, Deletion], ids: frozenset[int], whole: bool
) -> tuple[int, list[str]]:
    """Delete the records ``ids``, or the ``whole`` log, and what else the ``known`` deletions are for."""
    everything = whole or any(deletion.everything for deletion in known.values())
    try:
        deleted = log.purge(everything=True) if whole else log.purge(ids=ids)
    finally:  # also if the log's file could not be rewritten: its records are deleted
        gone = erase_beside(state, everything)
    for note in known:
        note.unlink(missing_ok=True)
    return deleted, gone


def _doomed(log: Log, deletions: Iterable[Deletion]) -> tuple[frozenset[int], bool]:
    """The ids of the records to delete, and whether this is the whole log."""
    deletions = tuple(deletions)
    ids = frozenset[int]().union(*(deletion.ids for deletion in deletions))
    everything = [deletion.until for deletion in deletions if deletion.everything]
    if not everything:
        return ids, False
    try:
        there = log.ids()
    except DamagedLogError:
        if None not in everything:  # there may be newer records, which the log's recovery will keep
            raise
        return ids, True
    newest = max((until for until in everything if until is not None), default=0)
    return ids | {number for number in there if number <= newest}, False


def _newest(log: Log) -> int | None:
    try:
        return log.last_id()
    except AdaptiveError:
        return None


def _note(state: PairState, deletion: Deletion) -> None:
    """Write a note. Without room for it, the deletion is done all the same."""
    said = {"ids": sorted(deletion.ids), "everything": deletion.everything, "until": deletion.until}
    try:
        files.replace_text(state.root, state.root / f"{NOTE}{secrets.token_hex(8)}.json", json.dumps(said))
    except OSError as error:
        logger.warning("a deletion is not noted, so that it will not be finished if it is interrupted: %s", error)


def _noted(state: PairState) -> dict[Path, Deletion]:
    """The notes. A damaged one stands for a deletion of which only traces are left."""
    found = {}
    for file in state.root.glob(f"{NOTE}*.json"):
        try:
            said = json.loads(file.read_bytes())
            until = said["until"]
            found[file] = Deletion(
                frozenset(map(int, said["ids"])), bool(said["everything"]), None if until is None else int(until)
            )
        except FileNotFoundError:  # another process has finished it
            pass
        except (OSError, ValueError, KeyError, TypeError):
            found[file] = Deletion()
    return found
