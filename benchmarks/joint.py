"""Measures joint passes over several answers, without a server: the upper bound of what slots gain on this machine.

    python benchmarks/joint.py --target ... --draft ... --answers 1 2 4 8

For each number of answers, each with ``--context`` tokens: the medians of a joint pass over 1, 2, 3, ... tokens of each
and of their proposals made together; and the tokens per second over those of a lone answer without a draft, if every
verified token were accepted. Nothing is sampled, logged or sent.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from timing import filled

from adaptive.engines.protocol import Engine, ExtendCall, ProposalCall, ProposesTogether, Sequence
from adaptive.pair import load_pair
from adaptive.settings import load_settings
from adaptive.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def main() -> None:
    """Run the measurements, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--answers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3, 5], help="of each answer in a pass")
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("target", "draft", "dtype", "threads")}
    pair = load_pair(load_settings({name: value for name, value in given.items() if value is not None}))
    most = max(options.answers)
    targets = [filled(pair.target, options.context) for _ in range(most)]
    drafts = [] if pair.draft is None else [filled(pair.draft, options.context) for _ in range(most)]
    tried = [(count, tokens) for count in options.answers for tokens in options.tokens]
    passes = {one: _pass(pair.target, targets[: one[0]], one[1]) for one in dict.fromkeys([(1, 1), *tried])}
    proposals = {one: _proposals(pair.draft, drafts[: one[0]], one[1] - 1) for one in tried if drafts and one[1] > 1}
    took = _in_turns({("pass", *one): call for one, call in passes.items()}, options.repeats)
    took |= _in_turns({("drafts", *one): call for one, call in proposals.items()}, options.repeats)
    lone = took["pass", 1, 1]
    print(f"{pair.target.name}, context {options.context}; one token alone takes {1e3 * lone:.1f} ms")
    print("answers  tokens each  rows  pass, ms  drafts, ms  times a lone token's rate")
    for count, tokens in tried:
        verified, drafted = took["pass", count, tokens], took.get(("drafts", count, tokens), 0.0)
        rate = count * tokens * lone / (verified + drafted)
        print(f"{count:7} {tokens:12} {count * tokens:5} {1e3 * verified:9.1f} {1e3 * drafted:11.1f} {rate:10.2f}")


def _pass(engine: Engine, sequences: list[Sequence], tokens: int) -> Callable[[], None]:
    """A joint pass over ``tokens`` tokens of each sequence, with logits of all, and its rollback."""

    def call() -> None:
        held = [sequence.length for sequence in sequences]
        engine.extend_together([ExtendCall(one, list(range(5, 5 + tokens)), tokens) for one in sequences])
        for sequence, length in zip(sequences, held, strict=True):
            sequence.rollback(length)

    return call


def _proposals(engine: Engine | None, sequences: list[Sequence], length: int) -> Callable[[], None]:
    """A proposal of ``length`` tokens for each sequence, made together if the engine can, and its rollback."""
    assert engine is not None

    def call() -> None:
        held = [sequence.length for sequence in sequences]
        calls = [(one, ProposalCall([5], length, engine.vocab_size, GREEDY, [], None)) for one in sequences]
        if isinstance(engine, ProposesTogether) and all(one.fused is not None for one in sequences):
            engine.propose_together(calls)
        else:
            for one, wanted in calls:
                _propose(one, wanted)
        for sequence, kept in zip(sequences, held, strict=True):
            sequence.rollback(kept)

    return call


def _propose(sequence: Sequence, wanted: ProposalCall) -> None:
    """One proposal, in a call if the engine can, else token by token."""
    if sequence.fused is not None:
        sequence.fused.propose(wanted)
        return
    token = wanted.tokens
    for _ in range(wanted.length):
        token = [int(sequence.extend(token, 1).argmax())]


def _in_turns(calls: dict[tuple[str, int, int], Callable[[], None]], repeats: int) -> dict[tuple[str, int, int], float]:
    """Median seconds of each call. The calls take turns, so that other load on the machine affects all alike."""
    times: dict[tuple[str, int, int], list[float]] = {name: [] for name in calls}
    for number in range(repeats + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            if number:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in times.items()}


if __name__ == "__main__":
    main()
