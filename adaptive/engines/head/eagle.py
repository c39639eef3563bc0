"""EAGLE-3 heads, from checkpoints of the speculators library and of SpecForge.

Row i reads token x_i and a feature f_(i-1) of token i - 1. One linear layer makes this feature from the target's hidden
states before some of its layers; where the target has none yet, the output of row i - 1 is the feature. The head's
first layer reads token and feature side by side, so its projections are twice as wide, and its residual is the feature
alone. Only the tokens of a draft vocabulary have logits, all others -inf: ::

    h_i = layer([input_norm(embed(x_i)), hidden_norm(f_(i-1))]) + f_(i-1),    logits_i = projection(norm(h_i))[d2t]

docs/notes/2026-11-foreign-heads.md has the variants and their sources. In: the folder of a head, and its target. Out: a
module.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from adaptive.engines.head.foreign import ForeignHead
from adaptive.engines.head.kinds import HeadKind, raw_config
from adaptive.engines.hf.lora import read_lora
from adaptive.errors import AdaptiveError, first_line

if TYPE_CHECKING:
    from transformers import Cache

    from adaptive.engines.head.parts import Parts

# Supported layer types. The other types of speculators and SpecForge have a different structure.
LAYERS = ("llama", "qwen3")
# Prefixes of tensors that are ignored: those that only training needs, and rotary tables, which are computed here.
LEFT_OUT = ("t2d", "verifier_", "rotary_emb.", "layers.0.self_attn.rotary_emb.")

# The module prefix of a head's layers, which the names in a file lack.
INSIDE = "body.model."

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class EagleConfig:
    """A head's ``config.json``, in one form for both formats. ``layer``: the config of the head's layers;
    ``vocab_size``: the target's; ``draft_vocab_size``: the number of tokens with logits. ``taps``: the target's layers
    before which its hidden states are read, None for the usual three; ``target_width``: the width of these states.
    ``norm_before_residual``: the first layer's residual is the feature after ``hidden_norm``. ``norm_before_fc``: one
    norm over all states before ``fc``; ``fc_norm``: a norm for each state. ``norm_output``: the next row reads the
    output of the final norm.
    """

    layer: Any
    vocab_size: int
    draft_vocab_size: int
    target_width: int
    taps: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool = False
    norm_output: bool = False

    def taps_of(self, layers: int) -> tuple[int, ...]:
        """The layers before which the hidden states of a target with ``layers`` layers are read."""
        return self.taps or (2, layers // 2, layers - 3)


def read_eagle(folder: Path) -> EagleConfig:
    """A head's config. Raises AdaptiveError if it is not supported."""
    from transformers import CONFIG_MAPPING

    raw = raw_config(folder)
    written = raw.get("transformer_layer_config")
    layer: dict[str, Any] = dict(written if isinstance(written, dict) else raw)
    kind = layer.pop("model_type", "llama")
    eagle = raw.get("eagle_config") or {}
    try:
        if kind not in LAYERS:
            raise ValueError(f"its layers are of type {kind}, and {' and '.join(LAYERS)} are known")
        if set(layer.get("layer_types") or ()) - {"full_attention"}:
            raise ValueError("its layers attend to a window, which is not known here")
        if eagle.get("use_aux_hidden_state") is False:
            raise ValueError("it reads one hidden state only, as EAGLE-1 did")
        taps = raw.get("eagle_aux_hidden_state_layer_ids")
        outputs = eagle.get("eagle_aux_hidden_state_layer_ids")
        if taps is None and outputs is not None:  # SpecForge names the layers before these states, not after them
            taps = [int(number) + 1 for number in outputs]
        for name in ("architectures", "dtype", "torch_dtype", "transformers_version", "eagle_config", "auto_map"):
            layer.pop(name, None)
        layer["num_hidden_layers"] = int(layer.get("num_hidden_layers") or 1)
        if kind == "qwen3":
            layer |= {"layer_types": ["full_attention"] * layer["num_hidden_layers"], "use_sliding_window": False}
        config: Any = CONFIG_MAPPING[kind](**layer)
        return EagleConfig(
            config,
            int(config.vocab_size),
            int(raw.get("draft_vocab_size") or config.vocab_size),
            int(raw.get("target_hidden_size") or config.hidden_size),
            None if taps is None else tuple(int(number) for number in taps),
            bool(raw.get("norm_before_residual", False)),
            bool(raw.get("norm_before_fc", False)),
            bool(raw.get("fc_norm", False)),
            bool(raw.get("norm_output", False)),
        )
    except Exception as error:  # transformers raises many kinds of errors for a bad config
        raise AdaptiveError(f"the EAGLE-3 head in {folder} cannot be used: {first_line(error)}") from error


def read_tensors(folder: Path) -> Tensors:
    """A head's tensors, with the same names for both formats. Raises AdaptiveError if they cannot be read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise AdaptiveError(f"{folder} holds no weights: there is no *.safetensors file in it")
    found: Tensors = {}
    try:
        for file in files:
            found |= load_file(file)
    except (OSError, SafetensorError) as error:
        raise AdaptiveError(f"the EAGLE-3 head in {folder} cannot be read: {first_line(error)}") from error
    named = {}
    for name, tensor in found.items():
        short = name.removeprefix("model.")
        short = f"layers.0.{short.removeprefix('midlayer.')}" if short.startswith("midlayer.") else short
        if not short.startswith(LEFT_OUT):
            named[short] = tensor
    return named


def learned(folder: Path, adapter: Path | None) -> Tensors:
    """The tensors of the head in ``folder``, as ``read_tensors``, with a LoRA ``adapter`` merged into them if given.
    Raises AdaptiveError if either cannot be read."""
    tensors = read_tensors(folder)
    for module, delta in ({} if adapter is None else read_lora(adapter)).items():
        weight = f"{module.removeprefix(INSIDE)}.weight"
        tensors[weight] = delta.merged(tensors[weight])
    return tensors


class Eagle3Head(ForeignHead):
    """An EAGLE-3 head as a module. ``body`` is a causal language model with the head's layers; its own forward is not
    used."""

    kind = HeadKind.EAGLE3

    def __init__(self, target: Parts, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Read the head in ``folder``. It shares the embedding and the projection of ``target`` and their device;
        ``dtype`` None means the embedding's. Raises AdaptiveError if it is damaged or made for another target."""
        super().__init__()
        said = read_eagle(folder)
        self.width = int(said.layer.hidden_size)
        self.taps = said.taps_of(int(target.config.num_hidden_layers))
        self._added, self._normed = said.norm_before_residual, said.norm_output
        dtype = dtype or target.dtype
        embedding, projection = (part["weight"].to(dtype) for part in (target.embedding, target.projection))
        tensors = read_tensors(folder)
        _check_target(said, tensors, target.config, embedding.shape, self.taps, folder)
        self.body = _body(said, tensors, dtype)
        self.config = self.body.config
        self.config.vocab_size = said.vocab_size
        first = self.body.model.layers[0]
        self.hidden_norm = copy.deepcopy(first.input_layernorm)
        self.reads = len(self.taps) * said.target_width
        eps = float(said.layer.rms_norm_eps)
        self.fc = nn.Linear(self.reads, self.width, bias="fc.bias" in tensors, dtype=dtype)
        self.input_norm = nn.RMSNorm(self.reads, eps=eps, dtype=dtype) if said.norm_before_fc else nn.Identity()
        norms = [nn.RMSNorm(said.target_width, eps=eps, dtype=dtype) for _ in self.taps if said.fc_norm]
        self.fc_norm = nn.ModuleList(norms)
        d2t = tensors.pop("d2t", torch.zeros(said.draft_vocab_size, dtype=torch.long)).to(torch.long)
        self._vocab = int(projection.shape[0])
        self._take(tensors, embedding, projection, folder)
        ids = torch.arange(len(d2t)) + d2t
        if len(d2t) != said.draft_vocab_size or int(ids.min()) < 0 or int(ids.max()) >= said.vocab_size:
            raise AdaptiveError(f"the EAGLE-3 head in {folder} names tokens (d2t) that its target does not have")
        self.to(embedding.device)
        self.ids: torch.Tensor  # (draft vocabulary,): the target's ids of the tokens with logits
        self.register_buffer("ids", ids.to(embedding.device), persistent=False)

    def _take(self, tensors: Tensors, embedding: torch.Tensor, projection: torch.Tensor, folder: Path) -> None:
        """Copy the tensors of the file into the modules. A missing embedding, or a missing projection of the right
        shape, is the target's. Raises AdaptiveError if the tensors do not fit."""
        wanted = {**self.own(), "lm_head.weight": self.body.lm_head.weight}
        shared = tensors.get("embed_tokens.weight")
        own_embedding = embedding if shared is None else shared.to(embedding.dtype)
        self.embedding = nn.Parameter(own_embedding, requires_grad=False)
        if "lm_head.weight" not in tensors and projection.shape == self.body.lm_head.weight.shape:
            tensors["lm_head.weight"] = projection
        for name, tensor in wanted.items():
            given = tensors.get(name)
            if given is None:
                raise AdaptiveError(f"the EAGLE-3 head in {folder} lacks {name}")
            if given.shape != tensor.shape:
                raise AdaptiveError(
                    f"the EAGLE-3 head in {folder} does not fit: its {name} is {tuple(given.shape)}, and its config "
                    f"asks for {tuple(tensor.shape)}"
                )
            if not torch.isfinite(given).all():
                raise AdaptiveError(f"the EAGLE-3 head in {folder} cannot be used: {name} holds no finite values")
            with torch.no_grad():
                tensor.copy_(given)
        surplus = sorted(set(tensors) - set(wanted) - {"embed_tokens.weight"})
        if surplus:
            raise AdaptiveError(f"the EAGLE-3 head in {folder} has a tensor {surplus[0]}, which is not known here")

    def own(self) -> Tensors:
        """The head's tensors by their names in its file, without embedding and projection."""
        layers = {f"layers.{name}": t for name, t in self.body.model.layers.state_dict(keep_vars=True).items()}
        found = {**layers, "norm.weight": self.body.model.norm.weight}
        for name, module in (
            ("layers.0.hidden_norm", self.hidden_norm),
            ("fc", self.fc),
            ("input_norm", self.input_norm),
            ("fc_norm", self.fc_norm),
        ):
            found |= {f"{name}.{part}": tensor for part, tensor in module.state_dict(keep_vars=True).items()}
        return found

    @torch.no_grad()
    def put(self, tensors: Tensors) -> None:
        """Copy ``tensors``, as ``own`` names them, into the head."""
        for name, tensor in self.own().items():
            tensor.copy_(tensors[name])

    @property
    def vocab_size(self) -> int:
        """The target's vocabulary size; see ``HeadModule``."""
        return self._vocab

    @property
    def _fusing(self) -> nn.Linear:
        return self.fc

    def of_target(self, features: torch.Tensor) -> torch.Tensor:
        """One feature (..., width) from the target's hidden states (..., reads), which are side by side."""
        states = self.input_norm(features.to(self.dtype))
        if len(self.fc_norm):
            parts = zip(self.fc_norm, states.chunk(len(self.fc_norm), dim=-1), strict=True)
            states = torch.cat([norm(part) for norm, part in parts], dim=-1)
        found: torch.Tensor = self.fc(states)
        return found

    def forward(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        """Hidden states (B, T, width), before the final norm, or after it with ``norm_output``; see ``HeadModule``."""
        from transformers.masking_utils import create_causal_mask

        decoder = self.body.model
        hidden = features.to(self.dtype)
        mask = create_causal_mask(self.config, hidden, attention_mask, past_key_values, position_ids)
        given = {
            "attention_mask": mask,
            "past_key_values": past_key_values,
            "position_embeddings": decoder.rotary_emb(hidden, position_ids=position_ids),
        }
        first, *others = decoder.layers
        normed = self.hidden_norm(hidden)
        embedded = first.input_layernorm(nn.functional.embedding(tokens, self.embedding))
        attended, _ = first.self_attn(hidden_states=torch.cat([embedded, normed], dim=-1), **given)
        hidden = (normed if self._added else hidden) + attended
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for layer in others:
            hidden = layer(hidden, position_ids=position_ids, **given)
        said: torch.Tensor = decoder.norm(hidden) if self._normed else hidden
        return said

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``HeadModule``."""
        found: torch.Tensor = self.body.lm_head(hidden if self._normed else self.body.model.norm(hidden))
        return found

    def get_output_embeddings(self) -> nn.Module:
        """See the base."""
        found: nn.Module = self.body.lm_head
        return found


def _body(said: EagleConfig, tensors: Tensors, dtype: torch.dtype) -> Any:
    """A causal language model with the head's layers; the attention projections of the first are twice as wide."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    small = copy.deepcopy(said.layer)
    small.vocab_size, small.pad_token_id, small.tie_word_embeddings = 1, None, False
    with no_init_weights():
        body: Any = AutoModelForCausalLM.from_config(small, dtype=dtype)
    attention = body.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(attention, name)
        biased = f"layers.0.self_attn.{name}.bias" in tensors
        setattr(attention, name, nn.Linear(2 * old.in_features, old.out_features, bias=biased, dtype=dtype))
    body.lm_head = nn.Linear(said.layer.hidden_size, said.draft_vocab_size, bias=False, dtype=dtype)
    return body.eval()


def _check_target(
    said: EagleConfig, tensors: Tensors, target: Any, embedding: torch.Size, taps: tuple[int, ...], folder: Path
) -> None:
    """Raise AdaptiveError unless the head fits a target with this text config and this ``embedding`` (vocab, width)."""

    def differs(what: str, one: object, other: object) -> AdaptiveError:
        return AdaptiveError(
            f"the EAGLE-3 head in {folder} is for a target with {what} {one}, and this one has {other}"
        )

    if said.target_width != target.hidden_size:
        raise differs("hidden size", said.target_width, target.hidden_size)
    if said.vocab_size != target.vocab_size:
        raise differs("a vocabulary of", said.vocab_size, target.vocab_size)
    own = tensors["embed_tokens.weight"].shape if "embed_tokens.weight" in tensors else embedding
    if own != (said.vocab_size, said.layer.hidden_size):
        raise differs("an embedding of", (said.vocab_size, said.layer.hidden_size), tuple(own))
    if min(taps) < 0 or max(taps) > target.num_hidden_layers:
        raise differs("layers", taps, target.num_hidden_layers)
    if said.draft_vocab_size < said.vocab_size and "d2t" not in tensors:
        raise AdaptiveError(f"the EAGLE-3 head in {folder} lacks d2t, which says which tokens it drafts")
