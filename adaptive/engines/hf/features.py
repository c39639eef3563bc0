"""Where a transformers model's hidden states pass on their way to its vocabulary projection."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def final_norm(model: PreTrainedModel) -> nn.Module | None:
    """The norm behind the last layer of a causal language model, as its decoder's forward calls it; None where there
    is none that is known as one."""
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None:
        return None
    behind, found = False, None
    for name, module in decoder.named_children():
        if isinstance(module, nn.ModuleList):  # of layers
            behind, found = True, None
        elif behind and _is_norm(name, module):
            found = module
    return found


def _is_norm(name: str, module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and ("norm" in name or name.startswith("ln"))
