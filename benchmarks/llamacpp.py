"""Races our loop on llama.cpp against llama-server, on the same GGUF files and threads, in turns on the same prompts.

    python benchmarks/llamacpp.py --server llama-server --target T.gguf --draft D.gguf [--lengths 2,4]
                                  [--kind math --skip 200] [--count 40] [--tokens 200] [--threads 2]
                                  [--adapter FOLDER] [--merged MERGED.gguf] [--temperature 0.7] [--out FILE]

Every contender answers every prompt, in rotating order. Speed is that of decoding: tokens after the first
and their seconds, ours by our clock and the server's by its own (so that HTTP does not count).
"On one prompt" is our speed over llama-server's with the same draft length: the median over prompts of the ratio
on each, which does not depend on differences between prompts. ``--adapter`` adds our loop with that PEFT adapter,
``--merged`` adds llama-server with that file as its draft.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from compare import controller
from served import end_when_terminated

from adaptive.assistant import Assistant, encode_chat
from adaptive.control.policy import FixedLength, LengthPolicy
from adaptive.pair import BUNDLED, Pair, load_pair
from adaptive.settings import load_settings
from adaptive.types import SamplingParams, StopParams
from cli.bench import of_every_kind
from cli.contenders import WARM_UP_PROMPT, repeated
from cli.prompts import PromptLine, bare_prompt, read_prompts

# Seconds that a server may take to load its files.
START = 120
# Tokens of the shortest answer that counts for speed: shorter ones are too noisy.
LEAST = 16


@dataclass(frozen=True)
class Answered:
    """One answer: token ids, seconds after the first token, tokens drafted and accepted."""

    contender: str
    prompt: int
    tokens: tuple[int, ...]
    seconds: float
    drafted: int
    accepted: int


Answer = Callable[[PromptLine, int], tuple[list[int], float, int, int]]


def ours(pair: Pair, policy: LengthPolicy, sampling: SamplingParams, tokens: int) -> Answer:
    """Our own loop under one policy."""
    assistant = Assistant(pair, policy, None)

    def answer(prompt: PromptLine, number: int) -> tuple[list[int], float, int, int]:
        for _ in assistant.chat(prompt.messages, sampling, StopParams(tokens)):
            pass
        done = assistant.last
        assert done is not None
        return done.output, done.timings.predicted_s, done.drafted, done.accepted

    return answer


class Server:
    """A llama-server of our own, on a free port."""

    def __init__(self, binary: str, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [binary, "--port", str(self.port), "--parallel", "1", "--ctx-size", "2048", "--no-webui", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + START
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            if self.process.poll() is not None or time.monotonic() > until:
                self.close()
                raise SystemExit(f"{' '.join(command)} does not come up")
            time.sleep(0.1)

    def ask(self, **body: Any) -> dict[str, Any]:
        """One completion."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait()


def theirs(server: Server, pair: Pair, sampling: SamplingParams, tokens: int) -> Answer:
    """llama-server, prompted with the same tokens."""

    def answer(prompt: PromptLine, number: int) -> tuple[list[int], float, int, int]:
        said = server.ask(
            prompt=encode_chat(pair, prompt.messages),
            n_predict=tokens,
            temperature=sampling.temperature,
            seed=number,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            cache_prompt=False,
            return_tokens=True,
        )
        timings = said["timings"]
        found = said["tokens"]
        if len(found) < timings["predicted_n"]:  # the server counts the end token but does not return it
            found = [*found, pair.tokenizer.eos_token_id]
        drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        return found, timings["predicted_ms"] / 1000, drafted, accepted

    return answer


def race(field: dict[str, Answer], prompts: list[PromptLine]) -> Iterator[Answered]:
    """Every contender on every prompt, in rotating order."""
    names = list(field)
    for name in names:
        field[name](bare_prompt(WARM_UP_PROMPT), 0)
    for number, prompt in enumerate(prompts):
        start = number % len(names)
        for name in (*names[start:], *names[:start]):
            tokens, seconds, drafted, accepted = field[name](prompt, number)
            yield Answered(name, number, tuple(tokens), seconds, drafted, accepted)


def rows(answers: list[Answered], names: list[str]) -> list[dict[str, Any]]:
    """One row a contender. ``against``: how many times as fast as the first, by medians of seconds a token. ``paired``:
    how many times as fast as llama-server with the same length, the median over prompts of the ratio."""
    first = {a.prompt: a.tokens for a in answers if a.contender == names[0]}
    paces = {(a.contender, a.prompt): a.seconds / (len(a.tokens) - 1) for a in answers if len(a.tokens) >= LEAST}
    found: list[dict[str, Any]] = []
    for name in names:
        mine = [a for a in answers if a.contender == name]
        pace = statistics.median(pace for (contender, _), pace in paces.items() if contender == name)
        drafted, accepted = sum(a.drafted for a in mine), sum(a.accepted for a in mine)
        committed = sum(len(a.tokens) - 1 for a in mine)
        found.append(
            {
                "contender": name,
                "tokens_per_second": 1 / pace,
                "seconds_per_token": pace,
                "acceptance": accepted / drafted if drafted else None,
                "mean_acceptance_length": committed / (committed - accepted) if drafted else None,
                "paired": _paired(paces, name),
                "same": statistics.fmean(a.tokens == first[a.prompt] for a in mine),
                "repeated": statistics.fmean(repeated(a.tokens) for a in mine),
            }
        )
    for row in found:
        row["against"] = found[0]["seconds_per_token"] / row["seconds_per_token"]
    return found


def _paired(paces: dict[tuple[str, int], float], ours: str) -> float | None:
    theirs = ours.replace("ours", "llama-server")
    if theirs == ours:
        return None
    ratios = [paces[theirs, p] / pace for (name, p), pace in paces.items() if name == ours and (theirs, p) in paces]
    return statistics.median(ratios) if ratios else None


def markdown(table: list[dict[str, Any]]) -> str:
    """The table in the format of the docs."""
    lines = [
        "| | tokens/s | times the first | on one prompt | acceptance | a round | same answer | 8-grams repeated |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        acceptance = "" if row["acceptance"] is None else f"{row['acceptance']:.3f}"
        paired = "" if row["paired"] is None else f"{row['paired']:.2f}"
        length = "" if row["mean_acceptance_length"] is None else f"{row['mean_acceptance_length']:.2f}"
        lines.append(
            f"| {row['contender']} | {row['tokens_per_second']:.1f} | {row['against']:.2f} | {paired} | {acceptance} "
            f"| {length} | {row['same']:.0%} | {row['repeated']:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Start the servers, run the race, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    for name in ("target", "draft"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--lengths", default="2,4")
    parser.add_argument("--kind", help="one of the shipped kinds of prompts; by default all in turn")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--merged", type=Path)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    end_when_terminated()

    settings = load_settings({"target": args.target, "draft": args.draft, "threads": args.threads})
    pair = load_pair(settings)
    sampling = SamplingParams(temperature=args.temperature)
    prompts = of_every_kind(10**6) if args.kind is None else read_prompts(BUNDLED / "prompts" / f"{args.kind}.jsonl")
    random.Random(0).shuffle(prompts)
    prompts = prompts[args.skip : args.skip + args.count]
    lengths = [int(part) for part in args.lengths.split(",")]
    base = ("--model", args.target, "--threads", str(args.threads))
    speculate = (*base, "--spec-type", "draft-simple", "--spec-draft-n-max")
    wanted: dict[str, tuple[str, ...]] = {"llama-server, plain": base}
    for n in lengths:
        wanted[f"llama-server, draft {n}"] = (*speculate, str(n), "--spec-draft-model", args.draft)
        if args.merged:
            wanted[f"llama-server, draft {n}, distilled"] = (*speculate, str(n), "--spec-draft-model", str(args.merged))
    with contextlib.ExitStack() as stack:
        field: dict[str, Answer] = {}
        for name, options in wanted.items():
            server = Server(args.server, *options)
            stack.callback(server.close)
            field[name] = theirs(server, pair, sampling, args.tokens)
        field["ours, plain"] = ours(pair, FixedLength(0), sampling, args.tokens)
        field |= {f"ours, draft {n}": ours(pair, FixedLength(n), sampling, args.tokens) for n in lengths}
        field["ours, controller"] = ours(pair, controller(pair, sampling), sampling, args.tokens)
        if args.adapter:
            learned = load_pair(settings)
            assert learned.draft is not None
            learned.draft.apply_adapter(args.adapter)
            for n in lengths:
                field[f"ours, draft {n}, distilled"] = ours(learned, FixedLength(n), sampling, args.tokens)
            policy = controller(learned, sampling)
            field["ours, controller, distilled"] = ours(learned, policy, sampling, args.tokens)
        answers = list(race(field, prompts))
    table = rows(answers, list(field))
    print(
        f"{len(prompts)} prompts, at most {args.tokens} tokens, temperature {args.temperature}, "
        f"{args.threads} threads\n"
    )
    print(markdown(table))
    if args.out:
        args.out.write_text(json.dumps({"rows": table, "answers": [asdict(a) for a in answers]}), encoding="utf-8")


if __name__ == "__main__":
    main()
