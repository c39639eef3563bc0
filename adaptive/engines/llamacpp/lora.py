"""Converts a PEFT LoRA adapter to a GGUF adapter, for llama.cpp's programs and for our engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adaptive.engines.hf.lora import read_lora
from adaptive.engines.llamacpp.model import LlamaModel
from adaptive.engines.llamacpp.names import Base, GgufNames, package
from adaptive.engines.llamacpp.write import written
from adaptive.engines.llamacpp.write_tokenizer import finish
from adaptive.errors import AdaptiveError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Low:
    """What an adapter adds to one weight: ``b`` (out, r), with the scaling in it, times ``a`` (r, in). Both are
    float32, with rows and columns in GGUF's order."""

    a: torch.Tensor
    b: torch.Tensor


def low_rank(folder: Path, base: LlamaModel | Base) -> dict[str, Low]:
    """The LoRA adapter in ``folder``, by GGUF's names of the weights that it changes.

    The scaling of each module (alpha / r, or by rsLoRA and patterns) is multiplied into ``b``. Raises AdaptiveError for
    an adapter that GGUF cannot express.
    """
    if isinstance(base, LlamaModel):
        base = Base.of_file(base)
    names = GgufNames(base)
    found = {}
    for module, lora in read_lora(folder).items():
        name = names.name(module)
        if name is None:
            raise AdaptiveError(f"adapter {folder} changes {module}, which a GGUF of {base.architecture} does not have")
        if lora.magnitude is not None:
            raise AdaptiveError(
                f"adapter {folder} is DoRA, which a GGUF adapter cannot hold; write the merged draft instead "
                "(`adaptive adapters export ID --merged FILE --format gguf`)"
            )
        if lora.transposed:
            raise AdaptiveError(
                f"adapter {folder} changes the embeddings ({module}), which a GGUF adapter cannot hold; "
                "write the merged draft instead, or train without it"
            )
        b = names.reorder(module, lora.b.float() * lora.scaling)
        a = names.reorder_columns(module, lora.a.float())
        found[f"{name}.weight"] = Low(a.contiguous(), b.contiguous())
    return found


def write_adapter(folder: Path, base: LlamaModel | Base, file: Path) -> None:
    """Write the LoRA adapter in ``folder`` for ``base`` to ``file``, in float32, completely or not at all.

    The file's alpha is 0, which means no further scaling in llama.cpp: the scaling is in the matrices.

    Raises AdaptiveError for an adapter that GGUF cannot express, or if ``file`` cannot be written.
    """
    gguf, matrices = package(), low_rank(folder, base)
    with written(file, base.architecture) as writer:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)
        for name, low in matrices.items():
            writer.add_tensor(f"{name}.lora_a", low.a.numpy())
            writer.add_tensor(f"{name}.lora_b", low.b.numpy())
        finish(writer)
