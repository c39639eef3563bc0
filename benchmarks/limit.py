"""Measures the limits of this machine, and how near decoding comes to them.

    python benchmarks/limit.py [--target DIR --draft DIR] [--length 4] [--prompts FILE]

Prints the memory's bandwidth; for each model the bytes that a pass reads, the time that reading them
takes (the floor), and the time of bare passes over 1 to 8 tokens; where the time of a speculative round
goes, and the share of it that is neither model's forward; how a round grows with the context; memory
over many tokens; and the time to the first token of a second turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import psutil
import torch
from rounds import show_round
from timing import REPEATS, bare, count_processor_time, filled, seconds, settle

from adaptive.assistant import Assistant, encode_chat
from adaptive.control.policy import FixedLength
from adaptive.engines.cpu.packing import PackedExperts
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.load import forward_of
from adaptive.engines.protocol import Engine
from adaptive.pair import BUNDLED, Pair, load_pair
from adaptive.settings import Settings, load_settings
from adaptive.types import Message, SamplingParams, StopParams
from cli.calibrate import answer_plainly, read_sample
from cli.prompts import PromptLine, read_prompts
from trainers.replay import acceptance_rate, replay_on

# Bytes read to measure the bandwidth: far more than any cache holds.
STREAM = 1 << 29


def bandwidth() -> float:
    """Bytes per second that all cores together read from memory."""
    data = torch.ones(STREAM // 4)
    square = data.view(-1, 1 << 14)
    vector = torch.ones(square.shape[1])
    best = min(seconds(call, 5) for call in (data.sum, lambda: torch.mv(square, vector)))
    return STREAM / best


def weight_bytes(engine: Engine) -> int:
    """Bytes of weights that one pass reads: of int8 layers a byte a number, and a float32 scale an output. An embedding
    table counts only if it is also the output head."""
    assert isinstance(engine, TransformersEngine)
    model = engine.model
    total = sum(int(parameter.nbytes) for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight
    total -= 0 if embedding is model.get_output_embeddings().weight else embedding.nbytes
    for packed in engine.cpu_forward.plan.linears if engine.cpu_forward is not None else ():
        for layer in (*packed.up, *packed.down) if isinstance(packed, PackedExperts) else (packed,):
            if layer.int8:
                total -= layer.nbytes - layer.outputs * (layer.inputs + 4)
    return total


def show_model(name: str, engine: Engine, speed: float) -> None:
    """Print the floor and the bare passes of one model."""
    size = weight_bytes(engine)
    sequence = filled(engine, min(200, engine.context_length - 16))
    # The numbers of tokens take turns, because the machine's speed changes over time.
    found: dict[int, list[float]] = {count: [] for count in (1, 2, 4, 5, 8)}
    for count in found:
        settle(sequence, count)
    for _ in range(REPEATS):
        for count, seen in found.items():
            seen.append(bare(sequence, count, repeats=1))
    times = {count: statistics.median(seen) for count, seen in found.items()}
    own = getattr(engine, "cpu_forward", None)
    print(f"{name}: reads {size / 1e6:.1f} MB a pass, floor {size / speed * 1e3:.3f} ms; {forward_of(engine).value}")
    for count, taken in times.items():
        share = f"{taken / times[1]:.2f} of one, {size / speed / taken:.0%} of the limit"
        threads = f", {own.threads.best(count)} thread(s)" if own else ""
        print(f"  {count} token(s): {taken * 1e3:8.3f} ms, {share}{threads}")


def show_context(pair: Pair, length: int) -> None:
    """Print how a round's forwards grow from a short to a long context, and how much of that is attention alone."""
    assert pair.draft is not None
    long = min(2000, pair.target.context_length - 32, pair.draft.context_length - 32)
    cost = {}
    for context in (100, long):
        draft, target = filled(pair.draft, context), filled(pair.target, context)
        settle(draft, 1)
        settle(target, length + 1)
        cost[context] = length * bare(draft, 1) + bare(target, length + 1)
    attention = {context: attention_alone(pair, context, length) for context in (100, long)}
    grown, due = cost[long] - cost[100], attention[long] - attention[100]
    print(f"from 100 to {long} tokens of context a round's forwards grow by {grown * 1e3:.3f} ms,")
    print(f"  attention alone by {due * 1e3:.3f} ms: {grown / due:.2f} of it")


def attention_alone(pair: Pair, context: int, length: int) -> float:
    """Seconds of the attention of one round's forwards, over keys and values of every layer."""
    total = 0.0
    for engine, rows, passes in ((pair.draft, 1, length), (pair.target, length + 1, 1)):
        own = getattr(engine, "cpu_forward", None)
        if own is None:
            return float("nan")
        # Tensors of the cache's shapes: the kernels' own cache has keys in panels, which torch's attention cannot read.
        dtype = own.cache_dtype
        mask = torch.zeros(rows, context + rows, dtype=dtype) if rows > 1 else None
        parts = []
        for layer in own.plan.attending:
            heads = layer.heads
            q = torch.randn(1, heads.keys, rows * heads.group, heads.size, dtype=dtype)
            k, v = (torch.randn(1, heads.keys, context + rows, heads.size, dtype=dtype) for _ in range(2))
            seen = None if mask is None else mask.repeat_interleave(heads.group, 0)
            parts.append((q, k, v, seen))
        given = torch.get_num_threads()
        torch.set_num_threads(own.threads.best(rows))

        def call(parts=parts) -> None:  # type: ignore[no-untyped-def]
            for q, k, v, seen in parts:
                torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)

        with torch.inference_mode():
            total += passes * seconds(call)
        torch.set_num_threads(given)
    return total


def show_memory(pair: Pair, prompts: list[PromptLine], length: int, tokens: int) -> None:
    """Print the growth of resident memory over many tokens."""
    assistant, process = Assistant(pair, FixedLength(length), None), psutil.Process()
    each = min(1000, pair.target.context_length - 600)
    done, first = 0, 0
    while done < tokens:
        prompt = prompts[(done // each) % len(prompts)]
        for _ in assistant.chat(prompt.messages, SamplingParams(temperature=0.7), StopParams(each, ignore_eos=True)):
            done += 1
        first = first or process.memory_info().rss  # the first answer allocates the buffers
    grown = process.memory_info().rss - first
    print(f"resident memory grew by {grown / 1e6:.1f} MB from token {each} to token {done}")


def show_int8(pair: Pair, settings: Settings, prompts: list[PromptLine]) -> None:
    """Print a step of the draft in its own dtype and with int8 weights, timed in turn, and the acceptance rates of both
    on the target's answers."""
    drafts: list[Engine] = []
    for kind in ("none", "int8"):
        draft = load_pair(settings.model_copy(update={"draft_quantize": kind})).draft
        assert draft is not None
        drafts.append(draft)
    sequences = [filled(draft, 200) for draft in drafts]
    times: list[list[float]] = [[], []]
    for sequence in sequences:
        settle(sequence, 1)
    for _ in range(REPEATS):
        for found, sequence in zip(times, sequences, strict=True):
            found.append(bare(sequence, 1))
    steps = [statistics.median(found) for found in times]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "records.db"
        answer_plainly(Assistant(pair, FixedLength(0), None), SamplingParams(temperature=0.0), prompts, log, 100)
        examples = read_sample(pair, log)
        assert examples, "these answers are too short to learn acceptance from"
    for draft, step in zip(drafts, steps, strict=True):
        rate = acceptance_rate(replay_on(draft, examples))
        print(
            f"draft in {draft.weights}: {step * 1e3:.3f} ms a step, {steps[0] / step:.2f} times; acceptance {rate:.4f}"
        )


def show_second_turn(pair: Pair, length: int) -> None:
    """Print the time to the first token of a second turn in a long conversation, over a pass over its new tokens."""
    ratios = []
    for number in range(7):
        text = f"Number {number}. " + "Tell me about the river and the fox and the winter. " * 60
        first = [Message("user", text)]
        assistant = Assistant(pair, FixedLength(length), None)
        sampling, stop = SamplingParams(seed=1), StopParams(48, ignore_eos=True)
        answer = "".join(step.text for step in assistant.chat(first, sampling, stop))
        turns = [*first, Message("assistant", answer), Message("user", "And then?")]
        for _ in assistant.chat(turns, sampling, StopParams(2, ignore_eos=True)):
            pass
        assert assistant.last is not None
        timings = assistant.last.timings
        alone = filled(pair.target, timings.cached_n)
        tokens = torch.tensor(encode_chat(pair, turns)[timings.cached_n :])
        began = time.perf_counter()
        alone.extend(tokens, 1)
        ratios.append(timings.prompt_s / (time.perf_counter() - began))
    print(
        f"first token of a second turn ({timings.prompt_n} new tokens after {timings.cached_n}): "
        f"{statistics.median(ratios):.2f} of a bare pass over the new tokens"
    )


def main() -> None:
    """Run all measurements, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--prompts", type=Path, default=BUNDLED / "prompts" / "roleplay.jsonl")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--passes-only", action="store_true", help="bandwidth, floors and bare passes, no more")
    parser.add_argument("--memory-tokens", type=int, default=10_000)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count one thread's own time, not the clock's: for a machine that other programs are using",
    )
    args = parser.parse_args()

    if args.processor_time:
        torch.set_num_threads(1)
        count_processor_time()
    named = {name: value for name in ("target", "draft", "dtype") if (value := getattr(args, name))}
    settings = load_settings(named)
    pair = load_pair(settings)
    assert pair.draft is not None
    prompts = read_prompts(args.prompts)[: args.count]
    speed = bandwidth()
    print(f"memory reads {speed / 1e9:.1f} GB/s on {torch.get_num_threads()} thread(s)")
    show_model("target", pair.target, speed)
    show_model("draft", pair.draft, speed)
    show_int8(pair, settings, prompts)
    if args.passes_only:
        return
    show_round(pair, prompts, args.length)
    show_context(pair, args.length)
    show_second_turn(pair, args.length)
    if args.memory_tokens:
        show_memory(pair, prompts, args.length, args.memory_tokens)


if __name__ == "__main__":
    main()
