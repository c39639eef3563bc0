"""The kinds of heads, recognised by a checkpoint's files without reading weights, and a head module's interface."""

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

# Model types whose multi-token head is tested to give the same results here as in transformers (tests/test_mtp.py). Any
# other type is treated as one without such a head.
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


# Endings of the names of packed weights, which cannot be read for a head.
PACKED = (".qweight", ".weight_packed", ".weight.absmax", ".SCB", "_blocks")


class HeadKind(Enum):
    """The origin of a head. The value is its name in rounds and records."""

    GROWN = "head"
    MTP = "mtp"
    EAGLE3 = "eagle3"

    @property
    def words(self) -> str:
        """A description for users."""
        return WORDS[self]


WORDS = {
    HeadKind.GROWN: "a head, grown here",
    HeadKind.MTP: "the multi-token head in the target's own checkpoint",
    HeadKind.EAGLE3: "an EAGLE-3 head",
}


class HeadModule(Protocol):
    """A head on a loaded target, whose tensors it shares.

    A row reads a token and the feature of the token before it, and predicts the token after it. Its hidden state is
    the feature for the next row as long as the target has none. ``config``: the config for the head's cache.
    ``width``: the size of the head's own feature; ``reads``: the size of the target's features that it is made from.
    ``body``: the module with the weights. ``vocab_size``: the width of the logits. ``ids`` (N,): the draft
    vocabulary, None for all of the target's tokens. ``begins``: 0 if the first token of a text has a row too, which
    then reads zeros as its feature; 1 if it has none.
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
    def ids(self) -> torch.Tensor | None:
        """See above."""

    @property
    def device(self) -> torch.device:
        """The device of the computation."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation."""

    def of_target(self, features: torch.Tensor) -> torch.Tensor:
        """The features (..., width) for rows, made from the target's features (..., reads)."""

    def __call__(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        """Hidden states (B, T, width) of rows with tokens (B, T), features (B, T, width) and positions (B, T).

        ``attention_mask`` (B, 1, T, keys) is added to the scores; without one, rows attend to all rows before them.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (..., vocab_size) of hidden states (..., width), -inf outside the draft vocabulary."""

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (..., N) of the tokens of the draft vocabulary, of hidden states (..., width)."""

    def eval(self) -> Any:
        """Switch to evaluation mode; see ``nn.Module.eval``."""


def head_kind(folder: Path) -> HeadKind | None:
    """The kind of head in a checkpoint that is not a model by itself; None for a model."""
    config = raw_config(folder)
    if isinstance(config.get("head"), dict):
        return HeadKind.GROWN
    named = config.get("architectures")
    architectures = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    if config.get("speculators_model_type") == "eagle3" or any("eagle3" in name.lower() for name in architectures):
        return HeadKind.EAGLE3
    return None


def raw_config(folder: Path) -> dict[str, Any]:
    """The unprocessed ``config.json`` of a checkpoint; empty if it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def mtp_weights(folder: Path) -> re.Pattern[str] | None:
    """A pattern for the names of the first multi-token layer's weights in the target's checkpoint in ``folder``; None
    if there is no such layer, its model type is not supported, or its weights are packed. Published checkpoints number
    the layer after the model's layers, or name it ``mtp``."""
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
