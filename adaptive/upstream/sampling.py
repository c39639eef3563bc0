"""How a server draws the tokens of a request, as the log keeps it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from adaptive.errors import AdaptiveError
from adaptive.types import SamplingParams
from adaptive.upstream.kinds import LLAMA_SERVER, Kind
from adaptive.upstream.prompts import Ask

# What a request calls each parameter.
NAMES = {
    "temperature": ("temperature",),
    "top_k": ("top_k",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "repetition_penalty": ("repetition_penalty", "repeat_penalty"),
    "presence_penalty": ("presence_penalty",),
    "frequency_penalty": ("frequency_penalty",),
}
# OpenAI's own, which servers have where nothing else is said.
DEFAULTS = {"temperature": 1.0}
# Fields that make an answer keep to something, which the reported distributions do not show.
CONSTRAINTS = (
    "grammar", "json_schema", "regex", "ebnf", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "structured_outputs",
)  # fmt: skip


def recommended(folder: Path) -> dict[str, Any]:
    """What the checkpoint in ``folder`` recommends, which vLLM, SGLang and we take where a request says nothing."""
    try:
        config = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    found = {name: config[name] for name in NAMES if isinstance(config.get(name), (int, float))}
    return found if config.get("do_sample", True) else {"temperature": 0.0}


def of_props(props: object) -> dict[str, Any]:
    """What llama.cpp's server says of itself in ``/props``."""
    settings = props.get("default_generation_settings") if isinstance(props, dict) else None
    params = settings.get("params", settings) if isinstance(settings, dict) else None
    if not isinstance(params, dict):
        return {}
    known = {name: params[other] for name, others in NAMES.items() for other in others if other in params}
    return {name: value for name, value in known.items() if isinstance(value, (int, float))}


def sampling_of(said: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """The sampling of the request ``said``. A server's seed fixes other noise than ours, so that none is kept.

    Raises AdaptiveError for parameters that the log cannot hold.
    """
    values: dict[str, Any] = {**DEFAULTS, **defaults}
    for name, others in NAMES.items():
        for other in others:
            if isinstance(said.get(other), (int, float)):
                values[name] = said[other]
    values["top_k"] = max(0, int(values.get("top_k", 0)))
    if values.get("top_p") == 0:
        values["top_p"] = 1e-9  # the likeliest token
    return SamplingParams(**values, logit_bias=_biases(said.get("logit_bias")), constrained=_constrained(said))


def _constrained(said: Mapping[str, Any]) -> bool:
    form = said.get("response_format")
    shaped = isinstance(form, dict) and form.get("type") != "text"
    forced = said.get("tool_choice") not in (None, "none", "auto")
    return shaped or forced or any(said.get(name) for name in CONSTRAINTS)


def _biases(given: object) -> dict[int, float]:
    """Biases by token id. Raises AdaptiveError for those of texts, which llama.cpp's server takes too."""
    pairs = list(given.items()) if isinstance(given, dict) else given if isinstance(given, list) else []
    try:
        return {int(token): -100.0 if bias is False else float(bias) for token, bias in pairs}
    except (TypeError, ValueError) as error:
        raise AdaptiveError("logit_bias is not by token ids") from error


def defaults_of(kind: Kind, model: str, ask: Ask, folder: Path) -> dict[str, Any]:
    """What is drawn with where a request for ``model`` says nothing; empty if that is not known. ``ask``: gets a path
    of the server."""
    if kind is not LLAMA_SERVER:
        return recommended(folder)
    return of_props(ask(f"/props?model={quote(model)}" if model else "/props", None))  # a router wants the name
