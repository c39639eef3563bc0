"""Reads from an adapter's ``adapter_config.json`` what a merge needs: the rank and the scaling of each module.

Does not use PEFT, whose import would take a second of processor time at every start with an adapter, or at the first
swap of a server.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field, ValidationError

from adaptive.errors import AdaptiveError, first_line

CONFIG = "adapter_config.json"
Value = TypeVar("Value")

# Options that change the model by more than one product of two matrices for each module.
UNSUPPORTED = (
    "modules_to_save", "target_parameters", "trainable_token_indices", "layer_replication", "lora_bias",
    "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config",
    "megatron_config",
)  # fmt: skip
# Initialisations of the two matrices that do not change the base weights.
STARTS = (True, False, "gaussian", "eva", "orthogonal")


class AdapterConfig(BaseModel, frozen=True):
    """The keys that a merge needs, with PEFT's defaults. A pattern names modules by a regular expression."""

    peft_type: str = "of no kind"
    r: int = Field(default=8, gt=0)
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    init_lora_weights: bool | str | None = True

    def rank(self, module: str) -> int:
        """Rank of the two matrices of ``module``."""
        return _matching(self.rank_pattern, module, self.r)

    def scaling(self, module: str) -> float:
        """The factor of their product: alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv 2312.03732)."""
        alpha, rank = _matching(self.alpha_pattern, module, self.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _matching(patterns: dict[str, Value] | None, module: str, otherwise: Value) -> Value:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise


def read_config(folder: Path) -> AdapterConfig:
    """The configuration of the adapter in ``folder``. Raises AdaptiveError for anything that a merge cannot express."""
    file = folder / CONFIG
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
        config = AdapterConfig.model_validate(written)
    except FileNotFoundError:
        raise AdaptiveError(f"{folder} holds no adapter: it has no {CONFIG}") from None
    except ValidationError as error:
        found = error.errors()[0]
        place = ".".join(map(str, found["loc"])) or "it"
        raise AdaptiveError(f"{file} cannot be read: {place}: {found['msg']}") from error
    except (OSError, ValueError) as error:
        raise AdaptiveError(f"{file} cannot be read: {first_line(error)}") from error
    if config.peft_type != "LORA":
        raise AdaptiveError(f"adapter {folder} is {config.peft_type}, not LoRA; only LoRA adapters can be used")
    for name in UNSUPPORTED:
        if written.get(name):
            raise AdaptiveError(f"adapter {folder} uses {name}, which is not supported; train it without")
    if config.init_lora_weights not in STARTS:
        raise AdaptiveError(
            f"adapter {folder} was started with {config.init_lora_weights}, which changes the base weights; "
            "convert it to plain LoRA"
        )
    return config
