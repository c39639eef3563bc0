"""Tests, once at loading, whether a model's passes over several tokens give the same logits as its single steps.

Speculative decoding needs that, but some forwards in transformers violate it: for example, an update ignores the state
before it, or only one of two code paths applies a limit. Such a model decodes plainly, and the user is shown the
reason.
"""

from __future__ import annotations

import torch

from adaptive.engines.protocol import Engine
from adaptive.errors import first_line

# Tokens of the text before the compared passes, and of these passes. Too high: the test takes longer on a large model.
# Too low: there is hardly any state to compare.
BEFORE, PASS = 9, 4
# The largest distance between logits, as a share of their norm. Rounding in half precision causes less than 0.01; a
# state that is ignored or not rolled back causes far more than the limit.
NEAR = {torch.float32: 1e-3, torch.float64: 1e-3}
NEAR_HALF = 0.1


@torch.inference_mode()
def unused_cache(engine: Engine) -> str | None:
    """The reason why this engine's model does not use the cache that it is given, in words that follow the model's
    name; None if it does."""
    try:
        sequence = engine.sequence()
        sequence.extend([1, 2, 3], 1)
    except Exception as error:  # any error of the model's own code
        return f"does not take the cache that it is given ({first_line(error)})"
    return None if sequence.length == 3 else "keeps its past in another way than the cache that it is given"


@torch.inference_mode()
def disagreement(engine: Engine, dtype: torch.dtype, quantised: bool) -> str | None:
    """The reason why this engine's passes over several tokens cannot be used, in words that follow the model's name;
    None if they can. ``dtype``: the dtype of its computations; ``quantised``: whether its weights are quantised."""
    if engine.context_length < BEFORE + PASS + 2:
        return None
    vocab = engine.vocab_size
    text = [1 + 7919 * place % (vocab - 1) for place in range(BEFORE + PASS)]
    half, kept = text[BEFORE:], BEFORE + PASS // 2
    other = [token % (vocab - 1) + 1 for token in half]
    try:
        several = engine.sequence()
        several.extend(text[:BEFORE], 1)
        drafted = several.extend(half, PASS).clone()
        several.rollback(kept)
        if several.length != kept:
            return "has a state whose update is not known here, and which cannot be taken back"
        after = several.extend(other[:2], 2).clone()
        single = engine.sequence()
        single.extend(text[:BEFORE], 1)
        steps = torch.cat([single.extend([token], 1).clone() for token in half])
        single.rollback(kept)
        again = torch.cat([single.extend([token], 1).clone() for token in other[:2]])
        fresh = engine.sequence()
        fresh.extend(text[:BEFORE], 1)
        expected = torch.cat([fresh.extend([token], 1).clone() for token in [*text[BEFORE:kept], *other[:2]]])[-2:]
    except Exception as error:  # any error of the model's own code
        return f"cannot continue a text by several tokens ({first_line(error)})"
    near = NEAR_HALF if quantised else NEAR.get(dtype, NEAR_HALF)
    if not _near(drafted, steps, near):
        return "computes something else in a pass over several tokens than in single steps"
    if not (_near(after, expected, near) and _near(again, expected, near)):
        return "computes something else after a rollback than without one"
    return None


def _near(found: torch.Tensor, expected: torch.Tensor, near: float) -> bool:
    one, other = (logits.float().cpu().double() for logits in (found, expected))  # MPS has no float64
    return bool((one - other).norm() / other.norm() < near)
