"""Compares the predictions of ``adaptive calibrate`` on a busy machine with measurements on a quiet one.

First ``busy``: ``--times`` calibrations while two other processes spin, without and with ``--busy``. Then, on a quiet
machine, ``quiet``: calibrations again, each followed by a race on other prompts of the same kind, interleaved: plain
decoding against the draft length that this calibration recommends and those recommended on the busy machine. Prints
each prediction divided by the speed-up measured at its length.

    python benchmarks/calibrate_busy.py busy FOLDER [--kind code] [--times 20]
    python benchmarks/calibrate_busy.py quiet FOLDER [--times 8]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from controller_live import Way, interleaved
from served import end_when_terminated
from typer.testing import CliRunner, Result

from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength
from adaptive.pair import BUNDLED, load_pair
from adaptive.settings import load_settings
from cli.main import app
from cli.prompts import read_prompts

SPIN = "import hashlib\nwhile True: hashlib.sha256(bytes(2**20)).digest()"
# Answers that acceptance is estimated from, prompts of the race, tokens of each answer, and passes of the race.
ANSWERS, RACED, TOKENS, PASSES = 32, 16, 80, 3


@contextlib.contextmanager
def spinning(count: int) -> Iterator[None]:
    """Run ``count`` processes that use all the processor time they get."""
    started = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def adaptive(folder: Path, *arguments: str) -> Result:
    """Run one command on the bundled pair, greedy, with its state in ``folder``."""
    return CliRunner().invoke(app, [*arguments, "--state-dir", str(folder / "state"), "--temperature", "0"])


def calibration(folder: Path, *options: str) -> dict[str, Any] | None:
    """The report of a calibration; None if the command refused because the machine is busy."""
    before = _kept(folder)
    done = adaptive(folder, "calibrate", "--json", *options)
    if done.exit_code == 1 and "this machine is busy" in done.stderr:
        assert _kept(folder) == before, "costs were kept"
        return None
    assert done.exit_code == 0, done.output
    report: dict[str, Any] = json.loads(done.stdout)
    low, high = report["predicted_speed_up_interval"]
    print(
        f"  predicted {report['predicted_speed_up']:.3f} ({low:.3f} to {high:.3f}) at length "
        f"{report['recommended_draft_length']}, break-even {report['break_even_acceptance']:.3f}, "
        f"others took {report['other_programs_cores'] or 0:.2f} cores",
        flush=True,
    )
    return report


def _kept(folder: Path) -> dict[Path, bytes]:
    """The costs that calibrations have kept."""
    return {file: file.read_bytes() for file in (folder / "state").rglob("controller.json")}


def busy(folder: Path, kind: str, times: int) -> None:
    """Calibrate while two processes spin, without and with ``--busy`` in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (BUNDLED / "prompts" / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "asked.jsonl").write_text("\n".join(lines[1 : 2 * ANSWERS : 2]), encoding="utf-8")
    (folder / "raced.jsonl").write_text("\n".join(lines[: 2 * RACED : 2]), encoding="utf-8")
    asked = ("--prompts", str(folder / "asked.jsonl"), "--max-new-tokens", str(TOKENS), "--draft-length", "0")
    done = adaptive(folder, "generate", "--json", *asked)
    assert done.exit_code == 0, done.output
    promised, marked = [], []
    print("beside two spinning processes")
    with spinning(2):
        for time in range(times):
            promised += [report for report in [calibration(folder)] if report is not None]
            marked += [report for report in [calibration(folder, "--busy")] if report is not None and report["busy"]]
            print(f"  refused {time + 1 - len(promised)} of {time + 1}", flush=True)
            (folder / "busy.json").write_text(json.dumps([*promised, *marked]), encoding="utf-8")


def quiet(folder: Path, times: int) -> None:
    """Calibrate on a quiet machine and run a race after each calibration. The relative speeds of a machine's passes can
    change within seconds, so a calibration is compared with its own race; those of ``busy`` with all races together."""
    before = json.loads((folder / "busy.json").read_text(encoding="utf-8"))
    pair, prompts = load_pair(load_settings({})), read_prompts(folder / "raced.jsonl")
    promised = {report["recommended_draft_length"] for report in before}
    everywhere: dict[int, Way] = {}
    own = []
    print("quiet")
    for _ in range(times):
        report = calibration(folder)
        if report is None:
            continue
        length = report["recommended_draft_length"]
        ways = {k: Way(f"{k}", Assistant(pair, FixedLength(k), None)) for k in {0, length, *promised}}
        interleaved(list(ways.values()), prompts, TOKENS, PASSES)
        for k, way in ways.items():
            everywhere.setdefault(k, Way(way.name, way.assistant)).take(way)
        own.append(report["predicted_speed_up"] / (ways[length].rate / ways[0].rate))
        low, high = report["predicted_speed_up_interval"]
        within = low <= ways[length].rate / ways[0].rate <= high
        print(f"  measured {ways[length].rate / ways[0].rate:.3f} at that length, {'within' if within else 'outside'} "
              f"the interval: predicted / measured {own[-1]:.3f}", flush=True)  # fmt: skip
    assert own, "this machine is not quiet"
    print(f"median of predicted / measured {statistics.median(own):.3f}")
    measured = {k: way.rate / everywhere[0].rate for k, way in sorted(everywhere.items())}
    print("all races: " + ", ".join(f"{speed_up:.3f} at length {k}" for k, speed_up in measured.items()))
    over = sorted(r["predicted_speed_up"] / measured[r["recommended_draft_length"]] for r in before)
    print("beside two spinning processes: predicted / measured " + " ".join(f"{ratio:.3f}" for ratio in over))
    print(f"  lowest break-even {min(r['break_even_acceptance'] for r in before):.3f}")


def main() -> None:
    """Run one of the two parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["busy", "quiet"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", default="code")
    parser.add_argument("--times", type=int)
    args = parser.parse_args()
    end_when_terminated()
    if args.part == "busy":
        busy(args.folder, args.kind, args.times or 20)
    else:
        quiet(args.folder, args.times or 8)


if __name__ == "__main__":
    main()
