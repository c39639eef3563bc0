"""The multi-token head inside a target's checkpoint, computed by transformers' module for it (``MtpModel``).

Row i reads token x_i and the feature f_(i-1), the target's hidden state at token i - 1 **after** its final norm. It
predicts x_(i+1) through the target's projection. The first token of a text has no token before it, hence no row. While
the head drafts, its own hidden state h_i, after the head's own norm, is the feature of the next row: ::

    h_i = post_norm(layer(eh_proj([enorm(embed(x_i)), hnorm(f_(i-1))]))),    logits_i = projection(h_i)

If a checkpoint has several such layers, only the first is used, for every step of a proposal: it was trained on the
target's hidden states, and its own hidden state replaces them. In: a loaded target and its folder. Out: a module.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from adaptive.engines.head.foreign import ForeignHead
from adaptive.engines.head.kinds import HeadKind, mtp_weights
from adaptive.engines.head.parts import Parts, decoder_of, opened, put_parts
from adaptive.engines.hf.cache import ATTENTION, layer_kinds
from adaptive.engines.hf.features import final_norm
from adaptive.engines.hf.quantised import multiplied
from adaptive.errors import AdaptiveError, first_line
from adaptive.installation import install_command, requirement

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


class MtpHead(ForeignHead):
    """A multi-token head as a module. ``body`` is transformers' ``MtpModel`` with one layer."""

    kind = HeadKind.MTP
    ids = None

    def __init__(self, target: PreTrainedModel, folder: Path) -> None:
        """Load the head from the checkpoint of ``target`` in ``folder``, on the target's device and in its dtype.
        Raises AdaptiveError if there is none or it is not supported."""
        super().__init__()
        norm = final_norm(target)
        pattern = mtp_weights(folder)
        if pattern is None or norm is None:
            raise AdaptiveError(f"the checkpoint in {folder} has no multi-token head that is known here")
        self.body = _loaded(target, folder, pattern)
        self.norm = norm
        self.config = self.body.config
        self.width = self.reads = int(self.config.hidden_size)
        strange = set(layer_kinds(self.config)) - ATTENTION
        if strange:
            raise AdaptiveError(
                f"the multi-token head in {folder} has layers of {min(strange).replace('_', ' ')}, which do not draft "
                "here; name another draft"
            )

    @property
    def vocab_size(self) -> int:
        """See ``HeadModule``."""
        return int(self.body.shared_head.weight.shape[0])

    @property
    def _fusing(self) -> nn.Linear:
        found: nn.Linear = self.body.layers[0].eh_proj
        return found

    def of_target(self, features: torch.Tensor) -> torch.Tensor:
        """The target's hidden states (..., width) after its final norm."""
        found: torch.Tensor = self.norm(features.to(self.dtype))
        return found

    def forward(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        """Hidden states (B, T, width); see ``HeadModule``."""
        features = features.to(self.dtype)
        with self._masked(attention_mask):
            hidden: torch.Tensor = self.body.forward_layer(0, features, position_ids, past_key_values, input_ids=tokens)
        return hidden

    @contextmanager
    def _masked(self, mask: torch.Tensor | None) -> Iterator[None]:
        """Make transformers' module use ``mask`` inside the context, instead of the mask that it makes itself."""
        if mask is not None:
            self.body.create_masks_for_mtp_layer = lambda *_, **__: {"attention_mask": mask}
        try:
            yield
        finally:
            vars(self.body).pop("create_masks_for_mtp_layer", None)

    def get_output_embeddings(self) -> nn.Module:
        """See the base."""
        found: nn.Module = self.body.shared_head
        return found

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``HeadModule``."""
        found: torch.Tensor = self.body._project_to_logits(hidden)
        return found


def target_of_parts(parts: Parts, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A target that serves its head alone: it has embedding, final norm and projection in ``dtype``, and its layers
    have no weights. Raises AdaptiveError if the model has another structure."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        target: Any = AutoModelForCausalLM.from_config(parts.config, dtype=dtype)
    put_parts(parts, target, dtype)
    decoder = decoder_of(target)
    decoder.rotary_emb = type(decoder.rotary_emb)(decoder.config)  # its tables are computed, not read
    made: PreTrainedModel = target.eval()
    return made


def _loaded(target: PreTrainedModel, folder: Path, pattern: re.Pattern[str]) -> Any:
    """transformers' module with the weights whose names match. Raises AdaptiveError if it cannot be loaded."""
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise AdaptiveError(
            "this version of transformers knows no multi-token heads; "
            f"install another: {install_command(requirement('transformers'))}"
        ) from error
    device = torch.device(str(target.get_input_embeddings().weight.device))
    try:
        with _readable(folder, pattern) as readable, _described(target, readable, pattern):
            body = MtpModel.from_pretrained(target, device_map={"": device}).eval()
    except Exception as error:  # transformers raises many kinds of errors for a damaged or unknown checkpoint
        raise AdaptiveError(
            f"the multi-token head in {folder} cannot be loaded ({first_line(error)}); name another draft, or "
            "--draft none"
        ) from error
    for parameter in body.parameters():  # from a quantised checkpoint they may keep the file's dtype
        parameter.data = parameter.data.to(target.get_input_embeddings().weight.dtype)
    return body


@contextmanager
def _readable(folder: Path, pattern: re.Pattern[str]) -> Iterator[Path]:
    """A folder with the layer's weights in a form that ``MtpModel`` reads: the checkpoint's, or for fp8 weights a
    temporary one with the dequantised weights. For a target that keeps fp8, ``MtpModel`` would ignore the scales."""
    with opened(folder) as files:
        mine = [(file, name) for file in files for name in file.keys() if pattern.search(name)]  # noqa: SIM118
        if not any(file.get_slice(name).get_dtype().startswith("F8") for file, name in mine):
            yield folder
            return
        tensors = multiplied({name: file.get_tensor(name) for file, name in mine})
    if tensors is None:
        raise AdaptiveError("its weights are quantised in a way that is not known here")
    with TemporaryDirectory(prefix="adaptive-mtp-") as place:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, Path(place) / "model.safetensors")
        yield Path(place)


@contextmanager
def _described(target: PreTrainedModel, folder: Path, pattern: re.Pattern[str]) -> Iterator[None]:
    """Inside the context, give the target the attributes that ``MtpModel`` reads and some configs lack: that there is
    one multi-token layer, its kind, the checkpoint's folder, and the pattern of the layer's weights."""
    config, ignored = target.config, target._keys_to_ignore_on_load_unexpected
    said = copy.copy(config)
    said.num_mtp_layers = 1
    said.name_or_path = str(folder)
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if kinds is not None and getattr(config, f"mtp_{name}", None) is None:
            # Like the model's last layer, except for attention: published heads attend to all tokens.
            setattr(said, f"mtp_{name}", ["full_attention" if name == "layer_types" else kinds[-1]])
    target.config = said
    target._keys_to_ignore_on_load_unexpected = [pattern.pattern]
    try:
        yield
    finally:
        target.config = config
        target._keys_to_ignore_on_load_unexpected = ignored
