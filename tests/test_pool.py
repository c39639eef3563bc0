"""Threads share work whichever of them run: beside busy programs, from several callers, in a forked child."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from spinning import spinning

from adaptive.engines.cpu import kernels

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="the kernels are not built, or not for this machine")


@pytest.fixture(scope="module")
def linear() -> kernels.NativeLinear:
    torch.manual_seed(0)
    return kernels.NativeLinear(torch.randn(512, 256))


def product(linear: kernels.NativeLinear, x: torch.Tensor, threads: int) -> torch.Tensor:
    """Compute the layer on ``threads`` threads, a number that torch keeps for each calling thread."""
    torch.set_num_threads(threads)
    return linear(x)


def on_a_thread_of_its_own(linear: kernels.NativeLinear, x: torch.Tensor, threads: int) -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(product, linear, x, threads).result()


@pytest.mark.thorough(but="5")
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_product_is_the_same_on_any_number_of_threads(linear: kernels.NativeLinear, rows: int) -> None:
    x = torch.randn(rows, 256)
    alone = on_a_thread_of_its_own(linear, x, 1)
    with spinning(2):
        for threads in (2, 3, 7, 2):
            for _ in range(50):
                assert torch.equal(on_a_thread_of_its_own(linear, x, threads), alone)


def test_several_callers_at_once_get_what_each_gets_alone(linear: kernels.NativeLinear) -> None:
    xs = [torch.randn(3, 256) for _ in range(4)]
    alone = [on_a_thread_of_its_own(linear, x, 1) for x in xs]
    wrong: list[int] = []

    def ask(number: int) -> None:
        torch.set_num_threads(2)
        for _ in range(2000):
            if not torch.equal(linear(xs[number]), alone[number]):
                wrong.append(number)

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert not wrong


def test_a_forked_child_shares_its_work_among_threads_of_its_own(linear: kernels.NativeLinear) -> None:
    x = torch.randn(2, 256)
    alone = on_a_thread_of_its_own(linear, x, 1)
    assert torch.equal(on_a_thread_of_its_own(linear, x, 2), alone)
    child = os.fork()
    if not child:
        same = all(torch.equal(on_a_thread_of_its_own(linear, x, 2), alone) for _ in range(200))
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


NO_MEMORY = """
import resource, sys, torch
from adaptive.engines.cpu import kernels

torch.set_num_threads(2)
linear, few, many = kernels.NativeLinear(torch.randn(64, 256)), torch.randn(2, 256), torch.randn(400_000, 256)
expected = linear(few)
def address_space():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
unlimited = resource.getrlimit(resource.RLIMIT_AS)
for _ in range(3):
    # The result has room, and each thread's copy of the rows has not.
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + 400_000 * 64 * 4 + (32 << 20), unlimited[1]))
    try:
        linear(many)
    except MemoryError:
        pass
    else:
        sys.exit("there was memory")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
    assert torch.equal(linear(few), expected)
"""


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux has this file")
def test_threads_without_memory_raise_an_error_and_go_on() -> None:
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
