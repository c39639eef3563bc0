"""Computes from configs, before any weight is read, what a pair takes of a device's memory, and what fits.

In: the sources of the models and the settings. Out: a ``Budget`` for each device, with a ``text`` for users; or an
error with advice if the weights and a short text do not fit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptive.devices import choose_device, device_bytes
from adaptive.engines.load import OWN, Choice, Forward, Source, choose_forward, class_name, read_config, weight_bytes
from adaptive.errors import AdaptiveError, first_line
from adaptive.settings import Settings, memory_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

# Tokens of text that must fit beside the weights: a short chat. Too low: a loaded pair is useless. Too high: a useful
# pair is refused.
LEAST_TOKENS = 1024
# Bytes of passes besides weights and caches: activations of a piece of a prompt, logits, workspaces of libraries.
PASSES = 256 << 20
# Weights below this share of the free memory are loaded without reading their config, which takes a tenth of a second.
# Useful caches and training then fit as well.
SMALL = 0.2
# Bytes per weight in bitsandbytes' nf4, with a scale for every 64 weights, and in int8.
NF4, INT8 = 0.5 + 4 / 64, 1.0
# Bytes of a training run: the libraries, and a multiple of the draft's float32 weights, for the weights, a layer's
# gradients, the adapter with its optimiser and the logits of a batch.
TRAINING_LIBRARIES = 600 << 20
TRAINING_PER_BYTE = 4


@dataclass(frozen=True)
class Need:
    """The memory of one model on its ``device``: bytes of ``weights``, and of a ``token`` in its cache, None if unknown
    before loading. ``numbers``: the count of its weights. ``packs``: whether there is room for the packed copy of its
    weights that our forward on a CPU reads, or none is needed."""

    device: str
    weights: int
    token: int | None
    numbers: int
    packs: bool = True


@dataclass(frozen=True)
class Budget:
    """Bytes on one ``device``: ``free``, of all ``weights``, of a ``token`` in all caches, of a ``training`` run beside
    decoding (0 for none). ``context``: most tokens of a text of the target."""

    device: str
    free: int
    weights: int
    token: int | None
    training: int
    context: int

    @property
    def left(self) -> int:
        """Bytes that remain for caches and training."""
        return self.free - self.weights - PASSES

    @property
    def fits(self) -> bool:
        """Whether the models can be loaded, and a short text decoded."""
        return self.left >= LEAST_TOKENS * (self.token or 0)

    def tokens(self, training: bool) -> int | None:
        """Tokens of text that fit beside the weights, and beside a ``training`` run if that is True; None if
        unknown."""
        if not self.token:
            return None
        return min(self.context, max(0, self.left - training * self.training) // self.token)

    @property
    def text(self) -> str:
        """The budget in one line."""
        said = f"{_size(self.weights)} of weights"
        said += f", {self.token / 1e3:.0f} kB a token of text" if self.token else ""
        said += f", {_size(self.training)} to train" if self.training else ""
        said += f"; {_size(self.free)} are free on {self.device}"
        if not self.fits:
            return f"{said}, which is not enough"
        alone, beside = self.tokens(False), self.tokens(True)
        if alone is None or beside is None:
            return f"{said}, and {'training fits' if self.training <= self.left else 'training does not fit'} beside"
        room = f"{said}: texts of {alone:,} tokens fit"
        if not self.training:
            return room
        return f"{room}, {beside:,} while it trains" if beside >= LEAST_TOKENS else f"{room}, and no training beside"


def budgets(
    target: Source, draft: Source | None, grows: bool, settings: Settings, checkpoint: Source | None = None
) -> list[Budget]:
    """The budget of a pair on each device that it uses; ``checkpoint``: that of a GGUF draft, if training has one.
    Raises AdaptiveError for a config that cannot be read."""
    needs = [need(target, settings, settings.device)]
    if draft is not None:
        where = settings.device if draft.head else settings.draft_device or settings.device
        needs.append(need(draft, settings, where, draft=True, beside=needs[0]))
    learns = 4 * needs[-1].numbers if draft is not None and not draft.head else 0
    if draft is not None and draft.gguf is not None and checkpoint is not None:
        learns = 4 * need(checkpoint, settings, "cpu", draft=True).numbers
    if grows or (draft is not None and draft.head):  # a head's layer, with the target's embedding and projection
        learns = 4 * _layer_of(target, settings)
    if settings.distill == "off":
        learns = 0
    trains_on = needs[-1].device
    found = []
    for device in dict.fromkeys(one.device for one in needs):
        here = [one for one in needs if one.device == device]
        known = [one.token for one in here if one.token is not None]
        training = TRAINING_LIBRARIES + TRAINING_PER_BYTE * learns if learns and device == trains_on else 0
        token = sum(known) if len(known) == len(here) else None
        weights = sum(one.weights for one in here)
        found.append(Budget(device, device_bytes(device), weights, token, training, _context(target, settings)))
    return found


def check(target: Source, draft: Source | None, grows: bool, settings: Settings) -> None:
    """Raises AdaptiveError with advice if a pair does not fit into memory."""
    where = choose_device(settings.device)
    if (weight_bytes(target) + weight_bytes(draft)) < SMALL * device_bytes(where) and not settings.draft_device:
        return
    short = next((one for one in budgets(target, draft, grows, settings) if not one.fits), None)
    if short is None:
        return
    least = short.weights + PASSES + LEAST_TOKENS * (short.token or 0)
    raise AdaptiveError(
        f"{target.id} does not fit{f' beside {draft.id}' if draft else ''}: weights, passes and a text of "
        f"{LEAST_TOKENS} tokens take {_size(least)}, and {_size(short.free)} are free on {short.device}; "
        f"{', or '.join(ways_out(target, draft, grows, settings))}"
    )


def ways_out(target: Source, draft: Source | None, grows: bool, settings: Settings) -> Iterator[str]:
    """Changes with which the pair would fit, as far as known."""
    for said, changed in _changes(target, draft, settings):
        other, without = changed
        try:
            if all(one.fits for one in budgets(*other, grows and draft is None, without)):
                yield said
        except AdaptiveError:  # a model that cannot be quantised like this
            continue
    yield "take a smaller target, or free memory"


def _changes(
    target: Source, draft: Source | None, settings: Settings
) -> Iterator[tuple[str, tuple[tuple[Source, Source | None], Settings]]]:
    if draft is not None and not draft.head:
        if choose_device(settings.device) != "cpu" and settings.draft_device is None:
            cpu = settings.model_copy(update={"draft_device": "cpu"})
            yield "give --draft-device cpu", ((target, draft), cpu)
        yield "give --draft none", ((target, None), settings)
    if target.gguf is None and target.quantize == "none":
        quantised = dataclasses.replace(target, quantize="nf4")
        yield "give --quantize nf4", ((quantised, draft), settings)
        if draft is not None:
            yield "give --quantize nf4 with --draft none", ((quantised, None), settings)


def need(source: Source, settings: Settings, device: str, draft: bool = False, beside: Need | None = None) -> Need:
    """The memory of one model, which is loaded after the model with the need ``beside``. Raises AdaptiveError for a
    config that cannot be read."""
    if source.gguf is not None or source.head:  # their configs do not describe a model
        return Need(_named(choose_device(device)), weight_bytes(source), None if source.gguf else 0, 0)
    import torch

    chosen = choose_forward(source, settings, device, draft)
    where = _named(chosen.device)
    assert chosen.dtype is not None
    config = read_config(source, settings)
    model = _skeleton(source, config, settings)
    parameters = {id(one): one for one in model.parameters()}.values()
    numbers, keys = sum(one.numel() for one in parameters), chosen.dtype.itemsize
    more: int | None = 0  # bytes beside the packed copy of the weights; None if there is no room for the copy
    if chosen.forward in OWN.values():
        free = device_bytes(where) - (beside.weights if beside is not None and beside.device == where else 0)
        more = _beside_copy(source, chosen, model, numbers, free)
        if more is None:
            chosen = without_copy(chosen, source)
    if chosen.forward.own:  # bfloat16 only with native attention, which is certain for these two forwards
        native = chosen.forward in (Forward.CPU_FUSED, Forward.STREAMED)
        keys = 2 if native and chosen.dtype == torch.bfloat16 else 4
    token = keys * _cached(config.get_text_config())
    weights = sum(int(one.numel() * _bytes(name, one, chosen, model)) for name, one in model.named_parameters())
    weights += more or 0
    if chosen.held is not None and not chosen.held.dense:  # kept quantised: about as large as its files
        weights = weight_bytes(source)
    if chosen.forward is Forward.STREAMED and settings.memory is not None:
        weights = min(weights, memory_bytes(settings.memory))
    return Need(where, weights, token, numbers, packs=more is not None)


def _beside_copy(source: Source, chosen: Choice, model: nn.Module, numbers: int, free: int) -> int | None:
    """Bytes of a model's weights, ``numbers`` in all, that stay in memory beside the packed copy of them; None if
    ``free`` bytes have no room for the copy. Weights in the dtype of their file are pages of that file, which the
    system can drop."""
    from adaptive.engines.cpu.families import copied, has_room

    assert chosen.dtype is not None
    size, copy = chosen.dtype.itemsize, copied(model)
    converted = numbers if chosen.held else min(numbers, _converted(source.folder, chosen.dtype))
    if not has_room(copy, chosen.dtype, free - size * converted):
        return None
    return size * min(converted, copy)  # other weights are not packed, and counted once


def without_copy(chosen: Choice, source: Source) -> Choice:
    """How a model runs if there is no memory for the packed copy of its weights that the ``chosen`` forward reads."""
    quantize = source.quantize if chosen.held is None else "none"
    return dataclasses.replace(chosen, forward=Forward.TRANSFORMERS, int8=False, quantize=quantize)


def _converted(folder: Path, dtype: torch.dtype) -> int:
    """How many of the numbers in a checkpoint's files are of another dtype, so that they are converted when loaded."""
    from safetensors import SafetensorError, safe_open

    from adaptive.engines.streamed.checkpoint import DTYPES

    total = 0
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, "pt") as opened:
                parts = [opened.get_slice(name) for name in opened.keys()]  # noqa: SIM118 - it is no dictionary
                total += sum(math.prod(one.get_shape()) for one in parts if DTYPES.get(one.get_dtype()) != dtype)
        except (OSError, SafetensorError):  # loading the file later reports the error
            continue
    return total


def _named(device: str) -> str:
    """The device with its number."""
    return "cuda:0" if device == "cuda" else device


def _skeleton(source: Source, config: Any, settings: Settings) -> nn.Module:
    """The model without its weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    language = bool(class_name(config)) or settings.trust_remote_code
    loader: Any = AutoModelForCausalLM if language else AutoModelForImageTextToText
    try:
        with torch.device("meta"):
            model: nn.Module = loader.from_config(config, trust_remote_code=settings.trust_remote_code)
    except Exception as error:  # a damaged or unknown checkpoint may raise anything in transformers
        raise AdaptiveError(f"model {source.id} cannot be loaded: {first_line(error)}") from error
    return model


def _bytes(name: str, parameter: nn.Parameter, chosen: Choice, model: nn.Module) -> float:
    """Bytes of one number of a parameter."""
    import torch

    assert chosen.dtype is not None
    module = model.get_submodule(name.rpartition(".")[0])
    projection: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if type(module) is not torch.nn.Linear or parameter.ndim != 2:
        return chosen.dtype.itemsize
    if chosen.int8:
        return INT8
    if chosen.quantize == "none" or module is projection:
        return chosen.dtype.itemsize
    return NF4 if chosen.quantize == "nf4" else INT8


def _cached(config: Any) -> int:
    """Numbers per token in a cache: keys and values of each attention layer."""
    from adaptive.engines.hf.cache import ATTENTION, layer_kinds
    from adaptive.engines.hf.kinds import Kinds

    if not getattr(config, "is_heterogeneous", False):
        layers = Kinds.of(config).attention
        return layers * _keys_and_values(config) if layers else 0  # without attention a config may name no heads
    each = zip(layer_kinds(config), config.per_layer_config, strict=True)
    return sum(_keys_and_values(layer) for kind, layer in each if kind in ATTENTION)


def _keys_and_values(config: Any) -> int:
    """Numbers per token in the keys and values of one layer."""
    heads = int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 2 * int(getattr(config, "num_key_value_heads", None) or heads) * size


def _layer_of(target: Source, settings: Settings) -> int:
    """Approximate numbers of a head on the target: its own layer, with the target's embedding and projection."""
    config = read_config(target, settings).get_text_config()
    width, vocab = int(config.hidden_size), int(config.vocab_size)
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    return width * (2 * vocab + 4 * width + 3 * inner)


def _context(target: Source, settings: Settings) -> int:
    """Tokens of the target's longest text, according to its config; 2**31 if that is unknown."""
    if target.gguf is not None:
        return 2**31
    from adaptive.engines.hf.generation import context_of

    return context_of(read_config(target, settings).get_text_config())


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"
