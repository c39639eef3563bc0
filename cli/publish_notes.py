"""Remembers which draft ``adaptive publish`` has put into which server, and deletes drafts that none of them uses."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adaptive.errors import AdaptiveError
from adaptive.printable import without_login
from checkpoints import files

if TYPE_CHECKING:
    from adaptive.state import PairState
    from adaptive.upstream.kinds import Kind


# What notes of drafts begin with that were written for a server which somebody starts by hand.
BY_HAND = "by hand: "


@dataclass(frozen=True)
class Put:
    """What a server was given by a trial: the kind of the server, the adapter or head, its draft, and the length."""

    engine: str
    adapter: str
    draft: str
    draft_length: int


def folder_of(state: PairState) -> Path:
    """The pair's own folder of drafts for other servers."""
    return (state.root / "published").absolute()


def earlier(state: PairState, url: str, kind: Kind) -> Put | None:
    """What the server at ``url`` was given before; None if nothing, or if a server of another kind was there."""
    found = _remembered(state).get(without_login(url))
    return found if found is not None and found.engine == kind.name else None


def remember(state: PairState, url: str, put: Put) -> None:
    """Note what the server at ``url`` has been given, and delete the draft that it had before, unless another server
    has that too. Raises AdaptiveError if the note cannot be written."""
    known, place = _remembered(state), without_login(url)
    replaced = known.get(place)
    known[place] = put
    _note_down(state, known, "it is in use")
    if replaced is not None and replaced.draft not in {one.draft for one in known.values()}:
        discard_own(state, Path(replaced.draft))


def keep(state: PairState, put: Put) -> None:
    """Note that the draft was written for a server that somebody starts by hand, so that it is never deleted: nothing
    tells when that server is given another. Raises AdaptiveError if the note cannot be written."""
    _note_down(state, {**_remembered(state), BY_HAND + put.draft: put}, "it is written")


def discard_own(state: PairState, draft: Path) -> None:
    """Delete a draft in the pair's own folder; one in a folder that the user named stays."""
    if draft.parent == folder_of(state):
        discard(draft)


def discard(path: Path) -> None:
    """Delete a file or folder, if it is there and can be deleted."""
    with contextlib.suppress(OSError):
        files.remove(path)


def _note_down(state: PairState, known: dict[str, Put], done: str) -> None:
    note = _note(state)
    try:
        files.replace_text(state.root, note, json.dumps({url: asdict(one) for url, one in known.items()}))
    except OSError as error:
        raise AdaptiveError(f"{done}, but {note} cannot be written ({error.strerror})") from error


def _note(state: PairState) -> Path:
    return state.root / "published.json"


def _remembered(state: PairState) -> dict[str, Put]:
    """By the servers' addresses without logins, or BY_HAND and the draft; nothing if the note is missing or of another
    form."""
    try:
        said = json.loads(_note(state).read_text(encoding="utf-8"))
        return {url if url.startswith(BY_HAND) else without_login(url): Put(**one) for url, one in said.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
