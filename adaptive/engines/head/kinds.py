"""Which heads there are, told by a checkpoint's files without reading its weights, and what an engine asks of one."""

from __future__ import annotations

import json
import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from adaptive.engines.hf.language import weight_names

if TYPE_CHECKING:
    import torch
    from transformers import Cache

# Model types whose own head is known to draft here as transformers computes it (tests/test_mtp.py). A type that is not
# among them is taken for one without.
HAVE_MTP = frozenset(
    {
        "deepseek_v3",
        "glm4_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
    }
)


# Ends of names of weights that are packed in a way in which a head's are not read.
PACKED = (".qweight", ".weight_packed", ".weight.absmax", ".SCB", "_blocks")


class HeadKind(Enum):
    """Where a head comes from. The value is what rounds and records call it."""

    GROWN = "head"
    MTP = "mtp"
    EAGLE3 = "eagle3"

    @property
    def words(self) -> str:
        """What it is, for people."""
        return WORDS[self]


WORDS = {
    HeadKind.GROWN: "a head, grown here",
    HeadKind.MTP: "the multi-token head in the target's own checkpoint",
    HeadKind.EAGLE3: "an EAGLE-3 head",
}


class HeadModule(Protocol):
    """A head on a loaded target, whose tensors it shares.

    A row reads a token and the feature of the token before it, and predicts the token after it; its own hidden state
    is the feature that the next row reads where the target has none yet. ``config`` is by which a cache for it is
    made, ``width`` how many numbers its own feature has, ``reads`` how many the target's that it is made from,
    ``body`` the module that has its weights, ``vocab_size`` what its logits are over. ``begins``: 0 where a text's
    first token has a row too, which then reads zeros, else 1.
    """

    kind: HeadKind
    config: Any
    width: int
    reads: int
    body: Any
    begins: int

    @property
    def vocab_size(self) -> int:
        """See above."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    def dtype(self) -> torch.dtype:
        """In what it computes."""

    def of_target(self, features: torch.Tensor) -> torch.Tensor:
        """What rows read of the target's features (..., reads): (..., width)."""

    def __call__(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        """Hidden states (B, T, width) of rows with tokens (B, T), features (B, T, width) and positions (B, T).

        ``attention_mask`` (B, 1, T, keys), which is added to the scores; without one rows see all rows before them.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (..., vocab_size) of hidden states (..., width)."""

    def eval(self) -> Any:
        """As it is to draft."""


def head_kind(folder: Path) -> HeadKind | None:
    """What kind of head a checkpoint is that is no model by itself; None for a model."""
    config = raw_config(folder)
    if isinstance(config.get("head"), dict):
        return HeadKind.GROWN
    named = config.get("architectures")
    architectures = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    if config.get("speculators_model_type") == "eagle3" or any("eagle3" in name.lower() for name in architectures):
        return HeadKind.EAGLE3
    return None


def raw_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's ``config.json`` as it stands there; nothing where it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def mtp_weights(folder: Path) -> re.Pattern[str] | None:
    """The names of the first multi-token layer's weights in the target's checkpoint in ``folder``; None where there is
    none that is known here, or it is packed in four bits. Published checkpoints number it behind the model's layers, or
    have it under ``mtp``."""
    config = raw_config(folder)
    if config.get("model_type") not in HAVE_MTP:
        return None
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    layers = text.get("num_hidden_layers")
    names = weight_names(folder)
    for pattern, fuse in (
        (r"^mtp\.(?!layers\.[1-9])", "mtp.fc.weight"),
        (rf"^model\.layers\.{layers}\.", f"model.layers.{layers}.eh_proj.weight"),
    ):
        if fuse in names:
            found = re.compile(pattern)
            packed = any(found.search(name) and name.endswith(PACKED) for name in names)
            return None if packed else found
    return None
