"""What a head takes from its target: embedding, final norm, vocabulary projection, and the last layer to start from.

In: a loaded target, or its folder, of which only these tensors are read. Out: ``Parts``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from adaptive.engines.hf.quantised import multiplied
from adaptive.errors import AdaptiveError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Parts:
    """``config`` is the target's text config. Tensors by their names in the module they belong to; ``embedding`` has
    ``weight`` (vocab, width). ``layer`` is the target's last one, empty where its weights are packed in fewer than
    eight bits."""

    config: Any
    embedding: Tensors
    norm: Tensors
    projection: Tensors
    layer: Tensors = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Of the embedding."""
        return self.embedding["weight"].dtype


def parts_of_model(target: PreTrainedModel) -> Parts:
    """The parts of a loaded target, sharing its memory. Raises AdaptiveError where a head does not fit its kind."""
    decoder = decoder_of(target)
    embedding, projection = target.get_input_embeddings(), target.get_output_embeddings()
    layer = dict(decoder.layers[-1].state_dict())
    if not all(tensor.is_floating_point() and tensor.element_size() > 1 for tensor in layer.values()):  # quantised
        layer = {}
    return Parts(
        target.config.get_text_config(),
        dict(embedding.state_dict()),
        dict(decoder.norm.state_dict()),
        dict(projection.state_dict()),
        layer,
    )


def shared_of_model(target: PreTrainedModel) -> Parts:
    """Embedding and projection of a loaded target, sharing its memory: what an EAGLE-3 head has of it."""
    embedding, projection = target.get_input_embeddings(), target.get_output_embeddings()
    return Parts(target.config.get_text_config(), dict(embedding.state_dict()), {}, dict(projection.state_dict()))


def parts_of_folder(folder: Path, trust_remote_code: bool = False) -> Parts:
    """The parts of the target whose checkpoint is in ``folder``; nothing else of its weights is read.

    Raises AdaptiveError where it cannot be read or a head does not fit its kind.
    """
    with _parts(folder, trust_remote_code) as (config, where, names):
        embedding, norm, projection, layer = (
            {short: where[name].get_tensor(name) for short, name in part.items()} for part in names
        )
    if any(not tensor.is_floating_point() for part in (embedding, norm, projection) for tensor in part.values()):
        raise AdaptiveError(f"no head can be grown on the target in {folder}: its embedding is quantised")
    return Parts(config, embedding, norm, projection or embedding, multiplied(layer) or {})


def parts_bytes(folder: Path, trust_remote_code: bool = False) -> int:
    """Bytes of the parts in float32, without reading them. Raises AdaptiveError as ``parts_of_folder``."""
    with _parts(folder, trust_remote_code) as (_, where, names):
        shapes = [where[name].get_slice(name).get_shape() for part in names for name in part.values()]
    return 4 * sum(int(math.prod(shape)) for shape in shapes)


@contextmanager
def _parts(folder: Path, trust_remote_code: bool) -> Iterator[tuple[Any, dict[str, Any], list[dict[str, str]]]]:
    """The target's text config; which open file has which tensor; and by their names in a module the tensors of
    embedding, norm, projection (none where it is the embedding) and last layer. Raises AdaptiveError."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
        with opened(folder) as files:
            where = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping
            prefix = _prefix(where, folder)
            heads = [name for name in where if name == "lm_head.weight" or name.endswith(".lm_head.weight")]
            if not heads and any(".lm_head." in f".{name}" for name in where):
                raise AdaptiveError(
                    f"no head can be grown on the target in {folder}: its vocabulary projection is quantised"
                )
            before = [f"{prefix}embed_tokens.", f"{prefix}norm.", f"{prefix}layers.{config.num_hidden_layers - 1}."]
            before.insert(2, "/" if config.tie_word_embeddings or not heads else heads[0].removesuffix("weight"))
            yield config, where, [{name.removeprefix(p): name for name in where if name.startswith(p)} for p in before]
    except AdaptiveError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise AdaptiveError(f"the target in {folder} cannot be read: {first_line(error)}") from error


def decoder_of(model: PreTrainedModel) -> Any:
    """The part of a causal language model that has the ``layers`` and, behind them, the ``norm``.

    Raises AdaptiveError for a model built otherwise, of whose layers no head can be made.
    """
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not all(hasattr(decoder, name) for name in ("layers", "norm", "embed_tokens")):
        raise AdaptiveError(f"no head can be grown on a {type(model).__name__}: it is built in another way")
    for setting in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if getattr(model.config.get_text_config(), setting, None) not in (None, 1, 1.0):
            raise AdaptiveError(f"no head can be grown on a {type(model).__name__}: it scales its logits ({setting})")
    return decoder


@contextmanager
def opened(folder: Path) -> Iterator[list[Any]]:
    """The safetensors files of a checkpoint, those that its index names where it has one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = sorted(file.name for file in folder.glob("*.safetensors"))
    if not names:
        raise AdaptiveError(f"{folder} holds no weights: there is no *.safetensors file in it")
    with ExitStack() as stack:
        yield [stack.enter_context(safe_open(folder / name, "pt")) for name in names]


def _prefix(names: Mapping[str, Any], folder: Path) -> str:
    """What stands before ``embed_tokens`` of the text model, whose layers and norm carry it too."""
    for name in names:
        prefix = name.removesuffix("embed_tokens.weight")
        layered = any(other.startswith(f"{prefix}layers.0.") for other in names)
        if prefix != name and f"{prefix}norm.weight" in names and layered:
            return prefix
    raise AdaptiveError(f"no head can be grown on the target in {folder}: its weights have names unknown here")
