"""The adapter in doubt and how far training has read, when several processes use one folder, or the file cannot be
used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from shortages import replaced_by_a_folder
from store_factory import folder_in_memory, published

from adaptive.errors import AdaptiveError
from adaptive.service.doubts import Doubt, Doubts
from checkpoints.store import AdapterStore


def two(tmp_path: Path, store: AdapterStore) -> tuple[Doubts, Doubts]:
    """Those of a server and of a chat, say, that have read the same file."""
    server, chat = (Doubts(store, tmp_path / "doubts.json", pytest.fail) for _ in range(2))
    server.remember(0)
    chat.remember(0)
    return server, chat


def test_what_two_processes_note_is_all_kept(tmp_path: Path) -> None:
    server, chat = two(tmp_path, published(tmp_path / "adapters", 1, promote=1))
    server.trained(60, newest=60)
    chat.reviewed(70, newest=70)
    assert server.roll_back("0001", "live acceptance fell", lambda: 80)
    chat.trained(40, newest=80)  # of a run that began earlier
    assert Doubt.load(tmp_path / "doubts.json") == chat.now == Doubt("0001", settled=80, reviewed=70, trained=60)


# Notes 100 answers, one after the other, and finds each in the file while another process does so, too.
NOTES = """
import sys
from pathlib import Path
from adaptive.service.doubts import Doubts
from checkpoints.store import AdapterStore
folder, name = Path(sys.argv[1]), sys.argv[2]
doubts = Doubts(AdapterStore(folder / "adapters"), folder / "doubts.json", sys.exit)
for answer in range(1, 101):
    getattr(doubts, name)(answer, newest=1000)
    doubts.refresh()
    if getattr(doubts.now, name) != answer:
        sys.exit(f"{name} {answer} was written over: {doubts.now}")
"""


def test_what_two_processes_note_at_the_same_moment_is_all_kept() -> None:
    with folder_in_memory() as folder:
        commands = [[sys.executable, "-c", NOTES, str(folder), name] for name in ("trained", "reviewed")]
        processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
        assert [process.communicate()[1] for process in processes] == ["", ""]
        assert Doubt.load(folder / "doubts.json") == Doubt(trained=100, reviewed=100)


def test_a_doubt_that_another_process_noted_stays_unless_it_is_the_one_that_is_cleared(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 2, promote=2)
    server, chat = two(tmp_path, store)
    assert server.roll_back("0002", "live acceptance fell", lambda: 10)
    chat.refresh()
    store.promote("0002", "by hand")
    assert server.roll_back("0002", "live acceptance fell again", lambda: 20)
    assert server.roll_back("0001", "live acceptance fell", lambda: 30)
    chat.promoted()
    assert chat.now.adapter == "0001"
    server.promoted()
    assert Doubt.load(tmp_path / "doubts.json").adapter is None


def test_where_a_rollback_fails_the_doubt_before_it_is_kept(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 2, promote=2)
    Doubt("0001", settled=5).save(tmp_path / "doubts.json")
    doubts = Doubts(store, tmp_path / "doubts.json", pytest.fail)
    with replaced_by_a_folder(store.root / ".lock"), pytest.raises(AdaptiveError, match="cannot be written"):
        doubts.roll_back("0002", "live acceptance fell", lambda: 10)
    assert not doubts.roll_back("0001", "it is not in use", lambda: 10)
    assert Doubt.load(tmp_path / "doubts.json") == doubts.now == Doubt("0001", settled=5)


def test_what_could_not_be_written_is_written_with_the_next_change(tmp_path: Path) -> None:
    store, said = published(tmp_path / "adapters", 1, promote=1), list[str]()
    file = tmp_path / "doubts.json"
    server, chat = (Doubts(store, file, said.append) for _ in range(2))
    chat.reviewed(5, newest=9)
    with replaced_by_a_folder(file.with_suffix(".lock")):
        server.trained(7, newest=9)
        assert "cannot be written" in said[0]
        server.refresh()
        assert server.now == Doubt(reviewed=5, trained=7)
    server.reviewed(8, newest=9)
    assert Doubt.load(file) == Doubt(reviewed=8, trained=7)


def test_where_nothing_can_be_written_a_rollback_is_tried_again_and_again_and_leaves_nothing(tmp_path: Path) -> None:
    store, file = published(tmp_path / "adapters", 2, promote=2), tmp_path / "doubts.json"
    Doubt("0001", settled=5).save(file)
    doubts = Doubts(store, file, lambda said: None)
    doubts.remember(9)
    file.with_suffix(".lock").touch()
    with replaced_by_a_folder(store.root / ".lock"), replaced_by_a_folder(file.with_suffix(".lock")):
        for _ in range(3):
            with pytest.raises(AdaptiveError, match="cannot be written"):
                doubts.roll_back("0002", "live acceptance fell", lambda: 10)
            assert doubts.now == Doubt("0001", settled=5)
    assert not doubts._unwritten
    assert doubts.roll_back("0002", "live acceptance fell", lambda: 10)
    assert Doubt.load(file) == Doubt("0002", settled=10)


def test_a_file_that_cannot_be_read_for_a_while_is_not_written_over(tmp_path: Path) -> None:
    store, said, file = published(tmp_path / "adapters", 1), list[str](), tmp_path / "doubts.json"
    Doubt("0001", settled=3, reviewed=4).save(file)
    doubts = Doubts(store, file, said.append)
    with replaced_by_a_folder(file):
        doubts.remember(9)
    assert "cannot be read now" in said[0]
    doubts.trained(9, newest=9)
    assert Doubt.load(file) == Doubt("0001", settled=3, reviewed=4, trained=9)


def test_in_a_new_log_answers_count_from_its_beginning(tmp_path: Path) -> None:
    store, file = published(tmp_path / "adapters", 1), tmp_path / "doubts.json"
    Doubt(reviewed=500, trained=500).save(file)
    doubts = Doubts(store, file, pytest.fail)
    doubts.remember(40)
    assert doubts.trained_until(40) == 0
    doubts.trained(30, newest=40)
    doubts.reviewed(35, newest=40)
    assert Doubt.load(file) == Doubt(reviewed=35, trained=30)
