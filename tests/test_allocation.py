"""Sampling over a large vocabulary allocates few new pages; a process ends without a scan of all objects."""

from __future__ import annotations

import platform
import re
import subprocess
import sys

import pytest

ROUNDS = 40
COUNT = f"""
import resource, torch
from adaptive.types import SamplingParams
from adaptive.sampling import Uniform, pick, transform_logits
from cli.allocation import keep_buffers
keep_buffers()
torch.set_num_threads(1)
params, uniform, logits = SamplingParams(temperature=0.7), Uniform(torch.Generator()), torch.randn(5, 150_000)
def sample():
    drafts = []
    for row in logits[:4].split(1):
        drafts.append(transform_logits(row, params).softmax(-1))
        pick(drafts[-1][0].numpy(), uniform.next())
    p = transform_logits(logits, params).softmax(-1)
    pick(p[0].numpy(), uniform.next())
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}): sample()
before = faults()
for _ in range({ROUNDS}): sample()
print(faults() - before)
"""


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep freed memory by their own rules")
def test_a_process_keeps_the_buffers_of_a_large_vocabulary() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100 * ROUNDS  # page faults: up to 40 a round, without keep_buffers 400 to 1,200


def test_a_process_ends_without_looking_for_cycles_among_all_its_objects() -> None:
    code = "import gc; from cli.allocation import look_for_cycles_less; look_for_cycles_less(); "
    code += "kept = [[] for _ in range(50_000)]; gc.collect(); gc.set_debug(gc.DEBUG_STATS)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    looked_at = re.findall(r"objects in each generation: (\d+) (\d+) (\d+)", done.stderr)
    assert looked_at
    assert max(sum(map(int, generations)) for generations in looked_at) < 50_000
