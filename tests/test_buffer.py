"""What is retained of a long log: the newest, or every kind that was ever said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from records_factory import generation

from adaptive.records.log import Log, Outline
from adaptive.records.writer import LogWriter
from adaptive.types import Round
from trainers.buffer import retained, runs
from trainers.dataset import read_log


def outlines(kinds: list[str | None], accepted: int = 5) -> list[Outline]:
    return [Outline(n, kind, 10, accepted) for n, kind in enumerate(kinds, 1)]


def test_newest_keeps_the_newest() -> None:
    assert retained(outlines(["a"] * 10), 3, "newest") == [8, 9, 10]


def test_a_kind_of_long_ago_keeps_its_share_and_a_rare_one_all() -> None:
    known = outlines(["old"] * 100 + ["rare"] * 5 + ["new"] * 300)
    kept = set(retained(known, 105, "kinds"))
    assert len(kept) == 105
    count = {kind: sum(o.domain == kind for o in known if o.id in kept) for kind in ("old", "rare", "new")}
    assert count == {"old": 50, "rare": 5, "new": 50}
    assert {o.id for o in known[-25:]} <= kept
    assert {o.id for o in known[75:100]} <= kept


def test_badly_predicted_records_stay_more_often() -> None:
    known = [Outline(n, None, 10, 9 if n % 2 else 0) for n in range(1, 2001)]
    sample = [n for n in retained(known, 400, "kinds") if n <= 1800]
    assert np.mean([n % 2 == 0 for n in sample]) > 0.6


def test_the_sample_of_older_records_is_stable() -> None:
    kinds: list[str | None] = ["a"] * 500 + ["b"] * 500
    before = {n for n in retained(outlines(kinds), 200, "kinds") if n <= 400}
    after = {n for n in retained(outlines([*kinds, *["b"] * 20]), 200, "kinds") if n <= 400}
    assert before == after


@given(
    st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=60),
    st.integers(1, 70),
    st.sampled_from(["newest", "kinds"]),
)
def test_as_many_as_fit_are_kept_once_and_in_order(kinds: list[str | None], size: int, how: str) -> None:
    known = outlines(kinds)
    kept = retained(known, size, how)  # type: ignore[arg-type]
    assert kept == sorted(set(kept))
    assert len(kept) == min(size, len(known))
    found = [n for first, count in runs(known, kept) for n in range(first, first + count)]
    assert found == kept


def test_the_dataset_holds_what_is_retained(tmp_path: Path) -> None:
    rounds = (Round("model", 4, 1, 0.01, 0.02),)
    with LogWriter(tmp_path / "records.db") as writer:
        for n in range(30):
            writer.write(generation(n, asked=f"question {n}", domain="a" if n < 10 else "b", rounds=rounds))
        writer.flush()
    known = Log(tmp_path / "records.db").outlines()
    assert known[0] == Outline(1, "a", 4, 1)
    assert read_log(tmp_path / "records.db", 8)["id"] == list(range(23, 31))
    kept = read_log(tmp_path / "records.db", 8, retain="kinds")
    assert sorted(kept["domain"]) == ["a"] * 4 + ["b"] * 4
    assert kept["id"] == retained(known, 8, "kinds")
