"""Makes a model that computes the same function as a small Llama checkpoint at the cost of a large one.

    python benchmarks/inflate.py checkpoints/bundled/target OUT --width 1024 --feed-forward 4096 --heads 16 --layers 28
    python benchmarks/inflate.py checkpoints/bundled/target OUT --head FOLDER        # a head for the large target
    python benchmarks/inflate.py --hybrid OUT        # a pair: OUT/target, OUT/draft

Widths are padded with zeros; added heads have zero output, and added layers add nothing. The
distribution of the next token stays that of the small model (to rounding), so acceptance is that of
real text; time and memory are those of the large model. ``--adapter`` merges a LoRA adapter in first. ``--head``: a
head that was grown on the small model becomes one of the large model, in the same way.

RMS norms divide by the mean over the width, and padding changes that mean by small / large: the norm's
eps is scaled by that ratio and its weight by the ratio's square root. Widths that are the small one times a
power of four keep this exact in bfloat16.

``--hybrid`` starts from a small Qwen 3.5 of random weights, the draft, and makes a large one from it
(``inflate_hybrid.py``).
"""

from __future__ import annotations

import argparse
import copy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from inflate_hybrid import LARGE, SMALL, HybridSize, inflate_hybrid, same_buffers, small_hybrid
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from adaptive.engines.head.module import VOCABULARY, Head
from adaptive.engines.head.parts import parts_of_model
from adaptive.engines.hf.lora import MergedAdapter
from adaptive.errors import AdaptiveError
from adaptive.pair import BUNDLED


@dataclass(frozen=True)
class Size:
    """The size of the large model; no part may be smaller than in the small model."""

    width: int
    feed_forward: int
    heads: int
    layers: int


def inflate(small: LlamaForCausalLM, size: Size, device: torch.device | str = "cpu") -> LlamaForCausalLM:
    """A model of the given size with the small one's function, in its dtype, made on ``device``.

    Raises AdaptiveError for an architecture other than Llama's, and for a size that does not contain the small
    model or does not divide into its head groups.
    """
    config = small.config
    if type(small) is not LlamaForCausalLM or config.attention_bias or config.mlp_bias:
        raise AdaptiveError(f"{type(small).__name__} cannot be inflated; only Llama without biases can")
    have = Size(config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_hidden_layers)
    group = group_of(config)
    if size.heads % group:
        raise AdaptiveError(f"{size.heads} heads do not divide into groups of {group}, which this model has")
    for name in ("width", "feed_forward", "heads", "layers"):
        if getattr(size, name) < getattr(have, name):
            raise AdaptiveError(f"{name} {getattr(size, name)} is less than the model's own {getattr(have, name)}")
    with torch.device(device):  # only the large model has to fit there, in its own dtype
        large: LlamaForCausalLM = LlamaForCausalLM._from_config(config_of(config, size), dtype=small.dtype)
    root = root_of(have.width, size.width)
    sources = dict(small.named_parameters())
    with torch.no_grad():
        for name, parameter in large.named_parameters():
            # Norm weights of the added widths multiply zeros; those of added layers feed products that end in zeros.
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            source = sources.get(name)
            if source is None:
                # An added layer: random numbers in, zero out, so that it costs as much as a real layer.
                if not name.endswith(("norm.weight", "o_proj.weight", "down_proj.weight")):
                    parameter.normal_(std=0.02)
            else:
                place(source, parameter, root)
    same_buffers(large, small)
    large.generation_config = copy.deepcopy(small.generation_config)
    large.eval()
    return large


def group_of(config: LlamaConfig) -> int:
    """Query heads for each head of keys and values."""
    return config.num_attention_heads // (config.num_key_value_heads or config.num_attention_heads)


def root_of(small: int, large: int) -> float:
    """The factor of norm weights, by the widths."""
    return float((small / large) ** 0.5)


def place(source: torch.Tensor, parameter: torch.Tensor, root: float) -> None:
    """Write a small model's tensor into the beginning of a large one's; vectors are norms, which take ``root``."""
    if parameter.dim() == 1:
        parameter[: source.shape[0]] = source * root
    else:
        parameter[: source.shape[0], : source.shape[1]] = source


def inflate_head(folder: Path, small: LlamaForCausalLM, large: LlamaForCausalLM) -> Head:
    """A head of ``large``, made by ``inflate`` from ``small``, with the function of the head of ``small`` in
    ``folder``. Raises AdaptiveError if there is none."""
    source, head = Head.read(folder, parts_of_model(small)), Head.from_target(large)
    head.draft_among(source.ids)
    own, root = source.own(), root_of(source.width, head.width)
    with torch.no_grad():
        for name, tensor in head.own().items():
            if name == VOCABULARY:
                continue
            tensor.fill_(1.0 if tensor.dim() == 1 else 0.0)
            if name == "fuse.weight":  # it reads a token's embedding and a feature, side by side
                for part, parts in zip(tensor.chunk(2, 1), own[name].chunk(2, 1), strict=True):
                    place(parts, part, root)
            else:
                place(own[name], tensor, root)
    return head


def config_of(config: LlamaConfig, size: Size) -> LlamaConfig:
    """The config of a model of this size, inflated from ``config``."""
    large, group = copy.deepcopy(config), group_of(config)
    large.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    large.hidden_size, large.intermediate_size = size.width, size.feed_forward
    large.num_attention_heads, large.num_key_value_heads = size.heads, size.heads // group
    large.num_hidden_layers = size.layers
    large.rms_norm_eps = config.rms_norm_eps * config.hidden_size / size.width
    return large


def main() -> None:
    """Read a checkpoint, write the large one with the same tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("out", type=Path)
    parser.add_argument("--hybrid", action="store_true", help="a Qwen 3.5 pair of random weights, without a source")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--feed-forward", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--head", type=Path, help="a grown head of the source; only its inflated form is written")
    args = parser.parse_args()

    if args.hybrid:
        write_hybrids(args.out)
        return
    if args.source is None:
        parser.error("a checkpoint to inflate is needed, or --hybrid")
    small: Any = AutoModelForCausalLM.from_pretrained(args.source, dtype="auto")
    if args.adapter:
        MergedAdapter(small).apply(args.adapter)
    large = inflate(small, Size(args.width, args.feed_forward, args.heads, args.layers))
    if args.head:
        args.out.mkdir(parents=True, exist_ok=True)
        inflate_head(args.head, small, large).write(args.out)
        return
    _write(large, args.source, args.out)


def write_hybrids(out: Path, large: HybridSize = LARGE, small: HybridSize = SMALL) -> None:
    """Write a hybrid of random weights to ``out``/draft and a large one of the same function to ``out``/target, both
    with the tokenizer of the bundled pair."""
    tokens = BUNDLED / "target"
    draft = small_hybrid(small, vocab=AutoConfig.from_pretrained(tokens).vocab_size)
    _write(draft, tokens, out / "draft")
    _write(inflate_hybrid(draft, large), tokens, out / "target")


def _write(model: PreTrainedModel, tokens: Path, out: Path) -> None:
    model.save_pretrained(out)
    for file in tokens.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, out / file.name)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters in {out}")


if __name__ == "__main__":
    main()
