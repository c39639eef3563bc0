"""Measures a head's draft vocabulary: the time of a step by vocabulary size, and the share of answers within it.

    python benchmarks/vocabulary.py steps [--width 1024 --vocab 151936 --sizes 8192,32768 --threads 1,2 --int8]
    python benchmarks/vocabulary.py coverage FILE.jsonl.gz ... [--answers 100,1000 --tokenizer tokenizer.json]
    python benchmarks/vocabulary.py acceptance --cache DIR [--kind math] [--answers 200 --train]

``steps`` times whole proposals of a head on a target of random weights; the time does not depend on their values.
``coverage`` reads chats, with the bundled tokenizer or another: every other answer orders the tokens, the rest is
looked up. For a large vocabulary it also prints the size that a training run would choose for a target of 28 layers
and width 1,024. ``acceptance`` lets the bundled target answer, starts a head on some answers, trains it on all tokens
if ``--train`` is given, and replays it on other answers with the first tokens of the order as its vocabulary.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from adaptation import as_examples
from grow_head import grown, with_features
from head_costs import interleaved
from streams import answers_of, folder_of, stream
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from adaptive.engines.head.engine import HeadEngine
from adaptive.engines.head.module import Head
from adaptive.engines.head.parts import parts_of_folder
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.protocol import FusedCalls, ProposalCall, sequences
from adaptive.pair import BUNDLED, sources
from adaptive.settings import Settings
from adaptive.types import SamplingParams
from trainers.dataset import Example
from trainers.heads import replay_head
from trainers.recipe import Recipe
from trainers.replay import acceptance_rate, mean_acceptance_length
from trainers.start import start_from
from trainers.students import HeadStudent
from trainers.vocabulary import WHOLE, Reads, best_size, held_out_coverage, order, said, sizes

PROMPTS = BUNDLED / "prompts"
# Weights in a layer of Qwen3-0.6B, whose width is 1,024.
LAYER = 15_728_640
# Number of prompts whose answers the head is replayed on.
HELD = 64
# Steps of a proposal, and tokens before it.
LENGTH, CONTEXT = 4, 200
TURNS = 25
WAYS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.7),
    "seeded": SamplingParams(temperature=0.7, seed=3),
}


def target_of(width: int, vocab: int) -> Qwen3ForCausalLM:
    """A target of Qwen 3's architecture: two layers of random weights."""
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=2,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    nn.Module.to(model, torch.bfloat16)
    model.eval()
    return model


def steps(width: int, vocab: int, few: list[int], threads: list[int], int8: bool) -> None:
    """Print the milliseconds of a step, by vocabulary size and by the way its token is chosen."""
    target = TransformersEngine(target_of(width, vocab))
    heads: dict[str, HeadEngine] = {}
    for size in [vocab, *few]:
        head = Head.from_target(target.model)
        if size < vocab:
            head.draft_among(torch.randperm(vocab)[:size].sort().values)
        heads[f"{size:,}"] = HeadEngine(head, target, int8=int8)
    held = {}
    for name, engine in heads.items():
        text, sequence = sequences(target, engine)
        assert sequence is not None
        context = torch.arange(CONTEXT) + 1000
        text.extend(context, 1)
        sequence.extend(context[:-1], 1)
        held[name] = sequence
    # No head runs twice in a row, so that none finds its weights in the processor's caches, as after a target's pass.
    calls: dict[str, Callable[[], object]] = {}
    for way, params in WAYS.items():
        for name, sequence in held.items():
            assert sequence.fused is not None
            calls[f"{name} {way}"] = partial(proposed, sequence.fused, sequence.rollback, params, vocab)
    for count in threads:
        torch.set_num_threads(count)  # the most that passes may have
        for engine in heads.values():
            if engine.threads is not None:  # not one thread where that is faster: the line names a number
                engine.threads.held = count
        for name, seconds in interleaved(calls, TURNS).items():
            print(f"{count} threads, {name}: {1000 * float(np.median(seconds)) / LENGTH:.2f} ms a step", flush=True)


def proposed(fused: FusedCalls, rollback: Callable[[int], None], params: SamplingParams, vocab: int) -> None:
    """Make one proposal after the context."""
    rollback(CONTEXT - 1)
    uniform = [0.5] * LENGTH if params.temperature and params.seed is None else []
    fused.propose(ProposalCall([7], LENGTH, vocab, params, uniform, None))


def coverage(files: list[Path], answers: list[int], tokens: Path | None) -> None:
    """Print the share of answer tokens that are among the first of the order, by number of answers and size."""
    if tokens is None:
        tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    else:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokens))
    for file in files:
        with gzip.open(file, "rt") as lines:
            chats = [json.loads(line)["messages"] for line in lines]
        random.Random(0).shuffle(chats)
        examples = []
        for chat in chats[: max(answers)]:
            asked = "\n".join(m["content"] for m in chat if m["role"] != "assistant")
            told = "\n".join(m["content"] for m in chat if m["role"] == "assistant")
            ids = [np.array(tokenizer(text)["input_ids"], np.int32) for text in (asked, told)]
            examples.append(Example(1, "", ids[0], ids[1], SamplingParams(temperature=0.0), False, None))
        vocab = len(tokenizer)
        for count in answers:
            few = [256, 512, 1024, 1536, 2048, 3072] if vocab <= WHOLE else sizes(vocab)
            found = held_out_coverage(examples[:count], vocab, few)
            shares = ", ".join(f"{size:,} {share:.1%}" for size, share in found.items())
            if vocab > WHOLE:
                target = 28 * LAYER + vocab * 1024
                best = best_size(found, Reads(LAYER + 2 * 1024**2, 1024, target), vocab, LENGTH)
                shares += f"; chosen {best:,}"
            print(
                f"{file.name.partition('.')[0]}, {min(count, len(examples))} answers, of {vocab:,}: {shares}",
                flush=True,
            )


def acceptance(cache: Path, kind: str, count: int, train: bool) -> None:
    """Print a head's acceptance and its coverage, by the size of its draft vocabulary."""
    settings = Settings(device="cpu", max_new_tokens=120)
    target = sources(settings)[0].folder
    answers = answers_of(kind, settings, PROMPTS, cache, 0.7, 1)
    given = stream(f"stationary:{kind}", {kind: answers}, count, HELD, 0)
    told, held = (
        with_features(as_examples(some), folder_of(kind, settings, PROMPTS, cache, 0.7), str(target), False)
        for some in (given.generations, given.held_out[kind])
    )
    head = Head(parts_of_folder(target), torch.float32)
    if train:
        recipe = Recipe(draft_length=LENGTH)
        grown(HeadStudent(head, recipe), told, held, recipe)
    else:
        start_from(head, told)
    ordered = order(*said(told, head.vocab_size))
    output = np.concatenate([example.output for example in held])
    for size in (512, 1024, 1536, 2048, 3072, head.vocab_size):
        ids = np.sort(ordered[:size])
        head.draft_among(torch.from_numpy(ids))
        replays = replay_head(head, held, LENGTH)
        print(
            f"{kind}, {len(told)} answers, {size:,} of {head.vocab_size:,}: covered {np.isin(output, ids).mean():.1%}, "
            f"accepted {acceptance_rate(replays):.3f}, {mean_acceptance_length(replays, LENGTH):.2f} tokens a round",
            flush=True,
        )


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    timed = commands.add_parser("steps")
    timed.add_argument("--width", type=int, default=1024)
    timed.add_argument("--vocab", type=int, default=151_936)
    timed.add_argument("--sizes", default="8192,32768")
    timed.add_argument("--threads", default="1,2")
    timed.add_argument("--int8", action="store_true")
    read = commands.add_parser("coverage")
    read.add_argument("files", type=Path, nargs="+")
    read.add_argument("--answers", default="100,1000")
    read.add_argument("--tokenizer", type=Path, help="a tokenizer.json instead of the bundled one")
    replayed = commands.add_parser("acceptance")
    replayed.add_argument("--cache", type=Path, required=True, help="folder for the target's answers, made once")
    replayed.add_argument("--kind", default="math")
    replayed.add_argument("--answers", type=int, default=200)
    replayed.add_argument("--train", action="store_true", help="by a training run's default recipe")
    given = parser.parse_args()
    if given.command == "acceptance":
        acceptance(given.cache, given.kind, given.answers, given.train)
        return
    if given.command == "coverage":
        coverage(given.files, [int(n) for n in given.answers.split(",")], given.tokenizer)
        return
    few, threads = ([int(n) for n in text.split(",")] for text in (given.sizes, given.threads))
    steps(given.width, given.vocab, few, threads, given.int8)


if __name__ == "__main__":
    main()
