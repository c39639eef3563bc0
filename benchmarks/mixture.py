"""Measures our forward of a mixture of experts, on a Qwen 3 mixture of random weights.

    python benchmarks/mixture.py
    python benchmarks/mixture.py --experts 128 --layers 4

Prints plain decoding by our forward and by transformers' own in the same engine, timed in turn; and passes over several
tokens of a text sampled from the model, against one token, with the number of experts that they use in a layer.
"""

from __future__ import annotations

import argparse
import resource
import statistics
from typing import Any

import timing
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from adaptive.engines.cpu.feed_forward import Mixture
from adaptive.engines.hf.engine import TransformersEngine

# Tokens of text before the first timed pass, and tokens of the whole text; passes are timed at several places in it.
CONTEXT, TEXT = 64, 128
COUNTS = (1, 2, 4, 8, 16)


def make_model(args: argparse.Namespace) -> Qwen3MoeForCausalLM:
    """A model of random weights in which each token's distribution depends on all tokens before it."""
    torch.manual_seed(0)
    undeclared: dict[str, Any] = {"head_dim": 64}  # which the model reads, but its config class does not declare
    config = Qwen3MoeConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        moe_intermediate_size=args.inner,
        num_experts=args.experts,
        num_experts_per_tok=args.chosen,
        num_hidden_layers=args.layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        **undeclared,
    )
    model: Qwen3MoeForCausalLM = Qwen3MoeForCausalLM._from_config(config, dtype=getattr(torch, args.dtype))
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=(8 if "lm_head" in name else 1.5) / parameter.shape[-1] ** 0.5)
    return model


def say(engine: TransformersEngine, count: int) -> list[int]:
    """A text of ``count`` tokens sampled from the model."""
    torch.manual_seed(1)
    sequence, text = engine.sequence(), [1]
    while len(text) < count:
        text.append(int(torch.multinomial(sequence.extend(text[sequence.length :], 1)[0].float().softmax(-1), 1)))
    return text


def show_plain(ours: TransformersEngine, theirs: TransformersEngine, text: list[int], args: argparse.Namespace) -> None:
    """Print plain decoding, token by token, by each forward in turn."""
    taken: tuple[list[float], list[float]] = ([], [])
    held = [engine.sequence() for engine in (ours, theirs)]
    for sequence in held:
        sequence.extend(text[:CONTEXT], 1)
        timing.settle(sequence, 1)
    for _ in range(args.repeats):
        for sequence, seen in zip(held, taken, strict=True):
            began = timing.clock()
            for token in text[CONTEXT : CONTEXT + args.tokens]:
                sequence.extend([token], 1)
            seen.append((timing.clock() - began) / args.tokens)
            sequence.rollback(CONTEXT)
    one, other = map(statistics.median, taken)
    print(
        f"plain: {1 / one:.1f} tokens a second by our forward ({one * 1e3:.2f} ms each), {1 / other:.1f} by "
        f"transformers' own ({other * 1e3:.2f} ms): {other / one:.2f} times as fast"
    )


def show_passes(engine: TransformersEngine, text: list[int], repeats: int) -> None:
    """Print passes over several tokens against one, at several places of the text."""
    sequence = engine.sequence()
    sequence.extend(text, 1)
    found: dict[int, list[float]] = {count: [] for count in COUNTS}
    for count in COUNTS:
        timing.settle(sequence, count)
    places = torch.linspace(CONTEXT, len(text) - max(COUNTS), repeats).long().tolist()
    for place in places:
        for count, seen in found.items():
            sequence.rollback(place)
            began = timing.clock()
            sequence.extend(text[place : place + count], count)
            seen.append(timing.clock() - began)
        sequence.extend(text[sequence.length :], 1)
    chosen = experts_chosen(engine, text)
    one = statistics.median(found[1])
    for count, seen in found.items():
        taken = statistics.median(seen)
        used = statistics.mean(
            len(set(layer[place : place + count].flatten().tolist())) for place in places for layer in chosen
        )
        print(f"a pass over {count:2}: {taken * 1e3:7.2f} ms, {taken / one:.2f} of one; {used:.1f} experts in a layer")


def experts_chosen(engine: TransformersEngine, text: list[int]) -> list[torch.Tensor]:
    """For each layer the experts of each token, (n, chosen)."""
    found: list[torch.Tensor] = []
    assert engine.cpu_forward is not None
    given: Any = Mixture.choose

    def seen(self: Mixture, x: torch.Tensor) -> Any:
        found.append(given(self, x)[0])
        return given(self, x)

    Mixture.choose = seen  # type: ignore[method-assign]
    try:
        engine.cpu_forward.by_layers(torch.tensor(text), 1, engine.cpu_forward.cache())
    finally:
        Mixture.choose = given  # type: ignore[method-assign]
    return found


def main() -> None:
    """Run both measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "layers": 8, "width": 1024, "experts": 64, "inner": 512, "chosen": 8, "vocab": 32000, "tokens": 32,
        "repeats": 15,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    model = make_model(args)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ours = TransformersEngine(model)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    hook = model.register_forward_pre_hook(lambda *given: None)  # a model with hooks keeps transformers' own forward
    theirs = TransformersEngine(model)
    hook.remove()
    size = sum(parameter.numel() for parameter in model.parameters())
    held = sum(parameter.nbytes for parameter in model.parameters())
    print(
        f"{size / 1e6:.0f}M parameters in {ours.weights}, {held / 1e6:.0f} MB, whose packed copy added "
        f"{(peak - before) * 1024 / 1e6:.0f} MB to the peak; {torch.get_num_threads()} threads"
    )
    text = say(ours, TEXT)
    show_passes(ours, text, args.repeats)
    show_plain(ours, theirs, text, args)


if __name__ == "__main__":
    main()
