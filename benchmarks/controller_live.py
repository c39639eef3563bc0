"""Measures the controller in real time: ``auto`` against every fixed length, interleaved, on the bundled pair.

Every prompt is answered in each way, one after the other in random order, several times over. The median
of the times of one prompt in one way counts, so that a slow moment of the machine puts no way at a
disadvantage. Greedy: the text is the same in every way. Prints, for every kind of prompts, tokens per
second by way, ``auto`` over the best fixed length, the speed-up that ``adaptive calibrate`` predicted
from other prompts of the kind over the measured one, and ``auto`` over plain decoding with a draft of
random weights.

    python benchmarks/controller_live.py [--kinds math code roleplay] [--prompts 24] [--tokens 100] [--passes 3]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from adaptive.assistant import Assistant
from adaptive.control.costs import CostTable
from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import Adviser, FixedLength, LengthPolicy, Scope
from adaptive.measure import attentive_on, measure
from adaptive.pair import BUNDLED, Pair, load_pair
from adaptive.settings import load_settings
from adaptive.types import Round, SamplingParams, StopParams
from cli.calibrate import answer_plainly, read_sample
from cli.forecast import Forecast, predict
from cli.prompts import PromptLine, read_prompts
from trainers.dataset import repeated_ngrams

GREEDY = SamplingParams(temperature=0.0)
# Most prompts in the calibration sample: every second prompt of a file; the race uses the others.
SAMPLE = 64


class Timed(LengthPolicy):
    """A policy that measures the seconds its own calls take."""

    def __init__(self, inner: GoodputLength) -> None:
        self.inner = inner
        self.name = inner.name
        self.seconds = 0.0
        self.asked = 0  # upper bound on the confidences that were computed for it

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        """Timed."""
        with self._timed():
            length = self.inner.next_length(limit, waiting, context)
        self.steady = self.inner.steady
        return length

    @property
    def adviser(self) -> Adviser | None:
        """Not timed: the thresholds that a proposal in one call evaluates without the policy."""
        return self.inner.adviser

    def observe(self, outcome: Round) -> None:
        """Timed. Also counts confidences: one for each drafted token, and perhaps for one token more."""
        self.asked += outcome.drafted + 1
        with self._timed():
            self.inner.observe(outcome)

    def begin(self, scope: Scope, decoded: int = 0) -> None:
        """Timed."""
        with self._timed():
            self.inner.begin(scope, decoded)

    def ended(self, tokens: int) -> None:
        """Timed."""
        with self._timed():
            self.inner.ended(tokens)


def confidence_seconds(vocab: int, repeats: int = 200) -> float:
    """Extra seconds that confidence adds to a greedy draft step: a softmax and its largest entry, less an argmax."""
    logits = torch.randn(1, vocab)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        calls: tuple[Callable[[], object], ...] = (lambda: float(logits.softmax(-1).max(-1)[0]), logits.argmax)
        for found, call in zip(times, calls, strict=True):
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
    longer, shorter = map(statistics.median, times)
    return max(0.0, longer - shorter)


@dataclasses.dataclass
class Way:
    """One way of decoding: by prompt, the tokens and the seconds of every answer; and ``spent``, seconds of all
    rounds."""

    name: str
    assistant: Assistant
    tokens: dict[int, int] = dataclasses.field(default_factory=dict)
    times: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    spent: float = 0.0

    @property
    def seconds(self) -> list[float]:
        """For every prompt the median over the passes."""
        return [statistics.median(times) for times in self.times.values()]

    @property
    def rate(self) -> float:
        """Tokens per second over all prompts."""
        return sum(self.tokens.values()) / sum(self.seconds)

    def take(self, other: Way) -> None:
        """Add the measurements of another race over the same prompts."""
        self.tokens.update(other.tokens)
        for number, times in other.times.items():
            self.times.setdefault(number, []).extend(times)
        self.spent += other.spent


def interleaved(ways: list[Way], prompts: list[PromptLine], tokens: int, passes: int) -> float:
    """Answer every prompt in every way, ``passes`` times. Returns the share of repeated 8-grams in the answers."""
    stop, repeated, order = StopParams(max_new_tokens=tokens), [], random.Random(0)
    for _ in range(passes):
        for number, prompt in enumerate(prompts):
            output: list[int] = []
            for way in order.sample(ways, len(ways)):
                for _ in way.assistant.chat(prompt.messages, GREEDY, stop):
                    pass
                done = way.assistant.last
                assert done is not None
                way.times.setdefault(number, []).append(done.timings.predicted_s)
                output = done.output
                way.tokens[number] = len(output) - 1
                way.spent += sum(r.draft_s + r.verify_s for r in done.rounds)
            repeated.append(repeated_ngrams(np.array(output)))
    return float(np.concatenate(repeated).mean())


def forecast(pair: Pair, costs: CostTable, prompts: list[PromptLine], tokens: int) -> Forecast:
    """The forecast of ``adaptive calibrate --prompts`` for these prompts."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "records.db"
        answer_plainly(Assistant(pair, FixedLength(0), None), GREEDY, prompts, log, tokens)
        sample = read_sample(pair, log)
        assert sample, "these answers are too short to learn acceptance from"
    return predict([costs], sample, pair)


def one_kind(pair: Pair, kind: str, prompts: list[PromptLine], args: argparse.Namespace) -> None:
    """Run and print all ways on the prompts of one kind."""
    costs = measure(pair, GREEDY, thorough=True).costs
    expected = forecast(pair, costs, prompts[1::2][:SAMPLE], args.tokens)
    policy = Timed(GoodputLength(expected.costs, attentive=attentive_on(pair)))
    lengths = sorted({*args.lengths, 0, expected.draft_length})
    ways = [Way(f"{k}", Assistant(pair, FixedLength(k), None)) for k in lengths]
    auto = Way("auto", Assistant(pair, policy, None))
    repeated = interleaved([*ways, auto], prompts[::2][: args.prompts], args.tokens, args.passes)
    by_length = dict(zip(lengths, ways, strict=True))
    best = max(lengths, key=lambda k: by_length[k].rate)
    plain = by_length[0].rate
    advised = by_length[expected.draft_length].rate / plain
    paired = statistics.median(b / a for a, b in zip(auto.seconds, by_length[best].seconds, strict=True))
    low, high = expected.speed_up_interval
    decoded = sum(auto.tokens.values())
    print(
        f"{kind}: {args.prompts} prompts, {decoded} tokens, {repeated:.0%} of 8-grams repeated\n  tokens/s  "
        + "  ".join(f"{w.name}: {w.rate:.0f}" for w in [*ways, auto])
        + f"\n  auto / best fixed ({best}): {auto.rate / by_length[best].rate:.3f} (median of prompts {paired:.3f})"
        f"   auto / plain: {auto.rate / plain:.3f}"
        f"\n  predicted {expected.speed_up:.3f} ({low:.3f} to {high:.3f}) at length {expected.draft_length}, "
        f"measured {advised:.3f}, "
        f"predicted / measured {expected.speed_up / advised:.3f} (auto: {expected.speed_up * plain / auto.rate:.3f})"
        f"\n  choosing: {policy.seconds / auto.spent:.2%} of the rounds' time, "
        f"and {policy.asked * confidence_seconds(pair.target.vocab_size) / auto.spent:.2%} for the draft's confidence",
        flush=True,
    )


def useless(args: argparse.Namespace) -> None:
    """Race ``auto`` with a draft of random weights against plain decoding."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(BUNDLED / "draft")).save_pretrained(folder)
        AutoTokenizer.from_pretrained(BUNDLED / "draft").save_pretrained(folder)
        pair = load_pair(load_settings({"target": str(BUNDLED / "target"), "draft": folder}))
        policy = GoodputLength(measure(pair, GREEDY).costs, attentive=attentive_on(pair))
        ways = [Way("plain", Assistant(pair, FixedLength(0), None)), Way("auto", Assistant(pair, policy, None))]
        prompts = read_prompts(BUNDLED / "prompts" / f"{args.kinds[0]}.jsonl")[: args.prompts]
        interleaved(ways, prompts, args.tokens, args.passes)
    plain, auto = ways
    paired = statistics.median(b / a for a, b in zip(auto.seconds, plain.seconds, strict=True))
    print(
        f"random draft: plain {plain.rate:.0f}, auto {auto.rate:.0f} tokens/s; "
        f"auto / plain {auto.rate / plain.rate:.3f} (median of prompts {paired:.3f})"
    )


def main() -> None:
    """Every kind, then the random draft."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["math", "code", "roleplay"])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 6])
    args = parser.parse_args()
    pair = load_pair(load_settings({}))
    for kind in args.kinds:
        one_kind(pair, kind, read_prompts(BUNDLED / "prompts" / f"{kind}.jsonl"), args)
    useless(args)


if __name__ == "__main__":
    main()
