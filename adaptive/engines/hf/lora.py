"""Merges a LoRA adapter into a transformers model, and restores the original weights bit for bit.

In: a folder that PEFT wrote, or None. The delta is merged in place into the model's weights, so that it costs nothing
per token. It is always added to a pristine copy, so that the weights depend only on the last adapter. Only weights that
some adapter has changed are copied. The copies are in CPU memory for any device, because the accelerator's memory is
scarce (a large target is there). A swap has steps of one block of the model each, so that an answer can continue
between them.

A module with quantised weights would have to be quantised again with the delta. Instead, a forward hook computes the
two thin matrices beside the weights. (PEFT's own modules are not used for that: loading them calls the model's
``state_dict``, after which bitsandbytes 0.50 computes other results on CPU.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from adaptive.engines.hf.lora_config import read_config
from adaptive.errors import AdaptiveError, first_line

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
LORA_PARTS = (
    "lora_A.weight",
    "lora_B.weight",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
)


Listener = Callable[[frozenset[str]], None]


@dataclass(frozen=True)
class Delta:
    """What an adapter adds to one module's weight: ``scaling * B @ A``.

    Shapes: a (rank, in), b (out, rank), magnitude (out,) for DoRA; for an embedding, "in" is the number of embeddings
    and "out" their dimension. ``transposed``: the weight is stored as (in, out).
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    magnitude: torch.Tensor | None
    transposed: bool

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` with this delta, computed in float32 (float64 for float64) and rounded once.

        With a magnitude m (DoRA, arXiv 2402.09353, eq. 5): m * (W + D) / |W + D|, norms by output row.
        """
        kind = torch.promote_types(weight.dtype, torch.float32)
        a, b = (part.to(weight.device, kind) for part in (self.a, self.b))
        whole = weight.to(kind)
        whole = (whole.T if self.transposed else whole) + self.scaling * (b @ a)
        if self.magnitude is not None:
            magnitude = self.magnitude.to(weight.device, kind)
            whole *= (magnitude / torch.linalg.vector_norm(whole, dim=1))[:, None]
        return (whole.T if self.transposed else whole).to(weight.dtype)


class MergedAdapter:
    """The adapter of one model: none at first, then the last one applied.

    Create it before anything replaces modules of ``model``, because it merges into the modules present at creation.
    ``listeners`` are called with the names of the modules that have just changed, so that packed copies can be
    refreshed. Weights never move in memory, so recorded CUDA graphs stay valid, except for quantised modules, whose
    hooks change. ``active`` is the folder in use, None for the pristine weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.listeners: list[Listener] = []
        self.active: Path | None = None
        self._modules = dict(model.named_modules())
        self._pristine: dict[str, torch.Tensor] = {}
        self._merged: frozenset[str] = frozenset()
        self._hooks: dict[str, RemovableHandle] = {}

    def apply(self, folder: Path | None) -> None:
        """Use the adapter in ``folder``, or the pristine weights for None.

        Call it between rounds only. Raises AdaptiveError if the adapter does not fit this model or is of an unsupported
        kind, with the weights unchanged; or if merging fails, with the pristine weights.
        """
        for _ in self.steps(folder):
            pass

    def steps(self, folder: Path | None) -> Iterator[None]:
        """``apply`` in steps: the first step reads and checks the adapter, each other step merges one block.

        Another thread may do the first step while the model computes, because it changes nothing. Between later steps
        the weights are a mixture of old and new ones. If the iterator is closed at the first ``yield``, nothing has
        changed; if it is closed later, before its end, the weights are pristine.
        """
        deltas: dict[str, Delta] = {}
        if folder is not None:
            deltas = _read(folder, self._modules, self._pristine)
        beside = {name: delta for name, delta in deltas.items() if _quantised(self._modules[name])}
        inside = {name: delta for name, delta in deltas.items() if name not in beside}
        if folder is not None:
            self._check_shared(folder, inside)
        yield
        unhooked = self._unhook()
        try:
            for block in _blocks(self._merged | frozenset(inside)):
                self._merge(block, inside)
                yield
            for name, delta in beside.items():
                hook = _beside(delta, self._weight(name).device)
                self._hooks[name] = self._modules[name].register_forward_hook(hook)
        except BaseException as error:  # out of memory, or interrupted: never leave a part of an adapter merged
            self.active = None
            self._tell(unhooked | self._unhook())
            self._merge(self._merged, {})
            if isinstance(error, (RuntimeError, MemoryError)):
                raise AdaptiveError(f"adapter {folder} could not be merged ({first_line(error)})") from error
            raise
        self.active = folder
        self._tell(unhooked | frozenset(beside))

    @torch.no_grad()
    def _merge(self, names: Iterable[str], deltas: dict[str, Delta]) -> None:
        """Set these modules' weights to the pristine ones, plus the delta if there is one."""
        names = frozenset(names)
        for name in sorted(names):
            weight = self._weight(name)
            if name not in self._pristine:
                self._pristine[name] = weight.detach().to("cpu", copy=True)
            self._merged |= {name}  # from here on the weight may differ from the pristine one
            pristine = self._pristine[name].to(weight.device)
            weight.copy_(deltas[name].merged(pristine) if name in deltas else pristine)
        self._tell(names)  # before a module counts as pristine: packed copies are refreshed here, which may fail
        self._merged -= names - frozenset(deltas)

    def _tell(self, changed: frozenset[str]) -> None:
        for listener in self.listeners if changed else ():
            listener(changed)

    def _weight(self, name: str) -> torch.Tensor:
        weight: torch.Tensor = self._modules[name].get_parameter("weight")
        return weight

    def _check_shared(self, folder: Path, deltas: dict[str, Delta]) -> None:
        """Raise AdaptiveError if a delta changes a weight that another module shares, or one that is offloaded.

        The delta of one module would change the other too. Untying the weights would move them in memory and add the
        size of an embedding to a draft that should be small, so an adapter must not change tied weights.
        """
        for name in deltas:
            weight = self._weight(name)
            if weight.is_meta:
                raise AdaptiveError(
                    f"adapter {folder}: the weight of {name} is offloaded; keep the whole draft in memory"
                )
            for other, module in self._modules.items():
                if other != name and module._parameters.get("weight") is weight:
                    raise AdaptiveError(
                        f"adapter {folder} changes {name}, whose weight is also that of {other} (tied embeddings); "
                        f"train with target_modules that leave out {name.rpartition('.')[2]}"
                    )

    def _unhook(self) -> frozenset[str]:
        names = frozenset(self._hooks)
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self.active = None
        return names


def _blocks(names: Iterable[str]) -> list[frozenset[str]]:
    """Group modules by their parent: those of one attention or one feed-forward part are a block."""
    blocks: dict[str, set[str]] = {}
    for name in sorted(names):
        blocks.setdefault(name.rpartition(".")[0], set()).add(name)
    return [frozenset(block) for block in blocks.values()]


def _beside(
    delta: Delta, device: torch.device
) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]:
    """A forward hook that adds ``scaling * B A x``, computed in the adapter's dtype, to the module's output."""
    a, b, scaling = delta.a.to(device), delta.b.to(device), delta.scaling

    def add(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        extra = nn.functional.linear(nn.functional.linear(args[0].to(a.dtype), a), b) * scaling
        return (output + extra).to(output.dtype)

    return add


def _read(folder: Path, modules: dict[str, nn.Module], pristine: dict[str, torch.Tensor]) -> dict[str, Delta]:
    """The deltas of the adapter in ``folder`` by module name, checked against ``modules``."""
    config = read_config(folder)
    deltas: dict[str, Delta] = {}
    for name, parts in _tensors(folder, modules, pristine).items():
        if name not in modules:
            raise AdaptiveError(f"adapter {folder} is for another model: this one has no module {name}")
        rank, scaling = config.rank(name), config.scaling(name)
        deltas[name] = _delta(f"adapter {folder}: {name}", modules[name], parts, rank, scaling)
    if not deltas:
        raise AdaptiveError(f"adapter {folder} holds no LoRA weights")
    return deltas


def read_lora(folder: Path) -> dict[str, Delta]:
    """The deltas of the adapter in ``folder`` by module name, without modules to check them against.

    ``transposed`` marks those of embeddings. Raises AdaptiveError if the adapter cannot be read or is of an unsupported
    kind.
    """
    config = read_config(folder)
    deltas: dict[str, Delta] = {}
    for name, parts in _tensors(folder, {}, {}).items():
        rank, scaling = config.rank(name), config.scaling(name)
        embedding = "lora_embedding_A" in parts
        names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        missing = next((one for one in names if one not in parts), None)
        if missing or parts[names[0]].shape[0] != rank or parts[names[1]].shape[1] != rank:
            raise AdaptiveError(f"adapter {folder}: {name} does not have two matrices of rank {rank}")
        deltas[name] = Delta(
            parts[names[0]], parts[names[1]], scaling, parts.get("lora_magnitude_vector"), transposed=embedding
        )
    if not deltas:
        raise AdaptiveError(f"adapter {folder} holds no LoRA weights")
    return deltas


def _tensors(
    folder: Path, modules: dict[str, nn.Module], pristine: dict[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    """The adapter's tensors by module name and LoRA part."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        if not (folder / WEIGHTS).exists():
            raise AdaptiveError(f"{folder} holds no adapter: it has no {WEIGHTS}") from None
        raise AdaptiveError(f"{folder / WEIGHTS} cannot be read: {first_line(error)}") from error
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        inner = key.removeprefix(PREFIX)
        part = next((part for part in LORA_PARTS if inner.endswith(f".{part}")), None)
        if part is not None:
            if not torch.isfinite(tensor).all():
                raise AdaptiveError(f"adapter {folder}: {inner} holds values that are not finite")
            # A copy, because arithmetic on memory mapped at an unaligned address may round differently.
            found.setdefault(inner.removesuffix(f".{part}"), {})[part] = tensor.clone()
        elif not _same_embedding(inner, tensor, modules, pristine):
            raise AdaptiveError(
                f"adapter {folder}: {inner} is not a LoRA weight; train without extra modules or biases"
            )
    return found


def _same_embedding(
    key: str, tensor: torch.Tensor, modules: dict[str, nn.Module], pristine: dict[str, torch.Tensor]
) -> bool:
    """Whether ``tensor`` is the copy of an unchanged embedding that PEFT writes beside an adapter on it."""
    name = key.removesuffix(".weight").removesuffix(".base_layer")
    weight = pristine.get(name)
    if weight is None and name in modules:
        weight = modules[name]._parameters.get("weight")
    if weight is None or not key.endswith(".weight") or weight.shape != tensor.shape or not weight.is_floating_point():
        return False
    # Only one of them may have been rounded to bfloat16 (8 bits) or float16 (steps of 6e-8 near zero).
    return torch.allclose(tensor.float(), weight.detach().to("cpu", torch.float32), rtol=2**-7, atol=1e-7)


def _delta(what: str, module: nn.Module, parts: dict[str, torch.Tensor], rank: int, scaling: float) -> Delta:
    """The delta of a module from its tensors. Raises AdaptiveError, naming ``what``, if they do not fit the module."""
    from transformers.pytorch_utils import Conv1D

    embedding = "lora_embedding_A" in parts or "lora_embedding_B" in parts
    magnitude = parts.get("lora_magnitude_vector")
    if isinstance(module, nn.Linear):  # including bitsandbytes' layers
        inputs, outputs = module.in_features, module.out_features
    elif isinstance(module, Conv1D):
        inputs, outputs = module.weight.shape
    elif isinstance(module, nn.Embedding):
        inputs, outputs = module.num_embeddings, module.embedding_dim
        if magnitude is not None:
            raise AdaptiveError(f"{what} is an embedding with DoRA, which is not supported; use plain LoRA on it")
    else:
        raise AdaptiveError(f"{what} is a {type(module).__name__}; LoRA is supported on Linear, Conv1D and Embedding")
    if embedding != isinstance(module, nn.Embedding):
        raise AdaptiveError(f"{what} is a {type(module).__name__}, and the adapter's weights are for another kind")
    names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
    for name, shape in zip(names, ((rank, inputs), (outputs, rank)), strict=True):
        actual = tuple(parts[name].shape) if name in parts else None
        if actual != shape:
            raise AdaptiveError(f"{what}.{name} must have shape {shape} for this model, and has {actual or 'none'}")
    if magnitude is not None and tuple(magnitude.shape) != (outputs,):
        raise AdaptiveError(
            f"{what}.lora_magnitude_vector must have shape {(outputs,)}, and has {tuple(magnitude.shape)}"
        )
    if magnitude is not None and _quantised(module):
        raise AdaptiveError(
            f"{what} has DoRA, which cannot be used beside quantised weights; load the draft with --draft-quantize none"
        )
    if not _quantised(module) and not module.get_parameter("weight").is_floating_point():
        raise AdaptiveError(
            f"{what} has weights of type {module.get_parameter('weight').dtype}, which cannot be merged into"
        )
    return Delta(parts[names[0]], parts[names[1]], scaling, magnitude, embedding or isinstance(module, Conv1D))


def _quantised(module: nn.Module) -> bool:
    """Whether ``module`` holds quantised weights of bitsandbytes. Compares class names, because bitsandbytes may not be
    installed."""
    return type(module).__name__ in ("Linear4bit", "Linear8bitLt") and type(module).__module__.startswith(
        "bitsandbytes"
    )
