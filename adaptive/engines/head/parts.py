"""The tensors that a head takes from its target: embedding, final norm, vocabulary projection, and the last layer as
the initial state.

In: a loaded target, or its folder, from which only these tensors are read. Out: ``Parts``.
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

from adaptive.engines.hf.language import is_part, language_config
from adaptive.engines.hf.quantised import multiplied
from adaptive.errors import AdaptiveError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Parts:
    """A target's tensors, each by its name in its module, and its text ``config``. ``embedding`` has ``weight`` (vocab,
    width). ``layer`` is the target's last layer, without the experts of a mixture, and without quantised weights except
    those of eight bits that are read from a folder."""

    config: Any
    embedding: Tensors
    norm: Tensors
    projection: Tensors
    layer: Tensors = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding."""
        return self.embedding["weight"].dtype


def parts_of_model(target: PreTrainedModel) -> Parts:
    """The parts of a loaded target; they share its memory. Raises AdaptiveError if its structure is not supported."""
    decoder = decoder_of(target)
    embedding, projection = target.get_input_embeddings(), target.get_output_embeddings()
    layer = {name: tensor for name, tensor in decoder.layers[-1].state_dict().items() if not of_experts(name)}
    return Parts(
        target.config.get_text_config(),
        dict(embedding.state_dict()),
        dict(decoder.norm.state_dict()),
        dict(projection.state_dict()),
        _plain(layer),
    )


def parts_beside(target: PreTrainedModel, folder: Path, trust_remote_code: bool = False) -> Parts:
    """The parts of a loaded target whose linear layers are on disk (``engines.streamed``). What the target holds is
    shared; the vocabulary projection, unless it is the embedding, and the last layer are read from its checkpoint in
    ``folder``. These are pages of that file, which the system can drop. Raises AdaptiveError like
    ``parts_of_folder``."""
    decoder, embedding = decoder_of(target), target.get_input_embeddings()
    read = parts_of_folder(folder, trust_remote_code)
    shared = dict(embedding.state_dict())
    tied = target.get_output_embeddings().weight is embedding.weight
    return Parts(read.config, shared, dict(decoder.norm.state_dict()), shared if tied else read.projection, read.layer)


def of_experts(name: str) -> bool:
    """Whether a tensor of a layer belongs to the experts of a mixture. A grown head has no such experts."""
    return "experts" in name.split(".")


def _plain(layer: Tensors) -> Tensors:
    """The tensors of a layer that are not quantised."""
    return {name: x for name, x in layer.items() if x.is_floating_point() and x.element_size() > 1}


def shared_of_model(target: PreTrainedModel) -> Parts:
    """The parts for an EAGLE-3 head: embedding and projection of a loaded target; they share its memory."""
    embedding, projection = target.get_input_embeddings(), target.get_output_embeddings()
    return Parts(target.config.get_text_config(), dict(embedding.state_dict()), {}, dict(projection.state_dict()))


def parts_of_folder(folder: Path, trust_remote_code: bool = False) -> Parts:
    """The parts of the target whose checkpoint is in ``folder``; its other weights are not read.

    Raises AdaptiveError if the checkpoint cannot be read or its structure is not supported.
    """
    with _parts(folder, trust_remote_code) as (config, where, names):
        embedding, norm, projection, layer = (
            {short: where[name].get_tensor(name) for short, name in part.items()} for part in names
        )
    if any(not tensor.is_floating_point() for part in (embedding, norm, projection) for tensor in part.values()):
        raise AdaptiveError(f"no head can be grown on the target in {folder}: its embedding is quantised")
    known = multiplied(layer)
    return Parts(config, embedding, norm, projection or embedding, _plain(layer) if known is None else known)


def parts_bytes(folder: Path, trust_remote_code: bool = False) -> int:
    """Bytes of the parts in float32, from their shapes alone. Raises AdaptiveError like ``parts_of_folder``."""
    with _parts(folder, trust_remote_code) as (_, where, names):
        shapes = [where[name].get_slice(name).get_shape() for part in names for name in part.values()]
    return 4 * sum(int(math.prod(shape)) for shape in shapes)


@contextmanager
def _parts(folder: Path, trust_remote_code: bool) -> Iterator[tuple[Any, dict[str, Any], list[dict[str, str]]]]:
    """Yields the target's text config, the open file of each tensor, and four dicts from a tensor's name in its module
    to its name in the file: embedding, norm, projection (empty if it is the embedding) and last layer. Raises
    AdaptiveError like ``parts_of_folder``."""
    from transformers import AutoConfig

    try:
        # The config with which the target is loaded: that of the language model in a checkpoint with vision.
        loaded = language_config(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code))
        config = loaded.get_text_config()
        tied = not is_part(folder, loaded) and getattr(loaded, "tie_word_embeddings", False)
        with opened(folder) as files:
            where = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping
            prefix = _prefix(where, folder)
            heads = [name for name in where if name == "lm_head.weight" or name.endswith(".lm_head.weight")]
            if not heads and any(".lm_head." in f".{name}" for name in where):
                raise AdaptiveError(
                    f"no head can be grown on the target in {folder}: its vocabulary projection is quantised"
                )
            before = [f"{prefix}embed_tokens.", f"{prefix}norm.", f"{prefix}layers.{config.num_hidden_layers - 1}."]
            before.insert(2, "/" if tied or not heads else heads[0].removesuffix("weight"))
            parts = [{name.removeprefix(p): name for name in where if name.startswith(p)} for p in before]
            parts[-1] = {short: name for short, name in parts[-1].items() if not of_experts(short)}
            yield config, where, parts
    except AdaptiveError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise AdaptiveError(f"the target in {folder} cannot be read: {first_line(error)}") from error


def decoder_of(model: PreTrainedModel) -> Any:
    """The part of a causal language model that has ``embed_tokens``, ``layers`` and the ``norm`` after them.

    Raises AdaptiveError for a model with another structure or with scaled logits, for which no head can be made.
    """
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not all(hasattr(decoder, name) for name in ("layers", "norm", "embed_tokens")):
        raise AdaptiveError(f"no head can be grown on a {type(model).__name__}: it is built in another way")
    for setting in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if getattr(model.config.get_text_config(), setting, None) not in (None, 1, 1.0):
            raise AdaptiveError(f"no head can be grown on a {type(model).__name__}: it scales its logits ({setting})")
    return decoder


def put_parts(parts: Parts, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Put embedding, final norm and projection into ``model``, frozen and in ``dtype``. A tensor that is both embedding
    and projection stays one parameter, so that it is held once on any device."""
    held: dict[tuple[int, torch.Size], torch.nn.Parameter] = {}
    for module, tensors in (
        (model.get_input_embeddings(), parts.embedding),
        (decoder_of(model).norm, parts.norm),
        (model.get_output_embeddings(), parts.projection),
    ):
        for name, tensor in tensors.items():
            place = tensor.data_ptr(), tensor.shape
            if place not in held:
                held[place] = torch.nn.Parameter(tensor.to(dtype), requires_grad=False)
            setattr(module, name, held[place])


@contextmanager
def opened(folder: Path) -> Iterator[list[Any]]:
    """Opens the safetensors files of a checkpoint: those in its index, or all if it has no index."""
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
    """The common prefix of the names of the text model's ``embed_tokens``, layers and norm, which may have no
    weights."""
    for name in names:
        prefix = name.removesuffix("embed_tokens.weight")
        if prefix == name or not any(other.startswith(f"{prefix}layers.0.") for other in names):
            continue
        known = (name, f"{prefix}layers.", f"{prefix}norm.")
        if f"{prefix}norm.weight" in names or all(n.startswith(known) for n in names if n.startswith(prefix)):
            return prefix
    raise AdaptiveError(f"no head can be grown on the target in {folder}: its weights have names unknown here")
