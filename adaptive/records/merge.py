"""Imports the records of other logs into this one, each once: from a team's proxies, or from another machine.

Prompts, answers and the target's distributions are imported. Adapters, rounds and all seconds are not, since they
describe another draft on another machine. Duplicates are recognised by their content, not by their ids.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from adaptive.errors import AdaptiveError
from adaptive.records.log import Log
from adaptive.records.recover import open_for_writing
from adaptive.records.rows import continue_ids, insert, last_given_id
from adaptive.records.schema import connect, damaged, is_damage, transaction, unusable
from adaptive.state import PairState
from adaptive.types import Generation
from checkpoints import files

# LOOKED_AT: records of a log that are checked for this target's tokens; ALIKE: the share of them that must have them.
# With fewer records the sample may be untypical; checking all takes long.
LOOKED_AT, ALIKE = 20, 0.5
# Records written in one transaction, during which no other process can write.
TOGETHER = 64


@dataclass(frozen=True)
class Merged:
    """The result of an import: records that were new, records that were already here, and unreadable records."""

    taken: int
    known: int
    damaged: int


def merge(state: PairState, sources: Iterable[Path], decode: Callable[[list[int]], str], after: int = 0) -> Merged:
    """Import into the log of ``state`` the new records of the logs ``sources`` (files, or folders of a pair), in order
    of time. New ids are above ``after``. ``decode`` turns token ids into text, as the target's tokenizer does.

    Raises AdaptiveError, before anything is written, for a file that is not a log or has another target.
    """
    from filelock import FileLock

    paths = [_log_of(source, state) for source in sources]
    with FileLock(state.root / "import.lock", mode=0o600), contextlib.ExitStack() as stack:
        copies = [stack.enter_context(_copied(path, state)) for path in paths]
        for path, copy in zip(paths, copies, strict=True):
            _check_target(path, copy, decode)
        connection, _ = open_for_writing(state.records)
        stack.callback(connection.close)
        stack.enter_context(_writing(state.records))
        if after > last_given_id(connection):
            with transaction(connection):
                continue_ids(connection, after)
        with Log(state.records) as log:
            seen = {key_of(one.generation) for one in log.generations(with_supervision=False)}
        places, taken, known = [], 0, 0
        for copy in copies:
            for one in copy.generations(with_supervision=False):
                key = key_of(one.generation)
                known += key in seen
                if key not in seen:
                    seen.add(key)
                    places.append((one.generation.created, copy, one.id))
        places.sort(key=lambda place: place[0])
        for begin in range(0, len(places), TOGETHER):
            with transaction(connection):
                for _, copy, number in places[begin : begin + TOGETHER]:
                    for one in copy.generations(number - 1, 1):  # none if its supervision is damaged
                        insert(connection, _as_imported(one.generation))
                        taken += 1
        return Merged(taken, known, sum(len(copy.damaged) for copy in copies))


def key_of(generation: Generation) -> bytes:
    """A digest that is equal for copies of one record: of its session, time, messages, sampling, owner, tokens and
    answer."""
    digest = hashlib.sha256()
    texts = [generation.session, repr(generation.created), generation.finish_reason, generation.sampling.to_json()]
    texts += [generation.owner, generation.prompt_text, generation.text]
    texts += [part for message in generation.messages for part in (message.role, message.content)]
    parts = [text.encode("utf-8", "replace") for text in texts]
    parts += [tokens.astype("<i4").tobytes() for tokens in (generation.prompt, generation.output)]
    for part in parts:
        digest.update(b"%d:%b" % (len(part), part))
    return digest.digest()


def _as_imported(generation: Generation) -> Generation:
    untimed = dataclasses.replace(generation.timings, prompt_s=0.0, predicted_s=0.0, expected_s=0.0)
    return dataclasses.replace(generation, adapter=None, rounds=(), timings=untimed)


def _log_of(source: Path, state: PairState) -> Path:
    path = source / state.records.name if source.is_dir() else source
    if not path.is_file():
        raise AdaptiveError(f"{source} holds no log; name a records.db, or the folder of a pair that it is in")
    if state.records.exists() and path.samefile(state.records):
        raise AdaptiveError(f"{path} is the very log that would take it; name another one")
    return path


@contextlib.contextmanager
def _copied(path: Path, state: PairState) -> Iterator[Log]:
    """A copy of the log at ``path``, migrated to the current schema; the original stays as it is."""
    folder = files.unfinished(state.root)  # if this process is killed, the next start removes the folder
    try:
        with Log(_copy(path, folder)) as log:
            yield log
    finally:
        files.finished(folder)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Within the block, an error of SQLite is one of the log at ``path``."""
    try:
        yield
    except sqlite3.Error as error:
        raise unusable(path, error) from error


def _copy(path: Path, folder: Path) -> Path:
    """Copy the log at ``path`` into the new ``folder``. Raises AdaptiveError."""
    copy = folder / path.name
    try:
        folder.mkdir(mode=0o700)
        readable = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)
        with contextlib.closing(readable) as source, contextlib.closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        connect(copy).close()
    except sqlite3.Error as error:
        if is_damage(error):
            raise damaged(path, error) from error
        raise AdaptiveError(f"log {path} cannot be read ({error})") from error
    except OSError as error:
        raise AdaptiveError(f"log {path} cannot be copied to {folder} ({error.strerror})") from error
    return copy


def _check_target(path: Path, log: Log, decode: Callable[[list[int]], str]) -> None:
    """Raise AdaptiveError if the token ids of a log do not decode to the texts of their records."""
    looked = [one.generation for one in log.generations(0, LOOKED_AT, with_supervision=False)]
    spoken = [generation for generation in looked if generation.text.strip()]
    alike = sum(_contains(_said(generation, decode), generation.text.strip()[:100]) for generation in spoken)
    if spoken and alike < ALIKE * len(spoken):
        raise AdaptiveError(
            f"{path} is of another target: its tokens are not those of its texts by this target's tokenizer; name the "
            "pair that it belongs to with --target and --draft"
        )


def _contains(said: str, text: str) -> bool:
    """Whether ``said`` contains ``text``, in one piece or in two: reasoning and answer are shown without the marks
    between them."""
    first = next(n for n in range(len(text), -1, -1) if text[:n] in said)
    return text[first:] in said[said.index(text[:first]) + first :]


def _said(generation: Generation, decode: Callable[[list[int]], str]) -> str:
    try:
        return decode(generation.output.tolist())
    except (OverflowError, IndexError, TypeError, ValueError):  # ids that this tokenizer does not have
        return ""
