"""Measures whether a server gets faster in use. Two servers, one with background training and one without, get the same
prompts of one kind in turn, with pauses; compares speed and tokens a round of the first and of the last prompts.

    python benchmarks/session.py --kind tools --count 320 --out session.json
    python benchmarks/session.py --prompts FILE.jsonl --count 400

Prints one line a block of prompts, a plot and the two ratios; --out keeps every answer's figures as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from served import Served, prompts, served

from adaptive.records.stats import SpeculativeStats

# Seconds from an answer until the trainer starts. Both servers answer within them, so that neither is
# measured while it trains; the trainer has the rest of the pause.
IDLE_S = 0.5
NAMES = {"idle": "training", "off": "no training"}


@dataclass(frozen=True)
class Answered:
    """One answer: tokens and seconds after the first token, rounds that drafted, their accepted and drafted tokens."""

    tokens: int
    seconds: float
    rounds: int
    accepted: int
    drafted: int
    adapter: str | None


def main() -> None:
    """Run the session and print the results."""
    options = _options()
    texts = prompts(options.kind, options.count, options.prompts)
    answers: dict[str, list[Answered]] = {policy: [] for policy in NAMES}
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
        servers = {policy: stack.enter_context(_server(Path(home) / policy, policy, options)) for policy in NAMES}
        for number, text in enumerate(texts):
            time.sleep(options.pause)
            # This request pauses the trainer before both measurements. The order alternates, so that none is favoured.
            servers["idle"].post("/v1/completions", {"prompt": "a", "max_tokens": 1, "store": False})
            for policy in sorted(servers, reverse=bool(number % 2)):
                answers[policy].append(_ask(servers[policy], text, number, options))
            if (number + 1) % options.block == 0:
                _print_block(number + 1, answers, options.block)
        for line in servers["idle"].news:
            print(line)
    _print_plot(answers, options.block)
    block = options.block
    first, last, plain = answers["idle"][:block], answers["idle"][-block:], answers["off"][-block:]
    print(f"last {block} against first {block}: {_speed(last) / _speed(first):.2f}x")
    print(f"last {block} against the server without training: {_speed(last) / _speed(plain):.2f}x")
    if options.out is not None:
        found = {policy: [asdict(answer) for answer in given] for policy, given in answers.items()}
        options.out.write_text(json.dumps(found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=320, help="prompts")
    parser.add_argument("--block", type=int, default=50, help="prompts that are compared")
    parser.add_argument("--kind", default="tools", help="a file of the bundled prompts")
    parser.add_argument("--prompts", type=Path, help="another file of prompts")
    parser.add_argument("--tokens", type=int, default=120, help="longest answer")
    parser.add_argument("--pause", type=float, default=1.3, help="seconds between two prompts")
    parser.add_argument("--after", type=int, default=60, help="answers that a round of training needs")
    parser.add_argument("--nice", type=int, default=19, help="of the trainer; 0 on a shared machine")
    parser.add_argument("--threads", type=int, default=1, help="threads of each server")
    parser.add_argument("--out", type=Path, help="file for every answer's figures")
    return parser.parse_args()


def _server(home: Path, policy: str, options: argparse.Namespace) -> contextlib.AbstractContextManager[Served]:
    return served(
        home,
        ["--threads", str(options.threads)],
        distill=policy,
        distill_after=options.after,
        distill_idle_seconds=IDLE_S,
        distill_nice=options.nice,
    )


def _ask(server: Served, text: str, seed: int, options: argparse.Namespace) -> Answered:
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": options.tokens,
        "temperature": 0.7,
        "seed": seed,
    }
    found = server.post("/v1/chat/completions", body)
    timings, stats = found["timings"], SpeculativeStats(**found["speculative_decoding"])
    return Answered(
        tokens=timings["predicted_n"] - 1,
        seconds=timings["predicted_ms"] / 1000,
        rounds=stats.num_spec_steps,
        accepted=stats.num_accepted_draft_tokens,
        drafted=stats.num_draft_tokens,
        adapter=found["adapter"],
    )


def _speed(answers: list[Answered]) -> float:
    """Tokens per second of all answers together."""
    return sum(a.tokens for a in answers) / max(sum(a.seconds for a in answers), 1e-9)


def _print_block(number: int, answers: dict[str, list[Answered]], block: int) -> None:
    parts = []
    for policy, given in answers.items():
        newest = given[-block:]
        rounds, drafted = sum(a.rounds for a in newest), sum(a.drafted for a in newest)
        accepted = sum(a.accepted for a in newest)
        parts.append(
            f"{NAMES[policy]}: {_speed(newest):.0f} tokens/s, {accepted / max(1, drafted):.0%} of drafts accepted, "
            f"{1 + accepted / max(1, rounds):.2f} tokens a drafted round, adapter {newest[-1].adapter or 'none'}"
        )
    print(f"{number} prompts  " + "  |  ".join(parts), flush=True)


def _print_plot(answers: dict[str, list[Answered]], block: int) -> None:
    """Print a plot of tokens per second over the prompts, a running mean of half a block."""
    import plotext

    half = block // 2
    plotext.terminal.limit(False, False)
    figure = plotext.figure
    figure.plot_size(100, 20)
    figure.theme("colorless")
    figure.title(f"tokens per second, mean of the last {half} prompts: * with training, . without")
    top = 0.0
    for (_, given), mark in zip(answers.items(), "*.", strict=True):
        ends = list(range(half, len(given) + 1))
        speeds = [_speed(given[end - half : end]) for end in ends]
        top = max([top, *speeds])
        figure.draw(figure.signal(ends, speeds, marker=mark))
    figure.ruler("y").lim(0, 1.1 * top or 1.0)
    figure.label("prompt", "x")
    print(figure.build().string(colorless=True))


if __name__ == "__main__":
    main()
