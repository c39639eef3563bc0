"""Writes a Hugging Face checkpoint as a GGUF file.

In: a loaded model and its tokenizer. Out: one file that llama.cpp's programs and our engine read.
Weights have the requested encoding, except that one-dimensional ones (norms, biases) are float32, as is usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from adaptive.engines.llamacpp.names import HYBRID, Base, Delta, GgufNames, package
from adaptive.engines.llamacpp.write_tokenizer import add_tokenizer, pre_tokenizer
from adaptive.errors import AdaptiveError, first_line
from checkpoints import files

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Encoding = Literal["f32", "f16", "bf16", "q8_0"]
ENCODINGS: tuple[str, ...] = get_args(Encoding)

# The alignment of every weight in the file, in bytes: a processor's cache line. With the usual 32, passes over two to
# five tokens took 3 to 10% longer on a mapped file.
ALIGNMENT = 64

# Two-dimensional weights that llama.cpp reads only in float32.
WHOLE = ".ssm_conv1d.weight"


def write_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    file: Path,
    encoding: Encoding,
    name: str,
    on_progress: Callable[[float], None] | None = None,
) -> None:
    """Write ``model`` to ``file``, completely or not at all. ``on_progress`` is called with the share of the tensors
    that are written.

    Raises AdaptiveError for an unsupported architecture, rotary embedding or tokenizer, or if ``file`` cannot be
    written.
    """
    config = model.config.get_text_config()
    base = Base.of_config(config)
    names = GgufNames(base)
    splitter = pre_tokenizer(tokenizer, config.vocab_size)
    with written(file, base.architecture, encoding) as writer:
        _describe(writer, model, name, base)
        add_tokenizer(writer, tokenizer, config.vocab_size, splitter)
        write_tensors(writer, lambda: chain(rope_factors(config), _tensors(model, names)), encoding, on_progress)


@contextmanager
def written(file: Path, architecture: str, encoding: Encoding | None = None) -> Iterator[Any]:
    """A writer for a model of ``architecture``, or for an adapter of one, which has no ``encoding``. Once the block, in
    which everything is written, has ended without an error, the file exists, complete. Raises AdaptiveError if it
    cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = files.unfinished(file.parent)
        try:
            writer = package().GGUFWriter(partial, architecture)
            if encoding is not None:
                writer.add_custom_alignment(ALIGNMENT)
                writer.add_file_type(_kinds()[encoding][1])
            yield writer
            files.flush(partial)
            partial.replace(file)
        finally:
            files.finished(partial)
    except OSError as error:  # numpy has its own error for a full disk
        why = error.strerror or first_line(error)
        raise AdaptiveError(f"{file} cannot be written ({why}); choose another place") from error


def _kinds() -> dict[str, tuple[Any, Any]]:
    """The package's constants of each encoding: for a tensor, and for a file."""
    gguf = package()
    tensor, file = gguf.GGMLQuantizationType, gguf.LlamaFileType
    return {
        "f32": (tensor.F32, file.ALL_F32),
        "f16": (tensor.F16, file.MOSTLY_F16),
        "bf16": (tensor.BF16, file.MOSTLY_BF16),
        "q8_0": (tensor.Q8_0, file.MOSTLY_Q8_0),
    }


def _describe(writer: Any, model: PreTrainedModel, name: str, base: Base) -> None:
    """Add the architecture's sizes and the checkpoint's recommended sampling to the metadata. Raises AdaptiveError for
    a rotary embedding or an attention window that is not supported."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    known = ("default", "llama3") if base.architecture == "llama" else ("default",)
    if rope.get("rope_type", "default") not in known:
        raise AdaptiveError(
            f"{name} scales its rotary embedding ({rope['rope_type']}), which cannot be written here; use llama.cpp's "
            "convert_hf_to_gguf.py"
        )
    windows = config.model_type == "mistral" or "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if windows and config.sliding_window is not None:
        raise AdaptiveError(
            f"{name} attends to the last {config.sliding_window} tokens alone, which llama.cpp does not compute for "
            "its architecture"
        )
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_type("model")
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(base.heads[0])
    writer.add_head_count_kv(base.heads[1])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    rotated = int(size * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotated)
    writer.add_vocab_size(config.vocab_size)
    if base.delta is not None:
        _describe_delta(writer, config, base.delta, rotated)
    advice = model.generation_config
    if advice is not None and advice.do_sample:
        for key in ("temperature", "top_k", "top_p", "min_p"):
            value = getattr(advice, key, None)
            if value is not None:
                add = writer.add_sampling_temp if key == "temperature" else getattr(writer, f"add_sampling_{key}")
                add(value)


def _describe_delta(writer: Any, config: Any, delta: Delta, rotated: int) -> None:
    """Add the sizes of gated delta nets, and which layers are delta nets, to the metadata. ``rotated``: how many of a
    head's numbers the rotary embedding of the other layers turns."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(delta.size)
    writer.add_ssm_group_count(delta.keys)
    writer.add_ssm_time_step_rank(delta.values)
    writer.add_ssm_inner_size(delta.values * delta.size)
    recurrent = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array(f"{HYBRID}.attention.recurrent_layers", recurrent)
    # For programs that do not read that list: the distance between two layers of full attention.
    writer.add_full_attention_interval(recurrent.index(False) + 1 if False in recurrent else len(recurrent) + 1)
    # How many pairs of rotated numbers turn with the time, the height and the width of an image. In a text all three
    # are the token's position. A pair that belonged to none of the three would not turn.
    pairs = rotated // 2
    writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])


def rope_factors(config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The divisors of the frequencies in Llama 3's rotary embedding, which GGUF stores as a tensor; nothing for other
    rotary embeddings."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
        plain = rope["rope_theta"] ** -(torch.arange(len(scaled), dtype=torch.float64) / len(scaled))
        yield "rope_freqs.weight", plain.float() / scaled


def _tensors(model: PreTrainedModel, names: GgufNames) -> Iterator[tuple[str, torch.Tensor]]:
    """GGUF's names and values of all weights. A tied vocabulary projection is left out, as llama.cpp expects. Raises
    AdaptiveError for a weight that GGUF does not have."""
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for key, tensor in model.state_dict().items():
        if tied and key.startswith("lm_head."):
            continue
        found = names.tensor(key, tensor.detach().cpu())
        if found is None:
            raise AdaptiveError(f"the model has {key}, which a GGUF of its architecture does not have")
        yield found


def write_tensors(
    writer: Any,
    tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    encoding: Encoding,
    on_progress: Callable[[float], None] | None = None,
) -> None:
    """Write everything: what was given to ``writer``, and tensors with GGUF's names. ``tensors`` is called twice, for
    the table of all of them and for their values, so that only one is held encoded. Integers are of 64 bits; for
    ``on_progress`` see ``write_model``."""
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import quantize

    kinds = []
    for title, tensor in tensors():
        kind = _kind(title, tensor, encoding)
        block, size = GGML_QUANT_SIZES[kind]
        writer.add_tensor_info(title, tensor.shape, np.dtype(np.float32), tensor.numel() // block * size, kind)
        kinds.append(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, ((_, tensor), kind) in enumerate(zip(tensors(), kinds, strict=True)):
        if tensor.is_floating_point():
            writer.write_tensor_data(quantize(tensor.float().contiguous().numpy(), kind))
        else:
            writer.write_tensor_data(tensor.numpy())
        if on_progress is not None:
            on_progress((number + 1) / len(kinds))
    writer.close()


def _kind(title: str, tensor: torch.Tensor, encoding: str) -> Any:
    """The package's constant of the encoding that the tensor gets."""
    kinds = _kinds()
    if not tensor.is_floating_point():
        return package().GGMLQuantizationType.I64
    whole = tensor.ndim == 1 or title.endswith(WHOLE)
    # Rows that are not a multiple of a quantisation block (32) stay in 16 bits, as in llama.cpp.
    if encoding == "q8_0" and tensor.shape[-1] % 32 and not whole:
        encoding = "f16"
    return kinds["f32" if whole else encoding][0]
