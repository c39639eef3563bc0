"""Runs several streaming clients on one server: tokens per second, time to the first token, and a lone client's loss.

    python benchmarks/slots.py --target ... --draft ... --clients 8 --tokens 128 --rounds 6
    python benchmarks/slots.py --target ... --draft ... --clients 1 --rounds 30    # what a lone client loses

One process answers with one slot and with N, in turns whose order changes (``slotted_server.py``), so that other load
and the process's memory layout affect both alike. In every round, with either number of slots, one client is answered
alone and then all clients at once, greedily, with prompts that no cache holds. Prints the figures of each and their
ratios, medians over the rounds, and the number of texts that are the same with both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from served import PATIENCE_S, Served, Stream, prompts, served, stream
from slotted_server import PREFIX

PROGRAM = Path(__file__).with_name("slotted_server.py")
# Required ratios over one slot: all clients' tokens per second, and a lone client's.
TOGETHER, ALONE = 2.5, 0.98


@dataclass(frozen=True)
class Figures:
    """Figures of simultaneous clients: tokens per second in total, and median and longest seconds to a first text."""

    tokens_per_s: float
    first_s: float
    longest_first_s: float


def main() -> None:
    """Run the benchmark, print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--kind", default="math", help="of the bundled prompts")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--slots", default="8")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--draft-length", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="where to write every figure")
    options = parser.parse_args()
    shared = ["--distill", "off", "--draft-length", options.draft_length, "--dtype", options.dtype]
    for name in ("target", "draft", "threads"):
        value = getattr(options, name)
        shared += [] if value is None else [f"--{name}", str(value)]
    texts = prompts(options.kind, options.clients)
    found: dict[tuple[str, str], list[Figures]] = defaultdict(list)
    said: dict[str, set[str]] = defaultdict(set)
    given = [*shared, "--slots", options.slots]
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder), given, program=[str(PROGRAM)]) as server,
    ):
        if len(server.get("/slots")) != int(options.slots):
            raise SystemExit(server.get("/health")["slots"]["why_not_more"])
        for number in range(options.rounds + 1):  # the first is not counted: it warms up the machine and the policy
            for slots in ("1", options.slots) if number % 2 else (options.slots, "1"):
                for count in sorted({1, options.clients}):
                    asked = [f"Question {number}.{count}: {text}" for text in texts[:count]]
                    streams, seconds = ask(server, asked, options.tokens, slots)
                    for prompt, one in zip(asked, streams, strict=True):
                        said[prompt].add(one.text)
                    if number:
                        found[slots, "alone" if count == 1 else "together"].append(figures(streams, seconds))
    report(options, found, said)


def ask(server: Served, texts: list[str], tokens: int, slots: str) -> tuple[list[Stream], float]:
    """Send each text by its own client, all at once. Returns the streams and the seconds until the last one ended."""
    shared = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "store": False}
    messages = [[{"role": "user", "content": text}] for text in texts]
    bodies = [{"messages": one, "user": f"{number}", **shared} for number, one in enumerate(messages)]
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in texts:  # created before timing begins: each takes tens of milliseconds of processor time
            session = {"x-session-id": f"{PREFIX}{slots}/{uuid.uuid4().hex}"}
            client = httpx.Client(base_url=server.url, timeout=PATIENCE_S, headers=session, verify=False)
            clients.append(stack.enter_context(client))
        pool = stack.enter_context(ThreadPoolExecutor(len(texts)))
        began = time.perf_counter()
        streams = list(pool.map(stream, clients, bodies))
        return streams, time.perf_counter() - began


def figures(streams: list[Stream], seconds: float) -> Figures:
    """The figures of these streams. Raises SystemExit if an answer is not complete."""
    if not all(one.whole and one.times for one in streams):
        raise SystemExit("an answer did not come whole")
    tokens = sum(one.ending["timings"]["predicted_n"] for one in streams if one.ending is not None)
    first = [one.times[0] - one.asked for one in streams]
    return Figures(tokens / seconds, statistics.median(first), max(first))


def report(options: argparse.Namespace, found: dict[tuple[str, str], list[Figures]], said: dict[str, set[str]]) -> None:
    """Print medians over the rounds and their ratios."""

    def median(slots: str, how: str, name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in found[slots, how]))

    def ratio(how: str, name: str) -> float:
        """The median of the rounds' ratios; both measurements of a round were made next to each other."""
        both = zip(found[options.slots, how], found["1", how], strict=True)
        return float(statistics.median(getattr(many, name) / getattr(one, name) for many, one in both))

    for slots, how in sorted(found):
        count = 1 if how == "alone" else options.clients
        print(
            f"{slots} slots, {count} at once: "
            f"{median(slots, how, 'tokens_per_s'):.1f} tokens/s, first text after "
            f"{median(slots, how, 'first_s'):.3f} s (longest {median(slots, how, 'longest_first_s'):.3f})"
        )
    if options.clients > 1:
        together, lone = ratio("together", "tokens_per_s"), median(options.slots, "alone", "first_s")
        print(f"{options.clients} clients, tokens/s against one slot: {together:.2f} (asked for: {TOGETHER})")
        print(f"{options.clients} clients, time to the first text against one slot: {ratio('together', 'first_s'):.2f}")
        print(f"the same against a client alone: {median(options.slots, 'together', 'first_s') / lone:.2f}")
    alone = ratio("alone", "tokens_per_s")
    print(f"one client alone, tokens/s against one slot: {alone:.3f} (asked for: {ALONE})")
    print(f"prompts to which both said the same: {sum(len(texts) == 1 for texts in said.values())} of {len(said)}")
    if options.json is not None:
        every = {f"slots {slots}, {how}": [asdict(one) for one in figures] for (slots, how), figures in found.items()}
        options.json.write_text(json.dumps(every, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
