"""Reads the log: for the trainer, for resuming a session, and for the commands that show it.

A log that does not exist yet reads as empty. One ``Log`` belongs to one thread; it may stay open
while another process writes, and holds no lock between two calls. Damaged records are skipped and counted.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from adaptive.errors import AdaptiveError
from adaptive.records.drafters import DrafterFigures, drafter_figures
from adaptive.records.erase import delete, selection, shrink
from adaptive.records.figures import FiguresTable, is_packed
from adaptive.records.holders import Held, search
from adaptive.records.logged import LoggedGeneration, LoggedText, LogStats, Session, Share
from adaptive.records.place import Place, abandon
from adaptive.records.recover import remove
from adaptive.records.rows import (
    DamagedRecordError,
    answered,
    generation_of,
    messages_of,
    owner_of,
    read_rows,
    readable,
    select_columns,
    storable,
)
from adaptive.records.saved import Spent
from adaptive.records.schema import (
    MIGRATIONS,
    DamagedLogError,
    DiskFullError,
    connect,
    damaged,
    is_damage,
    is_disk_full,
    transaction,
)
from adaptive.records.stats import Drafted
from adaptive.types import LEAST_TEMPERATURE, Message, Round

# Generations read at a time. Each page is one short read, so that a slow reader never keeps the
# writer from emptying the WAL. Too high costs memory (about 100 kB a generation), too low costs queries.
PAGE = 64

# Upper bound of a plausible number: times since the epoch, tokens and durations are far below, damaged ones may not be.
MOST_PLAUSIBLE = 1e11


_around: AbstractContextManager[Any] = nullcontext()


@contextmanager
def around_reads(held: AbstractContextManager[Any]) -> Iterator[None]:
    """Have every read of a log by this process enter ``held`` before it begins and leave it when it is over, for the
    time of the context. For a process that may be stopped at any moment: while it stood still within a read, the
    write-ahead log would grow and no purge would succeed. ``held`` must be reentrant if reads may lie within it."""
    global _around
    before, _around = _around, held
    try:
        yield
    finally:
        _around = before


class Log:
    """Read access to the log at ``path``; also a context manager. The file is opened when first needed.

    ``damaged`` maps the ids of the records that ``generations`` could not read so far to the reasons. Every
    method raises AdaptiveError if the file itself is damaged or is not a log.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged: dict[int, str] = {}
        self._file: sqlite3.Connection | None = None
        self._place: Place | None = None

    def count(self, *, older_than_s: float | None = None, session: str | None = None) -> int:
        """The number of generations: all, or only those that ``purge`` would delete with the same arguments."""
        with self._reading() as connection:
            where, values = _chosen(connection, older_than_s, session)
            return int(connection.execute(f"SELECT count(*) FROM generations WHERE {where}", values).fetchone()[0])

    def last_id(self) -> int:
        """The id of the newest generation, 0 if there is none."""
        with self._reading() as connection:
            return int(connection.execute("SELECT coalesce(max(id), 0) FROM generations").fetchone()[0])

    def ids_under(self, adapter: str) -> tuple[int, ...]:
        """Ids of the generations that began under ``adapter``, oldest first."""
        query = "SELECT generation FROM figures WHERE adapter = ? ORDER BY generation"
        with self._reading() as connection:
            return tuple(row[0] for row in connection.execute(query, (adapter,)))

    def generations(
        self, after_id: int = 0, limit: int | None = None, with_supervision: bool = True
    ) -> Iterator[LoggedGeneration]:
        """Generations with an id above ``after_id``, oldest first, from at most ``limit`` records.

        Records that cannot be read are added to ``damaged``.
        """
        left = limit if limit is not None else float("inf")
        while left > 0:
            ids, page = self._page(after_id, int(min(left, PAGE)), with_supervision)
            if max(ids, default=0) <= after_id:  # the end, or damaged ids
                return
            yield from page
            left -= len(ids)
            after_id = max(ids)

    def texts(self, after_id: int, limit: int) -> tuple[int, list[LoggedText]]:
        """The last id and the tokens of the first ``limit`` records with an id above ``after_id``, oldest first. The
        checksum is not verified; records whose bytes cannot be tokens are left out."""
        columns = "id, session, sampling, prompt, output"
        query = f"SELECT {columns} FROM generations WHERE id > ? ORDER BY id LIMIT ?"
        with self._reading() as connection:
            rows = connection.execute(query, (after_id, limit)).fetchall()
        found = []
        for number, session, sampling, *tokens in rows:
            with suppress(ValueError, TypeError):
                owner = owner_of(sampling)
                found.append(LoggedText(number, session, owner, np.frombuffer(b"".join(tokens), "<i4")))
        return max((row[0] for row in rows if isinstance(row[0], int)), default=after_id), found

    def first_within(self, tokens: int) -> int:
        """The id after which the newest records begin that have at most ``tokens`` tokens together; 0 if all fit. Older
        ones are not read: in a log of gigabytes that takes seconds, from a hard disk minutes."""
        query = "SELECT id, length(prompt) / 4 + length(output) / 4 FROM generations WHERE id < ? ORDER BY id DESC"
        before = 2**63 - 1
        while True:
            with self._reading() as connection:
                lengths = connection.execute(f"{query} LIMIT {PAGE}", (before,)).fetchall()
            for number, length in lengths:
                tokens -= int(length or 0)
                if tokens < 0:
                    return int(number)
            if not lengths or lengths[-1][0] >= before:  # the end, or damaged ids
                return 0
            before = lengths[-1][0]

    def changes(self) -> tuple[int, int]:
        """A value that changes whenever another connection changes the log."""
        with self._reading() as connection:
            return id(connection), int(connection.execute("PRAGMA data_version").fetchone()[0])

    def ids(self, *, older_than_s: float | None = None, session: str | None = None) -> frozenset[int]:
        """The ids of all records, or only of those that ``purge`` would delete with the same arguments."""
        with self._reading() as connection:
            where, values = _chosen(connection, older_than_s, session)
            return frozenset(row[0] for row in connection.execute(f"SELECT id FROM generations WHERE {where}", values))

    def ids_since(self, first: int) -> frozenset[int]:
        """The ids of all records from ``first`` on, from the short rows of their figures."""
        with self._reading() as connection:
            query = "SELECT generation FROM figures WHERE generation >= ?"
            return frozenset(row[0] for row in connection.execute(query, (first,)))

    def session_messages(self, session: str) -> tuple[Message, ...]:
        """The chat so far of ``session``: the messages of its latest readable generation and the answer to them.

        Empty if the log has no chat of that session.
        """
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT messages, text FROM generations WHERE session = ? AND messages != '[]' ORDER BY id DESC",
                (storable(session),),
            )
            for messages, text in rows:
                with suppress(DamagedRecordError):  # if damaged, continue with the generation before
                    return answered(messages_of(messages), text)
        return ()

    def sessions(self) -> tuple[Session, ...]:
        """Every session, the latest first."""
        with self._reading() as connection:
            rows = connection.execute(
                """SELECT session, count(*), min(created), max(created), min(id) FROM generations
                GROUP BY session ORDER BY max(id) DESC"""
            ).fetchall()
            # Not by a join: SQLite sorts much text in a temporary file outside of the private folder.
            opening = "SELECT messages, prompt_text FROM generations WHERE id = ?"
            openings = [connection.execute(opening, (first_id,)).fetchone() for *_, first_id in rows]
        found = []
        for (session, generations, first, last, _), (messages, prompt_text) in zip(rows, openings, strict=True):
            said = prompt_text
            with suppress(DamagedRecordError):
                said = next((m.content for m in messages_of(messages) if m.role == "user"), prompt_text)
            found.append(Session(session, generations, first, last, said))
        return tuple(found)

    def stats(self) -> LogStats:
        """Counts, bytes and times of the whole log."""
        with self._reading() as connection:
            row = connection.execute(
                """SELECT count(*), count(DISTINCT session), coalesce(sum(length(output) / 4), 0),
                coalesce(sum(CASE WHEN supervision IS NULL THEN 0 ELSE length(output) / 4 END), 0),
                min(created), max(created) FROM generations"""
            ).fetchone()
            domains, adapters = (
                tuple(
                    Share(*share)
                    for share in connection.execute(
                        f"""SELECT {column}, count(*), sum(length(output) / 4) FROM generations
                        GROUP BY {column} ORDER BY count(*) DESC, {column}"""
                    )
                )
                for column in ("domain", "adapter")
            )
        generations, sessions, tokens, positions, first, last = row
        return LogStats(generations, sessions, tokens, positions, self._size(), first, last, domains, adapters)

    def figures(self) -> FiguresTable:
        """The figures of all generations, oldest first, for ``adaptive.records.history``; no text, no tokens."""
        columns = "generation, session, created, adapter, predicted_n, predicted_s, expected_s, counts, own"
        with self._reading() as connection:
            rows = connection.execute(f"SELECT {columns} FROM figures ORDER BY generation").fetchall()
        try:
            table = FiguresTable(rows)
        except (TypeError, ValueError):  # a damaged row; rows are checked one by one only then, as that is slow
            table = None
        if table is None or not table.plausible(MOST_PLAUSIBLE):
            sound = (row for row in rows if is_packed(row[7]) and (row[8] is None or is_packed(row[8])))
            table = FiguresTable([row for row in sound if plausible(*row[4:7], row[2])])
        return table

    def seeded(self, ids: Collection[int]) -> set[int]:
        """Those of the generations ``ids`` that were sampled with a seed."""
        where, values = selection(None, None, 0.0, ids)
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT id FROM generations WHERE {where} AND temperature >= ? AND json_valid(sampling)"
                " AND json_extract(sampling, '$.seed') IS NOT NULL",
                (*values, LEAST_TEMPERATURE),
            ).fetchall()
        return {row[0] for row in rows}

    def newest(self, count: int, until: int | None = None) -> tuple[int, ...]:
        """Ids of the newest ``count`` generations with ids up to ``until``, oldest first."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT id FROM generations WHERE ? IS NULL OR id <= ? ORDER BY id DESC LIMIT ?", (until, until, count)
            ).fetchall()
        return tuple(sorted(row[0] for row in rows))

    def by_drafter(self) -> dict[str, Drafted]:
        """The figures of each drafter, in the order in which they first drafted."""
        return self.drafter_figures().drafters

    def drafter_figures(self, known: DrafterFigures | None = None) -> DrafterFigures:
        """The figures of each drafter; see ``drafters.drafter_figures``."""
        with self._reading() as connection, transaction(connection, "DEFERRED"):
            return drafter_figures(connection, known or DrafterFigures())

    def spent(self) -> tuple[Spent, ...]:
        """Tokens, rounds and seconds of every generation that took a round, oldest first (for ``records.saved``)."""
        with self._reading() as connection:
            rows = connection.execute(
                """SELECT t.generation, predicted_n - 1, predicted_s - start_s, t.rounds_n, rounds_s - start_s, plain_n,
                plain_s, shared_n
                FROM round_times AS t JOIN figures ON figures.generation = t.generation ORDER BY t.generation"""
            ).fetchall()
        return tuple(Spent(*row) for row in rows)

    def session_ids(self, session: str) -> tuple[int, ...]:
        """Ids of the generations of ``session``, oldest first."""
        with self._reading() as connection:
            return _session_ids(connection, session)

    def held(self, ids: Collection[int]) -> Held:
        """The answers ``ids``, to be found in other requests."""
        with self._reading() as connection:
            return search(connection, ids)[1]

    def holders(self, ids: Collection[int]) -> tuple[int, ...]:
        """Ids of other, later generations whose chat or raw prompt holds one of the answers ``ids``: it continues after
        it (see ``records.holders``)."""
        with self._reading() as connection:
            return tuple(sorted(search(connection, ids)[0]))

    def purge(
        self,
        *,
        older_than_s: float | None = None,
        session: str | None = None,
        ids: Collection[int] | None = None,
        everything: bool = False,
    ) -> int:
        """Delete generations for good and return how many: those that meet all given conditions (age in seconds,
        session, ids), or all. Without ids, a session includes its ``holders`` in other sessions.

        Their bytes are overwritten, the file is rewritten without them and the WAL is emptied. This needs twice as much
        free disk space as the remaining records take. If the disk is full or the file is damaged, ``everything``
        removes the file itself. Raises ValueError if nothing is chosen, AdaptiveError if the file cannot be rewritten
        now (the message names what was done).
        """
        if not everything and older_than_s is None and session is None and ids is None:
            raise ValueError("purge needs an age, a session, ids, or everything=True")
        try:
            return self._purge(older_than_s, session, ids)
        except AdaptiveError as error:
            cause = error.__cause__
            full = isinstance(error, DiskFullError) or (cause is not None and is_disk_full(self.path, cause))
            if not everything or not (full or isinstance(error, DamagedLogError)):
                raise
            self.close()
            return remove(self.path)

    def _purge(self, older_than_s: float | None, session: str | None, ids: Collection[int] | None) -> int:
        with self._reading() as connection:
            if connection is not self._file:
                return 0  # there is no file
            where, values = _chosen(connection, older_than_s, session, ids)
            deleted = delete(connection, where, values)
            shrink(connection, self.path)
        return deleted

    def close(self) -> None:
        """Close the file; a later call opens it again."""
        if self._file is None:
            return
        with _around:  # the last connection that is closed empties the write-ahead log
            if self._place is not None and self._place.holds():
                self._file.close()
            else:
                abandon(self._file)
            self._file = None

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _page(self, after_id: int, size: int, with_supervision: bool) -> tuple[list[int], list[LoggedGeneration]]:
        """The ids of one page of records, and its undamaged records."""
        found: list[tuple[tuple[Any, ...], list[Round]]] = []
        with self._reading() as connection, transaction(connection, "DEFERRED"):
            query = "SELECT id FROM generations WHERE id > ? ORDER BY id LIMIT ?"
            ids = [row[0] for row in connection.execute(query, (after_id, size))]
            columns = select_columns(with_supervision)
            try:
                found = read_rows(connection, columns, ids)
            except sqlite3.DatabaseError as first:
                if not is_damage(first):
                    raise
                for number in ids:  # at least one record is damaged; the others can be read one by one
                    try:
                        found += read_rows(connection, columns, [number])
                    except sqlite3.DatabaseError as error:
                        if not is_damage(error):
                            raise
                        self.damaged[number] = f"record {number} is damaged: {error}"
        page = []
        for row, rounds in found:
            try:
                page.append(LoggedGeneration(row[0], generation_of(row, rounds)))
            except DamagedRecordError as error:
                self.damaged[row[0]] = str(error)
        return ids, page

    def _size(self) -> int:
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """The connection to the file, or to an empty log in memory if there is no file. ``around_reads`` is held."""
        with _around:
            try:
                yield self._connection()
            except sqlite3.Error as error:
                if is_damage(error):
                    raise damaged(self.path, error) from error
                raise AdaptiveError(f"log {self.path} cannot be read now ({error}); try again") from error

    def _connection(self) -> sqlite3.Connection:
        there = self._there()
        if self._file is not None and there != self._place:
            abandon(self._file)  # moved or replaced while it was open
            self._file = None
        while self._file is None and there is not None:
            opened, before, there = connect(self.path), there, self._there()
            if there == before:
                opened.text_factory = readable
                self._file, self._place = opened, there
            else:  # replaced meanwhile, so this may be a connection to the old one
                abandon(opened)
        return self._file or _empty()

    def _there(self) -> Place | None:
        """The file at the path; None if there is none. Raises AdaptiveError if that cannot be said now, as of a network
        disk that is away: nothing may be concluded from it."""
        try:
            return Place.of(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise AdaptiveError(f"log {self.path} cannot be read now ({error.strerror}); try again") from error


def plausible(*numbers: object) -> bool:
    """Whether these are all numbers that a record can hold. Damaged bytes may be text, or numbers of any size."""
    return all(isinstance(n, (int, float)) and 0 <= n < MOST_PLAUSIBLE for n in numbers)


def _session_ids(connection: sqlite3.Connection, session: str) -> tuple[int, ...]:
    query = "SELECT id FROM generations WHERE session = ? ORDER BY id"
    return tuple(row[0] for row in connection.execute(query, (storable(session),)))


def _chosen(
    connection: sqlite3.Connection, older_than_s: float | None, session: str | None, ids: Collection[int] | None = None
) -> tuple[str, tuple[object, ...]]:
    """A WHERE clause and its values for the generations that ``purge`` deletes."""
    now = time.time()
    where, values = selection(older_than_s, session, now, ids)
    if session is None or ids is not None:
        return where, values
    holders = search(connection, frozenset(_session_ids(connection, session)))[0]
    others, more = selection(older_than_s, None, now, holders)
    return f"{where} OR {others}", (*values, *more)


def _empty() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    for migration in MIGRATIONS:
        migration(connection)
    return connection
