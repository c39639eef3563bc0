"""Our forward for short passes on CUDA: Llama and models with the same parts, each layer in some ten kernels.

transformers' forward launches about fifty kernels a layer. Even replayed as a CUDA graph (``hf/graphs.py``), the small
ones take as long as reading the weights of a 7B model, and several times as long as reading those of a draft. Here the
matrices that read the same input are one product, and everything between two products is one kernel or two. A pass may
be over several texts.

In: a loaded transformers model. Out: logits, with keys and values written to the caches of the model's own forward,
which computes prompts. The joined matrices take the place of the model's: its modules keep views of them, so adapters
merge into both.
"""

from __future__ import annotations

import importlib.util
import logging
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedModel

from adaptive.devices import device_bytes
from adaptive.engines.cpu.families import sliding_window
from adaptive.engines.cpu.rotary import known_ropes
from adaptive.engines.cuda import operations
from adaptive.engines.cuda.linear import product
from adaptive.engines.cuda.texts import Texts

logger = logging.getLogger("adaptive.engines")

# Classes whose layers are: norm, attention, norm, gated feed-forward part.
FAMILIES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
# The least compute capability of the kernels by dtype, and their head sizes.
DTYPES = {torch.bfloat16: (8, 0), torch.float16: (7, 5), torch.float32: (7, 5)}
HEAD_SIZES = {16, 32, 64, 128, 256}
# Free memory without which matrices are not joined, as a share of the weights: the places of the single ones are often
# too small for joined ones.
JOINING = 0.3


def short_forward(model: PreTrainedModel) -> ShortForward | None:
    """Our forward of a model, or None if it has other parts or is not on one device. On CUDA it needs Triton."""
    config = model.config
    if type(model).__name__ not in FAMILIES or not type(model).__module__.startswith("transformers.models."):
        return None
    if not known_ropes(config) or type(model.model.layers[0].mlp.act_fn).__name__ not in ("SiLUActivation", "SiLU"):
        return None
    places = {weight.device for weight in model.parameters()}
    if len(places) != 1 or any(hasattr(module, "_hf_hook") for module in model.modules()):
        return None
    if next(iter(places)).type != "cuda":
        return ShortForward(model, operations)
    size, least = model.model.layers[0].self_attn.head_dim, DTYPES.get(model.dtype)
    if importlib.util.find_spec("triton") is None or least is None or size not in HEAD_SIZES:
        return None
    if torch.cuda.get_device_capability(model.device) < least:
        return None
    weights = sum(weight.nbytes for weight in model.parameters())
    if device_bytes(str(model.device)) < JOINING * weights:
        logger.warning("%s: too little memory is left to join its matrices", type(model).__name__)
        return None
    from adaptive.engines.cuda import kernels

    try:
        return ShortForward(model, kernels)
    finally:
        torch.cuda.empty_cache()  # of the matrices that were joined


class Layer:
    """One decoder layer."""

    def __init__(self, block: Any, config: Any, number: int, use: ModuleType) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.attention_norm, self.mlp_norm = block.input_layernorm, block.post_attention_layernorm
        self.qkv = product([attention.q_proj, attention.k_proj, attention.v_proj], use)
        self.output = product([attention.o_proj], use)
        self.gate_up = product([mlp.gate_proj, mlp.up_proj], use)
        self.down = product([mlp.down_proj], use)
        self.head_norms: tuple[Any, Any] | None = None
        if hasattr(attention, "q_norm"):
            self.head_norms = attention.q_norm, attention.k_norm
        self.eps = 0.0 if self.head_norms is None else float(self.head_norms[0].variance_epsilon)
        self.scale = float(attention.scaling)
        self.window = sliding_window(config, number)


class ShortForward:
    """A model's forward for few tokens. ``use`` has the operations. ``layers_read``: the layers before which hidden
    states are kept, None for those before the final norm; see ``hf/features.py``."""

    def __init__(self, model: PreTrainedModel, use: ModuleType) -> None:
        base: Any = model.model
        self._use, self._embed, self._norm = use, base.embed_tokens, base.norm
        self._rotary, self._head = base.rotary_emb, product([model.lm_head], use)
        self.layers = [Layer(block, model.config, number, use) for number, block in enumerate(base.layers)]
        self.layers_read: tuple[int, ...] | None = None

    def __call__(self, tokens: torch.Tensor, places: torch.Tensor, texts: Texts) -> torch.Tensor:
        """Logits (n, vocab) of tokens (n,) at ``places`` (n,) of their texts: those of the first text, then those of
        the second, and so on."""
        use = self._use
        x = self._embed(tokens)
        cos, sin = (part[0] for part in self._rotary(x[None], places[None]))
        added: torch.Tensor | None = None
        read: dict[int, torch.Tensor] = {}
        for number, (layer, held) in enumerate(zip(self.layers, texts.layers, strict=True)):
            y = use.add_norm(x, added, layer.attention_norm.weight, layer.attention_norm.variance_epsilon)
            if texts.keeps and self.layers_read is not None and number in self.layers_read:
                read[number] = x.clone()
            norms = None if layer.head_norms is None else tuple(norm.weight for norm in layer.head_norms)
            queries = use.rotate_and_store(layer.qkv(y), cos, sin, norms, layer.eps, held)
            added = layer.output(use.attend(queries, held, layer.scale, layer.window))
            y = use.add_norm(x, added, layer.mlp_norm.weight, layer.mlp_norm.variance_epsilon)
            added = layer.down(use.gate(layer.gate_up(y)))
        y = use.add_norm(x, added, self._norm.weight, self._norm.variance_epsilon)
        if texts.keeps:
            names = self.layers_read
            texts.keep(x if names is None else torch.cat([read.get(name, x) for name in names], dim=-1))
        return self._head(y)
