"""Chooses the engine and the forward for a checkpoint on this machine, and loads its weights.

In: a ``Source`` and the settings. Out: an engine. The table in docs/architecture.md has a row for each ``Forward``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptive.devices import choose_device, quantisation
from adaptive.engines.head.kinds import HeadKind
from adaptive.engines.llamacpp.files import load_gguf
from adaptive.engines.llamacpp.model import gguf_bytes
from adaptive.errors import AdaptiveError, first_line
from adaptive.settings import Quantisation, Settings, memory_bytes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from adaptive.engines.cpu.kernels import Library
    from adaptive.engines.hf.blocks import Fit
    from adaptive.engines.hf.quantised import Quantised
    from adaptive.engines.protocol import Engine, SamplingKernels

logger = logging.getLogger("adaptive.engines")


@dataclass(frozen=True)
class Source:
    """The source of one model: ``id`` as the user typed it, ``folder`` on disk.

    ``gguf`` is the file for llama.cpp, None for a checkpoint for transformers. ``head`` is the kind of head on its
    target that the checkpoint is, or contains; None for a model by itself.
    """

    id: str
    folder: Path
    quantize: Quantisation
    gguf: Path | None = None
    head: HeadKind | None = None


class Forward(Enum):
    """The implementation that computes a model's logits."""

    LLAMA_CPP = "llama.cpp"
    CPU_FUSED = "our own on a CPU, a pass in one native call"
    CPU_NATIVE = "our own on a CPU, native linear layers"
    CPU_TORCH = "our own on a CPU, torch's operations over packed weights"
    STREAMED = "our own on a CPU, layers that do not fit read from disk"
    CUDA_GRAPHS = "transformers' own, short passes (ours or its own) replayed as CUDA graphs"
    TRANSFORMERS = "transformers' own"

    @property
    def own(self) -> bool:
        """Whether it uses our own arithmetic and cache."""
        return self is Forward.STREAMED or self in OWN.values()


OWN = {"fused": Forward.CPU_FUSED, "native": Forward.CPU_NATIVE, "torch": Forward.CPU_TORCH}


@dataclass(frozen=True)
class Choice:
    """How a model runs. ``dtype`` is None for a GGUF file. ``int8``: our own int8 linear layers. ``quantize``:
    bitsandbytes' quantisation at loading. ``held``: how the weights of a quantised checkpoint are held."""

    forward: Forward
    device: str
    dtype: torch.dtype | None = None
    int8: bool = False
    quantize: Quantisation = "none"
    held: Quantised | None = None

    @property
    def weights(self) -> str:
        """The format of the weights, as in ``Engine.weights``."""
        if self.dtype is None:
            return "gguf"
        return "int8" if self.int8 else str(self.dtype).removeprefix("torch.")

    @property
    def how(self) -> str:
        """The device and number formats of transformers' own forward."""
        return f"{self.device} {self.dtype} {self.quantize}{f' {self.held.text}' if self.held else ''}"


def choose_forward(source: Source, settings: Settings, device: str, draft: bool = False) -> Choice:
    """The forward for this model on this machine, as target or as ``draft``, without reading its weights.

    Transformers' own is used instead of our own forwards if there is no memory for their packed copy of the weights,
    and for a model that has hooks or weights of several dtypes (``forward_of`` gives the result). Raises AdaptiveError
    for an unusable device, a config that cannot be read, or an unsupported format of weights.
    """
    if settings.memory is not None and not draft:
        return _streamed_choice(source, settings, device)
    if source.gguf is not None:
        return Choice(Forward.LLAMA_CPP, device)
    import torch

    from adaptive.engines.cpu.families import forward_kind
    from adaptive.engines.cpu.weights import fast_int8
    from adaptive.engines.cuda.forward import FAMILIES

    where, config = choose_device(device), read_config(source, settings)
    dtype, name = choose_dtype(settings, where, config), class_name(config)
    graphs = settings.cuda_graphs == "auto" and where.startswith("cuda")
    if source.head not in (None, HeadKind.GROWN):
        return Choice(Forward.CUDA_GRAPHS if graphs else Forward.TRANSFORMERS, where, dtype)
    held = held_as(source, config, where, draft)
    small = draft and where == "cpu" and settings.draft_quantize in ("auto", "int8")
    if small and (settings.draft_quantize == "int8" or (settings.dtype == "auto" and fast_int8())):
        # A draft uses our own int8: bitsandbytes' saves memory, but not time.
        kind = forward_kind(name, config, dtype, torch.device(where), int8=True)
        if kind == "fused" or (kind is not None and not source.head):
            return Choice(OWN[kind], where, dtype, int8=True, held=held)
    if (small or source.quantize == "none") and (held is None or held.dense):
        kind = forward_kind(name, config, dtype, torch.device(where))
        if kind == "fused" or (kind is not None and not source.head):
            return Choice(OWN[kind], where, dtype, held=held)
    # bitsandbytes' own int8 waits for the device within a pass, which cannot be captured.
    eight = source.quantize == "int8" or (held is not None and not held.dense and bool(held.said.get("load_in_8bit")))
    captured = graphs and (not eight or name in FAMILIES)
    forward = Forward.CUDA_GRAPHS if captured else Forward.TRANSFORMERS
    if source.head:
        return Choice(forward, where, dtype)
    return Choice(forward, where, dtype, quantize=source.quantize, held=held)


def held_as(source: Source, config: Any, device: str, draft: bool = False) -> Quantised | None:
    """How the weights of a quantised checkpoint are held on ``device`` (a result of ``choose_device``); None for other
    checkpoints, and for a head.

    A draft's weights are dequantised if that is possible, except bitsandbytes' on a GPU, which can have an adapter
    beside them. Raises AdaptiveError if they cannot be read there, and if the settings ask to quantise them again.
    """
    from adaptive.engines.hf.quantised import BITSANDBYTES, method_of, quantised, settings_of

    if source.head:
        return None
    method = method_of(settings_of(config), source.folder)
    small = draft and device == "cpu" and source.quantize == "int8"
    if method is not None and source.quantize != "none" and not small:
        option = "--draft-quantize" if draft else "--quantize"
        raise AdaptiveError(f"{option} {source.quantize}: {source.id} is quantised already ({method}); leave it out")
    try:
        return quantised(config, source.folder, device, draft and (device == "cpu" or method != BITSANDBYTES))
    except AdaptiveError as error:
        raise AdaptiveError(f"model {source.id} {error}") from error


def check_readable(source: Source, settings: Settings, device: str, draft: bool = False) -> None:
    """Raise AdaptiveError if the format of a checkpoint's weights is not supported on that device, without reading
    them."""
    if source.gguf is None and not source.head:
        held_as(source, read_config(source, settings), choose_device(device), draft)


def _streamed_choice(source: Source, settings: Settings, device: str) -> Choice:
    """The choice for a target whose weights must fit into ``--memory``. Raises AdaptiveError if that is impossible."""
    import torch

    from adaptive.engines.cpu.families import forward_kind

    if source.gguf is not None:
        raise AdaptiveError("--memory is for checkpoints; llama.cpp reads a GGUF file as it needs it, leave it out")
    where = choose_device(device)
    if where != "cpu":
        raise AdaptiveError(f"--memory is for targets on the CPU, and this one runs on {where}; add --device cpu")
    if source.quantize == "nf4":
        raise AdaptiveError("--memory goes with --quantize int8 or none; nf4 weights are not streamed")
    config, int8 = read_config(source, settings), source.quantize == "int8"
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise AdaptiveError(f"{source.id} is a mixture of experts, which is not read from disk; leave --memory out")
    dtype = choose_dtype(settings, where, config)
    if forward_kind(class_name(config), config, dtype, torch.device(where), int8) != "fused":
        raise AdaptiveError(
            f"--memory is for targets whose passes are one native call here (docs/streamed.md), and {source.id} in "
            f"{'int8' if int8 else str(dtype).removeprefix('torch.')} is none; leave it out"
        )
    return Choice(Forward.STREAMED, where, dtype, int8)


def eagle_on(target: Choice) -> Choice:
    """The choice for an EAGLE-3 head on a target that runs as chosen."""
    forward = Forward.CUDA_GRAPHS if target.forward is Forward.CUDA_GRAPHS else Forward.TRANSFORMERS
    return Choice(forward, target.device, target.dtype)


def forward_of(engine: Engine) -> Forward:
    """The forward that a loaded engine runs."""
    from adaptive.engines.head.engine import HeadEngine
    from adaptive.engines.hf.engine import TransformersEngine

    if not isinstance(engine, TransformersEngine | HeadEngine):
        return Forward.LLAMA_CPP
    if engine.cpu_forward is not None:
        return OWN[engine.cpu_forward.kind] if engine.cpu_forward.plan.stream is None else Forward.STREAMED
    passes = engine if isinstance(engine, TransformersEngine) else engine.passes
    return Forward.TRANSFORMERS if passes.recorded is None else Forward.CUDA_GRAPHS


# Model types whose hidden states exceed the largest number of float16.
OVERFLOWS = ("gemma3", "gemma4")


def has_bfloat16(device: str) -> bool:
    """Whether a GPU multiplies bfloat16 itself."""
    import torch

    if device.startswith("cuda"):
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        return bool(torch.ones(1, dtype=torch.bfloat16, device=device) + 1 == 2)
    except (RuntimeError, TypeError):
        return False


def choose_dtype(settings: Settings, device: str, config: Any) -> torch.dtype:
    """The dtype of the settings; ``auto`` is bfloat16, else float16, on a GPU, and measured once on a CPU."""
    import torch

    if settings.dtype != "auto":
        dtype: torch.dtype = getattr(torch, settings.dtype)
        return dtype
    if device != "cpu":
        if has_bfloat16(device):
            return torch.bfloat16
        return torch.float32 if config.model_type.startswith(OVERFLOWS) else torch.float16
    from adaptive.engines.cpu.dtype import kept_dtype
    from adaptive.engines.cpu.families import forward_kind
    from adaptive.engines.cpu.weights import packs

    # If only the native kernels multiply bfloat16, a model that they cannot run would be emulated, and be very slow.
    cpu, half = torch.device("cpu"), torch.bfloat16
    if not packs(half, cpu) and forward_kind(class_name(config), config, half, cpu) is None:
        return torch.float32
    return kept_dtype(config.get_text_config().hidden_size, settings.state_dir)


def class_name(config: Any) -> str:
    """The class of transformers for a checkpoint with this config; empty if it is no causal language model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return str(known[type(config)].__name__) if type(config) in known else ""


def read_config(source: Source, settings: Settings) -> Any:
    """A checkpoint's config; for a model with vision only that of its language model, if transformers has a class for
    it. Raises AdaptiveError if it cannot be read."""
    from transformers import AutoConfig

    from adaptive.engines.hf.language import language_config

    try:
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=settings.trust_remote_code)
        return language_config(config)
    except Exception as error:  # a damaged or unknown checkpoint may raise anything in transformers
        raise AdaptiveError(f"model {source.id} cannot be loaded: {first_line(error)}") from error


def sampling_kernels() -> SamplingKernels | None:
    """Compiled code that chooses tokens, from any engine's logits on the CPU; None if it is not built."""
    from adaptive.engines.cpu import kernels

    found = kernels.library()
    return None if found is None else _sampling_of(found)


@cache
def _sampling_of(library: Library) -> SamplingKernels:
    from adaptive.engines.cpu.sampling import CpuSampling

    return CpuSampling(library)


def load_engine(
    source: Source, settings: Settings, device: str, tell: Callable[[float], None], draft: bool = False
) -> Engine:
    """Load the engine for this kind of file, as target or as ``draft``."""
    chosen = choose_forward(source, settings, device, draft)
    engine = _loaded(source, settings, chosen, tell)
    logger.info("%s: %s, %s, on %s", source.id, forward_of(engine).value, engine.weights, engine.device)
    return engine


def _loaded(source: Source, settings: Settings, chosen: Choice, tell: Callable[[float], None]) -> Engine:
    if source.gguf is not None:
        return load_gguf(source.gguf, settings, chosen.device, tell)
    if chosen.forward is Forward.STREAMED:
        return _streamed(source, settings, chosen, tell)
    from adaptive.engines.hf import tried
    from adaptive.engines.hf.engine import TransformersEngine

    with weights_progress(tell):
        plain, held = dataclasses.replace(source, quantize=chosen.quantize), chosen.held
        engine = TransformersEngine(load_model(plain, settings, chosen.device, chosen.dtype, held), int8=chosen.int8)
        if engine.cpu_forward is None and source.quantize != chosen.quantize and held is None:  # no memory for packing
            del engine  # its weights are freed before others are read
            gc.collect()
            engine = TransformersEngine(load_model(source, settings, chosen.device, chosen.dtype))
    engine.check()
    if engine.cpu_forward is None:
        tried.keep(settings.state_dir, source.folder, chosen.how, engine.undraftable)
    if engine.undraftable is not None:
        logger.warning("%s decodes plainly: it %s", source.id, engine.undraftable)
    if chosen.forward is Forward.CUDA_GRAPHS:
        engine.record()
        if engine.recorded is not None:
            engine.weights += "+graphs" if engine.short is None else "+own graphs"
    return engine


def _streamed(source: Source, settings: Settings, chosen: Choice, tell: Callable[[float], None]) -> Engine:
    from adaptive.engines.streamed.engine import load_streamed

    assert settings.memory is not None
    assert chosen.dtype is not None
    config, most = read_config(source, settings), memory_bytes(settings.memory)
    return load_streamed(source.folder, config, chosen.dtype, chosen.int8, most, settings.state_dir, tell)


@contextlib.contextmanager
def weights_progress(tell: Callable[[float], None]) -> Iterator[None]:
    """Pass transformers' loading progress to ``tell``, and suppress its own progress bars and messages."""
    from transformers.utils import logging

    class Counted:
        def __init__(self, items: Any = (), **_: Any) -> None:
            self.items = items

        def __iter__(self) -> Iterator[Any]:
            total = len(self.items) if hasattr(self.items, "__len__") else 0
            for number, item in enumerate(self.items):
                if total:
                    tell(number / total)
                yield item

    before = logging.set_tqdm_hook(lambda factory, args, kwargs: Counted(*args, **kwargs))
    loudness = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
        logging.set_verbosity(loudness)


def weight_bytes(source: Source | None) -> int:
    """Bytes of a source's weight files; 0 for None, and for a head in its target's files."""
    if source is not None and source.head is HeadKind.MTP:
        return 0
    if source is not None and source.gguf is not None:
        return gguf_bytes(source.gguf)
    return sum(file.stat().st_size for file in source.folder.glob("*.safetensors")) if source else 0


def four_bits(source: Source, config: Any, settings: Settings) -> Fit:
    """Which layers of a checkpoint nf4 can hold. Raises AdaptiveError if it can hold none."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from adaptive.engines.hf.blocks import nf4_fit

    language = bool(class_name(config)) or settings.trust_remote_code
    try:
        fit = nf4_fit(
            config, AutoModelForCausalLM if language else AutoModelForImageTextToText, settings.trust_remote_code
        )
    except Exception as error:  # a damaged or unknown checkpoint may raise anything in transformers
        raise AdaptiveError(f"model {source.id} cannot be loaded: {first_line(error)}") from error
    if fit.layers and fit.misfits == fit.layers:
        raise AdaptiveError(f"--quantize nf4 cannot hold {source.id}: {fit.text}; leave it out, or take int8")
    return fit


def _four_bits(source: Source, config: Any, settings: Settings, dtype: torch.dtype) -> tuple[str, ...] | None:
    """The modules that stay unquantised; None for those that transformers excludes by default."""
    fit = four_bits(source, config, settings)
    if not fit.misfits:
        return None
    logger.warning("%s: %s, the others stay in %s", source.id, fit.text, str(dtype).removeprefix("torch."))
    return fit.skip


def load_model(
    source: Source, settings: Settings, device: str, dtype: torch.dtype | None = None, held: Quantised | None = None
) -> PreTrainedModel:
    """Load a checkpoint on the requested device, in ``dtype`` or else the dtype of the settings. Weights of a quantised
    checkpoint are held as ``held`` says, or dequantised without it. Raises AdaptiveError if it cannot be loaded."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from adaptive.engines.hf.language import has_projection, is_part, text_weights, weight_names
    from adaptive.engines.hf.quantised import made_dense, quantised, tell

    where, config = choose_device(device), read_config(source, settings)
    dtype = choose_dtype(settings, where, config) if dtype is None else dtype
    renamed: dict[str, str] = {}
    if is_part(source.folder, config):
        names = weight_names(source.folder)
        renamed = text_weights(names, "model")
        config.tie_word_embeddings = not has_projection(names)
    try:
        held = quantised(config, source.folder, where, dense=True) if held is None else held
    except AdaptiveError as error:
        raise AdaptiveError(f"model {source.id} {error}") from error
    if held is not None:
        tell(config, held, renamed, dtype)
    language = bool(class_name(config)) or settings.trust_remote_code
    loader: Any = AutoModelForCausalLM if language else AutoModelForImageTextToText
    skip = _four_bits(source, config, settings, dtype) if source.quantize == "nf4" else None
    try:
        model: PreTrainedModel = loader.from_pretrained(
            source.folder,
            key_mapping=renamed or None,
            config=config,
            dtype=dtype,
            device_map={"": where},
            quantization_config=quantisation(source.quantize, dtype, skip),
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
        )
        if held is not None and held.dense:
            made_dense(model, held, dtype)
    except AdaptiveError:
        raise
    except Exception as error:  # a damaged or unknown checkpoint may raise anything in transformers
        raise AdaptiveError(f"model {source.id} cannot be loaded: {first_line(error)}") from error
    return model
