"""Reads from a loaded checkpoint its end tokens, its recommended sampling and the format of its weights."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from adaptive.types import SamplingParams


def weights(model: PreTrainedModel) -> str:
    """The number format of the weights in a model's own forward."""
    kind = getattr(model, "quantization_method", None) or model.dtype
    eight = getattr(getattr(model.config, "quantization_config", None), "load_in_8bit", False)
    return str(getattr(kind, "value", kind)).removeprefix("torch.") + ("-int8" if eight else "")


def context_of(config: Any) -> int:
    """Tokens of the longest text, by the config of a text model (``get_text_config``); 2**31 if it names none. MPT,
    whose biases have that many places, has its own name for it."""
    names = ("max_position_embeddings", "max_seq_len")
    return next((int(most) for name in names if (most := getattr(config, name, None))), 2**31)


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """The checkpoint's end-of-sequence ids; a generation config may name several."""
    ends = model.generation_config.eos_token_id if model.generation_config else None
    if ends is None:
        ends = model.config.get_text_config().eos_token_id
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


# The sampling if a checkpoint recommends none: varied answers, but few of the unlikely tokens that derail small models.
FALLBACK_SAMPLING = SamplingParams(temperature=0.7)


def recommended_sampling(model: PreTrainedModel) -> SamplingParams:
    """The sampling defaults in ``generation_config.json``, if it asks for sampling at all."""
    config = model.generation_config
    if config is None or not config.do_sample:
        return FALLBACK_SAMPLING

    def said(name: str, default: float) -> float:
        value = getattr(config, name, None)
        return default if value is None else value

    return SamplingParams(
        temperature=said("temperature", FALLBACK_SAMPLING.temperature),
        top_k=int(said("top_k", 0)),
        top_p=said("top_p", 1.0),
        min_p=said("min_p", 0.0),
        repetition_penalty=said("repetition_penalty", 1.0),
    )
