"""Tells users when a model runs a slower forward than there is for it on this processor, and why.

In: a loaded engine, and what it was loaded from. Out: a warning for users.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adaptive.engines.load import Forward, Source, choose_forward, forward_of
from adaptive.settings import Settings

if TYPE_CHECKING:
    from adaptive.engines.protocol import Engine

# Why transformers' own forward runs a model that ours computes, and what helps.
NO_ROOM = "there is no memory for the packed copy of its weights; free memory, or take a smaller model"
NOT_PLAIN = "its weights are of several dtypes, or it has hooks"


def why_slower(engine: Engine, source: Source, settings: Settings, device: str, draft: bool = False) -> str | None:
    """Why an engine on a CPU runs without native kernels, or without our forward although there is one for its model,
    with advice; or None. ``device`` and ``draft`` as for ``load_engine``."""
    from adaptive.engines.cpu import kernels
    from adaptive.engines.cpu.families import is_plain
    from adaptive.engines.hf.engine import TransformersEngine

    runs = forward_of(engine)
    if runs not in (Forward.CPU_TORCH, Forward.TRANSFORMERS) or engine.device.type != "cpu":
        return None
    missing = kernels.problem() if engine.weights in ("float32", "bfloat16") else None
    if missing is not None or runs is Forward.CPU_TORCH:
        return missing
    if not choose_forward(source, settings, device, draft).forward.own:
        return None
    assert isinstance(engine, TransformersEngine)
    reason = NO_ROOM if is_plain(engine.model) else NOT_PLAIN
    return f"{source.id} runs transformers' own forward, which is slower than ours: {reason}"
