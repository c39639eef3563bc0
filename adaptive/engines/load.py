"""The engines of a pair: loading their weights, and what is compiled for them.

In: a ``Source`` and the settings. Out: an engine for this kind of file, on the kernels that there are here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptive.devices import choose_device, choose_dtype, quantisation
from adaptive.engines.llamacpp.files import load_gguf
from adaptive.errors import AdaptiveError, first_line
from adaptive.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from adaptive.engines.cpu.compiled import Compilation
    from adaptive.engines.protocol import Engine
    from adaptive.pair import Source

# Bytes of a draft's weights below which, where there are no kernels of our own, `auto` compiles it in its own dtype
# rather than run it in int8, which cannot be compiled. The small operations that compiling saves took 0.1 ms of a pass,
# in which some 8 MB are read.
SMALL_DRAFT = 8_000_000


def lacks_kernels(engine: Engine) -> bool:
    """Whether this processor could run the engine faster with products that were not built."""
    from adaptive.engines.cpu import kernels
    from adaptive.engines.hf.engine import TransformersEngine

    if not isinstance(engine, TransformersEngine) or engine.device.type != "cpu":
        return False
    return engine.weights in ("float32", "bfloat16") and bool(kernels.runnable()) and kernels.library() is None


def compile_pair(settings: Settings, target: Engine, draft: Engine | None) -> Compilation | None:
    """Begin to compile, or on CUDA to record, what can be of a pair; None where our own kernels are in use, which are
    faster than what would be compiled. Raises AdaptiveError where there is nothing of all that."""
    from adaptive.engines.cpu.compiled import compilable
    from adaptive.engines.hf.engine import TransformersEngine

    wanted, recorded, ours = [], 0, 0
    for engine in (target, draft):
        if not isinstance(engine, TransformersEngine):
            continue
        if engine.lean is not None and engine.lean.plan.head.ours:
            ours += 1
        elif engine.lean is not None and compilable(engine.lean.plan):
            wanted.append(engine)
            engine.weights += "+compiled"
        elif engine.device.type == "cuda" and not engine.weights.endswith("-int8"):  # which waits for the device
            engine.record()
            engine.weights += "+recorded"
            recorded += 1
    if wanted or recorded:
        return compile_passes(
            target if target in wanted else None, draft if draft in wanted else None, settings.state_dir / "compiled"
        )
    if ours:
        return None
    raise AdaptiveError(
        "--compile is for checkpoints, of known architectures and not quantised by bitsandbytes on the CPU, of any "
        "on CUDA, and nothing here is one; leave it out"
    )


def compile_passes(target: Engine | None, draft: Engine | None, folder: Path) -> Compilation:
    """Begin to compile the passes of models whose plans are ``compilable``, whatever they run on now."""
    from adaptive.engines.cpu.compiled import OF_DRAFT, OF_TARGET, Compilation
    from adaptive.engines.hf.engine import TransformersEngine

    wanted = [
        (engine.lean, passes)
        for engine, passes in ((target, OF_TARGET), (draft, OF_DRAFT))
        if isinstance(engine, TransformersEngine) and engine.lean is not None
    ]
    return Compilation(wanted, folder)


def load_engine(
    source: Source, settings: Settings, device: str, tell: Callable[[float], None], draft: bool = False
) -> Engine:
    """The engine that runs this kind of file, as target or as ``draft``."""
    if source.gguf is not None:
        return load_gguf(source.gguf, settings, device, tell)
    from adaptive.engines.cpu.kernels import library
    from adaptive.engines.cpu.weights import fast_int8
    from adaptive.engines.hf.engine import TransformersEngine

    with weights_progress(tell):
        if draft and settings.draft_quantize in ("auto", "int8") and choose_device(device) == "cpu":
            # A draft's int8 products of our own: bitsandbytes' are for the memory they save, not for speed.
            plain = dataclasses.replace(source, quantize="none")
            small = settings.compile and library() is None and weight_bytes(source) < SMALL_DRAFT
            wanted = settings.draft_quantize == "int8" or (settings.dtype == "auto" and fast_int8() and not small)
            engine = TransformersEngine(load_model(plain, settings, device), int8=wanted)
            if source.quantize == "none" or engine.lean is not None:
                return engine
        return TransformersEngine(load_model(source, settings, device))


@contextlib.contextmanager
def weights_progress(tell: Callable[[float], None]) -> Iterator[None]:
    """Hear from transformers how far it is with the weights, instead of letting it draw bars of its own."""
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
    """Of the files that a source's weights lie in; 0 for none."""
    if source is not None and source.gguf is not None:
        return source.gguf.stat().st_size
    return sum(file.stat().st_size for file in source.folder.glob("*.safetensors")) if source else 0


def load_model(source: Source, settings: Settings, device: str) -> PreTrainedModel:
    """A checkpoint in the dtype and on the device asked for. Raises AdaptiveError where it cannot be loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    where = choose_device(device)
    try:
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=settings.trust_remote_code)
        dtype = choose_dtype(settings.dtype, where, config)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source.folder,
            config=config,
            dtype=dtype,
            device_map={"": where},
            quantization_config=quantisation(source.quantize, dtype),
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
        )
    except AdaptiveError:
        raise
    except Exception as error:  # whatever a damaged or unknown checkpoint makes transformers say
        raise AdaptiveError(f"model {source.id} cannot be loaded: {first_line(error)}") from error
    return model
