"""Measures the cost and the gain of history drafting: the index by its size, its rebuild at the start, a round by the
size of the log, and decoding speed with and without history, answer by answer in turns.

python benchmarks/history_drafting.py index --tokens 10000000
python benchmarks/history_drafting.py start --tokens 10000000
python benchmarks/history_drafting.py size --data DATA --sizes 10000 10000000
python benchmarks/history_drafting.py fresh --data DATA --temperature 1.3 --seeded
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adaptive.assistant import Assistant, encode_chat
from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import FixedLength, LengthPolicy
from adaptive.control.sources import GoodputWithHistory
from adaptive.decoding.loop import Decoding
from adaptive.drafting.archive import Archive, History
from adaptive.drafting.suffixes import suffixes
from adaptive.measure import attentive_on, measure
from adaptive.pair import Pair, load_pair
from adaptive.records.rows import insert
from adaptive.records.schema import connect, transaction
from adaptive.records.stats import by_drafter
from adaptive.records.writer import LogWriter
from adaptive.settings import load_settings
from adaptive.types import Generation, Message, SamplingParams, StopParams, Timings

WAYS = ("plain", "model", "model+history")
TEXT = 700  # tokens of a record, about as many as in the lived session


def texts(tokens: int, vocab: int = 32_000) -> np.ndarray:
    """Token ids that resemble text: Zipf's law, and a third of the 50-token pieces repeat one of the 1,000 before."""
    chance = np.random.default_rng(0)
    made = (chance.zipf(1.2, tokens) % vocab).astype(np.int32)
    for start in np.flatnonzero(chance.random(tokens // 50) < 1 / 3) * 50:
        back = int(chance.integers(1, 1000)) * 50
        if back <= start:
            made[start : start + 50] = made[start - back : start - back + 50]
    return made


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, 99th percentile and mean in microseconds."""
    us = sorted(1e6 * s for s in seconds)
    return {"median": statistics.median(us), "p99": us[int(0.99 * len(us))], "mean": statistics.fmean(us)}


def measure_index(tokens: int, rounds: int = 20_000) -> dict[str, object]:
    """Measure loading, memory, lookups and updates; every 40th lookup comes after work that empties the caches."""
    made = texts(tokens)
    index = suffixes()
    began = time.perf_counter()
    for number, start in enumerate(range(0, tokens, TEXT)):
        index.add(number, made[start : start + TEXT])
    load_s = time.perf_counter() - began
    running, dirt = suffixes(), np.zeros(1 << 23)
    running.begin(0)
    chance = np.random.default_rng(1)
    looked, cold = list[float](), list[float]()
    found = 0
    for number in range(rounds):
        start = int(chance.integers(0, tokens - 100))
        context, new = made[start : start + 32].tolist(), made[start + 32 : start + 35].tolist()
        if number % 40 == 0:
            dirt += 1  # 64 MB
        began = time.perf_counter()
        running.append(new)
        found += bool(index.follow(context)[0])
        (cold if number % 40 == 0 else looked).append(time.perf_counter() - began)
    return {
        "tokens": tokens,
        "load_tokens_per_s": tokens / load_s,
        "bytes_per_token": index.nbytes / tokens,
        "lookup_and_update_us": spread(looked),
        "behind_64_MB_us": spread(cold),
        "found": found / rounds,
    }


def measure_start(tokens: int) -> dict[str, object]:
    """Write a log of ``tokens`` tokens and measure how long the index of all of it takes to load. The server's start
    thread reads the log while this thread waits."""
    vocab = 32_000
    made = texts(tokens, vocab)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.db"
        connection = connect(path)
        with transaction(connection):
            for number, start in enumerate(range(0, tokens, TEXT)):
                insert(connection, _record(number, made[start : start + TEXT]))
        connection.close()
        archive = Archive(path, vocab)
        began, work = time.perf_counter(), time.process_time()
        archive.start()
        archive.loaded.wait()
        seconds, work = time.perf_counter() - began, time.process_time() - work
        held, memory = archive.tokens, archive.nbytes
        archive.close()
    return {
        "tokens": held,
        "start_s": seconds,
        "processor_s": work,
        "tokens_per_s": held / seconds,
        "bytes_per_token": memory / held,
    }


def _record(number: int, tokens: np.ndarray) -> Generation:
    return Generation(
        session=f"session {number}",
        created=1.7e9 + number,
        messages=(),
        prompt_text="",
        text="",
        prompt=tokens[: TEXT // 2],
        output=tokens[TEXT // 2 :],
        sampling=SamplingParams(),
        adapter=None,
        engine="transformers",
        domain=None,
        finish_reason="stop",
        rounds=(),
        timings=Timings(TEXT // 2, 0, 0.1, TEXT // 2, 1.0),
        supervision=None,
    )


class Way:
    """One way of drafting: an assistant with a log of its own, and the figures of its answers."""

    def __init__(self, pair: Pair, name: str, policy: LengthPolicy, folder: Path) -> None:
        self.name = name
        self.log = LogWriter(folder / f"{name}.db")
        self.archive = Archive(folder / f"{name}.db", pair.target.vocab_size) if "history" in name else None
        self.assistant = Assistant(pair, policy, self.log, history=History(self.archive) if self.archive else None)
        self.answers: list[dict[str, Any]] = []

    def answer(self, messages: list[Message], sampling: SamplingParams, tokens: int, label: str) -> str:
        """Answer once, keep the figures under ``label``, return the text."""
        for _ in self.assistant.chat(messages, sampling, StopParams(tokens)):
            pass
        done = self.assistant.last
        assert done is not None
        self.answers.append(
            {"label": label, "tokens": len(done.output) - 1, "rounds": len(done.rounds), "s": done.timings.predicted_s,
             "by": {k: (v.drafted, v.accepted) for k, v in by_drafter(done.rounds).items()}}
        )  # fmt: skip
        self.log.flush()
        if self.archive is not None:
            self.archive.catch_up()
        return done.text

    def figures(self, label: str) -> dict[str, Any]:
        """Totals over the answers under ``label``."""
        of = [a for a in self.answers if a["label"] == label]
        tokens, rounds, seconds = (sum(a[key] for a in of) for key in ("tokens", "rounds", "s"))
        by: dict[str, list[int]] = {}
        for a in of:
            for name, (drafted, accepted) in a["by"].items():
                both = by.setdefault(name, [0, 0])
                both[0], both[1] = both[0] + drafted, both[1] + accepted
        return {
            "answers": len(of),
            "tokens": tokens,
            "tokens_per_round": tokens / max(rounds, 1),
            "tokens_per_s": tokens / max(seconds, 1e-9),
            "us_a_round": 1e6 * seconds / max(rounds, 1),
            "drafted_accepted": by,
        }

    def speeds(self, label: str) -> list[float]:
        """Tokens per second of each answer under ``label``; 0 for one without a round."""
        return [a["tokens"] / a["s"] if a["tokens"] and a["s"] else 0.0 for a in self.answers if a["label"] == label]


def compared(ways: list[Way], label: str) -> list[dict[str, Any]]:
    """Quartiles of the speed ratio by answer: every later way that drafts over the first one that drafts."""
    first, *others = [way for way in ways if way.name != WAYS[0]]
    found = []
    for way in others:
        ratios = [a / b for a, b in zip(way.speeds(label), first.speeds(label), strict=True) if a and b]
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else []
        found.append({"label": label, "way": way.name, f"over {first.name}, by answer": quartiles})
    return found


def read(data: Path, kind: str) -> list[list[Message]]:
    """The chats of one kind."""
    with gzip.open(data / f"{kind}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [[Message(**m) for m in json.loads(line)["messages"]] for line in file]


def mixed(data: Path, count: int, seed: int) -> list[list[Message]]:
    """First messages of several kinds, the kinds alternating."""
    kinds = ("gsm8k_train", "code_instructions", "roleplay", "tool_calls", "instructions_1k")
    chance = random.Random(seed)
    chosen = {kind: chance.sample(read(data, kind), count) for kind in kinds}
    return [chosen[kinds[i % len(kinds)]][i][:1] for i in range(count)]


def ways_of(
    pair: Pair, folder: Path, sampling: SamplingParams, names: Sequence[str] = WAYS, sizes: Sequence[int] = ()
) -> list[Way]:
    """Plain decoding, the model under the controller, and the model with history under the controller. With ``sizes``,
    only the last of these, once for a log of each size in tokens. All start from the same measured costs."""
    costs = measure(pair, sampling).costs
    attentive = attentive_on(pair)
    print(json.dumps({"costs": dataclasses.asdict(costs)}), flush=True)
    clock = time.thread_time
    if sizes:
        made, sized = texts(max(sizes), pair.target.vocab_size), []
        for size in sizes:
            policy = GoodputWithHistory(costs, attentive=attentive, clock=clock)
            sized.append(way := Way(pair, f"{WAYS[2]}, {size}", policy, folder))
            assert way.archive is not None
            for number, start in enumerate(range(0, size, TEXT)):
                way.archive.index("").add(-1 - number, made[start : min(size, start + TEXT)])
        return sized
    kinds = GoodputLength, GoodputWithHistory
    policies = [FixedLength(0), *(kind(costs, attentive=attentive, clock=clock) for kind in kinds)]
    return [Way(pair, name, policy, folder) for name, policy in zip(WAYS, policies, strict=True) if name in names]


def repeat(ways: list[Way], args: argparse.Namespace, sampling: SamplingParams) -> list[str]:
    """Several passes over the same prompts, each in another order, with other prompts in between."""
    prompts, others = mixed(args.data, args.prompts, 1), mixed(args.data, args.passes * args.prompts // 4 + 1, 2)
    chance = random.Random(3)
    for number in range(1, args.passes + 1):
        for place, messages in enumerate(chance.sample(prompts, len(prompts))):
            for way in in_turns(ways, place):
                way.answer(messages, sampling, args.tokens, f"pass {number}")
            if place % 4 == 3:
                between = others.pop()
                for way in in_turns(ways, place // 4):
                    way.answer(between, sampling, args.tokens, "between")
    return [f"pass {number}" for number in range(1, args.passes + 1)] + ["between"]


def fresh(ways: list[Way], args: argparse.Namespace, sampling: SamplingParams) -> list[str]:
    """No prompt twice. With ``--seeded`` each answer is the same text in every way."""
    for number, messages in enumerate(mixed(args.data, args.prompts, args.chosen)):
        seeded = dataclasses.replace(sampling, seed=1000 * args.chosen + number) if args.seeded else sampling
        for way in in_turns(ways, number):
            way.answer(messages, seeded, args.tokens, args.what)
    return [args.what]


def in_turns(ways: list[Way], number: int) -> list[Way]:
    """The ways in rotated order, so that each comes first equally often: the first one finds colder caches."""
    return ways[number % len(ways) :] + ways[: number % len(ways)]


def tools(ways: list[Way], args: argparse.Namespace, sampling: SamplingParams) -> list[str]:
    """One growing conversation of tool calls; its first message contains the tool's schema."""
    by_schema: dict[str, list[str]] = {}
    for chat in read(args.data, "tool_calls"):
        *head, task = chat[0].content.rsplit("\n", 1)
        by_schema.setdefault("".join(head), []).append(task)
    schema, tasks = max(by_schema.items(), key=lambda item: len(item[1]))
    for way in ways:
        way.said = []  # type: ignore[attr-defined]
    for number, task in enumerate(tasks[: args.prompts]):
        for way in in_turns(ways, number):
            way.said.append(Message("user", task if number else f"{schema}\n{task}"))  # type: ignore[attr-defined]
            text = way.answer(way.said, sampling, min(args.tokens, 60), "tools")  # type: ignore[attr-defined]
            way.said.append(Message("assistant", text))  # type: ignore[attr-defined]
    return ["tools"]


class Forced:
    """The sequence of a target that generates a given ``script`` from position ``start`` of the text on."""

    def __init__(self, inner: Any, owner: ForcedEngine) -> None:
        self.inner, self.owner = inner, owner
        self.fused = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def extend(self, tokens: Any, rows: int, parents: list[int] | None = None) -> torch.Tensor:
        """Extend, and make the scripted token the likeliest in every row. Chains only, no trees."""
        logits: torch.Tensor = self.inner.extend(tokens, rows, parents).clone()
        first = self.inner.length - rows - self.owner.start + 1
        for row in range(rows):
            at = first + row
            if 0 <= at < len(self.owner.script):
                logits[row, self.owner.script[at]] = 1e4
        return logits


class ForcedEngine:
    """The engine of a target that generates a given script."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.script: list[int] = []
        self.start = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def sequence(self, features: bool = False) -> Any:
        """A sequence that generates the script."""
        return Forced(self.inner.sequence(features), self)


def rewrites(pair: Pair, ways: list[Way], args: argparse.Namespace, sampling: SamplingParams) -> list[str]:
    """A file and an instruction to rename one name in it; the answer is the file with that change."""
    chance = random.Random(5)
    files = [chat[1].content for chat in read(args.data, "code_instructions")]
    files = [text for text in files if 300 < len(text) < 1500 and text.count("\n") > 8]
    engine: Any = pair.target
    for number, text in enumerate(chance.sample(files, args.prompts)):
        words = [w for w in set("".join(c if c.isidentifier() else " " for c in text).split()) if len(w) > 3]
        old = max(sorted(words), key=text.count)
        messages = [Message("user", f"Rename {old} to {old}_new in this file and repeat the rest.\n{text}")]
        prompt = encode_chat(pair, messages)
        engine.script = pair.tokenizer.encode(text.replace(old, f"{old}_new"), add_special_tokens=False)
        engine.start = len(prompt)
        for way in in_turns(ways, number):
            way.answer(messages, sampling, min(args.tokens, len(engine.script)), "rewrites")
    return ["rewrites"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["index", "start", "size", "repeat", "fresh", "tools", "rewrites"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[120], help="of an answer; of the index or the log")
    parser.add_argument("--sizes", type=int, nargs="+", default=[], help="tokens of the logs that are compared")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--chosen", type=int, default=4, help="which prompts, by chance")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seeded", action="store_true", help="the same text in every way, at any temperature")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="only these: counts need no other")
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    if args.what in ("index", "start"):
        for tokens in args.tokens:
            print(json.dumps({"index": measure_index, "start": measure_start}[args.what](tokens)), flush=True)
        return
    args.tokens = args.tokens[0]
    sampling = SamplingParams(temperature=args.temperature)
    named = {name: getattr(args, name) for name in ("target", "draft", "dtype") if getattr(args, name)}
    pair = load_pair(load_settings({**named, "threads": 1}))
    torch.set_num_threads(1)
    Decoding.clock = staticmethod(time.thread_time)
    with tempfile.TemporaryDirectory() as folder:
        ways = ways_of(pair, Path(folder), sampling, args.ways, args.sizes)
        if args.what == "rewrites":
            forced: Any = ForcedEngine(pair.target)
            pair = dataclasses.replace(pair, target=forced)
            for way in ways:
                way.assistant = Assistant(pair, way.assistant.policy, way.log, history=way.assistant.history)
            labels = rewrites(pair, ways, args, sampling)
        else:
            run = {"repeat": repeat, "fresh": fresh, "size": fresh, "tools": tools}[args.what]
            labels = run(ways, args, sampling)
        for label in labels:
            for way in ways:
                print(json.dumps({"label": label, "way": way.name, **way.figures(label)}), flush=True)
            for ratios in compared(ways, label):
                print(json.dumps(ratios), flush=True)
        for way in ways:
            if way.archive is not None:
                way.archive.close()
            way.log.close()


if __name__ == "__main__":
    main()
