"""The campaign, each part at a scale of minutes: ``pytest -n 0 -s -m long tests/campaign``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCALE = {"kills": 0.05, "flips": 0.1, "full": 0.3, "clock": 0.4, "processes": 0.1, "soak": 0.03}


@pytest.mark.long
@pytest.mark.parametrize("part", SCALE)
def test_nothing_is_found(part: str) -> None:
    command = [sys.executable, "-m", "tests.campaign", part, "--scale", str(SCALE[part])]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
