"""A grown head: one decoder layer that reads the target's hidden states and predicts the target's next token.

Row i reads token x_i and the feature f_(i-1), the target's hidden state at token i - 1 after its last layer and before
its final norm (zeros for i = 0), and predicts x_(i+1). While the head drafts, its own hidden state h_i, before the
final norm, is the feature of the next row: ::

    h_i = layer(fuse([token_norm(embed(x_i)), feature_norm(f_(i-1))])),    logits_i = projection(norm(h_i))

Embedding, final norm and projection are the target's, shared with it and frozen. With a draft vocabulary
(``vocabulary.py``) the projection is a copy of the target's rows for these tokens, and all other logits are -inf.
In: ``Parts`` of a target. Out: a module, and its own tensors as a folder with ``config.json`` and
``model.safetensors``.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from adaptive.engines.head.kinds import HeadKind
from adaptive.engines.head.parts import Parts, decoder_of, parts_of_model, put_parts
from adaptive.engines.head.vocabulary import check_ids, spread
from adaptive.errors import AdaptiveError, first_line

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
# Increased with every change by which a head of an earlier version would give other results.
FORMAT = 1
# The hidden state of the target that is read: after the last layer, before the final norm.
FEATURES = "last"
# The name of the tensor with the draft vocabulary in a head's file.
VOCABULARY = "vocabulary"
# In the config of a mixture: how many experts there are, how many of them a token uses, and their groups.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
GROUPS = ("n_group", "num_expert_group", "topk_group")
# A mixture's head has this many experts, and every token uses all of them (some routers need two). Together they are as
# wide as the target's that a token uses, and at most WIDEST times as wide as the model, as in models without experts.
# Their widths are multiples of STEP, which torch's products of several experts ask for.
FEW, WIDEST, STEP = 2, 4, 16
# The modules whose result a layer adds to its input.
ADDED = frozenset({"o_proj", "down_proj", "out_proj", "dense", "dense_4h_to_h", "fc2", "c_proj", "w2", "wo"})


class Head(nn.Module):
    """A grown head as a module. ``body``: a causal language model of the target's class with one layer; its forward is
    not used, but code that supports the target's class can run the layer. ``width``: the target's hidden size;
    ``target_layers``: the target's number of layers. ``ids`` (N,): the draft vocabulary, None for all of the target's
    tokens."""

    kind = HeadKind.GROWN
    begins = 0

    def __init__(self, parts: Parts, dtype: torch.dtype | None = None) -> None:
        """A head that starts as the target's last layer, on the device of ``parts``; ``dtype`` None means the
        embedding's. Raises AdaptiveError if no head can be made for this kind of target."""
        super().__init__()
        dtype = dtype or parts.dtype
        device = parts.embedding["weight"].device
        self.config = head_config(parts.config)
        self.width = self.reads = int(self.config.hidden_size)
        self.body: Any = _body(self.config, dtype).to(device)
        put_parts(parts, self.body, dtype)
        self._give_sizes()
        self.target_layers = int(parts.config.num_hidden_layers)
        self._whole = dict(self.body.get_output_embeddings().named_parameters())  # the projection to all tokens
        self.ids: torch.Tensor | None
        self.register_buffer("ids", None, persistent=False)
        eps = float(getattr(self.config, "rms_norm_eps", 1e-6))
        self.token_norm = nn.RMSNorm(self.width, eps=eps, dtype=dtype, device=device)
        self.feature_norm = nn.RMSNorm(self.width, eps=eps, dtype=dtype, device=device)
        self.fuse = nn.Linear(2 * self.width, self.width, bias=False, dtype=dtype, device=device)
        self.came_from: Path | None = None  # the folder from which the head was read
        self.fresh = True  # unchanged since ``reset``
        self._first = parts.layer
        self.reset()

    @classmethod
    def from_target(cls, target: PreTrainedModel) -> Head:
        """A head on a loaded target, whose tensors it shares."""
        return cls(parts_of_model(target))

    @classmethod
    def read(cls, folder: Path, parts: Parts, dtype: torch.dtype | None = None) -> Head:
        """The head in ``folder``. Raises AdaptiveError if it does not fit the target."""
        head = cls(parts, dtype)
        head.load(folder)
        head.came_from = folder
        return head

    @property
    def layer(self) -> nn.Module:
        """The decoder layer."""
        found: nn.Module = decoder_of(self.body).layers[0]
        return found

    @property
    def whole(self) -> nn.Parameter:
        """The target's projection to all tokens (vocab, width)."""
        found: nn.Parameter = self._whole["weight"]
        return found

    @property
    def vocab_size(self) -> int:
        """The width of the logits: the target's vocabulary size."""
        return len(self._whole["weight"])

    @property
    def device(self) -> torch.device:
        """The device of the computation."""
        return torch.device(str(self.fuse.weight.device))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation."""
        return self.fuse.weight.dtype

    def of_target(self, features: torch.Tensor) -> torch.Tensor:
        """The features for rows: the target's features, unchanged."""
        return features

    def forward(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        """Hidden states (B, T, width), before the final norm, of rows with tokens (B, T) and features (B, T, width).

        ``position_ids`` (B, T); ``attention_mask`` is a padding mask (B, T), or (B, 1, T, keys) added to the scores.
        """
        x = self.fused(tokens, features)
        found: list[torch.Tensor] = []
        decoder = decoder_of(self.body)
        handle = decoder.norm.register_forward_pre_hook(lambda _, args: found.append(args[0]))
        try:
            decoder(
                inputs_embeds=x,
                position_ids=position_ids,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                use_cache=past_key_values is not None,
            )
        finally:
            handle.remove()
        return found[0]

    def fused(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The layer's input (B, T, width)."""
        embedded = self.token_norm(self.body.get_input_embeddings()(tokens))
        fused: torch.Tensor = self.fuse(torch.cat([embedded, self.feature_norm(features.to(embedded.dtype))], dim=-1))
        return fused

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``HeadModule``."""
        own = self.own_logits(hidden)
        return own if self.ids is None else spread(own, self.ids, self.vocab_size)

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``HeadModule``."""
        logits: torch.Tensor = self.body.get_output_embeddings()(decoder_of(self.body).norm(hidden))
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if not cap else cap * torch.tanh(logits / cap)

    @torch.no_grad()
    def draft_among(self, ids: torch.Tensor | None) -> None:
        """Set the draft vocabulary to ``ids`` (N,) int64, strictly increasing; None for all of the target's tokens.
        Raises AdaptiveError, with the head unchanged, if ``ids`` are not tokens of the target in that form."""
        if ids is not None:
            check_ids(ids, self.vocab_size)
            ids = ids.to(self.device, copy=True)
        if ids is self.ids or (ids is not None and self.ids is not None and torch.equal(ids, self.ids)):
            return
        projection: Any = self.body.get_output_embeddings()
        for name, rows in self._whole.items():
            few = rows if ids is None else nn.Parameter(rows.to(self.device)[ids], requires_grad=False)
            setattr(projection, name, few)
        projection.out_features = len(projection.weight)
        self.ids = ids

    def reset(self) -> None:
        """Return to the initial state: the layer is the target's last, ``fuse`` passes on the feature alone, and there
        is no draft vocabulary. Where the target has no such weights that can be read (quantised ones, the experts of a
        mixture), the layer's are random, and zero where it adds to its input."""
        self.draft_among(None)
        here = self.layer.state_dict()
        first = {name: x for name, x in self._first.items() if name in here and x.shape == here[name].shape}
        if len(first) < len(here):
            _initialise(self.layer, self.body)
        self.layer.load_state_dict(first, strict=False)
        nn.init.ones_(self.token_norm.weight)
        nn.init.ones_(self.feature_norm.weight)
        with torch.no_grad():
            self.fuse.weight.zero_()
            self.fuse.weight[:, self.width :].fill_diagonal_(1.0)
        self.fresh = True

    def own(self) -> dict[str, torch.Tensor]:
        """The head's own tensors, by their names in a file; they share the module's memory."""
        tensors = {f"layer.{name}": tensor for name, tensor in self.layer.state_dict().items()}
        for name in ("token_norm", "feature_norm", "fuse"):
            tensors[f"{name}.weight"] = getattr(self, name).weight.detach()
        return tensors if self.ids is None else tensors | {VOCABULARY: self.ids}

    def put(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy tensors as from ``own`` into the module. Raises AdaptiveError if names or shapes differ."""
        self.check(tensors)
        self.draft_among(tensors.get(VOCABULARY))
        with torch.no_grad():
            for name, tensor in self.own().items():
                tensor.copy_(tensors[name])
        self.fresh = False

    def check(self, tensors: dict[str, torch.Tensor]) -> None:
        """Raise AdaptiveError if ``put`` would."""
        own = self.own()
        own.pop(VOCABULARY, None)
        for name, tensor in own.items():
            if name not in tensors:
                raise AdaptiveError(f"the head lacks {name}")
            if tensors[name].shape != tensor.shape:
                raise AdaptiveError(
                    f"the head's {name} is {tuple(tensors[name].shape)}, and {tuple(tensor.shape)} fits this target"
                )
        if VOCABULARY in tensors:
            check_ids(tensors[VOCABULARY], self.vocab_size)
        surplus = next((name for name in tensors if name not in own and name != VOCABULARY), None)
        if surplus is not None:
            raise AdaptiveError(f"the head has a tensor {surplus}, for which this target has no place")

    def write(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors`` (the head's own tensors) into ``folder``, with mode 0600."""
        write_head(self.config, self.own(), folder)

    def load(self, folder: Path) -> None:
        """Load the weights in ``folder``. Raises AdaptiveError, with the head unchanged, if they do not fit."""
        self.put(self.fitting(folder))

    def fitting(self, folder: Path) -> dict[str, torch.Tensor]:
        """The tensors in ``folder``, for ``put``. Raises AdaptiveError if they do not fit or have values that are not
        finite."""
        config = read_config(folder)
        check_config(config, self.config, folder)
        try:
            tensors = load_file(folder / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise AdaptiveError(f"the head in {folder} cannot be read: {first_line(error)}") from error
        try:
            self.check(tensors)
        except AdaptiveError as error:
            raise AdaptiveError(f"the head in {folder} does not fit: {error}") from None
        said, held = config["head"]["vocabulary"], len(tensors.get(VOCABULARY, ())) or None
        if said != held:
            raise AdaptiveError(
                f"the head in {folder} cannot be used: {CONFIG} says that it drafts among {said or 'all'} tokens, and "
                f"{WEIGHTS} lists {held or 'none'}"
            )
        broken = next((name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()), None)
        if broken is not None:
            raise AdaptiveError(f"the head in {folder} cannot be used: {broken} holds values that are not finite")
        return tensors

    def _give_sizes(self) -> None:
        """Set the vocabulary size in modules and configs, which were created for a vocabulary of one token."""
        embedding: Any = self.body.get_input_embeddings()
        projection: Any = self.body.get_output_embeddings()
        embedding.num_embeddings = embedding.weight.shape[0]
        projection.out_features = projection.weight.shape[0]
        for config in (self.body.config, self.body.config.get_text_config()):
            config.vocab_size = projection.out_features
        if hasattr(self.body, "vocab_size"):
            self.body.vocab_size = projection.out_features


@torch.no_grad()
def _initialise(layer: nn.Module, model: Any) -> None:
    """Initialise a ``layer`` of ``model`` as for training, the same way each time, so that it adds nothing yet."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for module in layer.modules():
            model._init_weights(module)
    for name, parameter in layer.named_parameters():
        if ADDED & set(name.split(".")):
            parameter.zero_()


def head_config(target: Any) -> Any:
    """The config of a head for a target with this text config: a copy for the last layer alone. A mixture's head has
    FEW experts: a draft is to read few weights, and all of them are trained."""
    layers = int(target.num_hidden_layers)
    config = copy.deepcopy(
        target.per_layer_config[layers - 1] if getattr(target, "is_heterogeneous", False) else target
    )
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers and layers > 1:  # one entry a layer
            setattr(config, name, value[-1] if name in (*EXPERTS, *USED) else value[-1:])
    config.num_hidden_layers = 1
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    used = max((getattr(config, name, None) or 1 for name in USED), default=1)
    if any((getattr(config, name, None) or 1) > FEW for name in EXPERTS):
        for name in (*EXPERTS, *USED, *GROUPS):
            if getattr(config, name, None) is not None:
                setattr(config, name, 1 if name in GROUPS else FEW)
        wide = "moe_intermediate_size" if getattr(config, "moe_intermediate_size", None) else "intermediate_size"
        each = getattr(config, wide)
        whole = max(each, min(used * each, WIDEST * config.hidden_size))
        setattr(config, wide, -(-whole // (FEW * STEP)) * STEP)
    return config


def unsuitable(target: Any) -> str | None:
    """The reason, as a sentence, why no head can be grown on a target with this text config; None if one can."""
    try:
        with torch.device("meta"):
            decoder_of(_body(head_config(target), torch.float32))
    except AdaptiveError as error:
        return str(error)
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """A head's ``config.json``. Raises AdaptiveError if it is missing or this version does not support it."""
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        block = config["head"]
        few = block["vocabulary"]
        counts = few is None or (type(few) is int and few > 0)
        known = counts and (block["format"], block["features"]) == (FORMAT, FEATURES)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdaptiveError(
            f"{folder} holds no head: {CONFIG} is missing, or no head's ({first_line(error)})"
        ) from error
    if not known:
        raise AdaptiveError(f"the head in {folder} is of another format ({block}); this version reads {FORMAT}")
    return config


def check_config(config: dict[str, Any], target: Any, folder: Path) -> None:
    """Raise AdaptiveError unless a head's ``config`` fits ``target``, a text config."""
    for name in ("model_type", "hidden_size", "vocab_size"):
        if config.get(name) != getattr(target, name):
            raise AdaptiveError(
                f"the head in {folder} is for a target with {name} {config.get(name)}, and this one has "
                f"{getattr(target, name)}"
            )


def write_head(config: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a head's own ``tensors`` and its ``config`` into ``folder``."""
    few = len(tensors[VOCABULARY]) if VOCABULARY in tensors else None
    said = config.to_dict() | {"head": {"format": FORMAT, "features": FEATURES, "vocabulary": few}}
    (folder / CONFIG).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / WEIGHTS, metadata={"format": "pt"})
    for name in (CONFIG, WEIGHTS):
        os.chmod(folder / name, 0o600)


def _body(config: Any, dtype: torch.dtype) -> Any:
    """A causal language model with one layer and a vocabulary of one token; the caller puts in the target's embedding,
    norm and projection."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    if getattr(config, "hidden_size_per_layer_input", None):
        raise AdaptiveError(
            f"no head can be grown on a model of type {config.model_type} whose layers have inputs of their own"
        )
    small = copy.deepcopy(config)
    small.vocab_size, small.pad_token_id = 1, None
    try:
        with no_init_weights():
            body: Any = AutoModelForCausalLM.from_config(small, dtype=dtype)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise AdaptiveError(
            f"no head can be grown on a model of type {config.model_type}: {first_line(error)}"
        ) from error
    body.config.pad_token_id = config.pad_token_id
    return body.eval()
