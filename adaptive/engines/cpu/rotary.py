"""Rotary embeddings of our forward: which ones it supports, their tables, and the order of a head's numbers.

In: a transformers model or its config. Out: tables of cosines and sines by position, and which of them rotate the keys
and the queries of each layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from adaptive.engines.cpu.layers import TensorFunction

# Types with frequencies that are fixed at load. Those of others ("dynamic", "longrope") depend on the text.
FIXED = {"default", "linear", "llama3", "yarn", "proportional"}


class Rotation(NamedTuple):
    """The numbers of the tables that rotate a layer's keys and its queries."""

    keys: int = 0
    queries: int = 0


class Table(NamedTuple):
    """A rotary embedding for heads of ``size`` numbers. ``at`` maps positions (1, n) to cos + i sin (n, size / 2), 1
    for pairs that are not rotated."""

    size: int
    at: TensorFunction


@dataclass(frozen=True)
class Ropes:
    """A model's rotary embeddings: the ``tables``, and by layer which of them it uses (``layers``) and how many of the
    first numbers of a head are rotated (``rotated``)."""

    tables: tuple[Table, ...]
    layers: tuple[Rotation, ...]
    rotated: tuple[int, ...]


class Rotations:
    """The cosines and sines of a model's tables for the positions that were needed so far.

    For torch's operations ``tables`` holds for each table the complex numbers q (n, 1, 1, size / 2) and kv (2, 1, n,
    size / 2), in which the values' factor is 1. For the kernels the numbers (size / 2, 2) of all tables in turn lie at
    ``address``, ``nbytes`` bytes for each position. ``reach`` may move all of them.
    """

    def __init__(self, tables: tuple[Table, ...], context_length: int, device: torch.device) -> None:
        self.tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.address = self.nbytes = 0
        self._length, self._context_length = 0, context_length
        self._at, self._device = [table.at for table in tables], device

    def at(self, position: int) -> int:
        """The address of a position's numbers, valid until the next ``reach``."""
        return self.address + position * self.nbytes

    def reach(self, length: int) -> None:
        """Compute at least the first ``length`` positions."""
        if length > self._length:
            self._extend(length)

    @torch.inference_mode()
    def _extend(self, length: int) -> None:
        longer = min(max(2 * length, 2048), max(self._context_length, length))
        positions = torch.arange(longer, device=self._device)[None]
        found = [at(positions) for at in self._at]
        tables = [(r[:, None, None], torch.stack([r, torch.ones_like(r)])[:, None]) for r in found]
        cos_sin = torch.cat([torch.view_as_real(r).flatten(1) for r in found], 1)
        # Only now, so that an error above, such as no memory, leaves what is there in use.
        self.tables, self._cos_sin, self._length = tables, cos_sin, longer
        self.address, self.nbytes = cos_sin.data_ptr(), cos_sin[0].nbytes


def known_ropes(config: Any) -> bool:
    """Whether our forward computes a config's rotary embeddings."""
    kinds = set(_kinds(config))
    parameters = [config.rope_parameters if kind is None else config.rope_parameters[kind] for kind in kinds]
    if config.model_type == "hunyuan_v1_dense":
        return all(_keeps_lengths(one) for one in parameters)  # its norms come after the rotation
    if config.model_type == "ministral3" and None in _ministral_scaling(config):
        return False
    return all(one.get("rope_type") in FIXED for one in parameters)


def _keeps_lengths(parameters: dict[str, Any]) -> bool:
    """Whether Hunyuan's embedding is fixed and does not scale. Its checkpoints call "dynamic" a base that ``alpha``
    stretches once, the same for all texts."""
    kind = parameters.get("rope_type")
    return kind == "default" or (kind == "dynamic" and bool(parameters.get("alpha")))


def read_ropes(model: Any, sizes: list[int], dtype: torch.dtype) -> Ropes:
    """The rotary embeddings of a model whose layers have heads of these ``sizes``, with tables of this ``dtype``."""
    config, module, blocks = model.config, model.model.rotary_emb, model.model.layers
    turned = [_turns(getattr(block, "self_attn", None)) for block in blocks]
    used = list(zip(_kinds(config), turned, sizes, strict=True))
    names = list(dict.fromkeys(used))
    tables = [
        Table(size, _turning(module, dtype, size, kind) if turns else _still(dtype, size))
        for kind, turns, size in names
    ]
    layers = [Rotation(names.index(one), names.index(one)) for one in used]
    if config.model_type == "ministral3":
        factor = _query_factor(*_ministral_scaling(config))
        layers = [Rotation(one.keys, one.queries + len(tables)) for one in layers]
        tables += [Table(table.size, _scaled(table.at, factor)) for table in tables]
    start = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    rotated = {kind: _cos_sin(module, dtype, start, kind)[0].shape[-1] for kind, _, _ in names}
    return Ropes(tuple(tables), tuple(layers), tuple(rotated[kind] for kind, _, _ in used))


def pair_order(heads: int, size: int, rotated: int, side_by_side: bool = False) -> torch.Tensor:
    """The order (see ``stacked``) of the outputs of ``heads`` projected heads, (heads * size,) int64.

    Most checkpoints rotate number i of a head together with number i + rotated / 2, among the first ``rotated``. Here
    the two are adjacent, as other checkpoints have them already (``side_by_side``), so that a rotation is one complex
    multiplication. Scores do not change: queries and keys are reordered in the same way.
    """
    inside = torch.arange(size)
    if not side_by_side:
        inside[:rotated] = inside[:rotated].view(2, rotated // 2).T.reshape(-1)
    return (torch.arange(heads)[:, None] * size + inside).reshape(-1)


def _kinds(config: Any) -> list[str | None]:
    """By layer, its kind if the model has a rotary embedding for each kind of layer (Gemma 3, OLMo 3), else None."""
    kinds = getattr(config, "layer_types", None) or []
    if kinds and all(isinstance(config.rope_parameters.get(kind), dict) for kind in kinds):
        return list(kinds)
    return [None] * config.num_hidden_layers


def _turns(attention: Any) -> bool:
    """Whether a layer's attention uses rotation; in SmolLM 3 and EXAONE 4 some layers do not."""
    if hasattr(attention, "use_rope"):
        return bool(attention.use_rope)
    if hasattr(attention, "sliding_window_pattern"):
        return attention.sliding_window is None or bool(attention.is_sliding)
    return True


def _cos_sin(
    module: nn.Module, dtype: torch.dtype, positions: torch.Tensor, kind: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines as transformers has them: both (1, n, rotated), the second half equal to the first."""
    like = torch.empty(1, dtype=dtype, device=positions.device)
    cos, sin = module(like, positions) if kind is None else module(like, positions, kind)
    if type(module).__name__ == "GptOssRotaryEmbedding":  # gives the first half only
        cos, sin = (torch.cat([part, part], dim=-1) for part in (cos, sin))
    return cos.to(dtype), sin.to(dtype)


def _turning(module: nn.Module, dtype: torch.dtype, size: int, kind: str | None) -> TensorFunction:
    """The model's own rotary embedding, with 1 for the numbers of a head behind those that it rotates."""

    def turn(positions: torch.Tensor) -> torch.Tensor:
        cos, sin = _cos_sin(module, dtype, positions, kind)
        half = cos.shape[-1] // 2
        turned = torch.complex(cos[0, :, :half], sin[0, :, :half])
        return torch.cat([turned, turned.new_ones(len(turned), size // 2 - half)], dim=1)

    return turn


def _still(dtype: torch.dtype, size: int) -> TensorFunction:
    """An embedding that rotates nothing."""
    return lambda positions: torch.ones(positions.numel(), size // 2, dtype=dtype.to_complex(), device=positions.device)


def _scaled(table: TensorFunction, factor: TensorFunction) -> TensorFunction:
    """The embedding ``table`` multiplied by a ``factor`` that depends on the position."""
    return lambda positions: table(positions) * factor(positions[0])[:, None]


def _ministral_scaling(config: Any) -> tuple[float | None, int | None]:
    given = config.rope_parameters
    return given.get("llama_4_scaling_beta"), given.get("original_max_position_embeddings")


def _query_factor(beta: float | None, length: int | None) -> TensorFunction:
    """The factor of Ministral 3's queries by position, which grows a little after every ``length`` tokens; (n,)
    float32, as transformers computes it."""
    assert beta is not None
    assert length is not None
    return lambda positions: 1 + beta * torch.log(1 + torch.floor(positions / length))
