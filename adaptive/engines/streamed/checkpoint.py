"""Reads a checkpoint that does not fit into memory: a model without its linear layers' weights, and single weights.

In: the folder of a checkpoint. Out: a transformers model whose linear layers are on the meta device, which stores no
values; and any of their tensors on request.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from adaptive.engines.hf.language import has_projection, is_part, text_weights
from adaptive.errors import AdaptiveError, first_line

# The dtypes of linear layers' weights, by their names in safetensors files.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Checkpoint:
    """The tensors of a checkpoint's files, by their names in its language model."""

    def __init__(self, folder: Path, config: Any) -> None:
        """``config`` is the language model's. If the checkpoint has other parts too, ``tie_word_embeddings`` is set in
        it by the weights that are there. Raises AdaptiveError if there are none."""
        self.folder = folder
        found = [(file, *_header(file)) for file in sorted(folder.glob("*.safetensors"))]
        renamed: dict[str, str] = {}
        if is_part(folder, config):
            names = {name for _, _, header in found for name in header}
            renamed = text_weights(names, "model")
            config.tie_word_embeddings = not has_projection(names)
        self._where: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for file, begin, header in found:
            for name, said in header.items():
                own = name
                for pattern, replacement in renamed.items():
                    own = re.sub(pattern, replacement, own)
                self._where[own] = file, begin, said
        if not self._where:
            raise AdaptiveError(f"{folder} holds no weights: there is no *.safetensors file in it")

    def read(self, name: str, dtype: torch.dtype) -> nn.Parameter:
        """Read a tensor. The file is not mapped, because the pages of a mapped file would count as this program's
        memory. Raises AdaptiveError if the tensor is missing, has an unknown dtype or cannot be read."""
        try:
            file, begin, said = self._where[name]
            kind, (first, end) = DTYPES[said["dtype"]], said["data_offsets"]
            raw = torch.empty(end - first, dtype=torch.uint8)
            place: Any = raw.numpy()
            with file.open("rb") as stream:
                stream.seek(begin + first)
                if stream.readinto(place) != end - first:
                    raise OSError(f"{file.name} ends within {name}")
        except KeyError:
            raise AdaptiveError(f"{self.folder} cannot be streamed: it has no weights {name} of a known kind") from None
        except OSError as error:
            raise AdaptiveError(f"the weights in {self.folder} cannot be read: {first_line(error)}") from error
        return nn.Parameter(raw.view(kind).view(said["shape"]).to(dtype), requires_grad=False)


def _header(file: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """The offset of a file's tensors, and the header entry of each. Raises AdaptiveError if it cannot be read or is not
    a safetensors file."""
    try:
        with file.open("rb") as stream:
            first = stream.read(8)
            size = int.from_bytes(first, "little")
            if len(first) < 8 or size > os.fstat(stream.fileno()).st_size - 8:
                pointer = ", but a Git LFS pointer; run `git lfs pull` in its folder" * (first == b"version ")
                raise ValueError(f"it is no whole safetensors file{pointer}")
            header = json.loads(stream.read(size))
            if not isinstance(header, dict):
                raise ValueError("its header is no table of tensors")
    except (OSError, ValueError) as error:
        raise AdaptiveError(f"{file} cannot be read: {first_line(error)}") from error
    header.pop("__metadata__", None)
    return 8 + size, header


def skeleton(checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its embedding, norms and biases. Its linear layers have no weights, except for a vocabulary
    projection that is tied to the embedding. Raises AdaptiveError if a tensor is missing."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, module in model.named_modules():
        for own, _ in list(module.named_parameters(recurse=False)):
            if not (isinstance(module, nn.Linear) and own == "weight"):
                setattr(module, own, checkpoint.read(f"{name}.{own}", dtype))
        for own, _ in list(module.named_buffers(recurse=False)):
            if own not in module._non_persistent_buffers_set:  # for example a layer's scale in Gemma 4
                setattr(module, own, checkpoint.read(f"{name}.{own}", dtype).data)
    if config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight  # type: ignore[assignment]
    if (checkpoint.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.folder)
    model.eval()
    return model


def linear_names(model: PreTrainedModel) -> dict[nn.Linear, str]:
    """The name of the weight of each linear module."""
    return {m: f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear)}
