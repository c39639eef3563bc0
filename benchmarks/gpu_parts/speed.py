"""Measures speed: the bandwidth, plain decoding against it, passes over several tokens, the first token of a long
prompt, and speculation against what passes alone allow and against transformers' own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from adaptive.control.costs import CostTable
from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import FixedLength
from adaptive.engines.load import forward_of
from adaptive.engines.protocol import Engine, Prepares
from adaptive.measure import attentive_on, measure
from adaptive.pair import Pair
from adaptive.types import SamplingParams
from cli.bench import of_every_kind
from cli.contenders import Contender, ours, policies, race, table, theirs
from cli.contenders import Result as Raced
from cli.prompts import PromptLine
from gpu_parts.clocks import Taken, take
from gpu_parts.models import read_bytes
from gpu_parts.saying import GREEDY, SAMPLED, Speaker, fitting, model_of, prompts, text
from gpu_parts.work import Bench, Budget, Figures, Result, name_of, read

# Tokens of text before the timed passes.
CONTEXT = 200
# Seconds without which costs are not measured, nor transformers' own decoding: each takes up to ten.
ENOUGH_S = 15.0
# Share of the seconds of a race that our ways have, if transformers' own run as well.
OURS = 0.7


def bandwidth(bench: Bench) -> Figures:
    """Bytes a second of a copy within the device's memory; bytes read and bytes written both count."""
    count = bench.scale.copied
    source = torch.ones(count // 4, device=bench.device)
    target = torch.empty_like(source)
    taken = take(bench, {"copy": lambda: target.copy_(source)}, bench.budget)["copy"]
    return {"bytes a second": 2 * source.nbytes / taken.done, "copied": source.nbytes}


def bandwidth_here(bench: Bench) -> float:
    """The bandwidth in bytes a second: the stored result of that part for this device, else measured now."""
    known: Result | None = read(bench.folder / "bandwidth.json")
    here = known is not None and known.problem is None and known.device == name_of(bench.device)
    figures = known.figures if known is not None and here else bandwidth(bench)
    return float(figures["bytes a second"])


def plain(bench: Bench, kind: str, within: Budget | None = None) -> Figures:
    """Time answers without a draft, over eager and recorded passes, and their share of what the bandwidth allows."""
    found: Figures = {}
    whole = within or bench.budget
    limit = bandwidth_here(bench)
    ways = {"eager": False, "recorded": True} if bench.device.type == "cuda" else {"eager": False}
    for number, (name, recorded) in enumerate(ways.items()):
        pair = bench.workshop.pair(kind, graphs=recorded)
        engine = model_of(pair.target)
        if recorded and engine.recorded is None:
            continue  # passes of this kind cannot be recorded
        budget = whole.share(1 / (len(ways) - number))
        began = time.perf_counter()
        Speaker(pair, FixedLength(0)).say(prompts(bench, pair)[0], 1)
        first = time.perf_counter() - began  # with recordings, and with kernels that are compiled
        speeds, size = answered(bench, pair, budget), read_bytes(engine.model)
        found[name] = {
            "seconds of the first token": first,
            "forward": forward_of(engine).value,
            "weights": engine.weights,
            "bytes a token": size,
            "tokens a second": speeds,
            "share of the limit": speeds * size / limit,
        }
        if engine.recorded is not None and engine.recorded.problem is not None:
            found[name]["stays eager"] = engine.recorded.problem
    return found


def answered(bench: Bench, pair: Pair, budget: Budget, sampling: SamplingParams = GREEDY) -> float:
    """Tokens a second of answers without a draft, after their first token: the median over prompts."""
    speaker, found = Speaker(pair, FixedLength(0), sampling), list[float]()
    first = prompts(bench, pair)
    tokens = fitting([lambda count: speaker.say(first[0], count)], budget, bench.scale.race_tokens)
    for prompt in first:
        if found and budget.over:
            break
        found.append((tokens - 1) / speaker.say(prompt, tokens).predicted_s)
    return statistics.median(found)


def passes(bench: Bench, pair: Pair, engine: Engine, counts: tuple[int, ...], budget: Budget) -> dict[int, Taken]:
    """Times of passes over each number of tokens in the middle of real text, with logits of all and a rollback."""
    words = text(bench, pair, CONTEXT + max(counts))
    sequence = engine.sequence()
    sequence.reserve(CONTEXT + max(counts) + 32)
    if isinstance(sequence, Prepares):
        sequence.prepare(CONTEXT + max(counts) + 32)
    sequence.extend(words[:CONTEXT], 1)

    def a_pass(count: int) -> Callable[[], object]:
        def call() -> None:
            sequence.extend(words[CONTEXT : CONTEXT + count], count)
            sequence.rollback(CONTEXT)

        return call

    taken = take(bench, {str(count): a_pass(count) for count in counts}, budget)
    return {int(name): one for name, one in taken.items()}


def verification(bench: Bench, kind: str) -> Figures:
    """Time passes of the target over 1 to 64 tokens, and of the draft over one."""
    pair = bench.workshop.pair(kind)
    assert pair.draft is not None
    draft = passes(bench, pair, pair.draft, (1,), bench.budget.share(0.15))[1]
    found = passes(bench, pair, pair.target, bench.scale.passes, bench.budget)
    return {
        "draft": {"seconds": draft.done, "until it returned": draft.returned},
        "target": {
            str(count): {"seconds": one.done, "until it returned": one.returned, "times one": one.done / found[1].done}
            for count, one in found.items()
        },
    }


def first_token(bench: Bench, kind: str) -> Figures:
    """Time the first token after a long prompt, and measure the memory of its keys and values."""
    pair, count = bench.workshop.pair(kind), bench.scale.first
    words, sequence = text(bench, pair, count), pair.target.sequence()
    sequence.reserve(count + 32)

    def call() -> None:
        sequence.rollback(0)
        sequence.extend(words, 1)

    taken = take(bench, {"prompt": call}, bench.budget)["prompt"]
    return {
        "prompt": count,
        "seconds": taken.done,
        "tokens a second": count / taken.done,
        "bytes of the cache": sequence.memory.total,
    }


def speculation(bench: Bench, kind: str, peers: bool = True) -> Figures:
    """Race fixed draft lengths and the controller against plain decoding: tokens a second, and the share of what
    acceptance and passes alone allow. ``peers``: also transformers' own ``generate``, plain and assisted."""
    pair, scale = bench.workshop.pair(kind), bench.scale
    assert pair.draft is not None
    counts = (1, *(1 + length for length in scale.lengths))
    draft = passes(bench, pair, pair.draft, (1,), bench.budget.share(0.05))[1].done
    target = passes(bench, pair, pair.target, counts, bench.budget.share(0.1))
    measured = scale.measured and bench.budget.left > ENOUGH_S
    costs = measure(pair, GREEDY).costs if measured else None
    found: Figures = {"costs were measured": measured}
    for share, (name, sampling) in zip((0.5, 1.0), (("greedy", GREEDY), ("temperature 0.7", SAMPLED)), strict=True):
        budget = bench.budget.share(share)
        also = peers and name == "greedy" and (budget.left > ENOUGH_S or not scale.measured)
        rows = _raced(bench, pair, sampling, costs, budget, also)
        for row in rows:
            length = row["contender"].removeprefix("ours, fixed ")
            if length.isdigit():
                allowed = row["tokens a round"] * target[1].done / (int(length) * draft + target[1 + int(length)].done)
                row["passes alone allow"] = allowed
                row["share of that"] = row["times plain"] / allowed
        found[name] = rows
    return found


def _raced(
    bench: Bench, pair: Pair, sampling: SamplingParams, costs: CostTable | None, budget: Budget, peers: bool
) -> list[dict[str, Any]]:
    """Race all ways in turn on the same prompts, on as many of these as the budget allows."""
    warm, plain, again = (ours("ours, plain", pair, FixedLength(0), sampling) for _ in range(3))  # each with own caches
    field = [ours(name, pair, policy, sampling) for name, policy in policies(bench.scale.lengths).items()]
    field += [ours(name, pair, policy, sampling) for name, policy in _controllers(pair, costs).items()]
    *given, other = of_every_kind(bench.scale.prompts + 1)
    for prompt in (other, *given):
        warm.answer(prompt, 1)  # the first pass over each length of what is new in a prompt loads kernels
    found = _turns(bench, [plain, *field], given, other, budget.share(OURS) if peers else budget)
    if peers:  # apart, because they are slow: ours would have a few short answers only
        found += _turns(bench, [again, *_theirs(pair, sampling, bench.scale.lengths[-1])], given, other, budget)[1:]
    return found


def _turns(
    bench: Bench, field: Sequence[Contender], given: Sequence[PromptLine], other: PromptLine, budget: Budget
) -> list[dict[str, Any]]:
    """Race contenders on as many of the ``given`` prompts as the budget allows; the first one is plain decoding. The
    ``other`` prompt shows how long answers may be: ours would find a raced one in its caches."""
    tokens = fitting([partial(one.answer, other) for one in field], budget, bench.scale.race_tokens)
    turns, results = race(field, given, tokens, warm_up=False), list[Raced]()
    while len(results) < len(field) * len(given):
        if results and budget.over:
            break
        results += islice(turns, len(field))  # all ways on one prompt
    return [
        {
            "contender": row.contender,
            "tokens a second": row.tokens_per_second,
            "times plain": row.against,
            "tokens a round": row.tokens_per_round,
            "same answers as plain": row.same,
            "8-grams repeated": row.loops,
            "prompts": len(results) // len(field),
            "tokens of an answer": tokens,
        }
        for row in table(field, results)
    ]


def _controllers(pair: Pair, costs: CostTable | None) -> dict[str, GoodputLength]:
    """The default policy with the costs of this pair, if they were measured; and the same without the draft's
    confidence."""
    return {
        "ours, controller": GoodputLength(costs, attentive=attentive_on(pair)),
        "ours, controller without confidence": GoodputLength(costs, attentive=False),
    }


def _theirs(pair: Pair, sampling: SamplingParams, length: int) -> list[Contender]:
    threads = torch.get_num_threads()
    return [
        theirs("transformers, plain", pair, sampling, threads),
        theirs("transformers, assisted", pair, sampling, threads, assisted=True),
        theirs(f"transformers, assisted {length}", pair, sampling, threads, assisted=True, length=length),
    ]


def quantised(bench: Bench, kind: str) -> Figures:
    """Time a quantised target: plain decoding, and passes over several tokens against one."""
    bench.workshop.pair(kind)  # made before the timed share of the budget begins
    found = plain(bench, kind, bench.budget.share(0.6))
    pair = bench.workshop.pair(kind)
    counts = tuple(count for count in bench.scale.passes if count <= 16)
    taken = passes(bench, pair, pair.target, counts, bench.budget)
    return {
        **found,
        "passes": {str(n): {"seconds": one.done, "times one": one.done / taken[1].done} for n, one in taken.items()},
    }


def other_kind(bench: Bench, kind: str) -> Figures:
    """Time a mixture or a hybrid as ``quantised`` does, and speculation with it."""
    bench.workshop.pair(kind)  # made before the budget is divided
    whole = bench.budget
    bench.budget = whole.share(0.5)
    found = quantised(bench, kind)
    bench.budget = whole
    return {**found, "speculation": speculation(bench, kind, peers=False)}
