"""Makes a head on a loaded target: a head checkpoint, the head in the target's checkpoint, or a new one to be grown.

In: a ``Source`` or None, the settings and the target's engine. Out: the engine that drafts.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from adaptive.devices import choose_device
from adaptive.engines.head.kinds import HeadKind
from adaptive.engines.load import Source, forward_of, weights_progress
from adaptive.errors import AdaptiveError
from adaptive.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from adaptive.engines.head.engine import HeadEngine
    from adaptive.engines.head.foreign import ForeignHead
    from adaptive.engines.head.kinds import HeadModule
    from adaptive.engines.head.module import Head
    from adaptive.engines.hf.engine import TransformersEngine
    from adaptive.engines.protocol import Engine

logger = logging.getLogger("adaptive.engines")


def check_head(settings: Settings) -> None:
    """Raise AdaptiveError for settings that no head works with, before any weights are read."""
    import torch

    def place(name: str) -> tuple[str, int]:
        device = torch.device(name)
        return device.type, device.index or 0  # cuda is cuda:0

    where, of_target = settings.draft_device, choose_device(settings.device)
    if where is not None and place(choose_device(where)) != place(of_target):
        raise AdaptiveError(f"--draft-device {where}: a head runs where its target does, on {of_target}; leave it out")
    if settings.draft_quantize == "nf4":
        raise AdaptiveError("--draft-quantize nf4 is for models; a head is not quantised so, leave it out")


def load_head(source: Source | None, settings: Settings, target: Engine, folder: Path | None = None) -> HeadEngine:
    """The head of ``source`` on a loaded target, or, for None, the untrained head that is to be grown on it.
    ``folder``: the target's checkpoint, needed if its layers are on disk (--memory).

    The settings have passed ``check_head``. Raises AdaptiveError if the target gives no hidden states, or the head does
    not fit it.
    """
    from adaptive.engines.cpu.weights import fast_int8
    from adaptive.engines.head.engine import HeadEngine
    from adaptive.engines.hf.engine import TransformersEngine

    if not isinstance(target, TransformersEngine) or not target.feature_width:
        raise AdaptiveError(
            f"a head reads the target's hidden states, and this target, run by {target.name}, gives none; "
            "use its Hugging Face checkpoint, or another draft"
        )
    asked = settings.draft_quantize == "int8"
    int8 = asked or (settings.draft_quantize == "auto" and settings.dtype == "auto" and fast_int8())
    head = _head(source, target, None if settings.memory is None else folder, settings.trust_remote_code)
    int8 = int8 and target.device.type == "cpu"
    engine = HeadEngine(head, target, int8, grown=source is None, as_it_is=settings.memory is not None)
    if settings.cuda_graphs == "auto" and target.device.type == "cuda":
        engine.passes.record()
        engine.weights += "+graphs"
    name = "a head to be grown" if source is None else source.id
    if asked and not engine.weights.startswith("int8"):
        logger.warning("--draft-quantize int8 has no effect: %s has no int8 on this device", name)
    logger.info("%s: %s, %s, on %s", name, forward_of(engine).value, engine.weights, engine.device)
    return engine


def _head(
    source: Source | None, target: TransformersEngine, folder: Path | None, trust_remote_code: bool
) -> HeadModule:
    """The module of ``source``, or of a head to be grown. ``folder``: the checkpoint of a target whose layers are on
    disk. Raises AdaptiveError if it does not fit the target."""
    from adaptive.engines.head.eagle import Eagle3Head
    from adaptive.engines.head.module import Head
    from adaptive.engines.head.mtp import MtpHead, target_of_parts
    from adaptive.engines.head.parts import parts_beside, parts_of_model, shared_of_model

    beside = None if folder is None else parts_beside(target.model, folder, trust_remote_code)
    if source is not None and source.head is HeadKind.MTP:
        with weights_progress(lambda share: None):
            return MtpHead(target.model if beside is None else target_of_parts(beside, beside.dtype), source.folder)
    if source is not None and source.head is HeadKind.EAGLE3:
        eagle = Eagle3Head(beside or shared_of_model(target.model), source.folder)
        target.give_features_before(eagle.taps)
        return eagle
    parts = beside or parts_of_model(target.model)
    return Head(parts) if source is None else Head.read(source.folder, parts)


def head_for_training(source: Source | None, target: Path, trust_remote_code: bool) -> Head | ForeignHead:
    """The module of ``source``, or of a head to be grown, in float32, without the target's other weights. ``target`` is
    the folder of the target's checkpoint.

    Raises AdaptiveError if the head does not fit the target.
    """
    import torch

    from adaptive.engines.head.eagle import Eagle3Head
    from adaptive.engines.head.module import Head
    from adaptive.engines.head.mtp import MtpHead, target_of_parts
    from adaptive.engines.head.parts import parts_of_folder

    parts = parts_of_folder(target, trust_remote_code)
    if source is None:
        return Head(parts, torch.float32)
    if source.head is HeadKind.EAGLE3:
        return Eagle3Head(parts, source.folder, torch.float32)
    with weights_progress(lambda share: None):
        if source.head is HeadKind.MTP:
            return MtpHead(target_of_parts(parts), source.folder)
    return Head.read(source.folder, parts, torch.float32)
