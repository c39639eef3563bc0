"""Writes an EAGLE-3 head as a GGUF file, for llama-server's ``--spec-type draft-eagle3``.

In: the folder of a head, its target, and an optional LoRA adapter. Out: one file with the head's weights and the
target's tokenizer. The target's embedding is left out, which llama.cpp then takes from the target's own file.

llama.cpp computes one form of EAGLE-3 (its ``src/models/eagle3.cpp`` and ``struct
common_speculative_impl_draft_eagle3``, read in the source of llama-cpp-python 0.3.36): one layer of Llama's type
without biases, which reads the states before exactly three layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adaptive.engines.head.eagle import EagleConfig, Tensors, learned, read_eagle
from adaptive.engines.llamacpp.names import paired
from adaptive.engines.llamacpp.write import Encoding, rope_factors, write_tensors, written
from adaptive.engines.llamacpp.write_tokenizer import add_tokenizer, pre_tokenizer
from adaptive.errors import AdaptiveError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

ARCHITECTURE = "eagle3"
# The number of the target's layers whose states llama.cpp's graph reads.
STATES = 3
# Types of targets whose graphs in llama.cpp keep the inputs of their layers (``t_layer_inp`` in its ``src/models``).
# With any other target llama-server ends at the first token.
FEED_A_HEAD = (
    "gemma4_text", "gpt_oss", "hunyuan_v1_dense", "lfm2", "lfm2_moe", "llama", "mimo_v2_flash", "minimax_m2", "mistral",
    "mixtral", "nemotron_h", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
)  # fmt: skip
# GGUF's names of a head's tensors.
NAMES = {
    "fc": "fc",
    "input_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "layers.0.input_layernorm": "blk.0.attn_norm",
    "layers.0.hidden_norm": "blk.0.attn_norm_2",
    "layers.0.self_attn.q_proj": "blk.0.attn_q",
    "layers.0.self_attn.k_proj": "blk.0.attn_k",
    "layers.0.self_attn.v_proj": "blk.0.attn_v",
    "layers.0.self_attn.o_proj": "blk.0.attn_output",
    "layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    "layers.0.mlp.gate_proj": "blk.0.ffn_gate",
    "layers.0.mlp.up_proj": "blk.0.ffn_up",
    "layers.0.mlp.down_proj": "blk.0.ffn_down",
}


def write_eagle(
    head: Path,
    target: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    file: Path,
    encoding: Encoding,
    name: str,
    adapter: Path | None = None,
) -> None:
    """Write the EAGLE-3 head in ``head``, with an optional LoRA ``adapter`` merged into it, to ``file``, completely or
    not at all. ``target`` is the target's text config, ``tokenizer`` the target's.

    Raises AdaptiveError for a head of a form that llama.cpp does not compute, for an unsupported tokenizer, or if
    ``file`` cannot be written.
    """
    said = read_eagle(head)
    tensors = learned(head, adapter)
    taps = said.taps_of(int(target.num_hidden_layers))
    _check(said, tensors, taps, target, head)
    splitter = pre_tokenizer(tokenizer, said.vocab_size)
    with written(file, ARCHITECTURE, encoding) as writer:
        _describe(writer, said, taps, name)
        add_tokenizer(writer, tokenizer, said.vocab_size, splitter)
        write_tensors(writer, lambda: chain(rope_factors(said.layer), _tensors(said, tensors)), encoding)


def feeds_no_head(target: PretrainedConfig) -> bool:
    """Whether llama.cpp gives a head no states of this target."""
    return target.model_type not in FEED_A_HEAD


def _check(said: EagleConfig, tensors: Tensors, taps: tuple[int, ...], target: PretrainedConfig, folder: Path) -> None:
    """Raise AdaptiveError unless llama.cpp computes this head."""
    layers = int(target.num_hidden_layers)
    reasons = (
        (feeds_no_head(target), f"of targets of the type {target.model_type} it does not give the states"),
        (int(said.layer.num_hidden_layers) != 1, "it has more than one layer"),
        (said.layer.model_type != "llama", f"its layer is of type {said.layer.model_type}"),
        (said.layer.hidden_act != "silu", f"its activation is {said.layer.hidden_act}"),
        (len(taps) != STATES, f"it reads the states before {len(taps)} layers of the target"),
        (max(taps) >= layers, "it reads the target's states after its last layer"),
        (said.fc_norm, "it norms each state apart (fc_norm)"),
        (said.norm_output, "its next row reads what the final norm returns (norm_output)"),
        (any(tensor.endswith(".bias") for tensor in tensors), "it has biases"),
    )
    for applies, reason in reasons:
        if applies:
            raise AdaptiveError(f"llama.cpp does not compute the EAGLE-3 head in {folder}: {reason}")


def _describe(writer: Any, said: EagleConfig, taps: tuple[int, ...], name: str) -> None:
    """Add the head's sizes to the metadata."""
    layer = said.layer
    size = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    rope = getattr(layer, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ("default", "llama3"):
        raise AdaptiveError(f"the head scales its rotary embedding ({rope['rope_type']}), which cannot be written here")
    writer.add_type("model")
    writer.add_name(name)
    writer.add_context_length(layer.max_position_embeddings)
    writer.add_embedding_length(layer.hidden_size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(layer.intermediate_size)
    writer.add_head_count(layer.num_attention_heads)
    writer.add_head_count_kv(layer.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(layer.rms_norm_eps)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_rope_dimension_count(size)
    writer.add_vocab_size(said.vocab_size)
    writer.add_array(f"{ARCHITECTURE}.target_layers", list(taps))
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", said.target_width)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_residual", said.norm_before_residual)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_fc", said.norm_before_fc)


def _tensors(said: EagleConfig, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """GGUF's names and values of the head's tensors. Raises AdaptiveError for one that GGUF does not have."""
    heads = {"q_proj": said.layer.num_attention_heads, "k_proj": said.layer.num_key_value_heads}
    for key, tensor in tensors.items():
        if key == "d2t":  # llama.cpp reads the tokens themselves, a checkpoint holds how far each lies from its row
            yield "d2t", torch.arange(len(tensor)) + tensor.to(torch.int64)
            continue
        module, _, part = key.rpartition(".")
        if module not in NAMES:
            raise AdaptiveError(f"the head has {key}, which a GGUF of its architecture does not have")
        count = heads.get(module.rpartition(".")[2])
        yield f"{NAMES[module]}.{part}", tensor if count is None else paired(tensor, count)
