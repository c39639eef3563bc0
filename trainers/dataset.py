"""Turns records into a ``datasets.Dataset`` and splits it by prompt into training, validation and gate sets.

In: the log. Out: one row per generation, and ``Example``, the same row as numpy arrays.

Loops are removed. A small target that decodes greedily ends up repeating itself; any draft predicts a loop, and
training on it teaches nothing. An output is cut where its first loop begins.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets import Dataset, Features, List, Value, concatenate_datasets

from adaptive.errors import AdaptiveError
from adaptive.records.features import LONGEST_ANSWER, FeatureSpool, tokens_hash
from adaptive.records.features import Features as HiddenStates
from adaptive.types import LIKELIEST_PROPOSED, Generation, SamplingParams, Supervision

if TYPE_CHECKING:
    from adaptive.records.log import Log

Item = TypeVar("Item")

# Rows that are put into columns at a time, and read between two questions whether to stop.
ROWS = 64

FEATURES = Features(
    {
        "id": Value("int64"),
        "tokens": Value("string"),
        "domain": Value("string"),
        "fold": Value("float64"),
        "prompt": List(Value("int32")),
        "output": List(Value("int32")),
        "top_ids": List(Value("int32")),
        "top_logprobs": List(Value("float16")),
        "rest": List(Value("float16")),
        "chosen": List(Value("float16")),
        "sampling": Value("string"),
        "limited": Value("bool"),
        "repeated": Value("float64"),
    }
)

# Shares of all prompts. The gate's prompts decide whether an adapter is promoted; the validation prompts
# choose the checkpoint that the gate judges. They are separate because the best of many checkpoints on
# one set looks better on that set than it is. Too small: the gate has too few generations to see a gain.
# Too large: less is left to train on.
GATE_SHARE = 0.2
VALIDATION_SHARE = 0.1
# A first adapter is judged on FIRST_GATE generations, or on FIRST_GATE_SHARE of all generations if that is fewer: at
# a hundred records, GATE_SHARE was too few to detect a large gain in one log of six. Once an adapter is in use,
# GATE_SHARE applies; it is a part of the first gate's set, so no adapter is judged on prompts that an earlier one
# was trained on.
FIRST_GATE = 36
FIRST_GATE_SHARE = 0.35

# A loop: of LOOP_WINDOW consecutive 8-grams, at least LOOP_SHARE occurred earlier in the same output. Too short or
# too low: a line of code that is quoted twice counts as a loop. Too long or too high: short answers that loop to
# their end are not detected.
NGRAM = 8
LOOP_WINDOW = 24
LOOP_SHARE = 0.75


@dataclass(frozen=True)
class Spooled:
    """The place of a record's hidden states in the spool."""

    spool: FeatureSpool
    number: int
    tokens: str

    def read(self) -> HiddenStates | None:
        """The features; None where the spool no longer has them."""
        return self.spool.read(self.number, self.tokens)


class Stopped(Exception):  # noqa: N818 - a request, not an error
    """``should_stop`` returned True while many generations were read or replayed."""


class TooLittleError(AdaptiveError):
    """There is too little to learn from, or to judge or compare by. About ``more`` answers change that, or another
    draft; None if the number is unknown."""

    def __init__(self, message: str, more: int | None = None) -> None:
        super().__init__(message)
        self.more = more


@dataclass(frozen=True)
class Example:
    """One generation in the form that training uses.

    ``id`` is the log's id; a row from a file has its negated line number. ``prompt`` and ``output`` are
    token ids (int32). ``limited`` is True where a length limit ended the output, which the drafter knew in advance.
    ``supervision`` covers every output position, or is None. ``features`` are the target's hidden states, or
    their place in the spool, if the example has any. ``fold`` is that of its prompt (see the function); nan if it is
    unknown.
    """

    id: int
    domain: str
    prompt: npt.NDArray[np.int32]
    output: npt.NDArray[np.int32]
    sampling: SamplingParams
    limited: bool
    supervision: Supervision | None
    features: Spooled | HiddenStates | None = None
    fold: float = math.nan

    def states(self) -> HiddenStates | None:
        """The target's hidden states; None if there are none, or none any more."""
        return self.features.read() if isinstance(self.features, Spooled) else self.features

    def covered(self, states: HiddenStates) -> bool:
        """Whether every output token can be drafted from ``states``: a token reads the one of the token two before it.
        Those of a long answer may begin too late, since earlier versions kept only its last tokens."""
        needed = len(self.prompt) - 2, len(self.prompt) + len(self.output) - 2
        return states.first <= max(0, needed[0]) and states.first + len(states.values) >= needed[1]

    def shortened(self, longest: int) -> Example:
        """The example with at most the first ``longest`` tokens of its output."""
        if len(self.output) <= longest:
            return self
        known = self.supervision
        if known is not None:
            ids, logprobs = known.ids[:longest], known.logprobs[:longest]
            known = Supervision(ids, logprobs, known.rest[:longest], known.chosen[:longest])
        return replace(self, output=self.output[:longest], limited=False, supervision=known)

    @property
    def replayable(self) -> bool:
        """Whether acceptance can be computed from it. A sampled token needs the target's probability of it. Constrained
        sampling is excluded, since the tokens that the grammar forbade are not recorded."""
        known = self.sampling.greedy or self.supervision is not None
        return len(self.output) >= 2 and known and not self.sampling.constrained


@dataclass(frozen=True)
class Split:
    """Three sets that share no prompt."""

    train: Dataset
    validation: Dataset
    gate: Dataset


def repeated_ngrams(output: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """For each 8-gram of ``output`` (n,), whether it occurred earlier in the output: (max(0, n - 7),)."""
    seen: set[tuple[int, ...]] = set()
    tokens = output.tolist()
    flags = np.zeros(max(0, len(tokens) - NGRAM + 1), dtype=bool)
    for start in range(len(flags)):
        gram = tuple(tokens[start : start + NGRAM])
        flags[start] = gram in seen
        seen.add(gram)
    return flags


def loop_start(repeated: npt.NDArray[np.bool_], length: int) -> int:
    """The number of tokens, of ``length``, before the first loop; ``length`` if there is none.

    ``repeated`` is the result of ``repeated_ngrams``. The kept part ends before the loop's first repeated 8-gram is
    complete.
    """
    if len(repeated) < LOOP_WINDOW:
        return length
    counts = np.convolve(repeated, np.ones(LOOP_WINDOW, dtype=int), mode="valid")
    looping = np.flatnonzero(counts >= LOOP_SHARE * LOOP_WINDOW)
    if not len(looping):
        return length
    first = int(looping[0])
    return first + int(np.argmax(repeated[first:])) + NGRAM - 1


def fold(key: str) -> float:
    """Map a prompt to a number in [0, 1) that never changes and does not depend on other records.

    A prompt that was held out once is held out in every later run, so no adapter is ever judged
    on a prompt that it, or an ancestor of it, was trained on.
    """
    plain = " ".join(key.lower().split())
    return int.from_bytes(hashlib.sha256(plain.encode()).digest()[:8], "big") / 2**64


def prompt_key(generation: Generation) -> str:
    """The text that identifies a prompt: the last user message of a chat, or the text or ids of a raw prompt.

    Earlier turns are ignored, so that a question that is repeated later or after a greeting falls into the same set. Of
    a raw text the last line is ignored if it is not complete: an editor asks again after every few keystrokes, and
    nearly equal requests would otherwise be in training, validation and gate. A template ends its last line.
    """
    for message in reversed(generation.messages):
        if message.role == "user":
            return message.content
    text = generation.prompt_text
    return text[: text.rfind("\n") + 1].strip() or text or " ".join(map(str, generation.prompt.tolist()))


def row(
    number: int,
    key: str,
    domain: str | None,
    prompt: npt.NDArray[np.int32],
    output: npt.NDArray[np.int32],
    sampling: SamplingParams,
    supervision: Supervision | None,
    limited: bool,
) -> dict[str, Any]:
    """One row of ``FEATURES``, its output cut at the first loop, or at LONGEST_ANSWER, beyond which nothing is used."""
    repeated = repeated_ngrams(output)
    kept = min(loop_start(repeated, len(output)), LONGEST_ANSWER)
    return {
        "id": number,
        "tokens": tokens_hash(prompt, output),
        "domain": domain or "",
        "fold": fold(key),
        "prompt": prompt,
        "output": output[:kept],
        "top_ids": None if supervision is None else supervision.ids[:kept].reshape(-1),
        "top_logprobs": None if supervision is None else supervision.logprobs[:kept].reshape(-1),
        "rest": None if supervision is None else supervision.rest[:kept],
        "chosen": None if supervision is None else supervision.chosen[:kept],
        "sampling": sampling.to_json(),
        "limited": limited and kept == len(output),
        "repeated": float(repeated.mean()) if len(repeated) else 0.0,
    }


def from_rows(rows: Iterable[dict[str, Any]]) -> Dataset:
    """A dataset held in memory, so that no conversation text is written to a cache outside the state folder.

    Arrays become its columns as they are, a few rows at a time: ``Dataset.from_dict`` would make a Python object of
    every number, which takes 20 times the memory.
    """
    rows, schema = iter(rows), FEATURES.arrow_schema
    tables = [schema.empty_table()]
    while some := list(islice(rows, ROWS)):
        columns = [_column([row[field.name] for row in some], field.type) for field in schema]
        tables.append(pa.Table.from_arrays(columns, schema=schema))
    # Without a fingerprint, one is made of a copy of all numbers.
    return Dataset(pa.concat_tables(tables), fingerprint=secrets.token_hex(8))


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """A column of values, which are arrays or None if ``kind`` is a list."""
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    numbers = kind.value_type.to_pandas_dtype()
    there = [np.asarray(value, numbers).reshape(-1) for value in values if value is not None]
    flat = np.concatenate([np.zeros(0, numbers), *there])
    ends = np.cumsum([0, *(0 if value is None else len(value) for value in values)], dtype=np.int32)
    without = np.array([*(value is None for value in values), False])
    return pa.ListArray.from_arrays(pa.array(ends, mask=without), pa.array(flat, kind.value_type))


def unless_stopped(items: Iterable[Item], should_stop: Callable[[], bool] | None) -> Iterator[Item]:
    """``items`` as they are. Raises Stopped if ``should_stop``, asked before each ROWS of them, returns True."""
    for number, item in enumerate(items):
        if number % ROWS == 0 and should_stop is not None and should_stop():
            raise Stopped
        yield item


def read_log(
    log: Path,
    size: int,
    until: int | None = None,
    damaged: set[int] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Dataset:
    """The newest ``size`` generations of the log (the supervision buffer of a run), oldest first.

    Left out are generations after id ``until``, those with fewer than two output tokens before a loop, and damaged
    ones, whose ids are added to ``damaged``. Raises TooLittleError where there is no log, and Stopped when
    ``should_stop`` returns True.
    """
    from adaptive.records.log import Log

    if not log.exists():
        raise TooLittleError(
            f"there is no log at {log}: nothing has been recorded for this pair yet; use `adaptive chat` or "
            "`adaptive generate` first, or train from a file with --data"
        )
    with Log(log) as reader:
        rows = unless_stopped(_rows(reader, size, until), should_stop)
        found = from_rows(r for r in rows if len(r["output"]) >= 2 and len(r["prompt"]))
        if damaged is not None:
            damaged.update(reader.damaged)
    return found


def _rows(reader: Log, size: int, until: int | None) -> Iterator[dict[str, Any]]:
    """The rows of the newest ``size`` generations up to id ``until``, as they are read."""
    wanted = reader.newest(size, until)
    for logged in reader.generations(wanted[0] - 1, len(wanted), with_supervision=True) if wanted else ():
        g = logged.generation
        if g.sampling.constrained and g.supervision is None:
            continue  # a grammar chose among the tokens: without supervision the target's own choice is unknown
        limited, key = g.finish_reason == "length", prompt_key(g)
        yield row(logged.id, key, g.domain, g.prompt, g.output, _accepted_as(g), g.supervision, limited)


def _accepted_as(generation: Generation) -> SamplingParams:
    """The sampling by which drafted tokens are accepted. Where an external server proposes the draft's most likely
    tokens, a proposal is accepted exactly if it equals the output token, as under greedy decoding."""
    sampling = generation.sampling
    likeliest = generation.engine in LIKELIEST_PROPOSED
    return SamplingParams(constrained=sampling.constrained) if likeliest else sampling


def join(first: Dataset, second: Dataset) -> Dataset:
    """The rows of ``first``, then those of ``second``."""
    joined: Dataset = concatenate_datasets([first, second])
    return joined


def gate_share(generations: int, first: bool) -> float:
    """The gate's share of this many ``generations``, for a ``first`` adapter or a later one."""
    return max(GATE_SHARE, min(FIRST_GATE_SHARE, FIRST_GATE / max(1, generations))) if first else GATE_SHARE


def split(dataset: Dataset, first: bool = False) -> Split:
    """Split into train, validation and gate by the hash of the prompt; the gate of a ``first`` adapter is larger."""
    folds = np.asarray(dataset["fold"], dtype=np.float64)
    apart = GATE_SHARE + VALIDATION_SHARE
    validation = (folds >= GATE_SHARE) & (folds < apart)
    gate = (folds < gate_share(len(folds), first) + VALIDATION_SHARE) & ~validation
    return Split(
        train=dataset.select(np.flatnonzero(~gate & ~validation)),
        validation=dataset.select(np.flatnonzero(validation)),
        gate=dataset.select(np.flatnonzero(gate)),
    )


def examples(
    dataset: Dataset,
    longest: int,
    spool: FeatureSpool | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> list[Example]:
    """All rows as numpy arrays, with outputs cut to ``longest`` tokens (``batches.longest_output``). With a ``spool``,
    only the rows whose features it has. Raises Stopped when ``should_stop`` returns True."""
    return list(_examples(unless_stopped(dataset.with_format("numpy"), should_stop), longest, spool))


def _examples(rows: Iterable[dict[str, Any]], longest: int, spool: FeatureSpool | None) -> Iterator[Example]:
    for r in rows:
        features = None
        if spool is not None:
            features = Spooled(spool, int(r["id"]), str(r["tokens"]))
            if not spool.has(features.number, features.tokens):
                continue
        supervision = None
        if r["rest"] is not None:
            rest = np.asarray(r["rest"], np.float16)
            supervision = Supervision(
                ids=np.asarray(r["top_ids"], np.int32).reshape(len(rest), -1),
                logprobs=np.asarray(r["top_logprobs"], np.float16).reshape(len(rest), -1),
                rest=rest,
                chosen=np.asarray(r["chosen"], np.float16),
            )
        whole = Example(
            id=int(r["id"]),
            domain=str(r["domain"]),
            prompt=np.asarray(r["prompt"], np.int32),
            output=np.asarray(r["output"], np.int32),
            sampling=SamplingParams.from_json(str(r["sampling"])),
            limited=bool(r["limited"]),
            supervision=supervision,
            features=features,
            fold=float(r["fold"]),
        )
        yield whole.shortened(longest)


def held(given: Sequence[Example], should_stop: Callable[[], bool] | None = None) -> list[Example]:
    """The examples whose features can be read and cover the output, with these loaded into memory, so that every
    evaluation uses the same examples. Examples without features are kept. Raises Stopped if ``should_stop``, asked
    before features are read, returns True."""
    found = []
    for example in given:
        if example.features is None:
            found.append(example)
            continue
        if should_stop is not None and should_stop():
            raise Stopped
        features = example.states()
        if features is not None and example.covered(features):
            found.append(replace(example, features=features))
    return found


def domains(chosen: Sequence[Example]) -> dict[str, int]:
    """Number of generations by domain label, "" for none."""
    counts: dict[str, int] = {}
    for example in chosen:
        counts[example.domain] = counts.get(example.domain, 0) + 1
    return counts
