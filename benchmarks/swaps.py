"""Measures how a swap of the adapter delays answers in progress: gaps between tokens with and without swaps, on one
server.

    python benchmarks/swaps.py --swaps 50

Clients stream answers without a pause while adapters are promoted in turn; periods with and without swaps
alternate. Prints the gaps of both, and the outcome of every request.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import threading
import time
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path

import httpx
from served import PATIENCE_S, Served, Stream, served, stream

from adaptive.pair import load_draft_for_training, pair_identity
from adaptive.records.log import Log
from adaptive.settings import load_settings
from checkpoints.manifest import TrainedOn
from checkpoints.store import AdapterStore, NewAdapter

# Seconds from one promotion to the next; the steps of a period without swaps take as long.
EVERY_S = 0.8
# Swaps in a period.
STRETCH = 10


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=50)
    parser.add_argument("--clients", type=int, default=2, help="answers asked for at once")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of an answer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), distill="off") as server:
        names = _publish(AdapterStore(server.state / "adapters"))
        given: list[Stream] = []
        over = threading.Event()
        clients = [
            threading.Thread(target=_client, args=(server, number, options.tokens, over, given))
            for number in range(options.clients)
        ]
        for client in clients:
            client.start()
        time.sleep(3.0)
        spans = _swap(server, cycle(names), options.swaps)
        over.set()
        for client in clients:
            client.join()
        _report(server, given, spans, options.swaps)


def _publish(store: AdapterStore) -> list[str]:
    """Publish two adapters with small random deltas, which draft differently but not much worse. Returns their ids."""
    import torch
    from transformers import PreTrainedModel

    from trainers import lora
    from trainers.recipe import Recipe

    settings = load_settings({})
    base = pair_identity(settings).base
    names = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        draft = load_draft_for_training(settings)
        assert isinstance(draft, PreTrainedModel)
        model = lora.attach(draft, Recipe())
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight.data, std=0.003)
        state = lora.snapshot(model)
        write = partial(lora.write, model, state)
        names.append(store.publish(write, NewAdapter(base, TrainedOn(None, None, 0, 0))).id)
    return names


def _client(server: Served, number: int, tokens: int, over: threading.Event, given: list[Stream]) -> None:
    """Stream answer after answer until ``over``."""
    turn = 0
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        while not over.is_set():
            turn += 1
            body = {
                "prompt": f"Story {number}.{turn}. Once upon a time",
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": 0.7,
                "seed": turn,
                "user": f"client {number}",
            }
            given.append(stream(client, body))


def _swap(server: Served, names: cycle[str], swaps: int) -> list[tuple[float, float, bool]]:
    """Promote the adapters in turn. Returns periods of time (from, to, with swaps), all with the same pauses."""
    spans = []
    for done in range(0, swaps, STRETCH):
        for with_swaps in (False, True):
            began = time.perf_counter()
            for _ in range(min(STRETCH, swaps - done)):
                if with_swaps:
                    server.post(f"/adaptive/adapters/{next(names)}/promote", {})
                else:
                    server.get("/adaptive/trainer")  # as much work for the server's HTTP side
                time.sleep(EVERY_S)
            spans.append((began, time.perf_counter(), with_swaps))
    return spans


def _report(server: Served, given: list[Stream], spans: list[tuple[float, float, bool]], swaps: int) -> None:
    parts = re.findall(r"swapped in (\d+) ms, in (\d+) parts over (\d+) ms", server.said)
    with Log(server.state / "records.db") as log:
        logged = [entry.generation.text for entry in log.generations(with_supervision=False)]
    print(f"{len(parts)} swaps of {swaps} promotions, {sum(int(n) > 1 for _, n, _ in parts)} of them within an answer")
    own, whole = (max(int(found[place]) for found in parts) for place in (0, 2))
    print(f"the longest swap: {own} ms of work, {whole} ms from its beginning to its end")
    print(f"{len(given)} requests, {sum(s.whole for s in given)} answered whole, {len(logged)} in the log")
    print(f"each answer in the log once: {sorted(logged) == sorted(s.text for s in given)}")
    usual, swapped = (_gaps(given, spans, kind) for kind in (False, True))
    for name, gaps in (("without swaps", usual), ("with swaps", swapped)):
        shares = ", ".join(f"{100 * share:g}% {_quantile(gaps, share):.1f}" for share in (0.5, 0.99, 0.999))
        print(f"gaps between tokens {name}, ms: {shares}, longest {gaps[-1]:.1f} ({len(gaps)} gaps)")
    print(f"longest gap with swaps beyond the usual (median): {swapped[-1] - _quantile(usual, 0.5):.1f} ms")


def _gaps(given: list[Stream], spans: list[tuple[float, float, bool]], with_swaps: bool) -> list[float]:
    """Milliseconds between two pieces of text of one answer, in ascending order, in the periods of one kind."""
    wanted = [(began, ended) for began, ended, kind in spans if kind is with_swaps]
    return sorted(
        1000 * (after - before)
        for answer in given
        for before, after in pairwise(answer.times)
        if any(began <= after < ended for began, ended in wanted)
    )


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    main()
