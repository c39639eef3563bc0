"""Checks that live acceptance rolls back the right adapters: never a good one, over many restarts of a real server
under load, with drafting and without; but harmful ones (random weights) within some answers. After every answer, the
sentence of ``/props`` about decoding is checked against the rounds of that answer in the log.

    python benchmarks/rollbacks.py --restarts 40 --spin 2

Prints a line a restart and the counts. Exit status 1 if a good adapter was rolled back, a harmful one stayed, or a
sentence was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import peft  # noqa: F401
import torch
from served import Served, end_when_terminated, prompts, wait_until_served

import adaptive.service.server  # noqa: F401 - imported for the servers, which are forked
from adaptive.pair import load_draft_for_training, pair_identity
from adaptive.records.log import Log
from adaptive.settings import load_settings
from checkpoints.manifest import TrainedOn
from checkpoints.store import AdapterStore, NewAdapter

# Most answers until a harmful adapter is rolled back.
WITHIN = 30
# Draft length of the answers that the good adapter is trained on, and passes over them: enough for a clear gain.
LEARN_LENGTH, EPOCHS = 4, 6


@dataclass
class Tally:
    """Prompts left, the number of answers, and the sentences that were wrong."""

    left: Iterator[str]
    answers: int = 0
    wrong: list[str] = field(default_factory=list)


def main() -> None:
    """Run the checks and print the results."""
    options = _options()
    torch.set_num_threads(1)  # no other thread may run when the process forks
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end with this process
    tally = Tally(itertools.cycle(prompts(options.kind, 320)))
    end_when_terminated()
    with contextlib.ExitStack() as stack:
        home = options.home or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        good = _in_use(home) or _learn(home, tally, options)
        for _ in range(options.spin):
            stack.enter_context(_spinning())
        gone = [_restart(home, good, number, tally, options) for number in range(options.restarts)]
        took = {length: _harmful(home, length, tally, options) for length in ("auto", "4")}
    print(f"good adapter: {sum(gone)} rollbacks in {options.restarts} restarts")
    for length, answers in took.items():
        said = ", ".join("stayed" if n is None else str(n) for n in answers)
        print(f"harmful adapters at draft length {length}: gone after {said} answers")
    print(f"sentences: {tally.answers} asked for, {len(tally.wrong)} wrong")
    for line in tally.wrong[:10]:
        print(f"  {line}")
    stayed = any(n is None or n > WITHIN for answers in took.values() for n in answers)
    sys.exit(bool(sum(gone) or stayed or tally.wrong))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, help="keep the log and the adapters here, or begin with those there")
    parser.add_argument("--restarts", type=int, default=40, help="half of them without drafting")
    parser.add_argument("--answers", type=int, default=15, help="answers after each restart")
    parser.add_argument("--harmful", type=int, default=3, help="harmful adapters a draft length")
    parser.add_argument("--learn", type=int, default=120, help="answers that the good adapter is trained on")
    parser.add_argument("--spin", type=int, default=2, help="spinning processes beside the server")
    parser.add_argument("--tokens", type=int, default=60, help="longest answer")
    parser.add_argument("--kind", default="math", help="a file of the bundled prompts")
    return parser.parse_args()


def _in_use(home: Path) -> str | None:
    """The id of the adapter that an earlier run left in use."""
    return next((AdapterStore(folder).current_id() for folder in home.glob("*/adapters")), None)


def _learn(home: Path, tally: Tally, options: argparse.Namespace) -> str:
    """Collect answers drafted by the undistilled draft, train an adapter on them, and return its id."""
    from trainers.recipe import Recipe
    from trainers.run import distill

    with _served(home, str(LEARN_LENGTH)) as server:
        for _ in range(options.learn):
            _ask(server, tally, options)
        state = server.state
    settings = load_settings({})
    store = AdapterStore(state / "adapters")
    recipe = Recipe(epochs=EPOCHS, draft_length=LEARN_LENGTH)
    draft = load_draft_for_training(settings)
    outcome = distill(state / "records.db", store, pair_identity(settings).base, draft, recipe)
    print(outcome.message, flush=True)
    current = store.current_id()
    assert current is not None
    return current


def _restart(home: Path, good: str, number: int, tally: Tally, options: argparse.Namespace) -> bool:
    """Start a server and ask for some answers. Returns whether the good adapter was rolled back."""
    length = "0" if number % 2 else "auto"
    with _served(home, length) as server:
        for _ in range(options.answers):
            _ask(server, tally, options)
        time.sleep(1.5)  # live acceptance is checked twice a second
        watch, said = server.get("/adaptive/trainer")["watch"], server.get("/props")["speculation"]["sentence"]
        store = AdapterStore(server.state / "adapters")
        gone = store.current_id() != good
    print(f"restart {number + 1}, draft length {length}: {said}; {watch}{'; ROLLED BACK' * gone}", flush=True)
    if gone:
        store.promote(good, "again, by the benchmark")
    return gone


def _harmful(home: Path, length: str, tally: Tally, options: argparse.Namespace) -> list[int | None]:
    """The number of answers after which each harmful adapter was rolled back; None if it stayed."""
    took: list[int | None] = []
    with _served(home, length) as server:
        store = AdapterStore(server.state / "adapters")
        for seed in range(options.harmful):
            for _ in range(options.answers):  # these establish the usual acceptance
                _ask(server, tally, options)
            bad = _publish_random(store, seed)
            store.promote(bad, "forced by the benchmark")
            while server.get("/props")["adapter"] != bad:
                time.sleep(0.1)
            took.append(None)
            for number in range(1, 2 * WITHIN + 1):
                _ask(server, tally, options)
                time.sleep(0.7)
                if store.current_id() != bad:
                    took[-1] = number
                    break
            trainer = server.get("/adaptive/trainer")["watch"]
            print(f"harmful {seed} at draft length {length}: {took[-1]} answers; {trainer}", flush=True)
            if took[-1] is None:
                store.rollback("by the benchmark")
    return took


def _publish_random(store: AdapterStore, seed: int) -> str:
    """Publish a candidate of large random weights, which destroys the draft's predictions. Returns its id."""
    from transformers import PreTrainedModel

    from trainers import lora
    from trainers.recipe import Recipe

    settings = load_settings({})
    torch.manual_seed(seed)
    draft = load_draft_for_training(settings)
    assert isinstance(draft, PreTrainedModel)
    model = lora.attach(draft, Recipe())
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight.data, std=0.5)
    write = partial(lora.write, model, lora.snapshot(model))
    return store.publish(write, NewAdapter(pair_identity(settings).base, TrainedOn(None, None, 0, 0))).id


def _ask(server: Served, tally: Tally, options: argparse.Namespace) -> None:
    """Ask for one answer and check the server's sentence about it."""
    body = {
        "messages": [{"role": "user", "content": next(tally.left)}],
        "max_tokens": options.tokens,
        "temperature": 0.7,  # and no seed: a seed lowers acceptance, so answers with one do not count
    }
    server.post("/v1/chat/completions", body)
    found = server.get("/props")["speculation"]
    tally.answers += 1
    with Log(server.state / "records.db") as log:
        newest = next(iter(log.generations(after_id=log.last_id() - 1, with_supervision=False))).generation
    drafting = [r for r in newest.rounds if r.drafted]
    ahead = sum(r.drafted for r in drafting) / len(drafting) if drafting else 0.0
    mode = "drafting" if drafting and 2 * len(drafting) >= len(newest.rounds) else "plain"
    if newest.rounds and (
        (found["rounds"], found["drafting_rounds"], found["tokens_ahead"]) != (len(newest.rounds), len(drafting), ahead)
        or not found["sentence"].startswith(f"{mode} {ahead:.1f} tokens ahead" if mode == "drafting" else mode)
    ):
        tally.wrong.append(f"{found['sentence']} of {len(newest.rounds)} rounds, {len(drafting)} drafting, {ahead}")


@contextlib.contextmanager
def _served(home: Path, length: str) -> Iterator[Served]:
    """Run ``adaptive serve`` with this draft length in a forked process. It has this process's imports, which take most
    of the time of a start."""
    (home / "stderr").unlink(missing_ok=True)  # it contains the previous server's address
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(home, length))
    process.start()
    assert process.pid is not None
    try:
        yield Served(wait_until_served(process.is_alive, home / "stderr"), process.pid, home)
    finally:
        process.terminate()
        process.join()


def _serve(home: Path, length: str) -> None:
    from cli import main as command

    home.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    errors = os.open(home / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(errors, stream)
    os.environ |= {"ADAPTIVE_HOME": str(home), "ADAPTIVE_DISTILL": "off"}
    sys.argv = ["adaptive", "serve", "--port", "0", "--threads", "1", "--draft-length", length]
    command.run()


@contextlib.contextmanager
def _spinning() -> Iterator[None]:
    """Run another program that uses as much of a core as it gets."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
