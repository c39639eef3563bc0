"""A container's limits of memory and processor, which are those of control groups, hold. The number of threads is the
user's, or follows the limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from conftest import Command
from test_cpu_forward import made
from test_doctor import findings

from adaptive import machine
from adaptive.devices import device_bytes, free_bytes
from adaptive.engines.cpu.forward import cpu_forward
from adaptive.engines.cpu.torch_threads import MOST_THREADS
from adaptive.machine import Memory, memory
from adaptive.pair import load_pair
from adaptive.service.storage import Storage, with_memory
from adaptive.settings import load_settings
from trainers.worker import memory_is_short

MB = 1 << 20
Confine = Callable[[dict[str, str]], None]


@pytest.fixture
def confine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Confine:
    """Put this process into a made-up control group ``/outer/inner`` with these files, by path."""
    membership, root = tmp_path / "membership", tmp_path / "groups"

    def confined(files: dict[str, str], line: str = "0::/outer/inner") -> None:
        membership.write_text(f"{line}\n")
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        monkeypatch.setattr(machine, "MEMBERSHIP", membership)
        monkeypatch.setattr(machine, "CGROUPS", root)

    return confined


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four threads by torch, and none by the user."""
    given = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(given)


def used(most: int, current: int, inactive: int = 0, active: int = 0) -> dict[str, str]:
    """The files of a group with a limit of memory; megabytes."""
    stat = f"anon 1\ninactive_file {inactive * MB}\nactive_file {active * MB}\n"
    return {"memory.max": f"{most * MB}\n", "memory.current": f"{current * MB}\n", "memory.stat": stat}


def test_memory_is_what_the_narrowest_group_leaves(confine: Confine) -> None:
    confine({})
    assert memory().total == psutil.virtual_memory().total
    confine({f"outer/{name}": text for name, text in used(400, 300, 50, 30).items()})
    confine({"outer/inner/memory.max": "max\n", "outer/inner/memory.current": f"{90 * MB}\n"})
    assert memory() == Memory(180 * MB, 400 * MB)
    confine({f"outer/inner/{name}": text for name, text in used(200, 90).items()})
    assert memory() == Memory(110 * MB, 200 * MB)
    confine({f"outer/inner/{name}": text for name, text in used(200, 250).items()})  # the limit was lowered
    assert memory() == Memory(0, 200 * MB)


def test_memory_of_the_first_version_of_control_groups(
    confine: Callable[[dict[str, str], str], None],
) -> None:
    stat = f"inactive_file 0\ntotal_inactive_file {20 * MB}\ntotal_active_file {10 * MB}\n"
    group = {"limit_in_bytes": f"{300 * MB}", "usage_in_bytes": f"{200 * MB}", "stat": stat}
    confine({f"memory/x/memory.{name}": text for name, text in group.items()}, "4:memory:/x/y")
    assert memory() == Memory(130 * MB, 300 * MB)


@pytest.mark.thorough
def test_whatever_asks_for_memory_is_told_the_limit(confine: Confine) -> None:
    assert cpu_forward(made("llama", torch.float32)) is not None
    confine({f"outer/inner/{name}": text for name, text in used(64, 64).items()})
    assert free_bytes("cpu") == device_bytes("cpu") == 0
    assert memory_is_short()
    assert cpu_forward(made("llama", torch.float32)) is None
    assert with_memory(Storage("~", (), 0), None).memory_free == 0
    _, found = findings("--device", "cpu")
    assert found["memory"]["value"] == "0 B free of 67.1 MB"
    assert found["memory of cpu"]["status"] == "broken"
    confine({f"outer/inner/{name}": text for name, text in used(64, 14).items()})
    assert free_bytes("cpu") == device_bytes("cpu") == 50 * MB
    assert not memory_is_short()


@pytest.mark.thorough(but="50000-1")
@pytest.mark.parametrize(("allowed", "expected"), [("max", 4), ("250000", 2), ("50000", 1)])
@pytest.mark.usefixtures("four_threads")
def test_passes_have_no_more_threads_than_the_quota_allows(allowed: str, expected: int, confine: Confine) -> None:
    confine({"outer/cpu.max": f"{allowed} 100000\n"})
    _, found = findings("--device", "cpu")
    assert found["torch"]["value"].endswith(f"{expected} threads")
    pair = load_pair(load_settings({"device": "cpu"}))
    assert torch.get_num_threads() == expected
    for engine in (pair.target, pair.draft):
        assert engine is not None
        assert engine.threads is None or engine.threads.most == expected


@pytest.mark.thorough
@pytest.mark.usefixtures("four_threads")
def test_a_number_of_threads_by_the_user_is_taken_as_it_is(confine: Confine, monkeypatch: pytest.MonkeyPatch) -> None:
    confine({"outer/cpu.max": "100000 100000\n"})
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # torch has read it
    load_pair(load_settings({}))
    assert torch.get_num_threads() == 4
    load_pair(load_settings({"threads": 3}))
    assert torch.get_num_threads() == 3


@pytest.mark.thorough
@pytest.mark.usefixtures("four_threads")
def test_the_setting_holds_in_every_command_up_to_a_limit(adaptive: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTIVE_THREADS", "2")
    code, _, _ = adaptive("generate", "Hello", "--max-new-tokens", "2", "--device", "cpu", "--no-record")
    assert (code, torch.get_num_threads()) == (0, 2)
    # Commands that load a model for training or for an export; what they lack here is found later.
    others = ["distill"], ["head", "made"], ["publish", "--engine", "vllm"]
    for command in others:
        torch.set_num_threads(4)
        assert adaptive(*command)[0] == 2
        assert torch.get_num_threads() == 2
    monkeypatch.setenv("ADAPTIVE_THREADS", "65536")
    loading = ["generate", "Hello"], ["serve", "--port", "0"], ["draft-server", "--port", "0"], ["export", "made"]
    for command in (*others, *loading, ["doctor"]):
        code, out, said = adaptive(*command)
        assert (code, out) == (2, "")
        assert said.splitlines()[-1] == f"adaptive: threads is 65536; it must be at most {MOST_THREADS}"
