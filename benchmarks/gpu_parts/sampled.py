"""Checks that sampling on the device has the target's distribution: counts answers of two tiny models with a vocabulary
of eight tokens, and compares the counts with the exact probabilities of all answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adaptive.control.policy import FixedLength, LengthPolicy
from adaptive.decoding.loop import Decoding, Request
from adaptive.decoding.verifier import Verifier
from adaptive.drafting.model import ModelDrafter
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.protocol import Engine, sequences
from adaptive.sampling import LogitsProcessor, transform_logits
from adaptive.types import SamplingParams, StopParams
from gpu_parts.work import Bench, Figures, Wrong

VOCAB, PROMPT, CONTEXT = 8, [1, 5, 2], 64
# Tokens of an answer that are counted. Two more are decoded, so that a round drafts two tokens.
COUNTED = 2
# Below this p-value, answers are judged not to have the target's distribution. By chance, one run in 1,000 is below it.
LEAST_P = 1e-3
UNDER = {
    "top-p": SamplingParams(temperature=1.3, top_p=0.9),
    "penalties": SamplingParams(temperature=1.0, top_k=5, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.4),
}


class NoText:
    """A text stream of tokens that have no text."""

    stopped = False

    def push(self, token: int) -> str:
        """No text."""
        return ""

    def finish(self) -> str:
        """No text."""
        return ""


def tiny_pair(device: torch.device) -> tuple[TransformersEngine, TransformersEngine]:
    """Two models over eight tokens whose distributions differ, but not everywhere."""
    engines = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=CONTEXT,
        )
        model: Any = LlamaForCausalLM(config)
        with torch.no_grad():
            model.lm_head.weight.mul_(20)
        engine = TransformersEngine(model.to(device))
        engine.cpu_forward = None
        if device.type == "cuda":
            engine.record()
        engines.append(engine)
    return engines[0], engines[1]


def exactly(target: Engine, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every answer, computed from the target alone."""
    found = {}
    for said in product(range(VOCAB), repeat=COUNTED):
        probability = 1.0
        for place, token in enumerate(said):
            penalties = LogitsProcessor(params, VOCAB, target.device)
            penalties.start(torch.tensor(PROMPT))
            penalties.commit(list(said[:place]))
            none = torch.empty(0, dtype=torch.long, device=target.device)
            logits = penalties.apply(target.sequence().extend([*PROMPT, *said[:place]], 1), none)
            probability *= float(transform_logits(logits, params).softmax(-1)[0, token])
        found[said] = probability
    return found


def drawn(
    pair: tuple[Engine, Engine], params: SamplingParams, policy: LengthPolicy, runs: int, seeded: bool = False
) -> list[tuple[int, ...]]:
    """``runs`` answers by the whole decoding loop; with ``seeded`` each under its own seed."""
    target, draft = pair
    one, other = sequences(target, draft)
    assert other is not None
    # Two generators with different seeds, as on two devices: draft and verification must not share random numbers.
    generators = [torch.Generator(engine.device).manual_seed(seed) for seed, engine in enumerate(pair, 11)]
    found = []
    for number in range(runs):
        for sequence in (one, other):
            sequence.rollback(len(PROMPT) - 1)
        under = replace(params, seed=number) if seeded else params
        penalties = LogitsProcessor(under, VOCAB, target.device)
        request = Request(PROMPT, under, StopParams(COUNTED + 2), frozenset(), record=False)
        drafter = ModelDrafter(other, draft, VOCAB, under, penalties, generators[1])
        verifier = Verifier(under, penalties, generators[0])
        decoding = Decoding(request, one, CONTEXT, drafter, verifier, policy, NoText())  # type: ignore[arg-type]
        for _ in decoding.steps():
            pass
        found.append(tuple(decoding.output[:COUNTED]))
    return found


def p_value(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """The chi-square p-value of counts against exact probabilities. Answers expected fewer than 5 times are counted as
    one, or left out if they are expected fewer than 5 times together. 0 if an impossible answer occurred."""
    total = sum(counts.values())
    if any(not exact.get(said, 0.0) > 0 for said in counts):
        return 0.0
    common = [said for said, p in exact.items() if p * total >= 5]
    observed = [float(counts[said]) for said in common]
    expected = [exact[said] * total for said in common]
    rare = total - sum(expected)
    if rare >= 5:
        observed, expected = [*observed, total - sum(observed)], [*expected, rare]
    else:
        expected = [one * sum(observed) / sum(expected) for one in expected]
    if len(expected) < 2:
        raise ValueError(f"{total} answers are too few to tell two of them apart")
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def sampled(bench: Bench) -> Figures:
    """Check answers with drafts against exact probabilities, and seeded answers with a draft against those without."""
    pair, runs = tiny_pair(bench.device), bench.scale.samples
    found: Figures = {"answers": runs, "p": {}}
    for name, params in UNDER.items():
        p = p_value(Counter(drawn(pair, params, FixedLength(2), runs)), exactly(pair[0], params))
        found["p"][name] = p
        if p < LEAST_P:
            raise Wrong(f"answers under {name} do not have the target's distribution: p = {p:.1e} over {runs} answers")
    params, some = UNDER["top-p"], max(20, runs // 20)
    with_draft, alone = (drawn(pair, params, FixedLength(length), some, seeded=True) for length in (2, 0))
    found["seeded answers that differ with a draft"] = sum(a != b for a, b in zip(with_draft, alone, strict=True))
    if with_draft != alone:
        raise Wrong("an answer under a seed is another one with a draft")
    return found
