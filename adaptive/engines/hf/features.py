"""Captures the hidden states of a transformers model before its final norm or before given layers."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from adaptive.errors import AdaptiveError

# Usual names of the norm after the last layer. Gemma 4 has other norms behind its layers, too.
FINAL = {"norm", "final_layernorm", "final_layer_norm", "ln_f"}


class Keeps(Protocol):
    """A cache that keeps hidden states."""

    def keep(self, hidden: torch.Tensor) -> None:
        """Store those (1, n, width) of the n tokens of the present pass, whose keys are stored already."""


class FeatureHooks:
    """Passes hidden states of a model's own forward to the cache ``kept``, which is set during a pass. They are those
    before the final ``norm``, or with ``layers`` those before each of these, side by side; the total number of layers
    stands for those before the norm."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.norm = final_norm(model)
        self.layers: tuple[int, ...] | None = None
        self.kept: Keeps | None = None
        self._modules = layers_of(model)
        self._states: dict[int, torch.Tensor] = {}
        self._watching = False

    def name(self, layers: tuple[int, ...]) -> None:
        """Choose the layers before which states are captured. Call it before ``watch``. Raises AdaptiveError if the
        model has no such layers, or its layers are not known."""
        if self.norm is None or self._modules is None or max(layers) > len(self._modules):
            raise AdaptiveError(f"the hidden states before layers {layers} of the target are not known here")
        self.layers = layers

    def watch(self) -> None:
        """Register the hooks in the model, once."""
        if self._watching or self.norm is None:
            return
        self._watching = True
        self.norm.register_forward_pre_hook(self._at_norm)
        for number in set(self.layers or ()):
            if self._modules is not None and number < len(self._modules):
                hook = partial(self._before_layer, number)
                self._modules[number].register_forward_pre_hook(hook, with_kwargs=True)

    def _before_layer(self, number: int, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self.kept is not None:
            self._states[number] = given[0] if given else named["hidden_states"]

    def _at_norm(self, _: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if self.kept is None:
            return
        hidden = given[0]
        if self.layers is not None:
            hidden = torch.cat([self._states.get(number, hidden) for number in self.layers], dim=-1)
            self._states.clear()
        self.kept.keep(hidden)


def layers_of(model: PreTrainedModel) -> nn.ModuleList | None:
    """The layers of a causal language model's decoder; None if they are not known."""
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    found = [] if decoder is None else [m for m in decoder.children() if isinstance(m, nn.ModuleList)]
    return found[-1] if found else None


def final_norm(model: PreTrainedModel) -> nn.Module | None:
    """The norm after the last layer of a causal language model: by class, the one after the layers in the decoder with
    a usual name, else the last. None if there is none."""
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None:
        return None
    behind, found = False, None
    module: nn.Module
    for name, module in decoder.named_children():
        if isinstance(module, nn.ModuleList):  # of layers
            behind, found = True, None
        elif behind and _is_norm(name, module):
            if name in FINAL:
                return module
            found = module
    return found


def _is_norm(name: str, module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and ("norm" in name or name.startswith("ln"))
