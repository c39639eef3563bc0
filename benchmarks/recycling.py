"""Measures whether token recycling is worth having: tokens a round of recycling, history, the draft and combinations.

In:  the file of ``benchmarks/replay_workloads.py`` and its target. Out: by workload, counts; nothing is timed.

Recycling proposes after a token the tokens that the target itself ranked highest when it last processed that token. The
target's ranks are computed anew along the logged answers (``RANKS`` of them; the log holds 32). Successors are learned
from answers only, as they would be logged. A chain follows the first rank; a tree has the nodes of ``TREE``.

    python benchmarks/recycling.py workloads.npz
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from replay_workloads import Trace, load

from adaptive.drafting.suffixes import Suffixes, suffixes

RANKS = 8
# Nodes of a tree by the ranks that lead to them. Each node adds some percent to the time of a pass.
TREE = (
    (0,), (1,), (2,), (3,), (4,), (5,), (0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 0, 0),
)  # fmt: skip
# Longest chain of recycling, of history and of the draft, in tokens.
CHAIN, HISTORY, DRAFT = 4, 8, 4


def ranked(target: Any, trace: Trace) -> np.ndarray:
    """The target's ``RANKS`` likeliest tokens (n + 1, RANKS) after each token of the answer."""
    import torch

    with torch.inference_mode():
        logits = target(torch.from_numpy(trace.text.astype(np.int64))[None]).logits[0, trace.prompt :]
    return np.asarray(logits.topk(RANKS).indices.numpy())


class Recycled:
    """The tokens that the target ranked highest when it last processed each token."""

    def __init__(self) -> None:
        self.after: dict[int, list[int]] = {}

    def learn(self, token: int, ranks: list[int]) -> None:
        """Store the target's ranks after ``token``."""
        self.after[token] = ranks

    def chain(self, text: list[int], held: int) -> int:
        """Accepted tokens of a chain proposed after ``held`` tokens."""
        token, accepted = text[held - 1], 0
        for right in text[held : held + CHAIN]:
            token = self.after.get(token, [-1])[0]
            if token != right:
                break
            accepted += 1
        return accepted

    def tree(self, text: list[int], held: int) -> int:
        """Accepted tokens of a tree proposed after ``held`` tokens."""
        most = 0
        for path in TREE:
            token, depth = text[held - 1], 0
            for rank, right in zip(path, text[held:], strict=False):
                token = self.after.get(token, [-1] * RANKS)[rank]
                if token != right:
                    break
                depth += 1
            most = max(most, depth)
        return most


def play(traces: list[Trace], ranks: list[np.ndarray]) -> tuple[dict[str, float], dict[str, tuple[float, int]]]:
    """Tokens a round of every way over these answers, one after the other; and the share, and the number, of positions
    at which the first token of a recycling chain is right although the others have no right token. Records learn from
    an answer when it ends; recycling and history also use the current text so far."""
    totals: dict[str, list[int]] = {}
    hits: dict[str, list[bool]] = {"history finds nothing": [], "history and the draft are both wrong": []}
    records, kept = suffixes(), Recycled()
    for number, (trace, rows) in enumerate(zip(traces, ranks, strict=True)):
        places = _places(trace, rows, records, kept)
        records.add(number, np.ascontiguousarray(trace.text))
        draft, history, has, chain, tree = places
        for at, right in enumerate(chain):
            if not has[at]:
                hits["history finds nothing"].append(right > 0)
            if not history[at] and not draft[at]:
                hits["history and the draft are both wrong"].append(right > 0)
        ways = {
            "draft": draft,
            "history": history,
            "recycling, chain": chain,
            "recycling, tree": tree,
            "history, else recycling (chain)": _either(has, history, chain),
            "history, else recycling (tree)": _either(has, history, tree),
            "history, else draft": _either(has, history, draft),
            "draft, history behind it": _behind(draft, history),
            "draft, recycling behind it": _behind(draft, chain),
            "draft, history or else recycling behind it": _behind(draft, _either(has, history, chain)),
        }
        for name, accepted in ways.items():
            one, at = totals.setdefault(name, [0, 0]), 0
            while at < len(accepted):
                stood = min(accepted[at] + 1, len(accepted) - at)
                at, one[0], one[1] = at + stood, one[0] + stood, one[1] + 1
    per_round = {name: tokens / rounds for name, (tokens, rounds) in totals.items()}
    return per_round, {name: (float(np.mean(found or [False])), len(found)) for name, found in hits.items()}


def _places(
    trace: Trace, rows: np.ndarray, records: Suffixes, kept: Recycled
) -> tuple[list[int], list[int], list[bool], list[int], list[int]]:
    """For every position of an answer after its first token, the number of tokens that would be accepted: of the draft,
    of history (and whether it finds any), of a chain and of a tree of recycling."""
    text: list[int] = trace.text.tolist()
    begin, accepted = trace.prompt + 1, trace.accepted.tolist()
    draft, history, has, chain, tree = list[int](), list[int](), list[bool](), list[int](), list[int]()
    running = suffixes()
    running.begin(0)
    running.append(text[: begin - 1])
    for held in range(begin, len(text)):
        running.append([text[held - 1]])
        if held > begin:
            kept.learn(text[held - 2], rows[held - 2 - trace.prompt].tolist())
        run = 0
        while run < DRAFT and held - begin + run < len(accepted) and accepted[held - begin + run]:
            run += 1
        draft.append(run)
        context = text[max(0, held - 32) : held]
        found = max(
            (running.follow(context, True), records.follow(context, False)), key=lambda one: one[1][0] if one[1] else -1
        )
        has.append(bool(found[0]))
        right = text[held : held + min(HISTORY, len(found[0]))]
        pairs = zip(found[0], right, strict=False)
        history.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(right)))
        chain.append(kept.chain(text, held))
        tree.append(kept.tree(text, held))
    kept.learn(text[-2], rows[len(text) - 2 - trace.prompt].tolist())
    return draft, history, has, chain, tree


def _either(has: list[bool], one: list[int], other: list[int]) -> list[int]:
    return [a if there else b for there, a, b in zip(has, one, other, strict=True)]


def _behind(draft: list[int], other: list[int]) -> list[int]:
    """The draft's tokens, plus those of ``other`` behind them where the whole draft is accepted."""
    ends = len(other)
    return [n + (other[at + n] if n == DRAFT and at + n < ends else 0) for at, n in enumerate(draft)]


def main() -> None:
    """Read the workloads, rank, play, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    bundled = Path(__file__).resolve().parent.parent / "checkpoints" / "bundled"
    parser.add_argument("workloads", type=Path, help="the file that replay_workloads.py wrote")
    parser.add_argument("--target", type=Path, default=bundled / "target")
    parser.add_argument("--answers", type=int, default=40, help="of each workload")
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    for name, traces in load(args.workloads).items():
        if "+" in name:  # the same texts under another draft
            continue
        some = traces[: args.answers]
        per_round, hits = play(some, [ranked(target, trace) for trace in some])
        print(name, *(f"{way}: {value:.2f}" for way, value in per_round.items()), sep="  ")
        for where, (share, count) in hits.items():
            print(f"    its first token is right where {where}: {share:.3f} of {count}", flush=True)


if __name__ == "__main__":
    main()
