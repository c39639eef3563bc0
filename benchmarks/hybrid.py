"""Measures our forward of a hybrid (Qwen 3.5), on a pair whose draft computes the target's function.

    python benchmarks/inflate.py --hybrid /tmp/hybrid
    python benchmarks/hybrid.py --pair /tmp/hybrid --dtype float32 --length 7

Prints plain decoding against transformers' own; passes over several tokens against one; the cost of rollbacks, in the
call and in the passes, as a share of a round; and speculation against what the forwards alone allow. Our forward and
transformers' are timed in turn on the same number of threads: the target's own choice of threads (one beside another
program) is overridden, because transformers makes no such choice.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path
from typing import Any

import timing
import torch
from rounds import show_round
from timing import bare, count_processor_time, filled, settle
from transformers.generation import BaseStreamer

from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.load import forward_of
from adaptive.engines.protocol import Engine
from adaptive.pair import BUNDLED, Pair, load_pair
from adaptive.settings import load_settings
from cli.prompts import read_prompts

# Tokens of text before the timed passes, and the number of text lengths.
CONTEXT, PLACES = 200, 16


class Clocked(BaseStreamer):  # type: ignore[misc]  # transformers' own is not typed
    """Notes the time at which ``generate`` has made each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Called for the prompt, then for each token."""
        self.times.append(timing.clock())

    def end(self) -> None:
        """Called at the end of the text."""


def show_plain(engine: Engine, tokens: int, repeats: int) -> float:
    """Print and return how many times as fast our forward decodes token by token as transformers' own."""
    assert isinstance(engine, TransformersEngine)
    prompt = [token % (engine.vocab_size - 1) for token in range(CONTEXT)]
    ids = torch.tensor([prompt])
    sequence = engine.sequence()
    sequence.reserve(CONTEXT + tokens + 1)

    def ours() -> list[float]:
        sequence.rollback(0)
        token = int(sequence.extend(prompt, 1).argmax())
        times = [timing.clock()]
        for _ in range(tokens):
            token = int(sequence.extend([token], 1).argmax())
            times.append(timing.clock())
        return times

    @torch.inference_mode()
    def theirs() -> list[float]:
        given: dict[str, Any] = {
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
            "attention_mask": torch.ones_like(ids),
        }
        given["repetition_penalty"] = 1.0  # the checkpoint's would take time
        clocked = Clocked()
        engine.model.generate(ids, max_new_tokens=1 + tokens, streamer=clocked, **given)
        return clocked.times[1:]  # the first time is the prompt's, taken before its pass

    settle(sequence, 1)
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for call, seen in zip((ours, theirs), taken, strict=True):
            seen += [after - before for before, after in itertools.pairwise(call())]
    (best, one, _), (others_best, other, _) = (statistics.quantiles(seen, n=4) for seen in taken)
    print(
        f"plain: {one * 1e3:.2f} ms a token by {forward_of(engine).value}, {other * 1e3:.2f} ms by transformers' own: "
        f"{other / one:.2f} times as fast (medians; lower quartiles {best * 1e3:.2f}, {others_best * 1e3:.2f})"
    )
    return other / one


def show_passes(engine: Engine) -> float:
    """Print passes over several tokens against one, and return the ratio for 8 tokens. Means over texts of 16
    consecutive lengths, because our kernels apply tokens to a recurrent state in chunks of 16."""
    sequence = filled(engine, CONTEXT)
    found: dict[int, list[float]] = {count: [] for count in (1, 2, 4, 8, 16)}
    for count in found:
        settle(sequence, count)
    for _ in range(PLACES):
        for count, seen in found.items():
            seen.append(statistics.median(bare(sequence, count, repeats=1) for _ in range(timing.REPEATS // 3)))
        sequence.extend([1], 1)
        sequence.rollback(sequence.length)  # declares that no token before this point will be rolled back
    times = {count: statistics.mean(seen) for count, seen in found.items()}
    print("passes: " + ", ".join(f"{n} {t * 1e3:.2f} ms ({t / times[1]:.2f})" for n, t in times.items()))
    return times[8] / times[1]


def show_rollback(pair: Pair, length: int) -> float:
    """Print and return the cost of rejecting half of every verification, as a share of a round of ``length`` drafted
    tokens. It is the time of a pass and its rollback in a text that keeps half of each pass, less the time in a text
    that keeps all of it. Both texts grow by the same number of tokens."""
    assert pair.draft is not None
    sequence, beginning = pair.target.sequence(), filled(pair.target, CONTEXT)
    count = length + 1
    tokens, kept, grown = list(range(count)), count // 2, 8 * count
    sequence.reserve(CONTEXT + grown + count)
    draft = bare(filled(pair.draft, CONTEXT), 1)
    calls: list[float] = []

    def round_s(stand: int) -> float:
        sequence.copy_prefix(beginning, CONTEXT)
        sequence.extend([0], 1)  # an untimed pass on the same threads as the timed ones
        began, rounds = timing.clock(), grown // stand
        for _ in range(rounds):
            held = sequence.length
            sequence.extend(tokens, count)
            before = timing.clock()
            sequence.rollback(held + stand)
            calls.append(timing.clock() - before)
        return (timing.clock() - began) / rounds

    settle(sequence, count)
    found = [(round_s(count), round_s(kept)) for _ in range(timing.REPEATS)]
    call, clean, taken = statistics.median(calls), *map(statistics.median, zip(*found, strict=True))
    whole = length * draft + taken
    more = max(0.0, taken - clean)
    print(
        f"rollback: {call * 1e6:.1f} us the call; passes of which {kept} tokens of {count} stand take "
        f"{(taken - clean) * 1e3:+.3f} ms: {more / whole:.2%} of a round of {whole * 1e3:.2f} ms"
    )
    return float(more / whole)


def main() -> None:
    """Run all measurements, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True, help="a folder with target and draft")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--length", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32, help="of a plain text")
    parser.add_argument("--repeats", type=int, default=5, help="plain texts by each forward")
    parser.add_argument("--prompts", type=Path, default=BUNDLED / "prompts" / "roleplay.jsonl")
    parser.add_argument("--count", type=int, default=5, help="prompts that are answered speculatively")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count one thread's own time, not the clock's: for a machine that other programs are using",
    )
    args = parser.parse_args()
    if args.processor_time:
        torch.set_num_threads(1)
        count_processor_time()
    folders = {name: str(args.pair / name) for name in ("target", "draft")}
    pair = load_pair(load_settings({**folders, "dtype": args.dtype, "draft_quantize": "none", "device": "cpu"}))
    assert isinstance(pair.target, TransformersEngine)
    assert pair.target.threads is not None
    threads = pair.target.threads.held = torch.get_num_threads()
    size = sum(parameter.numel() for parameter in pair.target.model.parameters())
    kind = f"{pair.target.weights}; {forward_of(pair.target).value}, {threads} thread(s)"
    print(f"target of {size / 1e6:.0f}M parameters, {kind}")
    show_plain(pair.target, args.tokens, args.repeats)
    show_passes(pair.target)
    show_rollback(pair, args.length)
    show_round(pair, read_prompts(args.prompts)[: args.count], args.length)
    sequence = filled(pair.target, min(8000, pair.target.context_length - 16))
    held = sequence.memory
    print(
        f"memory of {sequence.length} tokens: keys and values {held.keys / 1e6:.1f} MB, "
        f"states {held.states / 1e6:.1f} MB, checkpoints {held.checkpoints / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
