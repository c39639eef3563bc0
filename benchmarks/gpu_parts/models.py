"""The models of ``gpu.py``, made on the device from the bundled pair or of random weights: no network, no checkpoints.

In: a ``Scale`` and a device. Out: a ``Pair`` by its kind, one at a time, always with the forward that GPUs use, even on
the CPU.
"""

from __future__ import annotations

import copy
import gc
import logging
from typing import Any

import torch
from inflate import config_of, inflate
from inflate_hybrid import EPS, inflate_hybrid, small_hybrid
from inflate_hybrid import config_of as hybrid_config
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils.quantization_config import QuantizationMethod

from adaptive.devices import quantisation
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.pair import BUNDLED, Pair, PairIdentity
from checkpoints.manifest import BaseDraft
from gpu_parts.scale import Scale

# Kinds of pairs, in the order in which the parts need them.
KINDS = ("bundled float32", "bundled bfloat16", "large", "nf4", "int8", "mixture", "hybrid")
# Factor on the output of a mixture's layers beyond those of its draft, so that some drafted tokens are accepted.
LATER = 0.3
# Bytes of a weight: in nf4, including the scale of every 64 weights; in int8, without the scale of each row.
BYTES = {"nf4": 0.5 + 4 / 64, "int8": 1.0}


class Workshop:
    """Makes one pair at a time and frees the previous one first."""

    def __init__(self, scale: Scale, device: torch.device) -> None:
        self.scale, self.device = scale, device
        self.tokenizer: Any = AutoTokenizer.from_pretrained(BUNDLED / "target")
        self.kind: str | None = None  # of the current pair
        self._pair: Pair | None = None

    def pair(self, kind: str, graphs: bool | None = None) -> Pair:
        """The pair of a kind in ``KINDS``, without an adapter. ``graphs``: short passes are recorded if the kind allows
        that; None: on CUDA only."""
        if kind != self.kind:
            self.clear()
            target, draft = self._models(kind)
            identity = PairIdentity(kind, BaseDraft(kind, "0" * 16))
            self._pair = Pair(identity, engine_of(target), engine_of(draft), self.tokenizer, ())
            self.kind = kind
        assert self._pair is not None
        assert self._pair.draft is not None
        for engine in (self._pair.target, self._pair.draft):
            assert isinstance(engine, TransformersEngine)
            engine.apply_adapter(None)
            wanted = self.device.type == "cuda" if graphs is None else graphs
            if not wanted:
                engine.recorded = None
            elif engine.recorded is None:
                engine.record()
        return self._pair

    def clear(self) -> None:
        """Free the current pair."""
        self.kind = self._pair = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _models(self, kind: str) -> tuple[PreTrainedModel, PreTrainedModel]:
        if kind.startswith("bundled"):
            dtype = getattr(torch, kind.partition(" ")[2])
            target, draft = (_bundled(name, dtype) for name in ("target", "draft"))
            return target.to(self.device), draft.to(self.device)
        if kind == "hybrid":
            return self._hybrid()
        if kind == "mixture":
            return self._mixture()
        scale = self.scale
        made = []
        for name, size in (("target", scale.target), ("draft", scale.draft)):
            small = _bundled(name, scale.dtype)
            small.config.max_position_embeddings = scale.context
            made.append(inflate(small, size, self.device))
        if kind in BYTES:
            quantise(made[0], kind)
        return made[0], made[1]

    def _hybrid(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        vocab = AutoConfig.from_pretrained(BUNDLED / "target").vocab_size
        small: Any = small_hybrid(self.scale.hybrid_draft, vocab, self.scale.context)
        small.to(self.scale.dtype)
        large = inflate_hybrid(small, self.scale.hybrid, self.device)
        return large, small.to(self.device)

    def _mixture(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        """A mixture of random weights, and a draft that has its first layers."""
        torch.manual_seed(0)
        first = self.scale.mixture_draft
        made: list[Any] = []
        for config in (mixture_config(self.scale), mixture_config(self.scale, num_hidden_layers=first)):
            with torch.device(self.device):
                made.append(Qwen3MoeForCausalLM._from_config(config, dtype=self.scale.dtype).eval())
        target, draft = made
        with torch.no_grad():
            for name, parameter in target.named_parameters():
                ends = name.endswith(("o_proj.weight", "down_proj", "down_proj.weight"))
                if ends and "layers" in name and int(name.split(".")[2]) >= first:
                    parameter.mul_(LATER)
        weights = target.state_dict()
        draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
        return target, draft


def engine_of(model: PreTrainedModel) -> TransformersEngine:
    """An engine with the model's own forward on any device, because that is what a GPU runs."""
    engine = TransformersEngine(model)
    engine.cpu_forward = None
    engine.check()
    return engine


def _bundled(name: str, dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED / name, dtype=dtype)
    return model.eval()


def mixture_config(scale: Scale, **changes: int) -> Qwen3MoeConfig:
    """The config of the mixture, with the bundled vocabulary."""
    vocab = AutoConfig.from_pretrained(BUNDLED / "target").vocab_size
    given: dict[str, Any] = {**scale.mixture, "max_position_embeddings": scale.context, **changes}
    return Qwen3MoeConfig(vocab_size=vocab, intermediate_size=given["moe_intermediate_size"], **given)


def quantise(model: PreTrainedModel, kind: str) -> None:
    """Quantise the linear layers except the vocabulary projection to ``kind`` (nf4 or int8), as bitsandbytes does when
    it loads a checkpoint. Each layer's original weights are freed before the next layer is quantised."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about rounding at every layer
    import bitsandbytes

    parts: Any = bitsandbytes.nn
    dtype, head = model.dtype, model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear and module is not head]
    for name in names:
        above, _, last = name.rpartition(".")
        owner = model.get_submodule(above)
        old = getattr(owner, last)
        weight, shape = old.weight.data, (old.in_features, old.out_features)
        layer: nn.Module
        if kind == "nf4":
            layer = parts.Linear4bit(
                *shape, bias=False, compute_dtype=dtype, compress_statistics=False, quant_type="nf4", device="meta"
            )
            layer.weight = parts.Params4bit(
                weight, requires_grad=False, compress_statistics=False, quant_type="nf4", module=layer
            )
        else:
            layer = parts.Linear8bitLt(*shape, bias=False, has_fp16_weights=False, threshold=6.0, device="meta")
            # ``to`` would quantise a weight only on its way from the processor to a device.
            quantised = parts.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
            layer.weight = quantised._quantize(weight.device)
        setattr(owner, last, layer.to(weight.device).eval())
        del old, weight
    model.quantization_method = QuantizationMethod.BITS_AND_BYTES  # type: ignore[assignment]
    model.config.quantization_config = quantisation("nf4" if kind == "nf4" else "int8", dtype)


def read_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a pass over one token reads: of a mixture's experts only those that one token uses, and an
    embedding table only if it is also the vocabulary projection."""
    config = model.config.get_text_config()
    experts = getattr(config, "num_experts", 0) or 0
    share = config.num_experts_per_tok / experts if experts else 1.0
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is embedding and embedding is not head:
            continue
        total += parameter.nbytes * (share if ".experts." in name else 1.0)
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        total += 0 if state is None else state.absmax.nbytes
    return round(total)


def planned_bytes(scale: Scale, kind: str) -> tuple[int, int]:
    """Bytes of the weights of both models of a kind: once they are made, and the peak while they are made. Computed
    from models without weights."""
    if kind.startswith("bundled"):
        width = 4 if "float32" in kind else 2
        models = [_empty(AutoConfig.from_pretrained(BUNDLED / name)) for name in ("target", "draft")]
        total = sum(_numbers(model) for model in models) * width
        return total, total
    width = scale.dtype.itemsize
    if kind == "mixture":
        layers = {"num_hidden_layers": scale.mixture_draft}
        total = sum(_numbers(_empty(mixture_config(scale, **change))) for change in ({}, layers)) * width
        return total, total
    if kind == "hybrid":
        vocab = AutoConfig.from_pretrained(BUNDLED / "target").vocab_size
        sizes = (scale.hybrid, scale.hybrid_draft)
        total = sum(_numbers(_empty(hybrid_config(size, vocab, scale.context, EPS))) for size in sizes) * width
        return total, total
    sizes_of = {"target": scale.target, "draft": scale.draft}
    configs = {name: config_of(AutoConfig.from_pretrained(BUNDLED / name), size) for name, size in sizes_of.items()}
    target, draft = (_empty(configs[name]) for name in ("target", "draft"))
    whole = (_numbers(target) + _numbers(draft)) * width
    if kind not in BYTES:
        return whole, whole
    linear = sum(module.weight.numel() for module in target.model.modules() if isinstance(module, nn.Linear))
    rest = _numbers(target) - linear
    return round(linear * BYTES[kind]) + (rest + _numbers(draft)) * width, whole


def _empty(config: Any) -> Any:
    """A model of this config without weights."""
    kinds = {"qwen3_moe": Qwen3MoeForCausalLM, "qwen3_5_text": Qwen3_5ForCausalLM}
    with torch.device("meta"):
        kind: Any = kinds.get(config.model_type)
        given = copy.deepcopy(config)
        return AutoModelForCausalLM.from_config(given) if kind is None else kind(given)


def _numbers(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
