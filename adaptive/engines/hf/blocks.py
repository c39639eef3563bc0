"""Which linear layers bitsandbytes can hold in four bits (nf4), known from a checkpoint's config alone.

In: a config. Out: the layers that do not fit and stay as they are. Without this they fail inside of the library at the
first pass, on a processor whose kernels it packs the weights for, and are computed slowly on others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Inputs that share one scale, and outputs that are packed together: a layer has to be whole blocks of both.
INPUTS, OUTPUTS = 64, 32


@dataclass(frozen=True)
class Fit:
    """``skip`` are the modules that are not to be quantised: those that do not fit, and those that never are, such as
    the vocabulary projection. ``misfits`` of the other ``layers`` do not fit."""

    skip: tuple[str, ...]
    layers: int
    misfits: int

    @property
    def text(self) -> str:
        """How many fit, in words."""
        fit = f"{self.layers - self.misfits} of {self.layers} linear layers fit"
        return f"{fit} bitsandbytes' blocks of {INPUTS} inputs and {OUTPUTS} outputs"


def nf4_fit(config: Any, loader: Any, trust_remote_code: bool = False) -> Fit:
    """The layers of the model that ``loader`` (an Auto class of transformers) makes of ``config``, without weights."""
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
