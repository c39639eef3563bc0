"""Measures several answers at once: passes over several texts, recorded and eager, and whole answers."""

from __future__ import annotations

import time
from collections.abc import Callable

from adaptive.answering import Answering, Question
from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength
from adaptive.decoding.batch import Batch
from adaptive.engines.protocol import ExtendCall
from adaptive.pair import Pair
from adaptive.types import StopParams
from gpu_parts.clocks import take
from gpu_parts.saying import GREEDY, model_of, prompts, text
from gpu_parts.speed import CONTEXT
from gpu_parts.work import Bench, Budget, Figures

# Shares of the part's seconds for passes, recorded and eager; the rest is for answers.
RECORDED, EAGER = 0.3, 0.3
# Bytes of caches that conversations may keep.
CACHES = 16 << 30


def several(bench: Bench, kind: str) -> Figures:
    """Time passes over several texts, with one token of each and with more, and several answers at once."""
    texts, whole = bench.scale.texts, bench.budget
    found: Figures = {"eager passes": _passes(bench, bench.workshop.pair(kind, graphs=False), whole.share(EAGER))}
    pair = bench.workshop.pair(kind)
    began = time.perf_counter()
    model_of(pair.target).prepare_together(max(texts), False)
    found["seconds of recording"] = time.perf_counter() - began
    found["recorded passes"] = _passes(bench, pair, whole.share(RECORDED))
    lengths = (0, bench.scale.lengths[0])
    _answers(bench, pair, max(texts), lengths[-1])  # its first passes load kernels
    for length in lengths:
        found[f"answers, {length} drafted"] = {
            str(count): _answers(bench, pair, count, length) for count in (1, *texts)
        }
    return found


def _passes(bench: Bench, pair: Pair, budget: Budget) -> dict[str, float]:
    """Seconds of passes over each number of texts, with one token of each and with more."""
    scale, target = bench.scale, model_of(pair.target)
    words = text(bench, pair, CONTEXT + 16)
    held = [target.sequence() for _ in range(max(scale.texts))]
    for number, sequence in enumerate(held):
        sequence.reserve(CONTEXT + 32)
        sequence.extend(words[: CONTEXT - number], 1)
    counts = (1, 1 + scale.lengths[-1] // 2)

    def joint(texts: int, count: int) -> Callable[[], object]:
        def call() -> None:
            target.extend_together([ExtendCall(one, words[CONTEXT : CONTEXT + count], count) for one in held[:texts]])
            for number, one in enumerate(held[:texts]):
                one.rollback(CONTEXT - number)

        return call

    calls = {f"{texts} texts, {count} tokens each": joint(texts, count) for texts in scale.texts for count in counts}
    return {name: taken.done for name, taken in take(bench, calls, budget).items()}


def _answers(bench: Bench, pair: Pair, count: int, length: int) -> dict[str, float]:
    """Tokens a second of ``count`` answers at once with drafts of ``length`` tokens, from the moment when all prompts
    were read to the end of the last answer; and tokens a round."""
    assistant = Assistant(pair, FixedLength(length), None, CACHES)
    batch, going = Batch(pair.target, lambda: True), list[Answering]()
    for prompt in (prompts(bench, pair) * count)[:count]:
        stop = StopParams(bench.scale.race_tokens, ignore_eos=True)
        going.append(assistant.begin(Question(prompt, (), "", GREEDY, stop)))
        going[-1].decoding.begin()
        batch.join(going[-1].decoding)
    began, tokens, rounds = None, 0, 0
    while batch.under_way:
        failed = batch.step()
        if failed:
            raise failed[0][1]
        said = sum(len(list(one.decoding.show())) for one in going)
        if began is not None:
            tokens += said
        elif not any(one.decoding.unread for one in going):
            bench.synchronise()
            began = time.perf_counter()
        for one in list(going):
            if one.decoding.finish_reason is not None:
                rounds += len(one.decoding.rounds)
                batch.leave(one.decoding)
                one.decoding.end()
                assistant.end(one)
                going.remove(one)
    assert began is not None
    whole = count * (bench.scale.race_tokens - 1)
    return {"tokens a second": tokens / (time.perf_counter() - began), "tokens a round": whole / max(1, rounds)}
