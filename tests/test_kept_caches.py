"""A restarted server continues a long conversation without reading it again."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import BUNDLED
from service_server import Server

from adaptive.caches import Conversations
from adaptive.kept import LEAST, KeptCaches
from adaptive.pair import Pair, load_pair
from adaptive.settings import load_settings

# One xdist worker runs these tests, since they start one server after another.
pytestmark = pytest.mark.xdist_group("kept_caches")

TEXT = list(range(5, 305)) * 2


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request: pytest.FixtureRequest) -> Pair:
    given = {"target": str(BUNDLED / "target"), "draft": str(BUNDLED / "draft"), "dtype": request.param}
    return load_pair(load_settings(given))


def conversations(pair: Pair, folder: Path, limit: int = 10**9) -> Conversations:
    return Conversations(pair.target, pair.draft, 10**9, KeptCaches(folder, limit, pair.target))  # type: ignore[arg-type]


def read(kept: Conversations, tokens: list[int], private: bool = False) -> torch.Tensor:
    """Logits after ``tokens`` in a conversation, which reads those that it does not hold."""
    conversation = kept.take([*tokens, 3])
    conversation.private = private
    conversation.target.keep_prefix_of([*tokens, 3])
    held = conversation.target.sequence.length
    if held < len(tokens):
        conversation.target.sequence.extend(tokens[held:], 0)
    conversation.target.tokens = list(tokens)
    logits = conversation.target.sequence.extend([3], 1).clone()
    conversation.target.sequence.rollback(len(tokens))
    return logits


def held(kept: Conversations, tokens: list[int]) -> int:
    """Number of tokens of a prompt that need not be read."""
    return kept.take(tokens).target.common(tokens)


def test_what_is_read_from_a_file_is_what_was_computed(pair: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "caches"
    first = conversations(pair, folder)
    wanted = read(first, TEXT)
    assert first.keep()
    assert not first.keep(), "it is on disk already"
    (file,) = folder.glob("*.safetensors")
    assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0
    again = conversations(pair, folder)
    assert held(again, [*TEXT, 9]) == len(TEXT)
    assert torch.equal(read(again, TEXT), wanted)
    other = conversations(pair, folder)
    assert held(other, [*TEXT[:400], 9, 9]) == 400
    assert torch.equal(read(other, TEXT[:400]), read(conversations(pair, tmp_path / "none"), TEXT[:400]))


@pytest.mark.parametrize("how", ["cut", "changed", "other"])
def test_a_damaged_file_is_as_good_as_none(pair: Pair, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "caches"
    first = conversations(pair, folder)
    wanted = read(first, TEXT)
    first.keep()
    (file,) = folder.glob("*.safetensors")
    whole = file.read_bytes()
    middle = len(whole) // 2
    if how == "cut":
        file.write_bytes(whole[:middle])
    elif how == "changed":
        file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 64]) + whole[middle + 1 :])
    else:
        file.write_bytes(b"no cache")
    again = conversations(pair, folder)
    assert held(again, [*TEXT, 9]) == 0
    assert not list(folder.glob("*.safetensors"))
    assert torch.equal(read(again, TEXT), wanted)


def test_there_is_no_more_on_disk_than_may_be_and_nothing_private(pair: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "caches"
    first = conversations(pair, folder)
    read(first, TEXT)
    read(first, TEXT[::-1], private=True)
    read(first, TEXT[: LEAST - 1][::-1])
    first.keep(every=True)
    (file,) = folder.glob("*.safetensors")
    small = conversations(pair, folder, limit=file.stat().st_size * 3 // 2)
    read(small, TEXT[7:])
    assert small.keep()
    assert len(list(folder.glob("*.safetensors"))) == 1
    assert held(conversations(pair, folder), [*TEXT, 9]) == 0, "the oldest went first"
    small.forget()
    assert not list(folder.glob("*.safetensors"))
    read(small, TEXT)
    folder.rmdir()  # as a purge does
    assert not small.keep()
    assert not list(folder.glob("*.safetensors"))


@pytest.mark.thorough
def test_the_second_turn_after_a_restart_reads_what_is_new(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "A long story about boats, told anew. " * 60}]

    def ask(server: Server, more: dict[str, Any] | None = None) -> dict[str, Any]:
        body = {"messages": turns, "max_tokens": 12, "temperature": 0, **(more or {})}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    texts: dict[str, str] = {}
    for kept in ("1GB", "0"):
        turns = turns[:1]
        options = ("--distill", "off", "--keep-caches", kept)
        one = Server(tmp_path / kept, *options).wait_until_ready()
        first = ask(one)
        assert one.stop() == 0
        turns.append(first["choices"][0]["message"])
        turns.append({"role": "user", "content": "And then?"})
        again = Server(tmp_path / kept, *options).wait_until_ready()
        second = ask(again)
        assert again.stop() == 0
        texts[kept] = second["choices"][0]["message"]["content"]
        if kept == "0":
            assert second["timings"]["prompt_n"] > 500
        else:
            assert second["timings"]["prompt_n"] < 60
            assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 500
    assert texts["1GB"] == texts["0"]
