"""Measures where a round's time goes: the device's time, the program's time, and the device's idle time."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from adaptive.decoding.round import commit, propose
from adaptive.pair import Pair
from adaptive.timed_rounds import TimedRounds
from adaptive.types import SamplingParams
from gpu_parts.clocks import Marks, at_work
from gpu_parts.saying import GREEDY, SAMPLED, text
from gpu_parts.speed import CONTEXT
from gpu_parts.work import Bench, Budget, Figures

# The stretches of a round, each between two marks.
STRETCHES = ("propose", "verify", "commit")


class MarkedRounds(TimedRounds):
    """Rounds over real text, with a mark at the end of each stretch. Every round starts from the same text."""

    def __init__(self, bench: Bench, pair: Pair, sampling: SamplingParams, length: int) -> None:
        super().__init__(pair, sampling, CONTEXT, attentive=False)
        self.bench, self.length = bench, length
        self.committed = text(bench, pair, CONTEXT)
        for sequence in (self.target, self.draft):
            sequence.rollback(0)
            sequence.extend(self.committed[:-1], 0)

    @torch.inference_mode()
    def marked(self) -> Marks:
        """Run one round with the same steps as ``speculative_round`` and return its marks."""
        held, committed, marks = len(self.committed), list(self.committed), Marks(self.bench)
        self.target.rollback(held - 1)
        self.draft.rollback(held - 1)
        marks.mark()
        proposal = propose(self.drafter, self.verifier, committed, self.length, None)
        marks.mark()
        verdict, _ = self.verifier.verify(self.target, committed[self.target.length :], proposal)
        marks.mark()
        commit(self.target, self.drafter, self.verifier, committed, proposal, verdict)
        marks.mark()
        return marks


def breakdown(bench: Bench, kind: str) -> Figures:
    """Time rounds of one draft length, greedy and sampled: by stretch the seconds of the program and of the device, and
    for the whole round the kernels' seconds and the gaps between them."""
    pair, length = bench.workshop.pair(kind), bench.scale.lengths[-1]
    found: Figures = {"draft length": length}
    for share, (name, sampling) in zip((0.5, 1.0), (("greedy", GREEDY), ("temperature 0.7", SAMPLED)), strict=True):
        rounds = MarkedRounds(bench, pair, sampling, length)
        found[name] = _of(bench, rounds, bench.budget.share(share))
    return found


def _of(bench: Bench, rounds: MarkedRounds, budget: Budget) -> dict[str, Any]:
    rounds.marked()
    host: list[list[float]] = []
    device: list[list[float]] = []
    while len(host) < bench.scale.repeats and not (host and budget.over):
        bench.synchronise()
        marks = rounds.marked()
        bench.synchronise()
        host.append(marks.host())
        on_device = marks.device()
        if on_device is not None:
            device.append(on_device)
    found: dict[str, Any] = {"rounds": len(host), "program": _medians(host)}
    kernels = at_work(bench, rounds.marked)
    if kernels is not None:
        whole = statistics.median(map(sum, device))
        found |= {"device": _medians(device), "kernels": kernels, "gaps": whole - kernels}
        found["share of gaps"] = 1 - kernels / whole
    return found


def _medians(rounds: list[list[float]]) -> dict[str, float]:
    by_stretch = {name: statistics.median(one) for name, one in zip(STRETCHES, zip(*rounds, strict=True), strict=True)}
    return {**by_stretch, "whole": statistics.median(map(sum, rounds))}
