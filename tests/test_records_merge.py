"""Logs of several machines become one: each record once and complete, and the source logs stay unchanged."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BUNDLED
from records_factory import generation, same
from transformers import AutoTokenizer

from adaptive.errors import AdaptiveError
from adaptive.pair import pair_identity
from adaptive.records.history import History, history
from adaptive.records.log import Log
from adaptive.records.merge import Merged, merge
from adaptive.records.writer import LogWriter
from adaptive.settings import load_settings
from adaptive.state import PairState, open_state
from adaptive.types import Generation, Timings

TEXTS: dict[tuple[int, ...], str] = {}


def said(number: int, **changes: Any) -> Generation:
    """A generation whose text is ``decode`` of its tokens."""
    made = dataclasses.replace(generation(number), **changes)
    tokens = tuple(made.output.tolist())
    TEXTS[tokens] = f"{TEXTS.get(tokens, '')}<s>{made.text}</s>"
    return made


def decode(ids: list[int]) -> str:
    return TEXTS.get(tuple(ids), "?")


def write(path: Path, *generations: Generation) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with LogWriter(path) as log:
        for one in generations:
            log.write(one)
    return path


def read(state: PairState) -> list[Generation]:
    with Log(state.records) as log:
        return [one.generation for one in log.generations()]


@pytest.fixture
def state(tmp_path: Path) -> PairState:
    return open_state(tmp_path / "home", "pair")


def test_three_logs_become_one_in_order_of_time_and_each_record_is_there_once(tmp_path: Path, state: PairState) -> None:
    everything = [said(number, session=f"s{number % 3}") for number in range(140)]
    shared = everything[60:70]
    logs = [write(tmp_path / str(part) / "records.db", *everything[part::3], *shared) for part in range(3)]
    write(state.records, *everything[:5])
    before = [hashlib.sha256(path.read_bytes()).digest() for path in logs]
    done = merge(state, [logs[0], logs[1].parent, logs[2]], decode)
    assert done == Merged(135, 5 + 30, 0)
    found = read(state)
    assert [one.created for one in found] == sorted(one.created for one in everything)
    for one, other in zip(found[5:], everything[5:], strict=True):
        timings = dataclasses.replace(other.timings, prompt_s=0.0, predicted_s=0.0)
        assert same(one, dataclasses.replace(other, rounds=(), adapter=None, timings=timings))
    assert [hashlib.sha256(path.read_bytes()).digest() for path in logs] == before
    assert merge(state, logs, decode) == Merged(0, 170, 0)
    assert len(read(state)) == 140
    assert sorted(path.name for path in state.root.iterdir() if path.is_dir()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"created": 5.0},
        {"session": "t"},
        {"text": "another answer"},
        {"output": np.array([1, 2, 3, 4, 6], np.int32)},
        {"prompt": np.array([9], np.int32)},
        {"owner": "somebody"},
    ],
)
def test_records_that_differ_are_two(tmp_path: Path, state: PairState, changes: dict[str, Any]) -> None:
    one = said(1, output=np.array([1, 2, 3, 4, 5], np.int32))
    other = said(1, **{"output": one.output, **changes})
    assert merge(state, [write(tmp_path / "a.db", one), write(tmp_path / "b.db", other)], decode).taken == 2


def test_what_another_draft_did_elsewhere_does_not_count_here(tmp_path: Path, state: PairState) -> None:
    merge(state, [write(tmp_path / "a.db", said(1, adapter="0007"))], decode)
    (one,) = read(state)
    assert one.adapter is None
    assert one.rounds == ()
    assert one.supervision is not None


def test_the_history_of_speed_and_adapters_is_the_same_before_and_after_an_import(
    tmp_path: Path, state: PairState
) -> None:
    def found() -> History:
        with Log(state.records) as log:
            return history(log.figures(), "adapter")

    def here(*numbers: int) -> None:
        write(state.records, *(said(n, adapter="0007", timings=Timings(3, 0, 0.1, 5, 0.4)) for n in numbers))

    theirs = [said(n, adapter="0003", timings=Timings(3, 0, 0.1, 5, 0.04, 0.05)) for n in range(10, 40)]
    here(*range(6))
    before = found()
    merge(state, [write(tmp_path / "a.db", *theirs)], decode)
    after = found()
    assert (after.totals.generations, after.totals.tokens) == (36, 180)
    for name in ("tokens_per_second", "expected_tokens_per_second", "mean_draft_length", "tokens_per_round"):
        assert getattr(after.totals, name) == getattr(before.totals, name)
    assert (after.swaps, after.series, after.latest) == ((), before.series, before.latest)
    assert [(row.key, row.tokens_per_second) for row in after.rows] == [("0007", 10.0), ("no draft", None)]
    here(6, 7)
    assert (found().swaps, found().latest.generations, found().totals.tokens_per_second) == ((), 8, 10.0)
    assert sum(point.generations for point in found().series) == 8
    assert merge(state, [tmp_path / "a.db"], decode) == Merged(0, 30, 0)


def test_a_log_of_imported_records_only_has_no_speed(tmp_path: Path, state: PairState) -> None:
    merge(state, [write(tmp_path / "a.db", said(1), said(2))], decode)
    with Log(state.records) as log:
        found = history(log.figures())
    assert (found.totals.generations, found.totals.tokens_per_second) == (2, None)
    assert (found.latest.generations, found.series, found.swaps) == (0, (), ())


def test_ids_go_on_behind_those_that_adapters_name(tmp_path: Path, state: PairState) -> None:
    merge(state, [write(tmp_path / "a.db", said(1))], decode, after=41)
    with Log(state.records) as log:
        assert log.last_id() == 42


def test_a_damaged_record_is_left_out(tmp_path: Path, state: PairState) -> None:
    import sqlite3

    path = write(tmp_path / "a.db", said(1), said(2), said(3))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE generations SET text = 'forged' WHERE id = 2")
    assert merge(state, [path], decode) == Merged(2, 0, 1)


def test_a_log_of_another_target_is_refused_and_nothing_of_any_is_taken(tmp_path: Path, state: PairState) -> None:
    mine, foreign = write(tmp_path / "a.db", said(1)), write(tmp_path / "b.db", generation(2), generation(3))
    with pytest.raises(AdaptiveError, match="another target"):
        merge(state, [mine, foreign], lambda ids: decode(ids) if ids == said(1).output.tolist() else "?")
    assert not state.records.exists()


@pytest.mark.parametrize("own", [True, False])
def test_reasoning_that_is_shown_without_its_marks_is_of_this_target(
    tmp_path: Path, state: PairState, own: bool
) -> None:
    """Of another target, the tokens are others of the same tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    logged = []
    for number in range(6):
        thoughts, answer = f"The question has number {number}. It is about a dog.", "\n\nThe dog likes to play."
        ids = tokenizer.encode(f"<think>\n{thoughts}\n</think>{answer}", add_special_tokens=False)
        output = np.array(ids, np.int32) if own else (np.array(ids, np.int32) * 7 + 600) % 4096
        logged.append(dataclasses.replace(generation(number, tokens=len(ids)), text=thoughts + answer, output=output))
    path = write(tmp_path / "a.db", *logged)
    if own:
        assert merge(state, [path], tokenizer.decode).taken == 6
    else:
        with pytest.raises(AdaptiveError, match="another target"):
            merge(state, [path], tokenizer.decode)


def test_what_stops_the_log_that_takes_the_others_is_said_of_that_one(tmp_path: Path, state: PairState) -> None:
    source = write(tmp_path / "other" / "records.db", said(1), said(2))
    write(state.records, said(3))
    with contextlib.closing(sqlite3.connect(state.records)) as log:
        log.execute("CREATE TRIGGER full BEFORE INSERT ON generations BEGIN SELECT RAISE(ABORT, 'no room'); END")
    with pytest.raises(AdaptiveError, match="no room") as failed:
        merge(state, [source], decode)
    assert str(state.records) in str(failed.value)
    assert str(source) not in str(failed.value)


def test_what_is_no_log_is_named(tmp_path: Path, state: PairState) -> None:
    (tmp_path / "text.db").write_text("no database" * 1000)
    with pytest.raises(AdaptiveError, match=r"text\.db"):
        merge(state, [tmp_path / "text.db"], decode)
    with pytest.raises(AdaptiveError, match="holds no log"):
        merge(state, [tmp_path / "gone"], decode)
    write(state.records, said(1))
    with pytest.raises(AdaptiveError, match="the very log"):
        merge(state, [state.root], decode)


def test_the_command_says_what_it_took(adaptive: Any, tmp_path: Path, own_home: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    made = generation(1)
    made = dataclasses.replace(made, text=tokenizer.decode(made.output.tolist()))
    log = write(tmp_path / "theirs" / "records.db", made)
    for taken, known in ((1, 0), (0, 1)):
        status, out, _ = adaptive("records", "import", str(log.parent), "--json")
        assert status == 0
        assert {name: json.loads(out)[name] for name in ("taken", "known")} == {"taken": taken, "known": known}
    assert len(list(own_home.glob("*/records.db"))) == 1


def test_a_log_of_before_the_targets_weights_were_there_is_named_and_can_be_taken_over(
    adaptive: Any, own_home: Path, tmp_path: Path
) -> None:
    """`adaptive learn` needs a folder with config and tokenizer only, `adaptive head` the weights too."""
    target = tmp_path / "target"
    target.mkdir()
    for file in (BUNDLED / "target").iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).symlink_to(file)
    names = ("--target", str(target), "--draft", "none")
    tokenizer = AutoTokenizer.from_pretrained(target)
    made = generation(1, supervised=False)
    made = dataclasses.replace(made, text=str(tokenizer.decode(made.output)))
    thin = pair_identity(load_settings({"target": str(target), "draft": "none"})).id
    log = write(own_home / thin / "records.db", made)
    (target / "model.safetensors").symlink_to(BUNDLED / "target" / "model.safetensors")
    status, _, errors = adaptive("records", "stats", *names)
    assert status == 2
    assert f"adaptive records import {log}` with the same" in errors
    status, _, errors = adaptive("records", "import", str(log), *names)
    assert status == 0, errors
    status, out, errors = adaptive("records", "stats", "--json", *names)
    assert (status, json.loads(out)["generations"]) == (0, 1)
    assert "import" not in errors
