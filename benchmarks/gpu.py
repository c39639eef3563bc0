"""Measures everything about a GPU with one command: whether decoding is exact on it, and how fast it is.

    python benchmarks/gpu.py --out DIR [--minutes 8] [--only PART ...] [--device cuda:1]
    python benchmarks/gpu.py --plan                  # parts, their seconds and bytes of the device's memory

Needs neither a network nor weights: the models are made on the device, from the bundled pair or of random weights
(``gpu_parts/``). Each part writes ``DIR/PART.json``, and is skipped if that file holds a result of this device;
``--only`` runs the parts that it names even then. If a part fails, the failure is noted and the others still run. At
any time ``DIR/gpu.json`` and ``DIR/gpu.md`` hold all results so far. On a machine without a GPU the same parts run with
tiny models on the CPU, which keeps them tested: exactness results are valid there, timings are not.

Exit status: 1 if a part failed, 2 for invalid options.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from gpu_parts import plan, report
from gpu_parts.scale import FULL, TINY, Scale
from gpu_parts.work import Part, Result, name_of, read, run
from transformers.utils import logging

from adaptive.devices import choose_device
from adaptive.errors import AdaptiveError

KNOWN = ("cpu", "cuda")
SCALES = {scale.name: scale for scale in (FULL, TINY)}


def main() -> int:
    """Run the requested parts. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=plan.MINUTES, help="that all parts take together")
    parser.add_argument("--out", type=Path, help="the folder of results")
    parser.add_argument("--plan", action="store_true", help="print what would be run, and run nothing")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="run this part, also once more")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--scale", choices=["auto", *SCALES], default="auto", help="auto: full on a GPU, else tiny")
    args = parser.parse_args()
    try:
        return _run(args)
    except AdaptiveError as error:
        print(error, file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    if not args.minutes > 0:
        raise AdaptiveError(f"--minutes is {args.minutes}; it must be above 0")
    if args.plan:
        print(plan.table(SCALES["full" if args.scale == "auto" else args.scale], args.minutes))
        return 0
    parts = _named(args.only)
    if args.out is None:
        raise AdaptiveError("--out is missing: name a folder for the results, or ask for the --plan alone")
    device = torch.device(choose_device(args.device))
    if device.type not in KNOWN:
        raise AdaptiveError(f"--device {device}: this measures CUDA devices; others are not known here")
    scale = SCALES["full" if device.type == "cuda" else "tiny"] if args.scale == "auto" else SCALES[args.scale]
    if scale is FULL and device.type == "cpu":
        raise AdaptiveError("--scale full needs a CUDA device: its models have 7.8 billion parameters")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    factor = args.minutes / plan.MINUTES * plan.SHARE[scale.name]
    again, needs = bool(args.only), plan.needs(scale)
    for said in run(parts, scale, device, args.out, factor, again, needs):
        print(said, flush=True)
        page = report.write(_results(args.out, scale, device), args.out)
    print(f"all figures: {page}")
    return 1 if any(_failed(result) for result in _results(args.out, scale, device)) else 0


def _results(folder: Path, scale: Scale, device: torch.device) -> list[Result]:
    """The results of this device in a folder, in the order of the parts."""
    found = [result for part in plan.PARTS if (result := read(folder / f"{part.name}.json")) is not None]
    return [result for result in found if (result.scale, result.device) == (scale.name, name_of(device))]


def _named(names: list[str]) -> list[Part]:
    """The parts of these names; all parts if ``names`` is empty."""
    known = {part.name: part for part in plan.PARTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise AdaptiveError(f"--only {unknown[0]}: there is no such part; the parts are {', '.join(known)}")
    return [part for name, part in known.items() if not names or name in names]


def _failed(result: Result) -> bool:
    return result.problem is not None and not result.left_out


if __name__ == "__main__":
    sys.exit(main())
