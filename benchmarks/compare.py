"""Races our decoding against that of transformers on one pair, in turns on the same prompts
(docs/notes/2026-11-performance.md).

    python benchmarks/compare.py [--target DIR --draft DIR] [--count 40] [--tokens 200] [--lengths 4]
                                 [--prompts FILE] [--adapter FOLDER | --merged DIR] [--temperature 0.7]
                                 [--brief] [--only-ours [--ends]]

The same as ``adaptive bench``, but without a session's state: it uses nothing learned before. An adapter is given as
its folder, or as the checkpoint of a draft with the adapter merged into its weights; the same controller then runs once
without and once with the adapter. Ctrl-C ends the race; the table then covers the prompts that all contenders answered.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from transformers.utils import logging

from adaptive.control.costs import CostModel
from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import FixedLength
from adaptive.measure import measure
from adaptive.pair import Pair, load_pair
from adaptive.settings import load_settings
from adaptive.types import SamplingParams
from cli.bench import of_every_kind
from cli.contenders import Row, fastest_threads, ours, policies, race, table, theirs
from cli.prompts import read_prompts


def controller(pair: Pair, sampling: SamplingParams) -> GoodputLength:
    """A controller with costs just measured on this pair."""
    policy = GoodputLength()
    policy.costs = CostModel(measure(pair, sampling).costs)
    return policy


def markdown(rows: list[Row]) -> str:
    """The table in the format of the docs."""
    lines = [
        "| | tokens/s | times the first | tokens a round | same answer | 8-grams repeated |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        length = "" if row.tokens_per_round is None else f"{row.tokens_per_round:.2f}"
        lines.append(
            f"| {row.contender} | {row.tokens_per_second:.1f} | {row.against:.2f} | {length} "
            f"| {row.same:.0%} | {row.loops:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the race and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "draft", "dtype"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--lengths", default="4")
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--merged", help="checkpoint of the draft with an adapter in its weights")
    parser.add_argument("--only-ours", action="store_true", help="leave transformers' own decoding out")
    parser.add_argument("--brief", action="store_true", help="of transformers' only plain and at the same lengths")
    parser.add_argument("--ends", action="store_true", help="answers may end before --tokens")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count one thread's own time, not the clock's: for a machine that other programs are using",
    )
    args = parser.parse_args()
    if args.ends and not args.only_ours:
        parser.error("--ends needs --only-ours: transformers' contenders are asked for a number of tokens")

    if args.processor_time:
        torch.set_num_threads(1)
    logging.set_verbosity_error()
    settings = load_settings({n: value for n in ("target", "draft", "dtype") if (value := getattr(args, n))})
    pair = load_pair(settings)
    prompts = read_prompts(args.prompts)[: args.count] if args.prompts else of_every_kind(args.count)
    sampling = SamplingParams(temperature=args.temperature)
    lengths = [int(part) for part in args.lengths.split(",")]
    field = []
    if not args.only_ours:
        threads = fastest_threads(pair, prompts[0])
        field = [
            theirs("transformers, plain", pair, sampling, threads),
            theirs("transformers, assisted", pair, sampling, threads, assisted=True),
            *(theirs(f"transformers, assisted {n}", pair, sampling, threads, assisted=True, length=n) for n in lengths),
            theirs("transformers, prompt lookup", pair, sampling, threads, lookup=10),
        ]
        if args.brief:
            field = [field[0], *field[2:-1]]
    mine = partial(ours, sampling=sampling, ends=args.ends)
    field += [
        mine("ours, plain", pair, FixedLength(0)),
        *(mine(name, pair, policy) for name, policy in policies(lengths).items()),
        mine("ours, controller", pair, controller(pair, sampling)),
    ]
    if args.adapter or args.merged:
        again = settings.model_copy(update={"draft": args.merged}) if args.merged else settings
        learned = dataclasses.replace(pair, draft=load_pair(again).draft)
        assert learned.draft is not None
        if args.adapter:
            learned.draft.apply_adapter(args.adapter)
        field += [mine(f"{name}, distilled", learned, policy) for name, policy in policies(lengths).items()]
        field.append(mine("ours, controller, distilled", learned, controller(learned, sampling)))
    turns = race(field, prompts, args.tokens, time.process_time if args.processor_time else time.perf_counter)
    console = Console(stderr=True)
    results = []
    try:
        for result in track(
            turns, "racing", len(field) * len(prompts), console=console, transient=True, disable=not console.is_terminal
        ):
            results.append(result)
    except KeyboardInterrupt:
        console.print("stopped")
    answered = len(results) // len(field)
    if not answered:
        return
    rows = table(field, results[: answered * len(field)])
    limit = f"at most {args.tokens}" if args.ends else args.tokens
    peers = "" if args.only_ours else f"; transformers on {threads} of {torch.get_num_threads()} threads"
    timed = "; processor time" if args.processor_time else ""
    print(f"{answered} prompts, {limit} tokens, temperature {args.temperature}, {pair.target.weights}{peers}{timed}\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
