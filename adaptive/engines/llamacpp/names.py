"""What GGUF and Hugging Face checkpoints call the same weights, and how their layouts differ.

Llama's rotary embedding pairs neighbouring numbers of a head in GGUF and the two halves of a head in
Hugging Face's layout, so that the rows of its query and key projections are in another order.
"""

from __future__ import annotations

from typing import Any

import torch

from adaptive.errors import AdaptiveError
from adaptive.installation import install_command

# Architectures whose layout is known here, and whether the rows of queries and keys are reordered.
# Others are converted by llama.cpp's own scripts.
REORDERED = {"llama": True, "qwen2": False, "qwen3": False}


def package() -> Any:
    """The module ``gguf``. Raises AdaptiveError where it is not installed."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise AdaptiveError(
            f"writing GGUF files needs the package gguf, which is not installed; {install_command('gguf')}"
        ) from None
    return gguf


class GgufNames:
    """Names and row orders of one architecture, as llama.cpp calls it."""

    def __init__(self, architecture: str, layers: int, heads: tuple[int, int]) -> None:
        """``heads`` of queries and keys. Raises AdaptiveError for an architecture that is not known here."""
        if architecture not in REORDERED:
            raise AdaptiveError(
                f"models of architecture {architecture} cannot be written as GGUF here ({', '.join(REORDERED)} can); "
                "llama.cpp's convert_hf_to_gguf.py and convert_lora_to_gguf.py know more"
            )
        gguf = package()
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        self._map = gguf.get_tensor_name_map(kinds[architecture], layers)
        self._heads = heads if REORDERED[architecture] else None

    def name(self, module: str) -> str | None:
        """GGUF's name of a module's weight (``model.layers.0.mlp.up_proj``), without ``.weight``; None for none."""
        found: str | None = self._map.get_name(module)
        return found

    def reorder(self, module: str, rows: torch.Tensor) -> torch.Tensor:
        """The rows (out, ...) of a module's weight, bias or LoRA B in GGUF's order."""
        part = module.rpartition(".")[2]
        if self._heads is None or part not in ("q_proj", "k_proj"):
            return rows
        heads = self._heads[0 if part == "q_proj" else 1]
        halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        return halves.swapaxes(1, 2).reshape(rows.shape)
