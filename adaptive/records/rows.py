"""A generation as rows of the two tables, and back. The writer and the reader meet here."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from adaptive.records.codec import decode, encode
from adaptive.types import Generation, Message, Round, SamplingParams, Timings

COLUMNS = (
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
    "supervision",
)
INSERT_GENERATION = f"INSERT INTO generations ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
INSERT_ROUND = (
    "INSERT INTO rounds (generation, idx, drafter, drafted, accepted, draft_s, verify_s) VALUES (?, ?, ?, ?, ?, ?, ?)"
)


def insert(connection: sqlite3.Connection, generation: Generation) -> int:
    """Insert ``generation`` and its rounds; the caller holds the transaction. Returns its id."""
    rounds, timings = generation.rounds, generation.timings
    cursor = connection.execute(
        INSERT_GENERATION,
        (
            _storable(generation.session),
            generation.created,
            generation.adapter,
            generation.engine,
            None if generation.domain is None else _storable(generation.domain),
            generation.finish_reason,
            generation.sampling.temperature,
            generation.sampling.to_json(),
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
            _storable(generation.prompt_text),
            _storable(generation.text),
            generation.prompt.astype("<i4").tobytes(),
            generation.output.astype("<i4").tobytes(),
            None if generation.supervision is None else encode(generation.supervision),
        ),
    )
    number = cursor.lastrowid
    assert number is not None  # an INSERT that did not raise has given one
    connection.executemany(
        INSERT_ROUND,
        [(number, i, r.drafter, r.drafted, r.accepted, r.draft_s, r.verify_s) for i, r in enumerate(rounds)],
    )
    return number


def select_columns(with_supervision: bool) -> str:
    """``id`` and every column, in the order that ``generation_of`` expects."""
    return ", ".join(("id", *COLUMNS[:-1], "supervision" if with_supervision else "NULL"))


def generation_of(row: sqlite3.Row | tuple[object, ...], rounds: Iterable[Round]) -> Generation:
    """The generation of one row of ``select_columns`` and its rounds.

    Raises AdaptiveError where its supervision is damaged.
    """
    values = dict(zip(("id", *COLUMNS), row, strict=True))
    return Generation(
        session=values["session"],
        created=values["created"],
        messages=messages_of(values["messages"]),
        prompt_text=values["prompt_text"],
        text=values["text"],
        prompt=_tokens(values["prompt"]),
        output=_tokens(values["output"]),
        sampling=SamplingParams.from_json(values["sampling"]),
        adapter=values["adapter"],
        engine=values["engine"],
        domain=values["domain"],
        finish_reason=values["finish_reason"],
        rounds=tuple(rounds),
        timings=Timings(*(values[field.name] for field in dataclasses.fields(Timings))),
        supervision=None if values["supervision"] is None else decode(values["supervision"]),
    )


def messages_of(text: str) -> tuple[Message, ...]:
    """The chat messages of the ``messages`` column."""
    return tuple(Message(role=m["role"], content=m["content"]) for m in json.loads(text))


def _messages_json(messages: tuple[Message, ...]) -> str:
    # Not escaped to ASCII, so that people can search their own words with LIKE.
    return _storable(json.dumps([{"role": m.role, "content": m.content} for m in messages], ensure_ascii=False))


def _storable(text: str) -> str:
    """``text`` with lone surrogates (a terminal's undecodable bytes) as '?', which UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _tokens(blob: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(blob, "<i4").astype(np.int32)
