"""Whether a model's passes over several tokens say what its single steps say, tried once when it is loaded.

Speculation needs that, and some forwards of transformers do not keep to it: an update of a recurrent state that ignores
what was before, a limit that only one of two ways applies. Such a model decodes plainly, and says why.
"""

from __future__ import annotations

import torch

from adaptive.engines.protocol import Engine
from adaptive.errors import first_line

# Tokens of the text before the passes that are compared, and of those passes. More would take longer on a large model,
# fewer leave no state to speak of.
BEFORE, PASS = 9, 4
# How far logits may lie apart, as a share of their norm: rounding is below a hundredth of it, a state that is ignored
# or not rolled back is far above.
NEAR = {torch.float32: 1e-3, torch.float64: 1e-3}
NEAR_HALF = 0.1


@torch.inference_mode()
def unused_cache(engine: Engine) -> str | None:
    """Why the cache is none that this engine's model keeps its past in, in words that follow its name; or None."""
    try:
        sequence = engine.sequence()
        sequence.extend([1, 2, 3], 1)
    except Exception as error:  # whatever the model's own code says
        return f"does not take the cache that it is given ({first_line(error)})"
    return None if sequence.length == 3 else "keeps its past in another way than the cache that it is given"


@torch.inference_mode()
def disagreement(engine: Engine, dtype: torch.dtype, quantised: bool) -> str | None:
    """Why passes over several tokens of this engine are not to be used, in words that follow a model's name; or None.
    ``dtype`` is that of what it computes, from weights that may be ``quantised``."""
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
    except Exception as error:  # whatever the model's own code says
        return f"cannot continue a text by several tokens ({first_line(error)})"
    near = NEAR_HALF if quantised else NEAR.get(dtype, NEAR_HALF)
    if not _near(drafted, steps, near):
        return "computes something else in a pass over several tokens than in single steps"
    if not (_near(after, expected, near) and _near(again, expected, near)):
        return "computes something else after a rollback than without one"
    return None


def _near(found: torch.Tensor, expected: torch.Tensor, near: float) -> bool:
    gap = (found.double() - expected.double()).norm() / expected.double().norm()
    return bool(gap < near)
