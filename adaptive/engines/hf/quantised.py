"""Decides from a checkpoint's config how its quantised weights (fp8, mxfp4, compressed-tensors, GPTQ, AWQ,
bitsandbytes, ...) are held.

In: a config and a device. Out: how the weights are held on the device, or why they cannot be, before any weight is
read. On a CPU, weights are dequantised as they are read, if transformers can do that: transformers computes there only
with bitsandbytes' format, and our own forward can serve dequantised weights. Callers request dequantised weights for a
draft, because a draft learns.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adaptive.devices import cure
from adaptive.errors import AdaptiveError, first_line
from adaptive.installation import install_command

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BITSANDBYTES = "bitsandbytes"
# Formats that transformers can dequantise while it reads them, by a setting in their config.
AS_READ = frozenset({"compressed-tensors", "fp8", "metal", "mxfp4", "mxfp8"})
# Distributions that transformers needs to read a format.
PACKAGES: dict[str, tuple[str, ...]] = {
    "aqlm": ("aqlm[cpu]",),
    "auto-round": ("auto-round>=0.5",),
    "awq": ("gptqmodel",),
    "compressed-tensors": ("compressed-tensors>=0.15",),
    "eetq": ("kernels",),
    "fbgemm_fp8": ("fbgemm-gpu",),
    "gptq": ("optimum>=1.24", "gptqmodel>=1.4.3"),
    "hqq": ("hqq",),
    "quanto": ("optimum-quanto",),
    "quark": ("amd-quark",),
    "torchao": ("torchao",),
}
# Formats that transformers runs only on CUDA.
ON_CUDA = frozenset({"eetq", "fbgemm_fp8", "fp_quant", "higgs", "hqq", "spqr", "vptq"})
# The config keys that list the modules whose weights are not quantised.
KEPT = ("modules_to_not_convert", "ignored_layers", "ignore", "llm_int8_skip_modules")
ELSE = "name another checkpoint of the model, not quantised or a GGUF file"
# What follows the name of an eight-bit weight in the name of its scales.
SCALES = ("_scale_inv", "_scale")
# Rows and columns that share a scale in published fp8 checkpoints; the last block of a matrix may be smaller.
BLOCK = 128
# Bytes in float32 for each byte of a file, by dtype. U8 holds two four-bit numbers per byte, I32 eight per number. The
# few tensors of other dtypes (indices) are not counted.
FLOAT32_BYTES = {"F64": 0.5, "F32": 1, "BF16": 2, "F16": 2, "F8_E4M3": 4, "F8_E5M2": 4, "I8": 4, "U8": 8, "I32": 8}


@dataclass(frozen=True)
class Quantised:
    """How a checkpoint's quantised weights are held. ``method``: the format. ``dense``: whether they are dequantised
    when loaded. ``said``: the config's settings of the format, adjusted for the loader."""

    method: str
    dense: bool
    said: Mapping[str, Any]

    @property
    def text(self) -> str:
        """A description for users."""
        return f"{self.method} in the checkpoint, {'dequantised as it is read' if self.dense else 'kept so'}"


def quantised(config: Any, folder: Path, device: str, dense: bool) -> Quantised | None:
    """How a checkpoint with this config is held on ``device``; None if its weights are not quantised. ``dense``
    requests dequantised weights.

    Raises AdaptiveError, in words that follow the model's name, if transformers cannot read the weights here, or if
    they cannot be ``dense``.
    """
    said = settings_of(config)
    method = method_of(said, folder)
    if method is None:
        return None
    if not said or not _known(said):
        raise AdaptiveError(f"is quantised as {method}, which transformers does not read; {ELSE}")
    possible = method in AS_READ or method == BITSANDBYTES
    if dense and not possible:
        raise AdaptiveError(
            f"is quantised as {method}, which is not dequantised here, as it must be to draft, learn or be exported; "
            "name the checkpoint that it was made from"
        )
    if possible and method != BITSANDBYTES:
        dense = dense or not _multiplies(method, device)
    if method in AS_READ:
        said["dequantize"] = dense
        if method == "compressed-tensors":
            said["use_optimized_inference"] = not dense
    _try(method, said, device)
    return Quantised(method, dense, said)


def settings_of(config: Any) -> dict[str, Any]:
    """A copy of a config's quantisation settings; empty if it has none."""
    said = getattr(config, "quantization_config", None) or {}
    return copy.deepcopy(dict(said if isinstance(said, dict) else said.to_dict()))


def method_of(said: Mapping[str, Any], folder: Path) -> str | None:
    """The format of a checkpoint's weights, by its settings ``said``; None if they are not quantised. NVIDIA's older
    checkpoints have a separate file for the settings."""
    if said.get("load_in_8bit") or said.get("load_in_4bit"):
        return BITSANDBYTES
    if said:
        return str(said.get("quant_method", "a format without a name"))
    return "modelopt" if (folder / "hf_quant_config.json").is_file() else None


def _known(said: Mapping[str, Any]) -> bool:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    in_bits = said.get("load_in_8bit") or said.get("load_in_4bit")
    return bool(in_bits or said.get("quant_method") in AUTO_QUANTIZATION_CONFIG_MAPPING)


def _multiplies(method: str, device: str) -> bool:
    """Whether transformers can compute with this format on the device without dequantising: on a GPU, by kernels of the
    package ``kernels``, or for compressed-tensors' eight bits by torch's own."""
    from transformers.utils.import_utils import is_kernels_available

    if method == "metal":
        return device.startswith("mps") and bool(is_kernels_available())
    if not device.startswith("cuda"):
        return False
    if method == "compressed-tensors":
        return torch.cuda.get_device_capability(device) >= (8, 9)
    return bool(is_kernels_available())


def _try(method: str, said: Mapping[str, Any], device: str) -> None:
    """Raise AdaptiveError if transformers refuses these settings on the device, which it checks before it reads
    weights, or if a needed package is missing."""
    from transformers.quantizers.auto import AutoHfQuantizer

    if method in ON_CUDA and not device.startswith("cuda"):
        raise AdaptiveError(f"is quantised as {method}, which runs on CUDA alone; take --device cuda, or {ELSE}")
    missing = [package for package in PACKAGES.get(method, ()) if not _installed(package)]
    if missing:
        raise AdaptiveError(
            f"is quantised as {method}, and what reads that is not installed; install it: "
            f"{install_command(*missing)}, or {ELSE}"
        )
    try:
        made: Any = AutoHfQuantizer.from_config(dict(said), pre_quantized=True)
        made.validate_environment(device_map={"": device}, weights_only=True)
    except Exception as error:  # transformers raises many kinds of errors for a missing, old or broken package
        advice = cure(ELSE) if method == BITSANDBYTES else ELSE
        raise AdaptiveError(
            f"is quantised as {method}, which cannot be read here ({first_line(error)}); {advice}"
        ) from error


def _installed(package: str) -> bool:
    """Whether the distribution of a requirement is installed, in any version."""
    try:
        version(re.split(r"[^\w.-]", package, maxsplit=1)[0])
    except PackageNotFoundError:
        return False
    return True


def tell(config: Any, held: Quantised, renamed: Mapping[str, str], dtype: torch.dtype) -> None:
    """Set the quantisation settings in ``config`` to ``held``. ``renamed`` (patterns of weights' names and their
    replacements) is applied to the names of unquantised modules; bitsandbytes computes in ``dtype``."""
    said = copy.deepcopy(dict(held.said))
    for name in KEPT:
        if said.get(name):
            said[name] = [_renamed(module, renamed) for module in said[name]]
    if held.method == BITSANDBYTES:
        said["bnb_4bit_compute_dtype"] = str(dtype).removeprefix("torch.")
    config.quantization_config = said


def _renamed(module: str, renamed: Mapping[str, str]) -> str:
    for pattern, name in renamed.items():
        module = re.sub(pattern, name, module)
    return module


def made_dense(model: PreTrainedModel, held: Quantised, dtype: torch.dtype) -> None:
    """Finish dequantising a loaded model: dequantise bitsandbytes' layers, and convert weights that were not quantised
    and still have the file's dtype to ``dtype``."""
    if held.method == BITSANDBYTES:
        model.dequantize(dtype)
    kept: set[str] = set()
    for names in (model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict):
        kept |= set(names or ())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and not any(part in name for part in kept):
                parameter.data = parameter.data.to(dtype)


def multiplied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Tensors of a checkpoint by name, with eight-bit weights multiplied by their scales (to float32); a scale is for a
    row, a block or the whole of a weight. None if any weight is packed in another way."""
    found: dict[str, torch.Tensor] = {}
    scales = {f"{name}{ending}" for name in tensors for ending in SCALES}
    for name, tensor in tensors.items():
        if name in scales or name.endswith(("activation_scale", "input_scale")):
            continue
        if not tensor.is_floating_point():
            return None
        if tensor.element_size() == 1:
            scale = next((tensors[f"{name}{ending}"] for ending in SCALES if f"{name}{ending}" in tensors), None)
            if scale is None or tensor.ndim != 2:
                return None
            whole = scale.float() if scale.ndim == 2 else scale.float().reshape(-1, 1)
            for axis, size in enumerate(tensor.shape):
                block = _block(size, whole.shape[axis])
                if block is None:
                    return None
                whole = whole.repeat_interleave(block, axis).narrow(axis, 0, size)
            found[name] = tensor.float() * whole
        else:
            found[name] = tensor
    return found


def _block(size: int, scales: int) -> int | None:
    """How many of ``size`` rows or columns share one of ``scales`` scales: BLOCK, the last scale for what is left, or
    equal parts. None if neither gives that many scales."""
    if -(-size // BLOCK) == scales:
        return BLOCK
    return None if size % scales else size // scales


def float32_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's weights in float32, from the headers of its files. A few percent too high for quantised
    weights, because their scales are counted."""
    total = 0.0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        except (OSError, ValueError):  # loading the file later reports the error
            continue
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                total += (end - begin) * FLOAT32_BYTES.get(tensor["dtype"], 0)
    return int(total)
