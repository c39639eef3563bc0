"""The adapter store: a promoted adapter is used, a damaged one is not, and nothing in use is ever lost."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from store_factory import BASE, NEW, folder_in_memory, published, write

from adaptive.errors import AdaptiveError
from checkpoints.in_use import InUse
from checkpoints.manifest import BaseDraft, HeldOut, Interval
from checkpoints.store import AdapterStore, DamagedAdapter, InUseChanged, training_seconds


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory, since these tests flush thousands of small files."""
    with folder_in_memory() as folder:
        yield folder


def flip_byte(file: Path, where: int = -3) -> None:
    data = bytearray(file.read_bytes())
    data[where] ^= 1
    file.write_bytes(data)


def statuses(store: AdapterStore) -> list[str]:
    return [manifest.status for manifest in store.list()]


def test_what_was_published_is_read_back_whole(tmp_path: Path) -> None:
    interval = Interval(0.5, 0.4, 0.6)
    held = HeldOut(10, 900, 4, interval, interval, interval, interval, interval)
    new = replace(NEW, recent=held, hyperparameters={"r": 32, "loss": "ce"}, train_seconds=12.5, device="cpu")
    manifest = AdapterStore(tmp_path / "adapters").publish(write, new)
    again = AdapterStore(tmp_path / "adapters")
    assert again.show("0001") == again.show("1") == manifest
    assert again.verify("0001").files.keys() == {"adapter_model.safetensors", "adapter_config.json"}
    assert manifest.status == "candidate"
    assert again.current() is None
    assert again.usable(BASE) == (None, [])


def test_a_change_meant_for_another_draft_in_use_changes_nothing(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 3, promote=1)
    with pytest.raises(InUseChanged, match="0001 has come into use; 0003 does not replace it"):
        store.promote("0003", "better than the plain draft", over=(None, "0002"))
    with pytest.raises(InUseChanged, match="0002 is in use no more"):
        store.rollback("worse", of="0002")
    assert store.current_id() == "0001"
    assert statuses(store) == ["promoted", "candidate", "candidate"]
    store.promote("0003", "better than 0001", over=("0001",))
    store.rollback("worse", of="0003")
    assert store.current_id() == "0001"


def test_everything_is_the_users_own(tmp_path: Path) -> None:
    published(tmp_path / "adapters", 1, promote=1)
    for path in (tmp_path / "adapters").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_nothing_is_there_when_writing_fails(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")

    def half(folder: Path) -> None:
        write(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.publish(half, NEW)
    assert store.list() == ()
    assert [path.name for path in store.root.iterdir()] in ([], [".lock"])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "optimizer.pt").write_bytes(b"x"), r"optimizer\.pt, which may hold pickled code"),
        (lambda f: (f / "adapter_model.bin").write_bytes(b"x"), r"adapter_model\.bin"),
        (lambda f: (f / "adapter_config.json").unlink(), r"no adapter_config\.json"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"short"), "not a safetensors file"),
    ],
)
def test_only_a_whole_safetensors_adapter_is_published(tmp_path: Path, spoil: object, says: str) -> None:
    def spoilt(folder: Path) -> None:
        write(folder)
        spoil(folder)  # type: ignore[operator]

    store = AdapterStore(tmp_path / "adapters")
    with pytest.raises(AdaptiveError, match=says):
        store.publish(spoilt, NEW)
    assert store.list() == ()


def test_rollback_returns_to_what_was_in_use_before_and_then_to_the_plain_draft(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 3, promote=3)
    store.promote("0001", "by hand")  # in use before: 1, 2, 3
    for expected in ("0003", "0002"):
        back = store.rollback("slower")
        assert back is not None
        assert back.id == store.current_id() == expected
    assert store.rollback("slower") is None
    assert store.current_id() is None
    assert statuses(store) == ["rolled_back"] * 3
    with pytest.raises(AdaptiveError, match="nothing to roll back"):
        store.rollback("again")


def test_rollback_passes_over_a_damaged_fallback(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 3, promote=3)
    flip_byte(store.path("0002") / "adapter_model.safetensors")
    back = store.rollback("slower")
    assert back is not None
    assert back.id == "0001"


def test_the_adapter_in_use_cannot_be_rejected(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 2, promote=1)
    assert store.reject("0002", "no gain").status == "rejected"
    with pytest.raises(AdaptiveError, match="0001 is in use"):
        store.reject("0001", "no gain")


@pytest.mark.parametrize("call", ["show", "path", "verify", "promote", "reject", "export"])
def test_an_unknown_id_is_answered_with_those_that_exist(tmp_path: Path, call: str) -> None:
    store = published(tmp_path / "adapters", 2)
    more = {"promote": ("why",), "reject": ("why",), "export": (tmp_path / "out",)}.get(call, ())
    with pytest.raises(AdaptiveError, match=r"no adapter '0009' in .*; there are 0001, 0002"):
        getattr(store, call)("0009", *more)


def test_a_flipped_byte_is_said_in_one_line_and_the_last_good_one_is_used(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 2, promote=2)
    flip_byte(store.path("0002") / "adapter_model.safetensors")
    with pytest.raises(DamagedAdapter, match=r"adapter_model\.safetensors"):
        store.promote("0002", "again")
    manifest, problems = AdapterStore(store.root).usable(BASE)
    assert manifest is not None
    assert manifest.id == store.current_id() == "0001"
    assert len(problems) == 1
    assert "0002 is damaged: adapter_model.safetensors" in problems[0]
    assert "set aside as 0002.damaged; adapter 0001 is used" in problems[0]
    assert "\n" not in problems[0]
    assert AdapterStore(store.root).usable(BASE) == (manifest, [])
    assert store.publish(write, NEW).id == "0003"  # the id of a set-aside adapter is not reused


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "emptied", "deleted"])
def test_a_broken_file_is_named_and_the_plain_draft_is_used(tmp_path: Path, file: str, damage: str) -> None:
    store = published(tmp_path / "adapters", 1, promote=1)
    path = store.path("0001") / file
    if damage == "deleted":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size // 2 if damage == "truncated" else 0)
    manifest, problems = AdapterStore(store.root).usable(BASE)
    assert manifest is None
    assert len(problems) == 1
    assert file in problems[0]
    assert problems[0].endswith("the draft without an adapter is used")
    assert store.current_id() is None


def test_each_damaged_adapter_has_its_line(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 3, promote=3)
    for name in ("0003", "0002"):
        flip_byte(store.path(name) / "adapter_config.json")
    manifest, problems = store.usable(BASE)
    assert manifest is not None
    assert manifest.id == "0001"
    assert [line.split()[1] for line in problems] == ["0003", "0002"]


def test_a_pickle_slipped_into_a_promoted_adapter_is_not_loaded(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 1, promote=1)
    (store.path("0001") / "adapter_model.bin").write_bytes(b"x")
    manifest, problems = store.usable(BASE)
    assert manifest is None
    assert "adapter_model.bin" in problems[0]


def test_current_naming_a_folder_that_is_gone_falls_back(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 2, promote=2)
    for file in store.path("0002").iterdir():
        file.unlink()
    (store.root / "0002").rmdir()
    manifest, problems = store.usable(BASE)
    assert manifest is not None
    assert manifest.id == "0001"
    assert len(problems) == 1
    assert "no adapter '0002'" in problems[0]


@pytest.mark.parametrize("text", ["", "garbage\n", "\x00\x00\x00\x00"])
def test_an_unreadable_current_is_mended_from_the_manifests(tmp_path: Path, text: str) -> None:
    store = published(tmp_path / "adapters", 3, promote=2)
    (store.root / "CURRENT").write_text(text)
    manifest, problems = AdapterStore(store.root).usable(BASE)
    assert manifest is not None
    assert manifest.id == store.current_id() == "0002"
    assert len(problems) == 1
    assert "CURRENT named no adapter" in problems[0]
    assert statuses(store) == ["promoted", "promoted", "candidate"]


def test_a_garbled_current_is_mended_to_an_adapter_that_was_promoted_again(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 3, promote=3)
    store.promote("0001", "by hand")
    (store.root / "CURRENT").write_text("garbage")
    assert store.usable(BASE)[0] == store.show("0001")
    assert store.current_id() == "0001"


def test_a_garbled_current_that_another_process_has_mended_stays_as_it_is(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 3, promote=2)

    class Other(AbstractContextManager[None]):
        """Promotes an adapter just before the second change begins; the first is the opening's."""

        changes = 0

        def __enter__(self) -> None:
            self.changes += 1
            if self.changes == 2:
                store.promote("0003", "better")

        def __exit__(self, *_: object) -> None:
            pass

    late = AdapterStore(store.root, around_changes=Other())
    (store.root / "CURRENT").write_text("garbage")
    assert late.usable(BASE)[0] == store.show("0003")
    assert store.current_id() == "0003"


def test_an_adapter_of_another_draft_is_not_used(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 1, promote=1)
    manifest, problems = store.usable(BaseDraft("other/draft", "ffff"))
    assert manifest is None
    assert len(problems) == 1
    assert "trained for other weights (of some/draft)" in problems[0]
    assert store.usable(None)[0] is not None


def test_a_promotion_killed_before_current_has_not_happened(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 2, promote=1)
    in_use = InUse(store.root)
    in_use.write_status("0002", "promoted", "better")  # the state of a promotion killed after its first step
    again = AdapterStore(store.root)
    assert again.current_id() == "0001"
    assert statuses(again) == ["promoted", "candidate"]
    in_use.write_status("0002", "promoted", "better")
    in_use.write_previous(["0001"])  # and after its second
    again = AdapterStore(store.root)
    assert again.current_id() == "0001"
    assert statuses(again) == ["promoted", "candidate"]


def test_a_rollback_killed_before_current_is_finished(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 2, promote=2)
    InUse(store.root).write_status("0002", "rolled_back", "slower")
    again = AdapterStore(store.root)
    assert again.current_id() == "0001"
    assert statuses(again) == ["promoted", "rolled_back"]


def test_prune_keeps_the_newest_the_one_in_use_and_its_fallback(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 6, promote=2)
    flip_byte(store.path("0003") / "adapter_config.json")
    assert store.prune(1) == ("0003", "0004", "0005")
    assert [manifest.id for manifest in store.list()] == ["0001", "0002", "0006"]
    back = store.rollback("slower")
    assert back is not None
    assert back.id == "0001"
    assert store.publish(write, NEW).id == "0007"
    with pytest.raises(AdaptiveError, match="at least 1"):
        store.prune(0)


def test_beside_a_garbled_current_a_prune_keeps_the_adapter_in_use(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 6, promote=2)
    (store.root / "CURRENT").write_text("garbage")
    assert store.prunable(1) == store.prune(1) == ("0003", "0004", "0005")
    assert store.usable(BASE)[0] == store.show("0002")


def test_what_is_pruned_still_counts_as_training_and_its_records_as_used(tmp_path: Path) -> None:
    store, judged = AdapterStore(tmp_path / "adapters"), HeldOut(10, 900, 4, *[Interval(0.5, 0.4, 0.6)] * 5)
    runs = [(10.0, None, 900), (30.0, judged, 900), (5.0, None, 40), (20.0, judged, None), (7.0, judged, 50)]
    for seconds, held, last in runs:  # the second run continued the first
        trained_on = replace(NEW.trained_on, last_id=last)
        new = replace(NEW, train_seconds=seconds, recent=held, trained_on=trained_on, reason="made by the test")
        store.publish(write, new)
        if seconds == 5.0:  # the one that continued it kept nothing, nor did the next one
            store.kept_nothing(6.0)
            store.kept_nothing(2.0)
    assert training_seconds(store) == 65.0
    assert store.last_record() == 900
    before = store.trained()
    assert store.prune(2) == ("0001", "0002", "0003")
    assert store.prune(1) == ("0004",)
    again = AdapterStore(store.root)
    assert again.trained() == before
    assert training_seconds(again) == 65.0
    assert again.last_record() == 900
    with (store.root / "PRUNED").open("a") as file:
        file.write("not a line of ours\n")
    assert again.trained() == before
    (store.root / "UNKEPT").write_text("[1")
    assert training_seconds(again) == 57.0


def test_a_training_run_prunes_neither_what_is_spared_nor_what_cannot_be_read(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 7, promote=2)
    flip_byte(store.path("0003") / "manifest.json", 0)
    assert store.prune(1, lambda manifest: manifest.id == "0004") == ("0005", "0006")
    assert [manifest.id for manifest in store.list()] == ["0001", "0002", "0004", "0007"]
    assert store.prune(1) == ("0003", "0004")


def test_an_id_is_never_given_twice_though_everything_is_pruned(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 3)
    store.prune(1)
    assert store.publish(write, NEW).id == "0004"


def test_export_writes_a_plain_peft_folder_and_overwrites_only_when_told(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 1)
    out = store.export("1", tmp_path / "deep" / "out")
    assert {path.name for path in out.iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "manifest.json",
    }
    (out / "notes.txt").write_text("mine")
    with pytest.raises(AdaptiveError, match="not empty"):
        store.export("1", out)
    store.export("1", out, force=True)
    assert (out / "notes.txt").read_text() == "mine"
    with pytest.raises(AdaptiveError, match="is a file"):
        store.export("1", out / "notes.txt")


HOLDS = """
import sys
from pathlib import Path
from checkpoints import files
folder = files.unfinished(Path(sys.argv[1]))
folder.mkdir()
(folder / "adapter_model.safetensors").write_bytes(b"half")
print(folder.name, flush=True)
sys.stdin.read()
"""


def test_leftovers_of_dead_processes_are_swept_and_of_living_ones_not(tmp_path: Path) -> None:
    store = published(tmp_path / "adapters", 1)
    command = [sys.executable, "-c", HOLDS, str(store.root)]
    writers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    dead, living = (store.root / writer.stdout.readline().strip() for writer in writers if writer.stdout)
    writers[0].kill()
    writers[0].wait()
    # Process ids of another container are meaningless here: only the lock that a process holds shows that it lives.
    AdapterStore(store.root)
    assert not dead.exists()
    assert living.exists()
    writers[1].kill()
    writers[1].wait()
    AdapterStore(store.root)
    assert not list(store.root.glob(".tmp-*"))


def test_a_store_that_does_not_exist_yet_is_empty_and_not_created(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    assert store.list() == ()
    assert store.usable(BASE) == (None, [])
    assert store.prune(1) == ()
    assert not store.root.exists()


def test_a_store_that_cannot_be_created_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AdaptiveError, match=r"adapter store .* cannot be written"):
        AdapterStore(tmp_path / "file" / "adapters").publish(write, NEW)
