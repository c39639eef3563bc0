"""What GGUF and Hugging Face checkpoints call the same weights, and how their layouts and values differ.

Llama's rotary embedding pairs neighbouring numbers of a head in GGUF and the two halves of a head in
Hugging Face's layout, so that the rows of its query and key projections are in another order. Where a gated delta net
has several value heads a key head, those of one key head follow each other in a checkpoint; in GGUF the first value
heads of all key heads come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from adaptive.engines.llamacpp.model import LlamaModel
from adaptive.errors import AdaptiveError
from adaptive.installation import install_command, requirement

# Architectures whose layout is known here, as checkpoints and as GGUF files call them.
# Others are converted by llama.cpp's own scripts.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_5_text": "qwen35"}
HYBRID = "qwen35"  # gated delta nets among its layers
# Where a checkpoint's delta net has something for every value head, or for every number of one: of a weight's rows all,
# or those behind queries and keys.
BY_HEAD = ("in_proj_a", "in_proj_b", "A_log", "dt_bias")
BY_NUMBER = ("in_proj_z", "in_proj_qkv", "conv1d")


def package() -> Any:
    """The module ``gguf``. Raises AdaptiveError where it is not installed."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise AdaptiveError(
            f"writing GGUF files needs the package gguf, which is not installed; {install_command(requirement('gguf'))}"
        ) from None
    return gguf


@dataclass(frozen=True)
class Delta:
    """A gated delta net's heads of keys and of values, and the numbers of one, which are as many in both."""

    keys: int
    values: int
    size: int


@dataclass(frozen=True)
class Base:
    """What must be known of a model to name and order its weights: GGUF's name of the architecture, layers, heads
    (queries, keys) and, of a hybrid, those of its delta nets."""

    architecture: str
    layers: int
    heads: tuple[int, int]
    delta: Delta | None = None

    @classmethod
    def of_config(cls, config: Any) -> Base:
        """Of a checkpoint's text config. Raises AdaptiveError for what llama.cpp does not compute."""
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
        """Of a GGUF file."""
        delta = None
        if model.architecture == HYBRID:
            numbers = (
                model.number(f"{{arch}}.ssm.{key}", 1) for key in ("group_count", "time_step_rank", "state_size")
            )
            delta = Delta(*numbers)
        return cls(model.architecture, model.shape["layers"], model.heads, delta)


class GgufNames:
    """Names, orders and values of one model's weights, as llama.cpp has them."""

    def __init__(self, base: Base) -> None:
        """Raises AdaptiveError for an architecture that is not known here."""
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
        """GGUF's name of a module's weight (``model.layers.0.mlp.up_proj``), without ``.weight``; None for none."""
        found: str | None = self._map.get_name(module)
        return found

    def tensor(self, key: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """GGUF's name and values of the tensor ``key`` of a checkpoint (``model.layers.0.mlp.up_proj.weight``); None
        for one that it does not have."""
        module, _, part = key.rpartition(".")
        if self._delta is None:
            name = self.name(module)
            return None if name is None else (f"{name}.{part}", self.reorder(module, tensor))
        if part == "A_log":  # llama.cpp has the rates of decay themselves
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
                tensor = tensor.float() + 1.0  # what a checkpoint's norms multiply by, less 1, is what they store
        return None if name is None else (name, self.reorder_columns(place, self.reorder(place, tensor)))

    def reorder(self, module: str, rows: torch.Tensor) -> torch.Tensor:
        """The rows (out, ...) of a module's weight, bias or LoRA B in GGUF's order."""
        part = module.rpartition(".")[2]
        if self._delta is not None:
            return _values_reordered(part, rows, self._delta) if "linear_attn" in module else rows
        if self._heads is None or part not in ("q_proj", "k_proj"):
            return rows
        heads = self._heads[0 if part == "q_proj" else 1]
        halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        return halves.swapaxes(1, 2).reshape(rows.shape)

    def reorder_columns(self, module: str, columns: torch.Tensor) -> torch.Tensor:
        """The columns (..., in) of a module's weight or LoRA A in GGUF's order."""
        if self._delta is None or not module.endswith("linear_attn.out_proj"):
            return columns
        return _tiled(columns.movedim(-1, 0), self._delta).movedim(0, -1)


def _values_reordered(part: str, rows: torch.Tensor, delta: Delta) -> torch.Tensor:
    """The rows of a part of a delta net."""
    if part in BY_HEAD:
        return _tiled(rows, delta)
    if part not in BY_NUMBER:
        return rows
    before = rows.shape[0] - delta.values * delta.size
    return torch.cat([rows[:before], _tiled(rows[before:], delta)])


def _tiled(rows: torch.Tensor, delta: Delta) -> torch.Tensor:
    """Rows by value heads, those of a key head together, as GGUF has them: of each key head the first, and so on."""
    heads = rows.reshape(delta.keys, delta.values // delta.keys, -1, *rows.shape[1:])
    return heads.swapaxes(0, 1).reshape(rows.shape)
