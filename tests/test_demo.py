"""``adaptive demo``, shortened: what it says to people and to machines."""

from __future__ import annotations

import json

import pytest
from conftest import Command

from cli import demo


@pytest.mark.thorough
def test_the_demo_says_what_it_came_to_as_one_object(adaptive: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few answers hardly teach anything; whether the gate lets that through, the figures say, too."""
    for name, value in (("JUDGED", 1), ("LEARNED", 56), ("TOKENS", 8)):
        monkeypatch.setattr(demo, name, value)
    status, out, err = adaptive("demo", "--json", "--dtype", "float32", "--seed", "1")
    assert status == 0, err
    for step in ("1. Before.", "2. Use it.", "3. Distil."):
        assert step in err
    (line,) = out.splitlines()
    found = json.loads(line)
    assert found["prompts"] == {"judged": 1, "learned": 56}
    plain, drafted = found["before"]
    assert (plain["draft_length"], plain["against_plain"], plain["acceptance"]) == (0, 1.0, None)
    assert plain["tokens"] == drafted["tokens"] > 0  # the seed fixes the text, whoever drafts
    assert drafted["tokens_per_round"] >= 1
    assert found["training"]["message"] in " ".join(err.split())
    assert found["training"]["promoted"] == (found["adapter"] is not None) == bool(found["after"])
    assert found["seconds"] > 0


@pytest.mark.long
def test_the_whole_demo_ends_with_an_adapter_and_what_it_brought(adaptive: Command) -> None:
    status, out, err = adaptive("demo", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["adapter"] == "0001"
    rows = {row["decoding"]: row for row in found["after"]}
    assert rows["speculative, adapter 0001"]["tokens_per_round"] > rows["speculative"]["tokens_per_round"]
    assert "times as fast as plain decoding" in " ".join(err.split()) or "as fast as plain decoding" in err
