"""Makes a small Qwen 3.5 of random weights, and a model that computes the same function at the cost of a large one.

In: sizes. Out: models, which ``inflate.py`` writes. As for Llama there, widths are padded with zeros, and the added
heads, feed-forward units and layers contribute nothing. The weights of norms over the width are scaled; Qwen stores
them minus one. All norms share one eps setting, so it cannot be scaled for some norms only and has to be negligible.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from adaptive.errors import AdaptiveError

# The repeating pattern of a hybrid's layers.
PATTERN = ["linear_attention"] * 3 + ["full_attention"]
EPS = 1e-12
# Spread of the logits: the likeliest tokens lie further apart than bfloat16 rounds, so both models choose the same.
SPREAD = 8.0


@dataclass(frozen=True)
class HybridSize:
    """``heads`` and ``key_heads``: attention heads of queries and of keys. ``delta_heads``: heads of a delta net's
    keys, and of its values. ``head`` and ``delta_head``: the sizes of these heads."""

    width: int
    feed_forward: int
    heads: int
    key_heads: int
    delta_heads: int
    layers: int
    head: int
    delta_head: int


# The size of a Qwen 3.5 of 0.8 billion parameters except for its vocabulary, and a size that fits into it.
LARGE = HybridSize(1024, 3584, 8, 2, 16, 24, 256, 128)
SMALL = HybridSize(256, 896, 4, 1, 4, 4, 256, 128)


def config_of(size: HybridSize, vocab: int, context: int, eps: float) -> Qwen3_5TextConfig:
    """The config of a model of this size."""
    return Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=size.width,
        intermediate_size=size.feed_forward,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        head_dim=size.head,
        linear_num_key_heads=size.delta_heads,
        linear_num_value_heads=size.delta_heads,
        linear_key_head_dim=size.delta_head,
        linear_value_head_dim=size.delta_head,
        num_hidden_layers=size.layers,
        layer_types=(PATTERN * size.layers)[: size.layers],
        max_position_embeddings=context,
        rms_norm_eps=eps,
        tie_word_embeddings=False,
    )


def small_hybrid(size: HybridSize, vocab: int, context: int = 16384, seed: int = 0) -> Qwen3_5ForCausalLM:
    """A model of random weights in which each token's distribution depends on all tokens before it."""
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config_of(size, vocab, context, EPS))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                width = math.prod(parameter.shape[1:])
                parameter.normal_(std=(SPREAD if "lm_head" in name else 1.5) / math.sqrt(width))
    model.eval()
    return model


def inflate_hybrid(
    small: Qwen3_5ForCausalLM, size: HybridSize, device: torch.device | str = "cpu"
) -> Qwen3_5ForCausalLM:
    """A model of the given size with the small one's function, in its dtype, made on ``device``.

    Raises AdaptiveError for a model of another kind, and for a size that does not contain the small model.
    """
    if type(small) is not Qwen3_5ForCausalLM:
        raise AdaptiveError(f"{type(small).__name__} cannot be inflated to a hybrid; only Qwen 3.5 can")
    have = _size(small.config)
    if (have.head, have.delta_head) != (size.head, size.delta_head):
        raise AdaptiveError("heads cannot be made larger, only more")
    if have.heads * size.key_heads != have.key_heads * size.heads:
        raise AdaptiveError("queries do not divide among keys as this model's do")
    for name in ("width", "feed_forward", "heads", "delta_heads", "layers"):
        if getattr(size, name) < getattr(have, name):
            raise AdaptiveError(f"{name} {getattr(size, name)} is less than the model's own {getattr(have, name)}")
    config, ratio = small.config, have.width / size.width
    whole = config_of(size, config.vocab_size, config.max_position_embeddings, config.rms_norm_eps)
    with torch.device(device):  # only the large model has to fit there, in its own dtype
        large: Qwen3_5ForCausalLM = Qwen3_5ForCausalLM._from_config(whole, dtype=small.dtype)
    sources = dict(small.named_parameters())
    with torch.no_grad():
        for name, parameter in large.named_parameters():
            source = sources.get(name)
            if source is None:
                _added(name, parameter)
            elif name.endswith(("layernorm.weight", "model.norm.weight")):
                parameter.fill_(0)
                parameter[: len(source)] = (1 + source.float()) * math.sqrt(ratio) - 1
            elif name.endswith(("in_proj_qkv.weight", "conv1d.weight")):  # parts for queries, keys and values
                parameter.fill_(0)
                parts = parameter.chunk(3), source.chunk(3)
                for part, given in zip(*parts, strict=True):
                    _corner(part, given)
            elif parameter.shape == source.shape:
                parameter.copy_(source)
            else:
                parameter.fill_(0)
                _corner(parameter, source)
    same_buffers(large, small)
    large.generation_config = copy.deepcopy(small.generation_config)
    large.eval()
    return large


def same_buffers(large: nn.Module, small: nn.Module) -> None:
    """Copy the small model's buffers (rotary frequencies) to the large one, where a cast may have rounded them."""
    sources = dict(small.named_buffers())
    for name, buffer in large.named_buffers():
        if name in sources:
            buffer.copy_(sources[name])


def _size(config: Qwen3_5TextConfig) -> HybridSize:
    if config.linear_num_value_heads != config.linear_num_key_heads:
        raise AdaptiveError("a delta net with more values than keys cannot be inflated")
    return HybridSize(
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.linear_num_key_heads,
        config.num_hidden_layers,
        config.head_dim,
        config.linear_key_head_dim,
    )


def _corner(large: torch.Tensor, small: torch.Tensor) -> None:
    large[tuple(slice(0, size) for size in small.shape)] = small


def _added(name: str, parameter: nn.Parameter) -> None:
    """Fill a parameter that the small model lacks: random numbers in, zero out, so that it costs as much as a real
    one."""
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
        parameter.zero_()
    elif parameter.ndim >= 2:
        parameter.normal_(std=0.02)
