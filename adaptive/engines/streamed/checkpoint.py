"""A model without the weights of its linear layers, and those one by one: what a model that does not fit is read by.

In: the folder of a checkpoint. Out: a model of transformers whose linear layers are on the meta device, where nothing
is stored; and their tensors, each when it is asked for.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from adaptive.engines.hf.language import has_projection, is_part, text_weights, weight_names
from adaptive.errors import AdaptiveError, first_line


class Checkpoint:
    """The tensors of a checkpoint's files, by their names in its language model, whose ``config`` is given."""

    def __init__(self, folder: Path, config: Any) -> None:
        """Raises AdaptiveError where there are none."""
        self.folder = folder
        part = is_part(folder, config)
        names = weight_names(folder)
        renamed = text_weights(names, "model") if part else {}
        if part:
            config.tie_word_embeddings = not has_projection(names)
        self._where: dict[str, tuple[Path, str]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - no mapping
                    own = name
                    for pattern, replacement in renamed.items():
                        own = re.sub(pattern, replacement, own)
                    self._where[own] = file, name
        if not self._where:
            raise AdaptiveError(f"{folder} holds no weights: there is no *.safetensors file in it")

    def read(self, name: str, dtype: torch.dtype) -> nn.Parameter:
        """A tensor, in memory of its own: no page of the file stays mapped. Raises AdaptiveError."""
        try:
            file, stored = self._where[name]
            with safe_open(file, "pt") as opened:
                return nn.Parameter(opened.get_tensor(stored).to(dtype, copy=True), requires_grad=False)
        except KeyError:
            raise AdaptiveError(f"{self.folder} cannot be streamed: it has no weights {name}") from None
        except (OSError, SafetensorError) as error:
            raise AdaptiveError(f"the weights in {self.folder} cannot be read: {first_line(error)}") from error


def skeleton(checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its embedding, norms and biases, and its linear layers without weights but for a vocabulary
    projection that is the embedding. Raises AdaptiveError where a tensor is missing."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, module in model.named_modules():
        for own, _ in list(module.named_parameters(recurse=False)):
            if not (isinstance(module, nn.Linear) and own == "weight"):
                setattr(module, own, checkpoint.read(f"{name}.{own}", dtype))
    if config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight  # type: ignore[assignment]
    if (checkpoint.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.folder)
    model.eval()
    return model


def linear_names(model: PreTrainedModel) -> dict[nn.Linear, str]:
    """By linear module the name of its weight."""
    return {m: f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear)}
