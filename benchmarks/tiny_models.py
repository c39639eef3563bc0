"""Tiny checkpoints of random weights, of any architecture of transformers, and greedy decoding of them by our loop.

In: a model type. Out: a model with a few layers of each kind that the architecture has; its continuation of a prompt by
transformers alone, and by our loop with and without a draft. Used by ``scripts/model_table.py`` and by tests.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import FixedLength, LengthPolicy
from adaptive.decoding.round import speculative_round
from adaptive.decoding.verifier import Verifier
from adaptive.drafting.model import ModelDrafter
from adaptive.engines.protocol import Engine
from adaptive.sampling import LogitsProcessor
from adaptive.types import Round, SamplingParams

VOCAB = 256
GREEDY = SamplingParams(temperature=0.0)
LAYERS = 4

# Settings that are given to every config that has a field of that name.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # mixtures
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 64,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    # recurrent layers
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 1,
    "chunk_size": 16,
    # others
    "sliding_window": 24,
}
HYBRID = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
# Settings of one type only; ``None`` leaves a common setting at the config's own default.
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [2], "num_key_value_heads": 2},
    "bloom": {"n_layer": LAYERS, "n_head": 4},
    "cohere2": {"sliding_window": 24, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "deepseek_v2": {"head_dim": None, "num_key_value_heads": 4, "topk_method": "greedy"},
    "deepseek_v3": {"head_dim": None, "num_key_value_heads": 4},
    "deepseek_v32": {
        "head_dim": None,
        "num_key_value_heads": 4,
        "index_topk": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
    },
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": LAYERS,
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "falcon_mamba": {"state_size": 8},
    "gemma": {"head_dim": 16},
    "gemma3_text": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "gemma3n_text": {
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 6,
        "intermediate_size": [96] * 6,
    },
    "gemma4_text": {
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "global_head_dim": 32,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
    },
    "gemma4_unified_text": {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 30.0,
    },
    "glm4_moe_lite": {"head_dim": None, "num_key_value_heads": 4},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": LAYERS, "n_positions": 512},
    "gpt_bigcode": {"n_embd": 64, "n_head": 4, "n_layer": LAYERS, "n_positions": 512},
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": LAYERS, "n_positions": 512, "rotary_dim": 8},
    "gpt_neo": {"num_layers": LAYERS, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 24},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
        "logits_scaling": 8.0,
    },
    "granitemoehybrid": {"layer_types": HYBRID, "num_key_value_heads": 2, "position_embedding_type": "rope"},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_dt_rank": 8},
    "kimi_linear": {"layer_types": HYBRID, "num_key_value_heads": 4, "head_dim": None, "q_lora_rank": None},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "llama4_text": {"attention_chunk_size": 32, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96},
    "longcat_flash": {
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "head_dim": None,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "expand": 2},
    "minicpm3": {"head_dim": None, "num_key_value_heads": 4},
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 16, "sliding_window": None},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": 512},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "num_hidden_layers": 5,
        "time_step_limit": (0.0, 0.05),
    },
    "olmo_hybrid": {"layer_types": HYBRID},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi3": {"pad_token_id": 0},
    "phimoe": {"pad_token_id": 0},
    "qwen2_moe": {"decoder_sparse_step": 1},
    "qwen2_5_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "qwen3_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "qwen3_5_text": {"layer_types": HYBRID},
    "qwen3_5_moe_text": {"layer_types": HYBRID},
    "qwen3_next": {"layer_types": HYBRID},
    "recurrent_gemma": {"attention_window_size": 24, "lru_width": 64, "num_hidden_layers": 3},
    "rwkv": {"attention_hidden_size": 64},
    "xlstm": {"qk_dim_factor": 1.0, "num_heads": 4, "num_blocks": 2, "chunk_size": 16},
    "zamba": {
        "n_mamba_heads": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "num_key_value_heads": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "num_key_value_heads": 4,
        "adapter_rank": 8,
    },
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A config of this type, with a few small layers."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    known = set(getattr(kind, "attribute_map", {}))
    for base in kind.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
    given = {name: value for name, value in COMMON.items() if name in known}
    given |= OWN.get(model_type, {})
    given = {name: value for name, value in given.items() if not (value is None and name != "eos_token_id")}
    return kind(**given | changes)


def randomise(model: nn.Module, seed: int) -> None:
    """Set random weights such that each token's distribution depends on all tokens before it: matrices preserve the
    magnitude of their inputs."""
    generator = torch.Generator().manual_seed(seed)
    outputs = model.get_output_embeddings()  # type: ignore[operator]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or "A_log" in name:
                continue
            width = math.prod(parameter.shape[1:]) if "conv" in name else parameter.shape[-1]
            # The output head's weights are larger, so that the likeliest tokens lie further apart than rounding errors.
            size = (8.0 if outputs is not None and parameter is outputs.weight else 1.5) / math.sqrt(width)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)


def tiny_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A model of this type in float32, ready to decode."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes), dtype=torch.float32).eval()
    randomise(model, seed)
    return model


def noisy(model: Any, noise: float = 0.03) -> Any:
    """A copy that agrees with the model on some tokens and not on others."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim >= 2:
                parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return other


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids of a prompt, without special tokens."""
    generator = torch.Generator().manual_seed(seed + length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def alone(model: Any, prompt: list[int], count: int) -> list[int]:
    """The greedy continuation of a prompt by transformers' own ``generate``."""
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    found: list[int] = text[0, len(prompt) :].tolist()
    return found


class Greedy:
    """One conversation decoded greedily by our loop, with ``draft`` if there is one."""

    def __init__(self, target: Engine, draft: Engine | None, policy: LengthPolicy | int | None = 4) -> None:
        """``policy``: a draft length, or None for the default policy."""
        if policy is None:
            policy = GoodputLength(attentive=False)
        self.policy = FixedLength(policy) if isinstance(policy, int) else policy
        processor = LogitsProcessor(GREEDY, target.vocab_size, target.device, None)
        self.verifier = Verifier(GREEDY, processor, torch.Generator(target.device))
        self.target = target.sequence()
        self.drafter = None
        if draft is not None and target.undraftable is None and draft.undraftable is None:
            generator = torch.Generator(draft.device)
            self.drafter = ModelDrafter(draft.sequence(), draft, target.vocab_size, GREEDY, processor, generator)
        self.rounds: list[Round] = []
        self.fed = 0  # tokens that went through the target

    def say(self, prompt: list[int], count: int) -> list[int]:
        """The next ``count`` tokens after a prompt; the caches may already hold its beginning."""
        self.rounds, self.fed = [], 0
        committed = list(prompt)
        self._round(committed, 0)
        while len(committed) < len(prompt) + count:
            left = len(prompt) + count - len(committed)
            self._round(committed, 0 if self.drafter is None else self.policy.next_length(max(0, left - 1)))
        self.target.rollback(len(committed) - 1)
        return committed[len(prompt) :]

    def again(self, held: int) -> None:
        """Keep at most ``held`` tokens in both caches, as before another prompt."""
        self.target.rollback(held)
        if self.drafter is not None:
            self.drafter.rollback(held)

    def _round(self, committed: list[int], length: int) -> None:
        before = len(committed) - self.target.length
        drafter = self.drafter if length else None
        outcome = speculative_round(self.target, drafter, self.verifier, committed, length)[0]
        self.fed += before + outcome.drafted
        self.rounds.append(outcome)
        if len(self.rounds) > 1:
            self.policy.observe(outcome)

    @property
    def accepted(self) -> float:
        """Share of drafted tokens that were accepted."""
        drafted = sum(outcome.drafted for outcome in self.rounds)
        return sum(outcome.accepted for outcome in self.rounds) / max(1, drafted)


def save(model: Any, folder: Path) -> Path:
    """Save the model as a checkpoint."""
    model.save_pretrained(folder)
    return folder
