"""Measures the costs of features and of a head, interleaved: plain passes that keep the hidden states against passes
that do not, and a head's proposal against the draft model's.

    python benchmarks/head_costs.py [--target MODEL --draft MODEL --dtype float32] [--busy]

``--busy`` is for a machine that other programs use: it runs on one thread and counts that thread's own time.

The head is initialized from the target's last layer; its time does not depend on its weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from timing import SETTLED

from adaptive.engines.load_head import load_head
from adaptive.engines.protocol import Engine, ProposalCall, Sequence, sequences
from adaptive.pair import load_pair
from adaptive.settings import load_settings
from adaptive.types import SamplingParams

# Tokens before the timed pass, as in the middle of an answer.
CONTEXT = 200
SAMPLED = SamplingParams(temperature=0.7)

clock: Callable[[], float] = time.perf_counter


def interleaved(calls: dict[str, Callable[[], object]], turns: int, each: int = 1) -> dict[str, list[float]]:
    """Seconds of every call by turn. Each turn runs all calls, starting with a different one."""
    began = clock()
    while clock() - began < SETTLED:
        for call in calls.values():
            call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns):
        names = list(calls)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            before = clock()
            for _ in range(each):
                calls[name]()
            found[name].append((clock() - before) / each)
    return found


def show(found: dict[str, list[float]], base: str) -> None:
    """Print medians, and the median and quartiles of the ratios to ``base`` within a turn."""
    for name, taken in found.items():
        ratios = [one / other for one, other in zip(taken, found[base], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        whole = statistics.median(taken) / statistics.median(found[base])
        print(
            f"  {name:28} {statistics.median(taken) * 1e6:9.1f} us   {middle:6.3f} times {base} "
            f"(quartiles {low:.3f}, {high:.3f}; of medians {whole:.3f})"
        )


def filled(sequence: Sequence, vocab: int) -> Sequence:
    """The sequence, filled with ``CONTEXT`` tokens."""
    sequence.reserve(CONTEXT + 64)
    sequence.extend([token * 7919 % (vocab - 1) for token in range(CONTEXT)], 1)
    return sequence


def a_pass(sequence: Sequence, count: int) -> Callable[[], object]:
    """A pass over ``count`` tokens with logits of all, and its rollback."""
    tokens, held = list(range(1, count + 1)), sequence.length

    def call() -> None:
        sequence.extend(tokens, count)
        sequence.rollback(held)

    return call


def a_proposal(draft: Sequence, held: int, length: int, waiting: int, vocab: int) -> Callable[[], object]:
    """A proposal of ``length`` tokens after ``waiting`` tokens committed since the last proposal, and its rollback."""
    uniform = [0.3] * length

    def call() -> None:
        draft.rollback(held - waiting)
        assert draft.fused is not None
        draft.fused.propose(ProposalCall([7] * (1 + waiting), length, vocab, SAMPLED, uniform, None))
        draft.rollback(held)

    return call


def bound(target: Engine, draft: Engine) -> tuple[Sequence, Sequence]:
    """The sequences of target and draft for one text, both filled."""
    held, small = sequences(target, draft)
    assert small is not None
    filled(held, target.vocab_size)
    filled(small, target.vocab_size)
    return held, small


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--busy", action="store_true")
    args = parser.parse_args()
    if args.busy:
        global clock
        clock = time.thread_time
        torch.set_num_threads(1)
    settings = load_settings({"target": args.target, "draft": args.draft, "dtype": args.dtype})
    pair = load_pair(settings)
    assert pair.draft is not None
    head = load_head(None, settings, pair.target)
    vocab = pair.target.vocab_size
    print(f"target {pair.target.weights}, draft {pair.draft.weights}, head {head.weights}")
    with torch.inference_mode():
        for count in (1, 5):
            plain, kept = (filled(pair.target.sequence(features=keeps), vocab) for keeps in (False, True))
            calls = {"without features": a_pass(plain, count), "with features": a_pass(kept, count)}
            print(f"a pass of the target over {count} tokens")
            show(interleaved(calls, args.turns), "without features")
        whole, small = bound(pair.target, pair.draft)
        _, draft = bound(pair.target, head)
        print("a proposal")
        for length, waiting in ((1, 0), (4, 0), (4, 2), (4, 4)):
            calls = {
                f"draft, {length} after {waiting}": a_proposal(small, CONTEXT - 1, length, waiting, vocab),
                f"head, {length} after {waiting}": a_proposal(draft, CONTEXT - 1, length, waiting, vocab),
                "target, one token": a_pass(whole, 1),
            }
            show(interleaved(calls, args.turns), next(iter(calls)))


if __name__ == "__main__":
    main()
