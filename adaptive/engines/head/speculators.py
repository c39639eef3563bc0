"""Exports an EAGLE-3 head in the format of the speculators library, which vLLM reads.

In: the folder of a head in either format, its target, and an optional LoRA adapter. Out: a folder with ``config.json``
and ``model.safetensors``.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from adaptive.engines.head.eagle import EagleConfig, Tensors, learned, read_eagle
from adaptive.engines.head.kinds import raw_config
from adaptive.errors import AdaptiveError, first_line
from checkpoints import files
from checkpoints.folder import filling

WEIGHTS = "model.safetensors"
# The exported draft length, which vLLM uses unless it is configured otherwise.
TOKENS = 3
# The keys of a SpecForge config that do not belong to the layer's config.
NOT_THE_LAYERS = (
    "architectures", "auto_map", "draft_vocab_size", "dtype", "eagle_aux_hidden_state_layer_ids", "eagle_config",
    "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "target_hidden_size", "torch_dtype",
    "transformers_version",
)  # fmt: skip


def write_speculators(head: Path, target: Path, name: str, destination: Path, adapter: Path | None = None) -> None:
    """Write the EAGLE-3 head in ``head``, with an optional LoRA ``adapter`` merged into it, into the folder
    ``destination``. Its target is in the folder ``target`` and is called ``name``. Raises AdaptiveError if a file
    cannot be read or written."""
    said, tensors, raw, whole = read_eagle(head), learned(head, adapter), raw_config(head), raw_config(target)
    text = whole.get("text_config") if isinstance(whole.get("text_config"), dict) else whole
    layers = text.get("num_hidden_layers") if isinstance(text, dict) else None
    if not isinstance(layers, int):
        raise AdaptiveError(f"the target in {target} cannot be read: its config.json names no number of layers")
    layer = raw.get("transformer_layer_config") or {k: v for k, v in raw.items() if k not in NOT_THE_LAYERS}
    said = replace(said, taps=said.taps_of(layers))
    save(destination, tensors, said, {**layer, "model_type": said.layer.model_type}, name, whole.get("architectures"))


def rewrite(folder: Path, tensors: Tensors, destination: Path) -> None:
    """Write the head in ``folder`` into ``destination``, with other ``tensors`` in the place of some of its own. Raises
    AdaptiveError if it cannot be read or written."""
    check_other_weights(destination)
    try:
        whole = {**load_file(folder / WEIGHTS), **tensors}
        _write(destination, whole, (folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, SafetensorError) as error:
        raise AdaptiveError(f"{destination} cannot be written ({first_line(error)}); choose another folder") from error


def save(
    destination: Path, tensors: Tensors, said: EagleConfig, layer: dict[str, Any], target: str, architectures: Any
) -> None:
    """Write a head's ``tensors`` and config into the folder ``destination``. ``layer``: the config of its layers;
    ``target``: the name of its target, of the class ``architectures``. Raises AdaptiveError if it cannot be written."""
    check_other_weights(destination)
    tensors = dict(tensors)
    d2t = tensors.get("d2t")
    if d2t is not None:
        ids = torch.arange(len(d2t)) + d2t
        tensors["t2d"] = torch.zeros(said.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    config: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": TOKENS}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": architectures or []},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": said.draft_vocab_size,
        "target_hidden_size": None if said.target_width == layer["hidden_size"] else said.target_width,
        "eagle_aux_hidden_state_layer_ids": list(said.taps or ()),
        "norm_before_residual": said.norm_before_residual,
        "norm_before_fc": said.norm_before_fc,
        "fc_norm": said.fc_norm,
        "norm_output": said.norm_output,
        "tie_word_embeddings": False,
        "dtype": str(tensors["fc.weight"].dtype).removeprefix("torch.") if "fc.weight" in tensors else "float32",
    }
    try:
        _write(destination, tensors, json.dumps(config, indent=2) + "\n")
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        reason = getattr(error, "strerror", None) or first_line(error)
        raise AdaptiveError(f"{destination} cannot be written ({reason}); choose another folder") from error


def _write(destination: Path, tensors: Tensors, config: str) -> None:
    """Write weights and config, each as a whole: a head that is there stays if there is no room for another."""
    with filling(destination):
        destination.mkdir(parents=True, exist_ok=True)
        new = files.unfinished(destination)
        try:
            save_file(tensors, new, metadata={"format": "pt"})
            os.replace(new, destination / WEIGHTS)
        finally:
            files.finished(new)
        files.replace_text(destination, destination / "config.json", config)


def check_other_weights(destination: Path) -> None:
    """Raise AdaptiveError if there are other weights in ``destination``, which would be read as parts of the head."""
    others = sorted(file.name for file in destination.glob("*.safetensors") if file.name != WEIGHTS)
    if others:
        raise AdaptiveError(
            f"{destination} holds {others[0]}, which would be read as a part of the head; choose another folder"
        )
