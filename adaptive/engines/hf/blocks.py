"""Decides from a checkpoint's config which linear layers bitsandbytes can hold in four bits (nf4).

In: a config. Out: the modules to leave unquantised. A layer of the wrong size would fail inside the library at the
first pass, on processors for whose kernels the library packs weights, and would be slow on others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Inputs that share one scale, and outputs that are packed together. A layer's sides must be multiples of these.
INPUTS, OUTPUTS = 64, 32


@dataclass(frozen=True)
class Fit:
    """``skip``: the modules to leave unquantised, which are those that do not fit and those that are never quantised,
    such as the vocabulary projection. ``layers``: the number of linear layers without the latter; ``misfits`` of them
    do not fit."""

    skip: tuple[str, ...]
    layers: int
    misfits: int

    @property
    def text(self) -> str:
        """How many layers fit, as text for users."""
        fit = f"{self.layers - self.misfits} of {self.layers} linear layers fit"
        return f"{fit} bitsandbytes' blocks of {INPUTS} inputs and {OUTPUTS} outputs"


def nf4_fit(config: Any, loader: Any, trust_remote_code: bool = False) -> Fit:
    """The fit of the model that ``loader`` (an Auto class of transformers) makes from ``config``, without weights."""
    import torch
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    with torch.device("meta"):
        model = loader.from_config(config, trust_remote_code=trust_remote_code)
    never = get_keys_to_not_convert(model)
    layers, misfits = 0, []
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear:
            sides = module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            sides = module.weight.shape[0], module.weight.shape[1]
        else:
            continue
        if not should_convert_module(name, never):
            continue
        layers += 1
        if sides[0] % INPUTS or sides[1] % OUTPUTS:
            misfits.append(name)
    return Fit((*never, *misfits), layers, len(misfits))
