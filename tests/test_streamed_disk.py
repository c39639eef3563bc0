"""Faults of the disk with packed weights: they are named as what they are, and pass when the disk is back."""

from __future__ import annotations

import contextlib
import hashlib
import io
import mmap
import os
import queue
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from conftest import BUNDLED, Command
from rich.console import Console
from small_disks import small_disk
from test_service_engine import job
from test_streamed import TARGET, packed_in, streamed

from adaptive.engines.cpu.kernels import library
from adaptive.engines.streamed.packed import PROJECTION, PackedFile, Section, manifest
from adaptive.errors import AdaptiveError
from adaptive.opened import OpenedPair
from adaptive.service.engine import EngineThread
from adaptive.service.jobs import Done, Event, Failed
from adaptive.service.metrics import Metrics
from adaptive.settings import load_settings
from checkpoints import files
from cli.opened import open_pair

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels were not built")

RUN = ("generate", "Hi", "--memory", "20MB", "--dtype", "float32", "--max-new-tokens", "2")


@pytest.mark.thorough
def test_a_pass_after_a_read_error_reads_again(own_home: Path) -> None:
    engine = streamed(TARGET, "20MB")
    file = packed_in(own_home) / "weights.bin"
    whole = file.read_bytes()
    right = engine.sequence().extend([3, 4], 1).clone()
    os.truncate(file, 4096)
    for _ in range(3):
        with pytest.raises(AdaptiveError, match="can no longer be read: it is shorter") as error:
            engine.sequence().extend([3, 4], 1)
    assert str(file) in str(error.value)
    assert f"`adaptive packed delete {file.parent.name}`" in str(error.value)
    file.write_bytes(whole)
    for _ in range(2):
        assert torch.equal(engine.sequence().extend([3, 4], 1), right)


@pytest.mark.thorough
def test_weights_are_read_at_their_path_if_they_are_the_same_ones(own_home: Path) -> None:
    """As after a disk was connected again: the descriptor is of a file that is no longer there."""
    engine = streamed(TARGET, "20MB")
    file, copy = packed_in(own_home) / "weights.bin", own_home / "copy"
    manifest = file.with_name("manifest.json")
    right, said = engine.sequence().extend([3, 4], 1).clone(), manifest.read_text()
    shutil.copy(file, copy)
    os.truncate(file, 4096)
    with pytest.raises(AdaptiveError):
        engine.sequence().extend([3, 4], 1)
    os.replace(copy, file)
    manifest.write_text(said + "\n")
    for _ in range(2):
        with pytest.raises(AdaptiveError):
            engine.sequence().extend([3, 4], 1)
    manifest.write_text(said)
    assert torch.equal(engine.sequence().extend([3, 4], 1), right)


@pytest.mark.thorough
def test_a_server_answers_503_while_the_disk_cannot_be_read_and_then_as_before(own_home: Path) -> None:
    given = {"target": str(TARGET), "draft": str(BUNDLED / "draft"), "dtype": "float32", "memory": "20MB"}
    settings = load_settings({**given, "record": False, "draft_length": "0"})

    def opened() -> contextlib.AbstractContextManager[OpenedPair]:
        return open_pair(settings, Console(file=io.StringIO()))

    engine, events = EngineThread(opened, Metrics(), queue=4), queue.SimpleQueue[Event]()

    def ended() -> Event:
        engine.submit(job(2, events.put))
        while not isinstance(event := events.get(timeout=60), Done | Failed):
            pass
        return event

    engine.start(when_over=lambda: None)
    try:
        assert isinstance(ended(), Done)
        file = packed_in(own_home) / "weights.bin"
        whole = file.read_bytes()
        os.truncate(file, 4096)
        failed = ended()
        assert isinstance(failed, Failed)
        assert (failed.status, "can no longer be read" in failed.message) == (503, True)
        file.write_bytes(whole)
        assert isinstance(ended(), Done)
    finally:
        engine.close()


def packed_at(folder: Path, offset: int) -> PackedFile:
    """Packed weights of one section, which begins at an offset in bytes."""
    section = Section(offset, 4096, hashlib.sha256(bytes(4096)).hexdigest())
    (folder / "manifest.json").write_text(manifest({PROJECTION: section}))
    (folder / "weights.bin").write_bytes(bytes(offset + 4096))
    return PackedFile(folder)


def test_where_direct_reads_are_refused_the_file_is_read_through_the_cache(tmp_path: Path) -> None:
    """As a compressed file on NTFS refuses them. Other file systems refuse those from such an offset."""
    file, before = packed_at(tmp_path, 100), psutil.Process().num_fds()
    file.read(file.sections[-1], mmap.mmap(-1, 4096))
    assert psutil.Process().num_fds() == before
    file.close()


def test_weights_that_cannot_be_read_are_not_called_damaged(tmp_path: Path) -> None:
    file, broken = packed_at(tmp_path, 0), os.open("/proc/self/mem", os.O_RDONLY)  # EIO at address 0
    os.dup2(broken, file.file)
    os.close(broken)
    with pytest.raises(AdaptiveError, match=r"cannot be read .*Input/output error") as error:
        file.read(file.sections[-1], mmap.mmap(-1, 4096))
    assert "delete" not in str(error.value)
    file.close()


def test_a_disk_without_room_is_not_filled(tmp_path: Path, adaptive: Command) -> None:
    with small_disk(tmp_path / "small", "30m") as small:
        status, _, said = adaptive(*RUN, "--state-dir", str(small))
        assert (status, said.count("\n")) == (2, 1)
        assert "GB are free): they take about 0.06 GB" in said
        assert list((small / "packed").iterdir()) == []


def test_a_write_that_fails_is_one_line_and_nothing_is_left(own_home: Path, adaptive: Command) -> None:
    """A limit on the size of files stands for another program that fills the disk meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000_000, before[1]))
    try:
        status, _, said = adaptive(*RUN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (status, said.count("\n")) == (2, 1)
    assert "File too large" in said
    assert list((own_home / "packed").iterdir()) == []


KILLED = """
import os, pathlib, signal, sys
from checkpoints import files
part = files.unfinished(pathlib.Path(sys.argv[1]))
part.mkdir()
(part / "weights.bin").write_bytes(bytes(2**30 // 10))
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_packing(root: Path) -> Path:
    """What a program leaves in ``root`` that is killed while it packs."""
    root.mkdir(parents=True, exist_ok=True)
    ended = subprocess.run([sys.executable, "-c", KILLED, str(root)], check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = (path for path in root.iterdir() if path.is_dir())
    return left


@pytest.mark.parametrize("chosen", [lambda left: "--all", lambda left: left.name], ids=["all", "by-name"])
def test_what_a_killed_packing_left_is_listed_and_deleted(
    own_home: Path, adaptive: Command, chosen: Callable[[Path], str]
) -> None:
    left = killed_packing(own_home / "packed")
    listed = adaptive("packed", "list")[1]
    assert left.name in listed
    assert re.search(r"[1-9]\.\d MB", listed)
    assert adaptive("packed", "delete", chosen(left))[0] == 0
    assert list((own_home / "packed").iterdir()) == []


def test_what_is_being_written_is_not_deleted(own_home: Path, adaptive: Command) -> None:
    (own_home / "packed" / "one").mkdir(parents=True)
    part = files.unfinished(own_home / "packed")
    part.mkdir()
    try:
        status, _, said = adaptive("packed", "delete", "--all")
        assert status == 2
        assert "deleted 1" in said
        assert str(part) in said
        assert part.is_dir()
    finally:
        files.finished(part)


def test_what_could_not_be_deleted_is_not_counted(own_home: Path, adaptive: Command) -> None:
    """The system does not remove a folder at which another file system is mounted."""
    with small_disk(own_home / "packed" / "one", "1m") as folder:
        status, _, said = adaptive("packed", "delete", "one")
        assert status == 2
        assert "deleted 0" in said
        assert f"not deleted: {folder}" in said


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [(POINTER.encode(), "git lfs pull"), (b"abc", "no whole safetensors file"), (b"\x02" + bytes(7) + b"[]", "table")],
    ids=["pointer", "short", "list"],
)
def test_a_file_that_holds_no_weights_is_one_line(tmp_path: Path, adaptive: Command, content: bytes, said: str) -> None:
    target = tmp_path / "target"
    shutil.copytree(TARGET, target)
    (target / "model.safetensors").write_bytes(content)
    status, _, err = adaptive(*RUN, "--target", str(target), "--draft", "none")
    assert (status, err.count("\n")) == (2, 1), err
    assert said in err
