"""What training reads of the log: no prompt is on two sides, loops are cut out, supervision arrives as it was made."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_trainer import VOCAB, generation, log, speak, spoken, target, write_log

from adaptive.records.features import LONGEST_ANSWER
from adaptive.types import Generation, SamplingParams, Supervision
from trainers.dataset import (
    Example,
    examples,
    fold,
    from_rows,
    gate_share,
    loop_start,
    prompt_key,
    read_log,
    repeated_ngrams,
    row,
    split,
)
from trainers.losses import cross_entropy, kl_tv, outcomes
from trainers.per_position import position_losses

assert log  # a fixture, as the next
assert spoken


def test_no_prompt_is_ever_on_two_sides_and_sides_never_change(tmp_path: Path, spoken: list[Generation]) -> None:
    again = [generation(f"0-{i}", np.arange(9), np.arange(1, 30), SamplingParams()) for i in range(60)]
    small = read_log(write_log(tmp_path / "a.db", spoken[:40]), 1000)
    large = read_log(write_log(tmp_path / "b.db", [*spoken, *again]), 1000)
    sides = [
        {side: set(getattr(split(rows), side)["fold"]) for side in ("train", "validation", "gate")}
        for rows in (small, large)
    ]
    for side in sides[1]:
        others = set().union(*(sides[1][other] for other in sides[1] if other != side))
        assert not sides[1][side] & others
        assert sides[0][side] <= sides[1][side]
    parts = split(large)
    assert len(parts.train) + len(parts.validation) + len(parts.gate) == 160
    assert fold("  What is\n2+2? ") == fold("what is 2+2?")


def raw(text: str, ids: np.ndarray) -> Generation:
    """An answer to a raw prompt; without its text, as some programs send it, if ``text`` is empty."""
    return replace(generation("", ids, np.arange(1, 30), SamplingParams()), messages=(), prompt_text=text)


def test_a_line_that_is_being_typed_is_one_prompt(tmp_path: Path) -> None:
    before, line = "import os\n\n\ndef main() -> None:\n", "    print(os.getcwd())"
    said = [raw(before + line[:end], np.arange(9)) for end in range(len(line) + 1)]
    said += [raw(before + line + "\n" + line[:end], np.arange(9)) for end in range(5)]
    rows = read_log(write_log(tmp_path / "r.db", said), 1000)
    assert len(rows) == len(line) + 6
    assert len(set(rows["fold"])) == 2


def test_other_raw_prompts_are_told_apart_by_all_of_their_text() -> None:
    ids = np.arange(9)
    template = "You are a knight.\nUser: {}\nAssistant:\n"
    for one, other in (("2 + 2 =", "2 + 3 ="), (template.format("Hello"), template.format("Farewell"))):
        assert prompt_key(raw(one, ids)) != prompt_key(raw(other, ids))
    assert prompt_key(raw("\n2 + 2", ids)) != prompt_key(raw("\n2 + 3", ids))
    assert prompt_key(raw("", ids)) != prompt_key(raw("", ids[:8]))


@pytest.mark.parametrize(("generations", "share"), [(40, 0.35), (120, 0.3), (1000, 0.2)])
def test_a_first_adapter_is_judged_on_more_and_never_on_what_chose_it(
    tmp_path: Path, generations: int, share: float
) -> None:
    said = [generation(f"{i}", np.arange(9), np.arange(1, 30), SamplingParams()) for i in range(generations)]
    rows = read_log(write_log(tmp_path / "r.db", said), 2000)
    usual, first = split(rows), split(rows, first=True)
    assert gate_share(generations, first=True) == pytest.approx(share)
    assert abs(len(first.gate) - share * generations) < 4 * (generations * share * (1 - share)) ** 0.5
    assert set(usual.gate["id"]) <= set(first.gate["id"])
    assert usual.validation["id"] == first.validation["id"]
    assert sorted([*first.train["id"], *first.validation["id"], *first.gate["id"]]) == sorted(rows["id"])


def test_loops_are_cut_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    fresh = rng.integers(0, VOCAB, 60)
    looping = np.concatenate([fresh, np.tile(np.arange(5), 30)])
    quoting = np.concatenate([fresh, fresh[:20], rng.integers(0, VOCAB, 40)])
    kept = loop_start(repeated_ngrams(looping), len(looping))
    assert 60 <= kept <= 75
    assert loop_start(repeated_ngrams(quoting), len(quoting)) == len(quoting)
    rows = read_log(write_log(tmp_path / "r.db", [generation("q", fresh, looping, SamplingParams())]), 10)
    (one,) = examples(rows, 1000)
    assert len(one.output) == kept
    assert not one.limited
    assert rows[0]["repeated"] > 0.5


def test_supervision_survives_the_way_through_the_dataset(log: Path, spoken: list[Generation]) -> None:
    for example, one in zip(examples(read_log(log, 1000), 1000), spoken, strict=True):
        assert example.supervision is not None
        assert one.supervision is not None
        n = len(example.output)
        for name in ("ids", "logprobs", "rest", "chosen"):
            np.testing.assert_array_equal(getattr(example.supervision, name), getattr(one.supervision, name)[:n])


def test_auto_takes_the_distribution_at_the_records_temperature_and_text_where_there_is_none(
    spoken: list[Generation],
) -> None:
    greedy = speak(target(), 1, SamplingParams())[0]

    def example(g: Generation) -> Example:
        return Example(1, "", g.prompt, g.output, g.sampling, False, g.supervision)

    both = [example(greedy), example(spoken[0]), replace(example(spoken[1]), supervision=None)]
    logits = torch.randn(120, VOCAB)
    found = position_losses(logits, both, "auto")
    kept: list[torch.Tensor] = []
    for name in ("ids", "logprobs", "rest"):
        arrays = [getattr(one.supervision, name) for one in (greedy, spoken[0])]
        kept.append(torch.cat([torch.from_numpy(a.astype(np.int64) if name == "ids" else a) for a in arrays]))
    temperatures = torch.tensor([1.0] * 40 + [0.7] * 40)
    torch.testing.assert_close(found[:80], kl_tv(*outcomes(logits[:80], *kept, temperatures)))
    torch.testing.assert_close(found[80:], cross_entropy(logits[80:], torch.from_numpy(spoken[1].output).long()))


def test_rows_become_a_dataset_without_an_object_for_every_number() -> None:
    positions, k = 400, 32
    supervision = Supervision(
        np.zeros((positions, k), np.int32), np.zeros((positions, k), np.float16),
        np.zeros(positions, np.float16), np.zeros(positions, np.float16),
    )  # fmt: skip
    output = np.arange(positions, dtype=np.int32)

    def rows(count: int) -> Iterator[dict[str, Any]]:
        for number in range(count):
            yield row(number, "q", "", output[:9], output, SamplingParams(), supervision if number % 2 else None, False)

    from_rows(rows(10))
    tracemalloc.start()
    found = from_rows(rows(200))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.data.nbytes > 100 * positions * k * 6
    assert peak < 1.5 * found.data.nbytes
    assert found[0]["rest"] is None
    assert found[0]["top_ids"] is None
    assert len(found[1]["top_ids"]) == positions * k
    assert [len(e.output) for e in examples(found, 1000)] == 200 * [positions]


def test_an_answer_is_kept_as_far_as_training_can_use_it() -> None:
    output = np.arange(3000, dtype=np.int32)
    made = row(1, "q", "", output[:9], output, SamplingParams(), None, True)
    assert len(made["output"]) == LONGEST_ANSWER
    assert not made["limited"]
