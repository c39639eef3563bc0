"""Finds the language model within a multimodal checkpoint, so that it can be loaded alone for text.

In: a checkpoint's config and the names of its weights. Out: the config of the language model, and patterns that rename
its weights. Weights for vision and audio are not read, and the language model has its usual forward.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

# Text parts without a language model class in transformers, and the model types that compute the same for text. The
# text parts' rotary embeddings use three positions, which are equal for text.
SAME_ON_TEXT = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}


def language_config(config: Any) -> Any:
    """The config of the language model within a model of this config. The same config if it is a language model's, or
    if transformers has no class for the text part alone."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config(decoder=True)
    if text is config or getattr(config, "is_encoder_decoder", False):
        return config
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        alone = copy.deepcopy(text)
    elif text.model_type in SAME_ON_TEXT:
        kind = SAME_ON_TEXT[text.model_type]
        given = {name: value for name, value in text.to_dict().items() if name != "model_type"}
        ropes = given.get("rope_parameters") or {}
        given["rope_parameters"] = {name: value for name, value in ropes.items() if not name.startswith("mrope")}
        alone = CONFIG_MAPPING[kind](**given)
    else:
        return config
    for name in ("eos_token_id", "bos_token_id", "pad_token_id", "quantization_config"):
        if getattr(config, name, None) is not None:
            setattr(alone, name, getattr(config, name))
    if alone.dtype is None:
        alone.dtype = config.dtype
    return alone


def is_part(folder: Path, config: Any) -> bool:
    """Whether ``config`` describes only the language model of the checkpoint in ``folder``. The config of the whole may
    name the text part's values beside those of vision, as published ones of Qwen 2 and 2.5 VL do."""
    whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return whole.get("model_type") != config.model_type and not {"text_config", "vision_config"}.isdisjoint(whole)


def weight_names(folder: Path) -> set[str]:
    """The names of all weights in a checkpoint, from the headers of its files."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, "pt") as opened:
                names |= set(opened.keys())
        except (OSError, SafetensorError):  # loading the file later reports the error
            continue
    return names


def text_weights(names: set[str], base: str) -> dict[str, str]:
    """Patterns for the beginnings of the names of the text part's weights, each with its replacement for a language
    model with this ``base`` prefix. Empty if the names are right already, or no text part is found."""
    for name in names:
        prefix = name.removesuffix("embed_tokens.weight")
        if prefix != name and any(other.startswith(f"{prefix}layers.0.") for other in names):
            break
    else:
        return {}
    found = {} if prefix == f"{base}." else {f"^{prefix.replace('.', chr(92) + '.')}": f"{base}."}
    heads = [name for name in names if name.endswith(".lm_head.weight")]
    if heads and "lm_head.weight" not in names:
        found[f"^{heads[0].replace('.', chr(92) + '.')}"] = "lm_head.weight"
    return found


def has_projection(names: set[str]) -> bool:
    """Whether the weights include a vocabulary projection, so that it is not tied to the embedding. A quantised
    projection has other names than ``weight``."""
    return any(".lm_head." in f".{name}" for name in names)
