"""Runs the parts of the campaign: ``python -m tests.campaign [PART ...] [--scale F] [--minutes N] [--seed S]``."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from . import clock, flips, full, kills, processes, soak
from .common import Campaign, reference

PARTS = {
    "kills": kills.run,
    "flips": flips.run,
    "full": full.run,
    "clock": clock.run,
    "processes": processes.run,
    "soak": soak.run,
}


def main() -> int:
    """Run what was asked for; 1 where anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all of them without any")
    parser.add_argument("--scale", type=float, default=1.0, help="1 is 200 kills, 200 flips of the log, 20 of the rest")
    parser.add_argument("--minutes", type=float, default=120.0, help="length of the soak at scale 1")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        expected = reference(Path(folder))
        for name in asked.parts or PARTS:
            began = time.monotonic()
            home = Path(folder) / name
            home.mkdir()
            campaign = Campaign(home, asked.scale, asked.minutes, random.Random(f"{asked.seed} {name}"), expected)
            print(f"== {name} (scale {asked.scale:g}, seed {asked.seed})", flush=True)
            try:
                PARTS[name](campaign)
            except AssertionError as error:
                campaign.failures.append(f"{name}: {error}")
            failures += campaign.failures
            for failure in campaign.failures:
                print(f"FOUND: {failure}", flush=True)
            print(f"== {name}: {len(campaign.failures)} found in {time.monotonic() - began:.0f} s", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
