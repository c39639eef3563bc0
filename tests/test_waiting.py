"""Threads spin briefly before they sleep, unless the user configures otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SAID = "import os; from cli.waiting import wait; wait(); first = os.environ.get('GOMP_SPINCOUNT'); wait(spins=0); "
SAID += "print(first, os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "10000 0"),
        ({"GOMP_SPINCOUNT": "7"}, "7 7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "None None"),
    ],
)
def test_what_the_user_says_stays(environment: dict[str, str], expected: str) -> None:
    clean = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", SAID], env={**clean, **environment}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected
