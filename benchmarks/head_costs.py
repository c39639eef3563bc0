"""What features and a head cost: plain passes with the hidden states kept against without, and a head's proposal
against the draft model's, interleaved.

    python benchmarks/head_costs.py [--target MODEL --draft MODEL --dtype float32] [--busy]

With ``--busy``, for a machine that others use, on one thread and by that thread's own time.

The head is the one that is made from the target's last layer: its weights make no difference to its time.
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

# Tokens before what is timed, as in the middle of an answer.
CONTEXT = 200
SAMPLED = SamplingParams(temperature=0.7)

clock: Callable[[], float] = time.perf_counter


def interleaved(calls: dict[str, Callable[[], object]], turns: int, each: int = 1) -> dict[str, list[float]]:
    """Seconds of every call by turn, one call after the other, each turn in another order."""
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
    """Medians, and of the ratios within a turn to ``base`` the median and the quartiles."""
    for name, taken in found.items():
        ratios = [one / other for one, other in zip(taken, found[base], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        whole = statistics.median(taken) / statistics.median(found[base])
        print(
            f"  {name:28} {statistics.median(taken) * 1e6:9.1f} us   {middle:6.3f} times {base} "
            f"(quartiles {low:.3f}, {high:.3f}; of medians {whole:.3f})"
        )


def filled(sequence: Sequence, vocab: int) -> Sequence:
    """With ``CONTEXT`` tokens."""
    sequence.reserve(CONTEXT + 64)
    sequence.extend([token * 7919 % (vocab - 1) for token in range(CONTEXT)], 1)
    return sequence


def a_pass(sequence: Sequence, count: int) -> Callable[[], object]:
    """A pass over so many tokens with logits of all, undone."""
    tokens, held = list(range(1, count + 1)), sequence.length

    def call() -> None:
        sequence.extend(tokens, count)
        sequence.rollback(held)

    return call


def a_proposal(draft: Sequence, held: int, length: int, waiting: int, vocab: int) -> Callable[[], object]:
    """A proposal of so many tokens where ``waiting`` were committed since the last one, and a rollback."""
    uniform = [0.3] * length

    def call() -> None:
        draft.rollback(held - waiting)
        assert draft.fused is not None
        draft.fused.propose(ProposalCall([7] * (1 + waiting), length, vocab, SAMPLED, uniform, None))
        draft.rollback(held)

    return call


def bound(target: Engine, draft: Engine) -> tuple[Sequence, Sequence]:
    """Sequences of one text."""
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
