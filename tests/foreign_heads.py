"""Tiny targets with the heads that people have: a multi-token head inside, named as published checkpoints name it.

``alike``: head and target add little to what they read, so that the next token hangs on the last one above all, and
some of what is drafted stands; else all weights are random, and next to nothing does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from conftest import BUNDLED
from safetensors.torch import load_file, save_file
from tiny_models import randomise, tiny_config

# Types with such a head, and what else their config says; the layer that becomes the head is the last.
MTP_TYPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 3},
    "glm4_moe": {"num_hidden_layers": 3},
    "qwen3_5_text": {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "full_attention"]},
    "qwen3_5_moe_text": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
    },
    "qwen3_next": {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "full_attention"]},
}
# Of what a layer adds, where head and target are alike.
DAMPED = 0.05
OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")


def save_with_mtp(model_type: str, folder: Path, alike: bool = True, vocab_size: int | None = None) -> Path:
    """A target whose checkpoint has a multi-token head, with the bundled target's tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    size = {"vocab_size": vocab_size or len(tokenizer), "max_position_embeddings": 2048, **ends}
    torch.manual_seed(0)
    config = tiny_config(model_type, **{**MTP_TYPES[model_type], **size})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, 1)
    if alike:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(OUTPUTS):
                    parameter.mul_(DAMPED)
            embedding = model.get_input_embeddings().weight
            embedding.div_(embedding.std())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    last_layer_becomes_head(folder, alike)
    return folder


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as published checkpoints have them, a tensor each."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        experts, _, which = name.rpartition(".experts.")
        if not experts or tensor.ndim != 3:
            found[name] = tensor
            continue
        for number, one in enumerate(tensor):
            parts = (
                {"down_proj": one}
                if which == "down_proj"
                else dict(zip(("gate_proj", "up_proj"), one.chunk(2), strict=True))
            )
            found |= {f"{experts}.experts.{number}.{part}.weight": t.clone() for part, t in parts.items()}
    return found


def last_layer_becomes_head(folder: Path, alike: bool) -> None:
    """In a checkpoint: the model has one layer less, and that one is the block of a multi-token head."""
    file = folder / "model.safetensors"
    tensors, config = load_file(file), json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    config["num_hidden_layers"] = last
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(config.get(name), list):
            config[name] = config[name][:last]
    width = int(config["hidden_size"])
    generator = torch.Generator().manual_seed(5)

    def around(middle: float) -> torch.Tensor:
        spread = 0.02 if alike else 0.3
        return middle + spread * torch.randn(width, generator=generator)

    inner = f"model.layers.{last}."
    fuse = torch.randn(width, 2 * width, generator=generator) * (1.5 / (2 * width) ** 0.5)
    if alike:
        fuse = 0.1 * fuse + torch.cat([torch.eye(width), torch.zeros(width, width)], 1)
    if config["model_type"].startswith("qwen"):  # whose norms multiply by one more than their weight
        head = {"mtp.fc.weight": fuse, "mtp.norm.weight": around(0.0)}
        head |= {f"mtp.pre_fc_norm_{part}.weight": around(0.0) for part in ("embedding", "hidden")}
        outer = "mtp.layers.0."
    else:
        head = {f"{inner}eh_proj.weight": fuse, f"{inner}shared_head.norm.weight": around(1.0)}
        head |= {f"{inner}{part}.weight": around(1.0) for part in ("enorm", "hnorm")}
        # Published ones have the shared parts once more.
        head[f"{inner}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        head[f"{inner}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        outer = inner
    # So that what is before the final norm and behind it are two things.
    head["model.norm.weight"] = around(0.0 if outer != inner else 1.0)
    named = {(outer + name.removeprefix(inner) if name.startswith(inner) else name): t for name, t in tensors.items()}
    save_file({**apart(named), **head}, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
