"""Checks that our loop on llama.cpp generates the same text as llama.cpp alone, and that a GGUF adapter equals PEFT's.

    python benchmarks/llamacpp_exact.py --target T.gguf --draft D.gguf [--checkpoint DIR --adapter FOLDER]
                                        [--count 40] [--tokens 200] [--lengths 0,1,4,9]

**Ties.** The target alone is decoded by the binding's own generation, without any of our code. Where our
greedy answer differs, the logits of both candidates at that position are computed again in passes of 1 to 10
tokens. A tie is a difference no larger than these passes' differences among themselves; it is printed with the gap
and the noise.

**Adapter.** Argmaxes of the adapted GGUF draft and of PEFT's model in float32 at 5,000 positions of the
target's answers, and the time of a swap.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from adaptive.assistant import Assistant, encode_chat
from adaptive.control.policy import FixedLength
from adaptive.engines.llamacpp.engine import LlamaCppEngine
from adaptive.pair import Pair, load_pair
from adaptive.settings import load_settings
from adaptive.types import SamplingParams, StopParams
from cli.bench import of_every_kind
from cli.prompts import PromptLine

POSITIONS = 5000
LARGEST_PASS = 10


def alone(file: str, prompts: list[list[int]], count: int, threads: int) -> list[list[int]]:
    """``count`` greedy tokens after each prompt, by the binding's own generation."""
    import llama_cpp

    llama = llama_cpp.Llama(
        file, n_ctx=2048, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False
    )
    found = []
    for prompt in prompts:
        llama.reset()
        found.append([token for token, _ in zip(llama.generate(prompt, temp=0.0), range(count), strict=False)])
    return found


def looks(engine: LlamaCppEngine, text: list[int], one: int, other: int) -> list[float]:
    """Logit of ``one`` less that of ``other`` after ``text``, for passes of 1 to LARGEST_PASS tokens at its end."""
    gaps = []
    for size in range(1, LARGEST_PASS + 1):
        sequence = engine.sequence()
        tokens = torch.tensor(text)
        sequence.extend(tokens[:-size], 0)
        row = sequence.extend(tokens[-size:], 1)[0]
        gaps.append(float(row[one] - row[other]))
        sequence.close()
    return gaps


def is_tie(gaps: list[float]) -> bool:
    """Whether these ``looks`` differ among themselves enough to decide for either token."""
    return min(gaps) <= 0 <= max(gaps) or abs(gaps[0]) <= max(gaps) - min(gaps)


def compare(pair: Pair, prompts: list[PromptLine], tokens: int, lengths: list[int], references: list[list[int]]) -> int:
    """Print every difference and return their number."""
    assert isinstance(pair.target, LlamaCppEngine)
    differences = 0
    for length in lengths:
        for number, prompt in enumerate(prompts):
            assistant = Assistant(pair, FixedLength(length), None)  # nothing cached, as with the target alone
            for _ in assistant.chat(prompt.messages, SamplingParams(), StopParams(tokens, ignore_eos=True)):
                pass
            assert assistant.last is not None
            mine, reference = assistant.last.output, references[number]
            if mine == reference:
                continue
            differences += 1
            place = next(i for i, (a, b) in enumerate(zip(mine, reference, strict=True)) if a != b)
            text = encode_chat(pair, prompt.messages) + reference[:place]
            gaps = looks(pair.target, text, reference[place], mine[place])
            noise = max(gaps) - min(gaps)
            verdict = "a tie" if is_tie(gaps) else "NOT A TIE"
            print(
                f"  length {length}, prompt {number}, token {place}: {verdict}, the two logits differ by "
                f"{gaps[0]:+.5f} and passes of 1 to {LARGEST_PASS} tokens by up to {noise:.5f}"
            )
    return differences


def agreement(engine: LlamaCppEngine, checkpoint: Path, adapter: Path, texts: list[list[int]]) -> None:
    """Print the share of equal argmaxes and the time of a swap."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, str(adapter)).eval()
    same = same_beside = changed = count = 0
    for text in texts:
        tokens = torch.tensor(text)
        engine.apply_adapter(None)
        before = engine.sequence().extend(tokens, len(tokens)).argmax(-1)
        engine.apply_adapter(adapter)
        after = engine.sequence().extend(tokens, len(tokens)).argmax(-1)
        for _ in engine.swap_adapter(adapter):
            pass
        beside = engine.sequence().extend(tokens, len(tokens)).argmax(-1)
        with torch.inference_mode():
            expected = model(input_ids=tokens[None]).logits[0].argmax(-1)
        same += int((after == expected).sum())
        same_beside += int((beside == expected).sum())
        changed += int((after != before).sum())
        count += len(tokens)
        if count >= POSITIONS:
            break
    print(
        f"adapter: same argmax as PEFT in float32 at {same_beside / count:.2%} of {count} positions beside the "
        f"weights, {same / count:.2%} merged into them; it changes {changed / count:.0%}"
    )
    sequence = engine.sequence()
    sequence.extend(torch.tensor(texts[0]), 1)
    swaps = []
    for number in range(40):
        began = time.perf_counter()
        for _ in engine.swap_adapter(adapter if number % 2 == 0 else None):
            pass
        sequence.extend(torch.tensor([5]), 1)  # the first pass with other weights builds the new graph
        swaps.append(1000 * (time.perf_counter() - began))
    print(
        f"swap on a running session, to the first token after it: median {statistics.median(swaps[::2]):.1f} ms, "
        f"longest {max(swaps):.1f} ms"
    )


def main() -> None:
    """Run both checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "draft"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--lengths", default="0,1,4,9")
    args = parser.parse_args()

    pair = load_pair(load_settings({"target": args.target, "draft": args.draft}))
    assert isinstance(pair.target, LlamaCppEngine)
    assert isinstance(pair.draft, LlamaCppEngine)
    prompts = of_every_kind(args.count)
    encoded = [encode_chat(pair, prompt.messages) for prompt in prompts]
    references = alone(args.target, encoded, args.tokens, pair.target.threads.most)
    lengths = [int(part) for part in args.lengths.split(",")]
    for adapter in (None, args.adapter) if args.adapter else (None,):
        pair.draft.apply_adapter(adapter)
        differences = compare(pair, prompts, args.tokens, lengths, references)
        said = f"adapter {adapter}" if adapter else "no adapter"
        print(f"{Path(args.target).name}, {said}: {differences} of {len(prompts) * len(lengths)} answers differ")
    if args.adapter and args.checkpoint:
        agreement(pair.draft, args.checkpoint, args.adapter, [a + b for a, b in zip(encoded, references, strict=True)])


if __name__ == "__main__":
    main()
