"""Tiny targets with heads in published formats: multi-token heads inside the checkpoint, and separate EAGLE-3 heads.

With ``alike`` the layers of head and target add little to their input, so the next token depends mainly on the last
one and some drafted tokens are accepted. Otherwise all weights are random and almost none are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from conftest import BUNDLED
from safetensors.torch import load_file, save_file
from tiny_models import randomise, tiny_config

# Model types with a multi-token head, and the config values to change. The last layer becomes the head.
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
# Factor on the output projections of the layers, where head and target are ``alike``.
DAMPED = 0.05
OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")


def save_with_mtp(
    model_type: str, folder: Path, alike: bool = True, vocab_size: int | None = None, **sizes: Any
) -> Path:
    """Save a target whose checkpoint holds a multi-token head, with the bundled target's tokenizer. ``sizes`` are
    further fields of its config."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    size = {"vocab_size": vocab_size or len(tokenizer), "max_position_embeddings": 2048, **ends}
    torch.manual_seed(0)
    config = tiny_config(model_type, **{**MTP_TYPES[model_type], **size, **sizes})
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
    """Split stacked experts into a tensor for each expert, as in published checkpoints."""
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
    """Rewrite a checkpoint so that the model's last layer becomes the block of a multi-token head."""
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
    if config["model_type"].startswith("qwen"):  # Qwen's norms multiply by 1 + weight
        head = {"mtp.fc.weight": fuse, "mtp.norm.weight": around(0.0)}
        head |= {f"mtp.pre_fc_norm_{part}.weight": around(0.0) for part in ("embedding", "hidden")}
        outer = "mtp.layers.0."
    else:
        head = {f"{inner}eh_proj.weight": fuse, f"{inner}shared_head.norm.weight": around(1.0)}
        head |= {f"{inner}{part}.weight": around(1.0) for part in ("enorm", "hnorm")}
        # Published checkpoints hold copies of the shared parts.
        head[f"{inner}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        head[f"{inner}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        outer = inner
    # Random weights, so that states before and after the final norm differ.
    head["model.norm.weight"] = around(0.0 if outer != inner else 1.0)
    named = {(outer + name.removeprefix(inner) if name.startswith(inner) else name): t for name, t in tensors.items()}
    save_file({**apart(named), **head}, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))


# The head reads the target's hidden states before these layers.
TAPS = (1, 3, 4)


def save_eagle_target(folder: Path, model_type: str = "llama") -> Path:
    """Save a target of five layers, each of which adds little, with the bundled target's tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    config = tiny_config(
        model_type,
        num_hidden_layers=5,
        vocab_size=len(tokenizer),
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(OUTPUTS):
                parameter.mul_(DAMPED)
        embedding = model.get_input_embeddings().weight
        embedding.div_(embedding.std())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def eagle_tensors(target: Path, few: int, alike: bool = True, biased: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a one-layer EAGLE-3 head for a target, by their names in a SpecForge file; ``few`` is the size of
    its vocabulary. With ``alike`` the head attends mainly to the token of its own row and predicts what the target's
    projection predicts for it."""
    tensors, config = load_file(target / "model.safetensors"), json.loads((target / "config.json").read_text())
    width, vocab = int(config["hidden_size"]), int(config["vocab_size"])
    projection = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    generator = torch.Generator().manual_seed(9)
    ids = torch.randperm(vocab, generator=generator)[:few].sort().values

    def random(*shape: int, size: float = 1.5) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * size / shape[-1] ** 0.5

    small = 0.05 if alike else 1.5
    found = {f"midlayer.self_attn.{part}_proj.weight": random(width, 2 * width, size=small) for part in ("q", "k", "v")}
    found["midlayer.self_attn.o_proj.weight"] = random(width, width, size=small)
    if alike:
        for part, size in (("q", 3.0), ("k", 3.0), ("v", 1.0)):
            found[f"midlayer.self_attn.{part}_proj.weight"][:, :width] += size * torch.eye(width)
        found["midlayer.self_attn.o_proj.weight"] += torch.eye(width)
    inner = {"gate_proj": (96, width), "up_proj": (96, width), "down_proj": (width, 96)}
    found |= {f"midlayer.mlp.{name}.weight": random(*shape, size=small) for name, shape in inner.items()}
    found["fc.weight"] = random(width, len(TAPS) * width, size=small)
    if biased:
        found["fc.bias"] = random(width)
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    spread = 0.02 if alike else 0.3
    found |= {f"{name}.weight": 1 + spread * torch.randn(width, generator=generator) for name in norms}
    found["lm_head.weight"] = projection[ids].clone()
    found["d2t"] = ids - torch.arange(few)
    found["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return found


def save_eagle(
    target: Path, folder: Path, written_by: str, few: int = 3000, alike: bool = True, kind: str = "llama", **said: Any
) -> Path:
    """Save a head for a target, in the format of ``specforge`` or ``speculators``; ``said`` goes into its config."""
    config = json.loads((target / "config.json").read_text())
    tensors = eagle_tensors(target, few, alike)
    layer = {
        "model_type": kind,
        "hidden_size": config["hidden_size"],
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": config["hidden_size"] // 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 2048,
        "vocab_size": config["vocab_size"],
        "tie_word_embeddings": False,
    }
    width = int(config["hidden_size"])
    if said.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.linspace(0.5, 1.5, len(TAPS) * width)
    if said.get("fc_norm"):
        tensors |= {f"fc_norm.{place}.weight": torch.linspace(0.5, 1.5 + place, width) for place in range(len(TAPS))}
    if written_by == "specforge":
        outputs = [number - 1 for number in TAPS]
        whole = {**layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": few}
        whole |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True}}
    else:
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        tensors["embed_tokens.weight"] = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
        if kind == "qwen3":
            tensors |= {f"layers.0.self_attn.{part}_norm.weight": torch.linspace(0.5, 1.5, 16) for part in ("q", "k")}
        whole = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": str(target)}},
            "draft_vocab_size": few,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": list(TAPS),
            "transformer_layer_config": layer,
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**whole, **said}, indent=2))
    return folder
