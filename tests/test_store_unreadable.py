"""What cannot be read now is neither damaged nor missing: nothing is concluded from it, and nothing changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from shortages import replaced_by_a_folder, short_of_files
from store_factory import BASE, NEW, folder_in_memory, published, write

from adaptive.errors import AdaptiveError
from checkpoints import files
from checkpoints.folder import UnreadableStore
from checkpoints.in_use import InUse
from checkpoints.store import AdapterStore


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory, since these tests flush many small files."""
    with folder_in_memory() as folder:
        yield folder


def statuses(store: AdapterStore) -> list[str]:
    return [manifest.status for manifest in store.list()]


def test_an_adapter_that_cannot_be_read_now_stays_where_it_is(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 2, promote=1)
    store.promote("0002", "better")
    weights = store.path("0002") / "adapter_model.safetensors"
    weights.rename(tmp_path / "away")
    weights.symlink_to(weights)  # an error that even the superuser gets
    manifest, problems = store.usable(BASE)
    assert manifest is not None
    assert manifest.id == "0001"
    assert "cannot be read (Too many levels of symbolic links); adapter 0001 is used" in problems[0]
    assert store.current_id() == "0002"
    assert str(store.unreadable(manifest)) in problems[0]
    (tmp_path / "away").replace(weights)
    assert store.usable(BASE) == (store.show("0002"), [])
    assert store.unreadable(store.show("0002")) is None
    assert store.unreadable(store.usable(replace(BASE, weights="others"))[0]) is None


def test_an_adapter_whose_folder_cannot_be_listed_is_passed_over(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 2, promote=2)
    before = os.open(".", os.O_RDONLY)
    os.chdir(store.path("0002"))
    try:
        for _ in range(20):  # longer than a path may be
            os.mkdir("x" * 250)
            os.chdir("x" * 250)
    finally:
        os.chdir(before)
        os.close(before)
    manifest, problems = store.usable(BASE)
    assert manifest == store.show("0001")
    assert "cannot be read (File name too long); adapter 0001 is used" in problems[0]
    assert store.current_id() == "0002"


def test_without_file_descriptors_an_adapter_is_not_published_in_part(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 1, promote=1)
    with ExitStack() as crowd:

        def write_then_crowd(folder: Path) -> None:
            write(folder)
            crowd.enter_context(short_of_files(0))

        with pytest.raises(AdaptiveError, match=r"cannot be written \(Too many open files\); try again in a moment"):
            store.publish(write_then_crowd, NEW)
    assert [manifest.id for manifest in store.list()] == ["0001"]
    assert not store.damaged()


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    write(tmp_path)
    assert files.files_below(tmp_path)
    with short_of_files(0), pytest.raises(OSError, match="Too many open files"):
        files.files_below(tmp_path)


def test_while_current_cannot_be_read_nothing_is_said_to_be_in_use_and_nothing_changes(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 3, promote=3)
    store.promote("0001", "by hand")
    with replaced_by_a_folder(store.root / "CURRENT"):
        for read in (store.current_id, store.current, lambda: store.usable(BASE)):
            with pytest.raises(UnreadableStore, match=r"CURRENT cannot be read \(Is a directory\)"):
                read()
        for change in (lambda: store.promote("0002", "better"), lambda: store.rollback("worse")):
            with pytest.raises(AdaptiveError):
                change()
    assert AdapterStore(store.root).usable(BASE) == (store.show("0001"), [])
    assert statuses(store) == ["promoted"] * 3


def test_while_previous_cannot_be_read_no_promotion_is_called_interrupted(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 3, promote=2)
    with replaced_by_a_folder(store.root / "PREVIOUS"):
        AdapterStore(store.root)
        with pytest.raises(UnreadableStore, match="PREVIOUS cannot be read"):
            InUse(store.root).promote("0003", "better")
    assert statuses(store) == statuses(AdapterStore(store.root)) == ["promoted", "promoted", "candidate"]
    assert store.fallback() == "0001"


def test_while_the_line_on_pruned_adapters_cannot_be_read_none_is_lost(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 3)
    store.prune(2)
    before = store.trained()
    with replaced_by_a_folder(store.root / "PRUNED"):
        for use in (store.trained, lambda: store.prune(1)):
            with pytest.raises(UnreadableStore, match="PRUNED cannot be read"):
                use()
    assert store.trained() == before


def test_without_file_descriptors_the_adapter_in_use_is_found_or_nothing_is_concluded(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 3, promote=3)
    store.promote("0001", "by hand")
    found = set()
    for left in range(6):
        with short_of_files(left):
            try:
                AdapterStore(store.root)
                found.add(store.usable(BASE)[0] == store.show("0001"))
                found.add(len(store.list()) == 3)
                found.add(store.fallback() == "0003")
            except UnreadableStore as error:
                found.add(str(error)[-20:])
    assert found == {True, "Too many open files)"}
    with short_of_files(0):
        for read in (store.list, store.damaged, store.trained, lambda: store.path("1"), lambda: store.verify("1")):
            with pytest.raises(UnreadableStore, match="Too many open files"):
                read()
    assert AdapterStore(store.root).usable(BASE) == (store.show("0001"), [])
    assert statuses(store) == ["promoted"] * 3
    assert InUse(store.root).previous() == ["0002", "0003"]
