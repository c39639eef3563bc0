"""Measures a target that is streamed from disk: its reading against the disk's speed, passes, and tokens a second.

    python benchmarks/streamed.py reading|passes|decoding|ahead|resident --target T --memory 540MB --state-dir S
        [--draft D] [--adapter FOLDER] [--kind math] [--prompts 4] [--tokens 48] [--dtype bfloat16]

reading   plain decoding against reading the same file from beginning to end, in turn, both bypassing the page cache
passes    seconds of a pass over 1 to 128 tokens, in turn
decoding  tokens a second of plain decoding, chains, trees and the controller, in turn, at temperatures 0.7 and 0
ahead     with and without drafting while the target verifies, in turn: the time that rounds wait for the draft (a head
          never drafts ahead)
resident  the peak memory of a whole session, as the system counts it, beyond --memory
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from trees import PROMPTS

from adaptive.assistant import Assistant
from adaptive.control.lengths import LengthByCost
from adaptive.control.nodes import NodesByCost
from adaptive.control.policy import FixedLength, LengthPolicy
from adaptive.decoding.loop import Decoding
from adaptive.drafting.ahead import AheadDrafter
from adaptive.engines.protocol import ReadsFeatures
from adaptive.engines.streamed.engine import PIECE, READERS
from adaptive.engines.streamed.packed import PackedFile
from adaptive.measure import makes_trees
from adaptive.pair import Pair, load_pair
from adaptive.settings import Settings, load_settings
from adaptive.state import packed_root
from adaptive.types import Message, Round, SamplingParams, StopParams

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["reading", "passes", "decoding", "ahead", "resident"])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", default=str(PROMPTS.parent / "draft"))
    parser.add_argument("--memory", required=True)
    parser.add_argument("--state-dir", required=True, dest="home")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--kind", default="math")
    parser.add_argument(
        "--held-out", type=int, metavar="SEED", help="only the prompts that grow_head.py --seed SEED sets aside"
    )
    parser.add_argument("--skip", type=int, default=0, help="prompts at the beginning that are left out")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--ends", action="store_true", help="answers end where the target ends them, if earlier")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.7, 0.0])
    parser.add_argument("--chains", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--trees", type=int, nargs="*", default=[16, 32, 64])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    names = ("target", "draft", "memory", "home", "dtype", "quantize")
    settings = load_settings({name: getattr(args, name) for name in names})
    if args.what == "resident":
        resident(args)
        return
    pair = load_pair(settings)
    if pair.draft is not None and args.adapter is not None:
        pair.draft.apply_adapter(args.adapter)
    print(f"{torch.get_num_threads()} threads, {args.memory} of {packed_file(settings).stat().st_size / 1e6:.0f} MB")
    {"reading": reading, "passes": passes, "decoding": decoding, "ahead": ahead}[args.what](args, pair, settings)


def packed_file(settings: Settings) -> Path:
    """The packed weights; the state folder must have exactly one set of them."""
    (folder,) = packed_root(settings.state_dir).iterdir()
    return folder / "weights.bin"


def read_through(file: Path, size: int, piece: int, readers: int) -> float:
    """Bytes per second of reading the first ``size`` bytes, bypassing the page cache, in requests of ``piece`` bytes,
    ``readers`` of them at a time."""
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    places, lock = iter(range(0, size, piece)), threading.Lock()

    def read() -> None:
        memory = mmap.mmap(-1, piece)
        while True:
            with lock:
                place = next(places, None)
            if place is None:
                return
            os.preadv(descriptor, [memory], place)

    threads = [threading.Thread(target=read) for _ in range(readers)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    os.close(descriptor)
    return size / seconds


def read_in_a_pass(target: Any, file: Path) -> int:
    """Bytes of the layers that every pass reads: those that share their memory with another layer."""
    memory = [id(layer.qkv.memory) for layer in target.cpu_forward.plan.layers]
    layers = PackedFile(file.parent).layers
    return sum(layer.bytes for layer, one in zip(layers, memory, strict=True) if memory.count(one) > 1)


def reading(args: argparse.Namespace, pair: Pair, settings: Settings) -> None:
    """Compare plain decoding and plain reading, in turn."""
    file = packed_file(settings)
    size = read_in_a_pass(pair.target, file)
    ways = {"one request of 4 MB": (4 << 20, 1), f"{READERS} requests of {PIECE >> 20} MB": (PIECE, READERS)}
    rates: dict[str, list[float]] = {name: [] for name in (*ways, "decoding")}
    sequence = pair.target.sequence()
    sequence.extend([3, 4, 5], 1)
    for _ in range(args.repeats):
        for name, way in ways.items():
            rates[name].append(read_through(file, size, *way))
        sequence.extend([6], 1)  # not timed: it finds two layers already read
        began = time.perf_counter()
        for token in (7, 8, 9):
            sequence.extend([token], 1)
        rates["decoding"].append(3 * size / (time.perf_counter() - began))
    print(f"{size / 1e6:.0f} MB are read in a pass")
    for name, found in rates.items():
        low, middle, high = (f(found) / 1e9 for f in (min, statistics.median, max))
        print(f"  {name:<24} {middle:5.2f} GB/s ({low:.2f} to {high:.2f})")
    shares = [own / max(others) for own, *others in zip(rates["decoding"], *(rates[n] for n in ways), strict=True)]
    low, middle, high = (f(shares) for f in (min, statistics.median, max))
    print(f"  decoding reads {middle:.2f} of the faster of the two, by turn {low:.2f} to {high:.2f}")


def passes(args: argparse.Namespace, pair: Pair, settings: Settings) -> None:
    """Time passes of several sizes in turn, each right after another one, as in decoding."""
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    sequence = pair.target.sequence()
    sequence.extend([(7 * i) % 400 + 3 for i in range(64)], 1)
    for turn in range(args.repeats):
        for size in random.Random(turn).sample(SIZES, len(SIZES)):
            began = time.perf_counter()
            sequence.extend([(5 * i) % 400 + 3 for i in range(size)], size)
            times[size].append(time.perf_counter() - began)
            sequence.rollback(64)
    first = statistics.median(times[1])
    for size, found in times.items():
        middle = statistics.median(found)
        print(f"  {size:3} tokens  {1e3 * middle:7.1f} ms  {middle / first:5.2f} of one token's")


def decoding(args: argparse.Namespace, pair: Pair, settings: Settings) -> None:
    """Run every policy on the same prompts, in turn."""
    prompts = list(said(args.kind, args.skip, args.prompts, args.held_out))
    for temperature in args.temperatures:
        sampling = SamplingParams(temperature=temperature)
        policies: dict[str, LengthPolicy] = {"plain": FixedLength(0)}
        policies |= {f"chain of {n}": FixedLength(n) for n in args.chains}
        policies |= {f"tree of {n}": FixedLength(n, tree=True) for n in args.trees}
        policies |= {"controller, chains": LengthByCost()}
        if makes_trees(pair):
            policies["controller"] = NodesByCost()
        seen: dict[str, list[Decoding]] = {name: [] for name in policies}
        for number, prompt in enumerate(prompts):
            names = list(policies)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                assistant = Assistant(pair, policies[name], None)
                assistant.chance = random.Random(number)
                # Plain decoding is shorter: it takes the same time for every token.
                stop = StopParams(args.tokens, ignore_eos=not args.ends)
                if name == "plain":
                    stop = StopParams(max(6, args.tokens // 8), ignore_eos=True)
                for _ in assistant.chat([Message("user", prompt)], sampling, stop):
                    pass
                answer = assistant.last
                assert answer is not None
                seen[name].append(answer)
        most = "at most " if args.ends else ""
        print(f"temperature {temperature}, {args.kind}, {len(prompts)} prompts of {most}{args.tokens} tokens:")
        plain = 0.0
        for name, answers in seen.items():
            rounds = [one for answer in answers for one in answer.rounds]
            tokens, seconds = (sum(get(a) for a in answers) for get in (_tokens, lambda a: a.timings.predicted_s))
            rate, count = tokens / seconds, len(rounds)
            plain = plain or rate
            drafted, draft_ms, pass_ms = (
                sum(get(one) for one in rounds) / count for get in (_drafted, _draft_ms, _verify_ms)
            )
            print(
                f"  {name:<20} {rate:6.2f} tokens/s  {rate / plain:5.2f} times plain  {tokens / count:5.2f} a pass; "
                f"a round drafts {drafted:5.1f} tokens in {draft_ms:5.1f} ms and takes {pass_ms:6.1f} ms beside",
                flush=True,
            )


def ahead(args: argparse.Namespace, pair: Pair, settings: Settings) -> None:
    """Run each shape and the controller with and without drafting ahead, on the same prompts, in turn."""
    prompts = list(said(args.kind, args.skip, args.prompts, args.held_out))
    ways = (False,) if isinstance(pair.draft, ReadsFeatures) else (False, True)
    for temperature in args.temperatures:
        sampling, seen = SamplingParams(temperature=temperature), dict[tuple[str, bool], list[Decoding]]()
        policies: dict[tuple[str, bool], LengthPolicy] = {}
        for on in ways:
            policies |= {(f"chain of {n}", on): FixedLength(n) for n in args.chains}
            policies |= {(f"tree of {n}", on): FixedLength(n, tree=True) for n in args.trees}
            policies["controller", on] = NodesByCost() if makes_trees(pair) else LengthByCost()
        for number, prompt in enumerate(prompts):
            for (name, on), policy in sorted(policies.items()):
                assistant = Assistant(pair, policy, None)
                assistant.drafts_ahead = assistant.drafts_ahead and on
                assistant.chance = random.Random(number)
                for _ in assistant.chat([Message("user", prompt)], sampling, StopParams(args.tokens, ignore_eos=True)):
                    pass
                assert assistant.last is not None
                seen.setdefault((name, on), []).append(assistant.last)
        print(f"temperature {temperature}, {args.kind}, {len(prompts)} prompts of {args.tokens} tokens:")
        for (name, on), answers in seen.items():
            rounds = [one for answer in answers for one in answer.rounds]
            tokens, seconds = (sum(get(a) for a in answers) for get in (_tokens, lambda a: a.timings.predicted_s))
            drafting, passes_ms = (sum(get(one) for one in rounds) / len(rounds) for get in (_draft_ms, _verify_ms))
            meanwhile = sum(a.drafter.ahead_s for a in answers if isinstance(a.drafter, AheadDrafter))
            waited = sum(a.drafter.waited_s for a in answers if isinstance(a.drafter, AheadDrafter))
            share = f", {meanwhile / (meanwhile + waited):.3f} of the draft's time beside passes" if on else ""
            speed = f"{tokens / seconds:5.2f} tokens/s, {tokens / len(rounds):5.2f} a pass"
            times = f"a round waits {drafting:6.2f} ms for the draft and takes {passes_ms:6.1f} ms beside"
            print(f"  {name:<12}{'ahead' if on else '':<6} {speed}; {times}{share}")


def _tokens(answer: Decoding) -> int:
    return len(answer.output) - 1


def _drafted(outcome: Round) -> int:
    return outcome.drafted


def _draft_ms(outcome: Round) -> float:
    return 1e3 * outcome.draft_s


def _verify_ms(outcome: Round) -> float:
    return 1e3 * outcome.verify_s


def said(kind: str, skip: int, count: int, seed: int | None = None) -> Iterator[str]:
    """``count`` prompts of a kind after the first ``skip``; with a ``seed`` in the order of ``streams.stream``, which
    sets the first ones aside."""
    import json

    lines = (PROMPTS / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    if seed is not None:
        lines = random.Random(f"{seed} {kind}").sample(lines, len(lines))
    for line in lines[skip : skip + count]:
        yield json.loads(line)["prompt"]


def resident(args: argparse.Namespace) -> None:
    """Print the peak memory of a process that answers prompts, read from outside while it runs. The peak includes
    packing if the state folder has no packed weights yet."""
    from adaptive.settings import memory_bytes

    prompts = Path(args.home) / "prompts.jsonl"
    prompts.parent.mkdir(parents=True, exist_ok=True)
    lines = (PROMPTS / f"{args.kind}.jsonl").read_text(encoding="utf-8").splitlines()[: args.prompts]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "cli.main", "generate", "--prompts", str(prompts), "--json", "--no-record"]
    options = {"target": args.target, "draft": args.draft, "memory": args.memory, "state-dir": args.home}
    options |= {"dtype": args.dtype, "quantize": args.quantize, "max-new-tokens": str(args.tokens)}
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
            peak = max([peak, *(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))])
            time.sleep(0.05)
    beyond = peak - memory_bytes(args.memory)
    print(f"exit status {process.returncode}; peak {peak / 1e6:.0f} MB, {beyond / 1e6:.0f} MB beyond {args.memory}")


if __name__ == "__main__":
    main()
