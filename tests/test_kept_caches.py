"""A restarted server continues a long conversation without reading it again."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import BUNDLED
from safetensors.torch import load_file
from service_server import Server

from adaptive.caches import Conversations
from adaptive.kept_caches import LEAST, KeptCaches
from adaptive.pair import Pair, load_pair
from adaptive.records.erase import erase_beside
from adaptive.settings import load_settings
from adaptive.state import open_state

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


def test_a_folder_that_is_gone_with_its_parents_ends_nothing(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "pair").mkdir()
    here = conversations(pair, tmp_path / "pair" / "caches")
    wanted = read(here, TEXT)
    shutil.rmtree(tmp_path / "pair")
    assert not here.keep()
    here.forget()
    assert torch.equal(read(here, TEXT), wanted)


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


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@pytest.mark.parametrize("left", range(2))
def test_a_file_for_which_there_is_no_file_descriptor_stays_and_is_used_later(
    pair: Pair, tmp_path: Path, left: int
) -> None:
    from shortages import short_of_files

    folder = tmp_path / "caches"
    first = conversations(pair, folder)
    wanted = read(first, TEXT)
    first.keep()
    again = conversations(pair, folder)
    with short_of_files(left):
        assert held(again, [*TEXT, 9]) == 0
    if left:  # enough to list the folder
        with short_of_files(left):
            assert held(conversations(pair, folder), [*TEXT, 9]) == 0
    assert len(list(folder.glob("*.safetensors"))) == 1
    assert held(again, [*TEXT, 9, 9]) == len(TEXT)
    assert torch.equal(read(conversations(pair, folder), TEXT), wanted)


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


def test_a_file_is_written_in_pieces_and_dropped_as_soon_as_somebody_asks(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaptive.kept_caches.PIECE", 1 << 16)
    folder = tmp_path / "caches"
    first = conversations(pair, folder)
    wanted = read(first, TEXT)
    whole: list[int] = []

    def asked(after: int) -> Callable[[], bool]:
        """Whether somebody asks: yes from the call number ``after`` on."""
        whole.clear()

        def is_asked() -> bool:
            whole.append(0)
            return len(whole) > after

        return is_asked

    for after in range(5):
        assert first.keep(asked(after))
        assert len(whole) == after + 1
        assert not any(folder.iterdir())
    assert first.keep(asked(10**6))
    assert len(whole) > 8
    (file,) = folder.iterdir()
    before = file.read_bytes()
    read(first, [*TEXT, 4])
    assert first.keep(asked(5))
    assert file.read_bytes() == before, "the earlier file stays until the new one is complete"
    again = conversations(pair, folder)
    assert held(again, [*TEXT, 9]) == len(TEXT)
    assert torch.equal(read(again, TEXT), wanted)


def test_a_purge_while_a_file_is_written_leaves_nothing(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaptive.kept_caches.PIECE", 1 << 16)
    state = open_state(tmp_path, "pair")
    here = conversations(pair, state.caches)
    read(here, TEXT)

    def purges() -> bool:
        erase_beside(state, everything=False)
        return False

    here.keep(purges)
    assert not [file for file in state.root.rglob("*") if file.suffix != ".db" and file.is_file()]


@pytest.mark.parametrize("limit", [10**9, 1])
def test_a_file_holds_nothing_of_an_unrecorded_conversation_that_begins_alike(
    pair: Pair, tmp_path: Path, limit: int
) -> None:
    """With ``limit`` 1 there is no room for a copy: the second conversation takes over the caches of the first."""
    shared = [*TEXT[:300], 7]
    both, alone = conversations(pair, tmp_path / "both"), conversations(pair, tmp_path / "alone")
    both.limit = limit
    read(both, TEXT, private=True)
    both.take([*shared, 3])
    both.keep(every=True)
    for file in (tmp_path / "both").glob("*.safetensors"):
        assert load_file(file)["tokens"].tolist() == TEXT[:300]
    for kept in (both, alone):
        read(kept, shared)
        kept.keep(every=True)
    files = [next((tmp_path / name).glob("*.safetensors")) for name in ("both", "alone")]
    found, wanted = map(load_file, files)
    assert len(found["tokens"]) == len(shared)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


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
