"""Determines from a model's config what its layers cache of a text, and whether that can be rolled back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adaptive.engines.hf.cache import ATTENTION, RECURRENT, layer_kinds
from adaptive.errors import first_line


@dataclass(frozen=True)
class Kinds:
    """``problem``: the reason why the model's passes cannot be rolled back, in words that follow its name; None if they
    can. ``recurrent``: the number of layers with a recurrent state; ``attention``: of those with keys and values."""

    problem: str | None
    recurrent: int = 0
    attention: int = 0

    @classmethod
    def of(cls, config: Any) -> Kinds:
        """For a model with this text config."""
        try:
            kinds = layer_kinds(config)
        except Exception as error:  # a config of another kind of model
            return cls(f"has layers that are not described as those of other models are ({first_line(error)})")
        recurrent = sum(kind in RECURRENT for kind in kinds)
        attention = sum(kind in ATTENTION or "hybrid" in kind for kind in kinds)
        strange = sorted(set(kinds) - ATTENTION - RECURRENT - {"dummy"})
        if strange:
            said = strange[0].replace("_", " ")
            return cls(f"has layers of {said}, whose cache cannot be rolled back here", recurrent, attention)
        return cls(None, recurrent, attention)
