"""A process killed while it changes the adapter store leaves a valid store. The processes are real."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from shortages import short_of_files
from store_factory import BASE, NEW, folder_in_memory, published, write

from adaptive.errors import AdaptiveError
from checkpoints.in_use import InUse
from checkpoints.manifest import HeldOut, Interval
from checkpoints.store import AdapterStore, training_seconds

TESTS = Path(__file__).resolve().parent
# Audit events of all changes of a folder; opening a file counts only if it is for writing.
CHANGES = frozenset({"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "shutil.rmtree"})

# Prints which adapter it is about to put in use and which it has put in use, until it is killed.
WORKER = """
import random, sys
from pathlib import Path
from checkpoints.store import AdapterStore
from store_factory import NEW, write

store, dice = AdapterStore(Path(sys.argv[1])), random.Random(int(sys.argv[2]))
def say(*words):
    print(*words, flush=True)
while True:
    name = store.publish(write, NEW).id
    say("published", name)
    if dice.random() < 0.3:
        store.reject(name, "no gain")
        continue
    say("promoting", name)
    store.promote(name, "better")
    say("current", store.current_id())
    if dice.random() < 0.4:
        say("promoting", store.fallback())
        store.rollback("slower")
        say("current", store.current_id())
    if dice.random() < 0.1:
        store.prune(5)
"""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory, since these tests flush thousands of small files."""
    with folder_in_memory() as folder:
        yield folder


def check_valid(root: Path) -> AdapterStore:
    """Check that each adapter is complete, the one in use is promoted, nothing is half-done, and publishing works."""
    store = AdapterStore(root)
    assert [path.name for path in root.glob(".tmp-*")] == []
    manifests = store.list()
    assert [m.id for m in manifests] == [p.name for p in sorted(root.iterdir()) if p.is_dir()]
    for manifest in manifests:
        assert store.verify(manifest.id) == manifest
    current = store.current()
    assert current is None or current.status == "promoted"
    assert store.usable(BASE) == (current, [])
    previous = InUse(root).previous()
    assert store.current_id() not in previous
    used = {store.current_id(), *previous}
    assert [m.id for m in manifests if m.status == "promoted" and m.id not in used] == []
    assert store.publish(write, NEW).id not in {m.id for m in manifests}
    return store


def killed_at_random(root: Path, seed: int) -> None:
    """Start a worker, kill it at a random moment, and compare its reports with the store."""
    dice = random.Random(seed)
    command = [sys.executable, "-c", WORKER, str(root), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS) as worker:
        assert worker.stdout is not None
        said = [worker.stdout.readline().split() for _ in range(dice.randint(1, 8))]
        assert said[0][:1] == ["published"]
        time.sleep(dice.uniform(0, 0.05))
        worker.kill()
        said += [line.split() for line in worker.stdout.read().splitlines()]
    assert worker.returncode == -signal.SIGKILL
    store = AdapterStore(root)
    there = max((int(m.id) for m in store.list()), default=0)
    assert there >= max(int(words[1]) for words in said if words[0] == "published")
    # "None" is the plain draft, after a rollback of the only adapter.
    possible = [words[1] for words in said if words[0] == "current"][-1:]
    if said[-1][0] == "promoting":
        possible.append(said[-1][1])
    if possible and not (len(possible) == 1 and said[-1][0] == "promoting"):
        assert str(store.current_id()) in possible
    check_valid(root)


def test_kill_at_random_moments_leaves_a_valid_store(tmp_path: Path) -> None:
    for seed in range(4):
        killed_at_random(tmp_path / "adapters", seed)


@pytest.mark.long
def test_kill_at_random_moments_twenty_times(tmp_path: Path) -> None:
    for seed in range(100, 120):
        killed_at_random(tmp_path / "adapters", seed)
        print(f"kill {seed - 99} of 20: store valid, in use {AdapterStore(tmp_path / 'adapters').current_id()}")


def killed_before_change(root: Path, number: int, work: Callable[[AdapterStore], object]) -> bool:
    """Fork, and kill the child before its ``number``-th change in ``root``. False where it had fewer."""
    child = os.fork()
    if child == 0:
        left = number

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if (event in CHANGES or writes) and str(arguments[0]).startswith(str(root)):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work(AdapterStore(root))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("work", "possible"),
    [
        (lambda store: store.publish(write, NEW), {"0002"}),
        (lambda store: store.promote("0003", "better"), {"0002", "0003"}),
        (lambda store: store.promote("0001", "by hand"), {"0002", "0001"}),
        (lambda store: store.rollback("slower"), {"0002", "0001"}),
        (lambda store: store.reject("0003", "no gain"), {"0002"}),
        (lambda store: store.prune(1), {"0002"}),
    ],
    ids=["publish", "promote", "promote-an-older-one", "rollback", "reject", "prune"],
)
def test_killed_before_each_single_change_the_store_is_valid(
    tmp_path: Path, work: Callable[[AdapterStore], object], possible: set[str]
) -> None:
    whole = published(tmp_path / "whole", 4, promote=2).root
    number, killed = 0, True
    while killed:
        number += 1
        root = shutil.copytree(whole, tmp_path / str(number))
        store = AdapterStore(root)
        killed = killed_before_change(root, number, work)
        assert store.current_id() in possible
        assert check_valid(root).current_id() in possible
    assert number > 3


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("name", ["0001", "0004"])
def test_a_promotion_that_is_killed_leaves_a_store_that_tells_what_a_garbled_current_named(
    tmp_path: Path, name: str
) -> None:
    whole = published(tmp_path / "whole", 4, promote=3).root
    number, killed, found = 0, True, []
    while killed:
        number += 1
        root = shutil.copytree(whole, tmp_path / str(number))
        killed = killed_before_change(root, number, lambda store: store.promote(name, "by hand"))
        store = AdapterStore(root)
        found.append(store.current_id())
        (root / "CURRENT").write_text("garbage")
        assert store.usable(BASE)[0] == store.show(str(found[-1]))
    assert set(found) == {"0003", name}


def without_files_at_read(root: Path, number: int, once: bool, work: Callable[[AdapterStore], bool]) -> bool:
    """Fork, and let the child have no file descriptor left at its ``number``-th read in ``root``: ``once``, or from
    there on. ``work`` returns whether all is as it should be, or raises AdaptiveError. False where the child had fewer
    reads."""
    child = os.fork()
    if child == 0:
        left, store, shortage = number, AdapterStore(root), ExitStack()

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(str(root)):
                left -= 1
                if left == 0:
                    shortage.enter_context(short_of_files(0))
                elif once:
                    shortage.close()

        sys.addaudithook(count)
        good = False
        try:
            good = work(store)
        except AdaptiveError:
            good = left <= 0
        finally:  # also after an error that a caller would not expect
            os._exit((0 if left <= 0 else 1) if good else 2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1), f"a wrong answer or error without a file descriptor at read {number}"
    return status == 0


@pytest.mark.thorough(but="once-usable")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("work", "garbled", "possible"),
    [
        (lambda store: store.usable(BASE) == (store.show("0001"), []), False, {"0001"}),
        (lambda store: store.usable(BASE)[0] == store.show("0001"), True, {"0001"}),
        (lambda store: store.fallback() == "0003", False, {"0001"}),
        (lambda store: store.rollback("slower").id == "0003", False, {"0001", "0003"}),
        (lambda store: store.promote("0002", "better").id == "0002", False, {"0001", "0002"}),
        (lambda store: store.prune(1) == ("0002", "0004"), False, {"0001"}),
    ],
    ids=["usable", "usable-garbled", "fallback", "rollback", "promote", "prune"],
)
@pytest.mark.parametrize("once", [True, False], ids=["once", "from-it-on"])
def test_without_a_file_descriptor_at_any_single_read_no_other_adapter_comes_into_use(
    tmp_path: Path, work: Callable[[AdapterStore], bool], garbled: bool, possible: set[str], once: bool
) -> None:
    store = published(tmp_path / "whole", 5, promote=3)
    store.promote("0001", "by hand")
    number, short = 0, True
    while short:
        number += 1
        root = shutil.copytree(store.root, tmp_path / str(number))
        if garbled:
            (root / "CURRENT").write_text("garbage")
        short = without_files_at_read(root, number, once, work)
        manifest, _ = AdapterStore(root).usable(BASE)
        assert manifest is not None
        assert manifest.id in possible
        assert check_valid(root).current_id() in possible
        assert {"0001", "0003", "0005"} <= {one.id for one in store.list()}
    assert number > 5


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_prune_that_is_killed_loses_no_training_seconds(tmp_path: Path) -> None:
    store, judged = AdapterStore(tmp_path / "whole"), HeldOut(10, 900, 4, *[Interval(0.5, 0.4, 0.6)] * 5)
    for seconds in (1.0, 2.0, 4.0):
        store.publish(write, replace(NEW, train_seconds=seconds, recent=judged, reason="made by the test"))
    number, killed = 0, True
    while killed:
        number += 1
        root = shutil.copytree(store.root, tmp_path / str(number))
        killed = killed_before_change(root, number, lambda one: one.prune(1))
        assert training_seconds(AdapterStore(root)) == 7.0
        AdapterStore(root).prune(1)
        assert training_seconds(AdapterStore(root)) == 7.0
    assert number > 10


@pytest.mark.thorough
def test_a_damaged_adapter_is_set_aside_though_the_first_try_is_killed(tmp_path: Path) -> None:
    whole = published(tmp_path / "whole", 2, promote=2)
    (whole.path("0002") / "adapter_config.json").write_text("{}")
    number, killed = 0, True
    while killed:
        number += 1
        root = shutil.copytree(whole.root, tmp_path / str(number))
        killed = killed_before_change(root, number, lambda store: store.usable(BASE))
        manifest, _ = AdapterStore(root).usable(BASE)
        assert manifest is not None
        assert manifest.id == "0001"


def test_concurrent_publishers_and_promoters_lose_nothing(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    script = """
import sys
from pathlib import Path
from checkpoints.store import AdapterStore
from store_factory import NEW, write
store = AdapterStore(Path(sys.argv[1]))
for _ in range(5):
    name = store.publish(write, NEW).id
    store.promote(name, sys.argv[2])
    print(name)
"""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(root), str(number)], stdout=subprocess.PIPE, text=True, cwd=TESTS
        )
        for number in range(3)
    ]
    names = [name for worker in workers for name in worker.communicate()[0].split()]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert sorted(names) == [f"{number:04d}" for number in range(1, 16)]
    store = check_valid(root)
    # One chain: each of the fifteen was in use once, so fourteen rollbacks reach the first.
    assert len({store.current_id(), *InUse(root).previous()}) == 15


def test_a_reader_never_waits_for_a_stopped_writer(tmp_path: Path) -> None:
    from filelock import FileLock

    store = published(tmp_path / "adapters", 2, promote=1)
    child = os.fork()
    if child == 0:  # holds the lock and does nothing
        FileLock(store.root / ".lock").acquire()
        (tmp_path / "held").touch()
        signal.pause()
    try:
        while not (tmp_path / "held").exists():
            time.sleep(0.01)
        assert store.current_id() == "0001"
        assert AdapterStore(store.root).usable(BASE)[0] is not None
        assert len(store.list()) == 2
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    store.promote("0002", "the lock of a killed process is free")


def test_a_full_disk_is_one_clear_line_and_no_adapter(tmp_path: Path) -> None:
    import resource

    store = published(tmp_path / "adapters", 1, promote=1)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))  # bytes a file: the weights do not fit
        try:
            store.publish(lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 1000), NEW)
        except AdaptiveError as error:
            os._exit(7 if "cannot be written (File too large)" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert [manifest.id for manifest in store.list()] == ["0001"]
