"""Write tiny quantised checkpoints in the formats found on the hub, without the packages of these formats.

In: a dense checkpoint. Out: a quantised copy; the weights of the dense checkpoint become the dequantised ones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK = 32
# The magnitudes of the sixteen mxfp4 values; the fourth bit is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Tensors = dict[str, torch.Tensor]
# Quantises a weight: returns its tensors in the format, by name suffix, and the dequantised weight.
Format = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Eight bits with a scale for each block of 32 by 32, as in DeepSeek's and Qwen's checkpoints."""
    rows, columns = (side // BLOCK for side in weight.shape)
    blocks = weight.reshape(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    small = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    dense = (small.float() * scale[:, None, :, None]).reshape(weight.shape)
    return {"weight": small.reshape(weight.shape), "weight_scale_inv": scale}, dense


def channels(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Eight bits with a scale for each row, as compressed-tensors writes them."""
    scale = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    small = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale": scale}, small.float() * scale


def packed(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Four bits in groups of 32 inputs, eight inputs to a 32-bit word, as compressed-tensors writes them."""
    groups = weight.reshape(len(weight), -1, BLOCK)
    scale = groups.abs().amax(2) / 7
    small = (groups / scale[:, :, None]).round().clamp(-8, 7)
    dense = (small * scale[:, :, None]).reshape(weight.shape)
    nibbles = (small.reshape(len(weight), -1, 8) + 8).to(torch.int64)
    words = (nibbles << (4 * torch.arange(8))).sum(2)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}, dense


def mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Four bits with a power-of-two scale for each 32 inputs, as in gpt-oss; weight (experts, inputs, outputs)."""
    groups = weight.transpose(1, 2).reshape(len(weight), weight.shape[2], -1, BLOCK)
    power = (groups.abs().amax(3) / 6).log2().ceil()
    scaled = groups / power.exp2()[..., None]
    values = torch.tensor(E2M1)
    number = (scaled.abs()[..., None] - values).abs().argmin(-1)
    dense = values[number] * scaled.sign() * power.exp2()[..., None]
    number = (number + 8 * (scaled < 0)).to(torch.uint8)
    return {
        "_blocks": number[..., 0::2] | number[..., 1::2] << 4,
        "_scales": (power + 127).to(torch.uint8),
    }, dense.reshape(len(weight), weight.shape[2], -1).transpose(1, 2).contiguous()


def gptq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Four bits in groups of 32 inputs, eight inputs to a 32-bit word; zero points are stored minus one."""
    whole, scale, dense = _from_the_middle(weight)
    zeros = torch.full_like(scale, MIDDLE - 1, dtype=torch.int64)
    return {
        "qweight": _words(whole.reshape(-1, 8, len(weight)).transpose(1, 2), range(8)),
        "qzeros": _words(zeros.reshape(len(scale), -1, 8), range(8)),
        "scales": scale,
        "g_idx": (torch.arange(weight.shape[1]) // BLOCK).to(torch.int32),
    }, dense


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Four bits in groups of 32 inputs, eight outputs to a 32-bit word, even ones first; zero points unchanged."""
    whole, scale, dense = _from_the_middle(weight)
    zeros = torch.full_like(scale, MIDDLE, dtype=torch.int64)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": _words(whole.reshape(weight.shape[1], -1, 8), order),
        "qzeros": _words(zeros.reshape(len(scale), -1, 8), order),
        "scales": scale,
    }, dense


# The four-bit number that represents zero.
MIDDLE = 8


def _from_the_middle(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise a weight (out, in): numbers from 0 to 15 (in, out), scales (groups, out) in float16, and the
    dequantised weight."""
    groups = weight.T.reshape(-1, BLOCK, len(weight))
    scale = (groups.abs().amax(1) / (MIDDLE - 1)).half()
    small = (groups / scale.float()[:, None]).round().clamp(-MIDDLE, MIDDLE - 1)
    dense = (small * scale.float()[:, None]).reshape(-1, len(weight)).T.contiguous()
    return (small + MIDDLE).to(torch.int64).reshape(-1, len(weight)), scale, dense


def _words(nibbles: torch.Tensor, order: Iterable[int]) -> torch.Tensor:
    """Pack eight four-bit numbers (..., 8) into a 32-bit word, in the given order from the lowest bits up."""
    words = sum(nibbles[..., number] << (4 * place) for place, number in enumerate(order))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


# The ``quantization_config`` of each format.
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": BLOCK, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": BLOCK, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
_WEIGHTS: dict[str, Any] = {"symmetric": True, "dynamic": False, "block_structure": None, "actorder": None}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", **_WEIGHTS},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}
PACKED = CHANNELS | {
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": BLOCK, **_WEIGHTS},
        }
    },
}


def quantise(folder: Path, into: Path, made: Format, config: dict[str, Any]) -> None:
    """Copy the checkpoint in ``folder`` to ``into`` with its linear layers (for mxfp4: its experts) quantised by
    ``made``. The weights in ``folder`` are replaced by the dequantised ones."""
    file = folder / "model.safetensors"
    dense = load_file(file)
    tensors = dict(dense)
    for name, weight in dense.items():
        experts = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        if not (experts if made is mxfp4 else _linear(name, weight)):
            continue
        del tensors[name]
        parts, dense[name] = made(weight)
        base = name if made is mxfp4 else name.removesuffix("weight")
        tensors |= {f"{base}{part}": tensor.contiguous() for part, tensor in parts.items()}
    shutil.copytree(folder, into)
    save_file(tensors, into / file.name, metadata={"format": "pt"})
    save_file(dense, file, metadata={"format": "pt"})
    say(into, config)


def _linear(name: str, weight: torch.Tensor) -> bool:
    """Whether this is a linear layer's weight of whole blocks that quantised checkpoints do not keep dense."""
    kept = ("lm_head.weight", "embed_tokens.weight", "router.weight", "mlp.gate.weight", "conv1d.weight")
    whole = weight.ndim == 2 and not any(side % BLOCK for side in weight.shape)
    return whole and name.endswith(".weight") and not name.endswith(kept) and "visual" not in name


def say(folder: Path, config: dict[str, Any]) -> None:
    """Add this ``quantization_config`` to the checkpoint's config."""
    file = folder / "config.json"
    said = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(said | {"quantization_config": config}), encoding="utf-8")
