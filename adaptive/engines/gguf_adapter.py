"""A PEFT LoRA adapter as a GGUF adapter, for llama.cpp's programs and for our own engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adaptive.engines.adapters import read_lora
from adaptive.engines.gguf_names import GgufNames, package
from adaptive.engines.llama_model import LlamaModel
from adaptive.errors import AdaptiveError


@dataclass(frozen=True)
class Base:
    """What an adapter file must know of the model it is for: architecture, layers, heads (queries, keys)."""

    architecture: str
    layers: int
    heads: tuple[int, int]


def write_adapter(folder: Path, base: LlamaModel | Base, file: Path) -> None:
    """Write the LoRA adapter in ``folder`` for ``base`` to ``file``, in float32.

    The scaling (alpha / r, or what rsLoRA and patterns make of it) is multiplied into B, for every module
    its own; the file's alpha is 0, which llama.cpp reads as "as it is".

    Raises AdaptiveError for an adapter that llama.cpp cannot express.
    """
    if isinstance(base, LlamaModel):
        base = Base(base.architecture, base.shape["layers"], base.heads)
    gguf = package()
    names = GgufNames(base.architecture, base.layers, base.heads)
    writer = gguf.GGUFWriter(file, base.architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)
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
                f"adapter {folder} changes the embeddings ({module}), which a GGUF adapter cannot hold where they "
                "are tied; write the merged draft instead, or train without it"
            )
        a, b = lora.a.float(), names.reorder(module, lora.b.float() * lora.scaling)
        for part, tensor in (("lora_a", a), ("lora_b", b)):
            writer.add_tensor(f"{name}.weight.{part}", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
