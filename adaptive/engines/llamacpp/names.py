"""Converts names, order and values of weights from Hugging Face checkpoints to GGUF.

For Llama, GGUF's rotary embedding pairs neighbouring numbers of a head, Hugging Face's the two halves of a head, so the
rows of the query and key projections are in another order. If a gated delta net has several value heads per key head,
a checkpoint orders the value heads by key head; GGUF has the first value head of every key head, then the second of
every key head, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from adaptive.engines.llamacpp.model import LlamaModel
from adaptive.errors import AdaptiveError
from adaptive.installation import install_command, requirement

# Supported architectures: the model type in a checkpoint, and the name in GGUF files. llama.cpp's own scripts convert
# others.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_5_text": "qwen35"}
HYBRID = "qwen35"  # the architecture with gated delta nets
# A delta net's weights with one row per value head; and those with one row per number of a value head, after the rows
# for queries and keys, if there are any.
BY_HEAD = ("in_proj_a", "in_proj_b", "A_log", "dt_bias")
BY_NUMBER = ("in_proj_z", "in_proj_qkv", "conv1d")


def package() -> Any:
    """The module ``gguf``. Raises AdaptiveError if it is not installed."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise AdaptiveError(
            f"writing GGUF files needs the package gguf, which is not installed; {install_command(requirement('gguf'))}"
        ) from None
    return gguf


@dataclass(frozen=True)
class Delta:
    """The sizes of a gated delta net: key heads, value heads, and the size of a head, the same for both."""

    keys: int
    values: int
    size: int


@dataclass(frozen=True)
class Base:
    """The properties of a model that decide the names and the order of its weights: GGUF's name of the architecture,
    layers, heads (query, key) and the sizes of a hybrid's delta nets."""

    architecture: str
    layers: int
    heads: tuple[int, int]
    delta: Delta | None = None

    @classmethod
    def of_config(cls, config: Any) -> Base:
        """From a checkpoint's text config. Raises AdaptiveError for sizes that llama.cpp does not support."""
        architecture, delta = ARCHITECTURES.get(config.model_type, config.model_type), None
        if architecture == HYBRID:
            if config.linear_key_head_dim != config.linear_value_head_dim:
                raise AdaptiveError(
                    f"the delta nets have keys of {config.linear_key_head_dim} numbers and values of "
                    f"{config.linear_value_head_dim}, and llama.cpp computes only those where both are as long"
                )
            delta = Delta(config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim)
        heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
        return cls(architecture, config.num_hidden_layers, heads, delta)

    @classmethod
    def of_file(cls, model: LlamaModel) -> Base:
        """From a GGUF file."""
        delta = None
        if model.architecture == HYBRID:
            numbers = (
                model.number(f"{{arch}}.ssm.{key}", 1) for key in ("group_count", "time_step_rank", "state_size")
            )
            delta = Delta(*numbers)
        return cls(model.architecture, model.shape["layers"], model.heads, delta)


class GgufNames:
    """Converts names, order and values of one model's weights to GGUF's."""

    def __init__(self, base: Base) -> None:
        """Raises AdaptiveError for an unsupported architecture."""
        if base.architecture not in ARCHITECTURES.values():
            raise AdaptiveError(
                f"models of architecture {base.architecture} cannot be written as GGUF here "
                f"({', '.join(ARCHITECTURES)} can); llama.cpp's convert_hf_to_gguf.py and convert_lora_to_gguf.py know "
                "more"
            )
        gguf = package()
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        self._map = gguf.get_tensor_name_map(kinds[base.architecture], base.layers)
        self._heads = base.heads if base.architecture == "llama" else None
        self._delta = base.delta

    def name(self, module: str) -> str | None:
        """GGUF's name of the weight of ``module`` (``model.layers.0.mlp.up_proj``), without ``.weight``; None if GGUF
        has none."""
        found: str | None = self._map.get_name(module)
        return found

    def tensor(self, key: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """GGUF's name and values of the tensor ``key`` of a checkpoint (``model.layers.0.mlp.up_proj.weight``); None
        if GGUF has no such tensor."""
        module, _, part = key.rpartition(".")
        if self._delta is None:
            name = self.name(module)
            return None if name is None else (f"{name}.{part}", self.reorder(module, tensor))
        if part == "A_log":  # GGUF stores the decay rates, -exp(A_log)
            name, place, tensor = self.name(key), key, -tensor.float().exp()
        elif part == "dt_bias":
            name, place = self.name(f"{module}.dt_proj"), key
            name = None if name is None else f"{name}.bias"
        else:
            name, place = self.name(module), module
            name = None if name is None else f"{name}.{part}"
            if module.endswith("conv1d"):
                tensor = tensor.squeeze(1)
            elif module.endswith("norm") and not module.endswith("linear_attn.norm"):
                tensor = tensor.float() + 1.0  # a checkpoint stores the factor of a norm minus 1
        return None if name is None else (name, self.reorder_columns(place, self.reorder(place, tensor)))

    def reorder(self, module: str, rows: torch.Tensor) -> torch.Tensor:
        """The rows (out, ...) of a module's weight, bias or LoRA B in GGUF's order."""
        part = module.rpartition(".")[2]
        if self._delta is not None:
            return _values_reordered(part, rows, self._delta) if "linear_attn" in module else rows
        if self._heads is None or part not in ("q_proj", "k_proj"):
            return rows
        return paired(rows, self._heads[0 if part == "q_proj" else 1])

    def reorder_columns(self, module: str, columns: torch.Tensor) -> torch.Tensor:
        """The columns (..., in) of a module's weight or LoRA A in GGUF's order."""
        if self._delta is None or not module.endswith("linear_attn.out_proj"):
            return columns
        return _tiled(columns.movedim(-1, 0), self._delta).movedim(0, -1)


def paired(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows (out, ...) of a query or key projection of ``heads`` heads, in an order in which the rotary embedding
    pairs neighbouring numbers. A checkpoint pairs the two halves of a head."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _values_reordered(part: str, rows: torch.Tensor, delta: Delta) -> torch.Tensor:
    """The rows of one weight of a delta net in GGUF's order; ``part`` is the last component of its name."""
    if part in BY_HEAD:
        return _tiled(rows, delta)
    if part not in BY_NUMBER:
        return rows
    before = rows.shape[0] - delta.values * delta.size
    return torch.cat([rows[:before], _tiled(rows[before:], delta)])


def _tiled(rows: torch.Tensor, delta: Delta) -> torch.Tensor:
    """Reorder rows of value heads grouped by key head to GGUF's order: the first of each key head, then the second."""
    heads = rows.reshape(delta.keys, delta.values // delta.keys, -1, *rows.shape[1:])
    return heads.swapaxes(0, 1).reshape(rows.shape)
