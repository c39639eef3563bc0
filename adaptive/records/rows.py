"""Converts a generation into rows of the log's tables, for the writer, and back, for the reader."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from adaptive.errors import AdaptiveError
from adaptive.records.codec import decode, encode
from adaptive.records.figures import packed
from adaptive.records.stats import asked, count_rounds, learned_rounds
from adaptive.types import Generation, Message, Round, SamplingParams, Timings

# The columns that the checksum covers, in this order. A new column goes after "checksum".
CHECKED = (
    "session",
    "created",
    "adapter",
    "engine",
    "domain",
    "finish_reason",
    "temperature",
    "sampling",
    "prompt_n",
    "cached_n",
    "prompt_s",
    "predicted_n",
    "predicted_s",
    "expected_s",
    "rounds_n",
    "draft_n",
    "draft_n_accepted",
    "messages",
    "prompt_text",
    "text",
    "prompt",
    "output",
)
COLUMNS = (*CHECKED, "checksum", "supervision")
INSERT_GENERATION = f"INSERT INTO generations (id, {', '.join(COLUMNS)}) VALUES (?{', ?' * len(COLUMNS)})"
ROUND = ", ".join(Round._fields)
INSERT_ROUND = f"INSERT INTO rounds (generation, idx, {ROUND}) VALUES (?, ?{', ?' * len(Round._fields)})"
FIGURES = ("generation", "session", "created", "adapter", "predicted_n", "predicted_s", "expected_s", "counts", "own")
INSERT_FIGURES = f"INSERT INTO figures ({', '.join(FIGURES)}) VALUES (?{', ?' * (len(FIGURES) - 1)})"
TIMES = ("generation", "rounds_n", "rounds_s", "plain_n", "plain_s", "start_s", "shared_n")
# Rounds at the start of an answer that do not show how long plain decoding takes: the processor's caches hold the work
# of before, and the previous answer is being written to the log. At most half of the answer's rounds. Too low: plain
# decoding seems slower than it is, because tries of a draft are often at the start. Too high: fewer rounds count.
START = 8
INSERT_TIMES = f"INSERT INTO round_times ({', '.join(TIMES)}) VALUES (?{', ?' * (len(TIMES) - 1)})"


class DamagedRecordError(AdaptiveError):
    """One record cannot be read, or differs from what was written; other records are not affected."""


def insert(connection: sqlite3.Connection, generation: Generation, number: int | None = None) -> int:
    """Insert ``generation`` and its rounds; the caller holds the transaction. Returns its id (``number`` if given)."""
    values = _values(generation)
    supervision = None if generation.supervision is None else encode(generation.supervision)
    cursor = connection.execute(INSERT_GENERATION, (number, *values, checksum(values), supervision))
    number = cursor.lastrowid
    assert number is not None  # a successful INSERT sets it
    rounds = generation.rounds
    connection.executemany(
        INSERT_ROUND,
        [(number, i, *r) for i, r in enumerate(rounds)],
    )
    if rounds:
        connection.execute(INSERT_TIMES, (number, *_times(rounds)))
    timings = generation.timings
    head = number, storable(generation.session), generation.created, generation.adapter
    measured = timings.predicted_n, timings.predicted_s, timings.expected_s
    counts, own = packed(count_rounds(rounds)), packed(count_rounds(learned_rounds(rounds)))
    connection.execute(INSERT_FIGURES, (*head, *measured, counts, None if own == counts else own))
    return number


def continue_ids(connection: sqlite3.Connection, newest: int) -> None:
    """Make new ids start after ``newest``, since manifests of adapters refer to records by id."""
    connection.execute("DELETE FROM sqlite_sequence WHERE name = 'generations' AND seq < ?", (newest,))
    connection.execute(
        "INSERT INTO sqlite_sequence SELECT 'generations', ? WHERE NOT EXISTS "
        "(SELECT 1 FROM sqlite_sequence WHERE name = 'generations')",
        (newest,),
    )


def last_given_id(connection: sqlite3.Connection) -> int:
    """The last id given to a record of this log, which may have been deleted since; 0 for none."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'generations'").fetchone()
    return 0 if row is None else int(row[0])


def _times(rounds: Sequence[Round]) -> tuple[int, float, int, float, float, int]:
    """The values of ``round_times``: the number of rounds and their seconds; the number and seconds of those that show
    how long plain decoding takes; the seconds that passes at the start took longer than later ones over as many drafted
    tokens; the number of shared passes.

    A plain step right after a round for which the draft was asked can take longer than the plain steps after it, and
    passes at the start of an answer do, whoever drafts. An answer for which no draft was asked shows what all its
    rounds take, without what its start took longer.
    """
    drafting = [asked(outcome) for outcome in rounds]
    seconds = [outcome.draft_s + outcome.verify_s for outcome in rounds]
    start = min(START, len(rounds) // 2)
    later: dict[int, list[float]] = {}
    for outcome in rounds[start:]:
        later.setdefault(outcome.drafted, []).append(outcome.verify_s)
    usual = {drafted: sum(passes) / len(passes) for drafted, passes in later.items()}
    start_s = sum(r.verify_s - usual[r.drafted] for r in rounds[:start] if r.drafted in usual)
    plain, plain_s = len(rounds), sum(seconds) - start_s
    if any(drafting):
        before = [False, *drafting]
        steps = [seconds[i] for i in range(start, len(rounds)) if not (before[i] or drafting[i])]
        plain, plain_s = len(steps), sum(steps)
    return len(rounds), sum(seconds), plain, plain_s, start_s, sum(outcome.shared > 0 for outcome in rounds)


def _values(generation: Generation) -> tuple[object, ...]:
    """The values of the columns CHECKED."""
    rounds, timings = generation.rounds, generation.timings
    return (
        storable(generation.session),
        generation.created,
        generation.adapter,
        generation.engine,
        None if generation.domain is None else storable(generation.domain),
        generation.finish_reason,
        generation.sampling.temperature,
        _asked(generation),
        timings.prompt_n,
        timings.cached_n,
        timings.prompt_s,
        timings.predicted_n,
        timings.predicted_s,
        timings.expected_s,
        len(rounds),
        sum(r.drafted for r in rounds),
        sum(r.accepted for r in rounds),
        _messages_json(generation.messages),
        storable(generation.prompt_text),
        storable(generation.text),
        generation.prompt.astype("<i4").tobytes(),
        generation.output.astype("<i4").tobytes(),
    )


def checksum(values: Sequence[object]) -> int:
    """CRC-32 of the columns CHECKED as SQLite returns them. The supervision has its own checksum (zlib's)."""
    return zlib.crc32(b"".join(_bytes(value) for value in values))


def _bytes(value: object) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, bytes):
        return b"b%d:%b" % (len(value), value)
    if isinstance(value, str):
        text = value.encode("utf-8", "replace")
        return b"s%d:%b" % (len(text), text)
    return b"f" + struct.pack("<d", value)  # also for int, as SQLite returns 0.0 for a 0 in a REAL column


def select_columns(with_supervision: bool) -> str:
    """``id`` and every column, in the order that ``generation_of`` expects."""
    return ", ".join(("id", *COLUMNS[:-1], "supervision" if with_supervision else "NULL"))


def read_rows(
    connection: sqlite3.Connection, columns: str, ids: Sequence[int]
) -> list[tuple[tuple[Any, ...], list[Round]]]:
    """The rows of the records with these ids (consecutive in the log, ascending), each with its rounds."""
    if not ids:
        return []
    between = (min(ids), max(ids))
    rows = connection.execute(
        f"SELECT {columns} FROM generations WHERE id BETWEEN ? AND ? ORDER BY id", between
    ).fetchall()
    rounds: dict[int, list[Round]] = {row[0]: [] for row in rows}
    of_rows = connection.execute(
        f"""SELECT generation, {ROUND} FROM rounds
        WHERE generation BETWEEN ? AND ? ORDER BY generation, idx""",
        between,
    )
    for number, *values in of_rows:
        if number in rounds:  # otherwise the id of its generation is damaged
            rounds[number].append(Round(*values))
    return [(row, rounds[row[0]]) for row in rows]


def generation_of(row: sqlite3.Row | tuple[object, ...], rounds: Iterable[Round]) -> Generation:
    """The generation in one row of ``select_columns``, with its rounds.

    Raises DamagedRecordError, which names the record, if it differs from what was written, and MemoryError.
    """
    try:
        whole = _generation_of(dict(zip(("id", *COLUMNS), row, strict=True)), tuple(rounds))
    except MemoryError:
        raise
    except Exception as error:  # reading damaged bytes may raise anything
        said = str(error) if isinstance(error, AdaptiveError) else f"{type(error).__name__}: {error}"
        raise DamagedRecordError(f"record {row[0]} is damaged: {said}") from error
    return whole


def mended(values: dict[str, Any], rounds: Iterable[Round]) -> Generation | None:
    """The generation made of the intact parts of these COLUMNS; None if the checked columns, among them the text, are
    damaged.

    Incomplete rounds and damaged supervision are left out. Raises MemoryError, since what cannot be read for want of
    memory is not damaged.
    """
    rounds = tuple(rounds)
    if not _as_written(values):
        return None
    if not _all_there(values, rounds):
        rounds, values = (), {**values, "rounds_n": 0, "draft_n": 0, "draft_n_accepted": 0}
    for supervision in (values["supervision"], None):
        try:
            return _whole(values, rounds, supervision)
        except MemoryError:
            raise
        except Exception:  # reading damaged bytes may raise anything
            continue
    return None


def _as_written(values: dict[str, Any]) -> bool:
    """Whether the checksum matches the columns; rows from before schema 4 have none and are accepted."""
    return values["checksum"] is None or values["checksum"] == checksum([values[name] for name in CHECKED])


def _all_there(values: dict[str, Any], rounds: tuple[Round, ...]) -> bool:
    told = len(rounds), sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    whole = all(r.first == 0 or 0 < r.first < r.drafted for r in rounds)
    return whole and told == (values["rounds_n"], values["draft_n"], values["draft_n_accepted"])


def _generation_of(values: dict[str, Any], rounds: tuple[Round, ...]) -> Generation:
    if not _as_written(values):
        raise AdaptiveError("its checksum is another")
    if not _all_there(values, rounds):
        raise AdaptiveError("its rounds are not all there")
    return _whole(values, rounds, values["supervision"])


def _whole(values: dict[str, Any], rounds: tuple[Round, ...], supervision: bytes | None) -> Generation:
    output = _tokens(values["output"])
    made = None if supervision is None else decode(supervision)
    if made is not None and len(made.ids) != len(output):
        raise AdaptiveError(f"its supervision has {len(made.ids)} positions where the answer has {len(output)}")
    return Generation(
        session=values["session"],
        created=values["created"],
        messages=messages_of(values["messages"]),
        prompt_text=values["prompt_text"],
        text=values["text"],
        prompt=_tokens(values["prompt"]),
        output=output,
        sampling=SamplingParams.from_json(values["sampling"]),
        adapter=values["adapter"],
        engine=values["engine"],
        domain=values["domain"],
        finish_reason=values["finish_reason"],
        rounds=rounds,
        timings=Timings(*(values[field.name] for field in dataclasses.fields(Timings))),
        supervision=made,
        owner=owner_of(values["sampling"]),
    )


def _asked(generation: Generation) -> str:
    """The ``sampling`` column: the sampling parameters, and the owner if there is one."""
    sampling = generation.sampling.to_json()
    return sampling if not generation.owner else json.dumps({**json.loads(sampling), "owner": generation.owner})


def owner_of(sampling: str) -> str:
    """The owner of a record, from its ``sampling`` column; "" for none. Raises ValueError if the column is damaged."""
    if '"owner"' not in sampling:  # saves parsing: this runs for every record at a start
        return ""
    owner = json.loads(sampling).get("owner", "")
    if not isinstance(owner, str):
        raise ValueError("the owner is no text")
    return owner


def messages_of(text: str) -> tuple[Message, ...]:
    """The chat messages of the ``messages`` column. Raises DamagedRecordError if it holds something else."""
    try:
        return tuple(Message(role=m["role"], content=m["content"]) for m in json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedRecordError(f"the messages of a record are damaged ({error})") from error


def answered(messages: tuple[Message, ...], answer: str) -> tuple[Message, ...]:
    """The chat ``messages`` with the ``answer`` to them, which continues the last message if that is an assistant's."""
    if messages and messages[-1].role == "assistant":
        return (*messages[:-1], Message("assistant", messages[-1].content + answer))
    return (*messages, Message("assistant", answer))


def beginning(messages: tuple[Message, ...]) -> str:
    """The beginning of the ``messages`` column of any chat that begins with ``messages``; the whole column if it adds
    only a closing bracket."""
    return _messages_json(messages)[:-1]


def _messages_json(messages: tuple[Message, ...]) -> str:
    # Not escaped to ASCII, so that LIKE finds words in any script.
    return storable(json.dumps([{"role": m.role, "content": m.content} for m in messages], ensure_ascii=False))


def storable(text: str) -> str:
    """``text`` with lone surrogates (a terminal's undecodable bytes) replaced by '?', as UTF-8 cannot encode them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def readable(text: bytes) -> str:
    """Decode a text of the log (for ``text_factory``). Damaged bytes become U+FFFD; the checksum reveals the damage."""
    return text.decode("utf-8", "replace")


def _tokens(blob: bytes) -> npt.NDArray[np.int32]:
    tokens = np.frombuffer(blob, "<i4").astype(np.int32)
    if len(tokens) and tokens.min() < 0:
        raise AdaptiveError("a token id is negative")
    return tokens
