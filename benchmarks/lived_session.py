"""Measures whether the gain of learning arrives in a lived session, on a machine that other programs use as well.

A real server with default settings answers questions of two kinds (or of ``--kinds``), one kind after the other, with
pauses; meanwhile other programs come and go (the regime). Before or after each of the session's answers the same
process (``paired_server.py``) answers the same prompt by plain decoding and by fixed draft lengths, with the same
adapter, so that disturbances of the machine affect all of them alike.

    python benchmarks/lived_session.py --regime busy-start --requests 600 --out lived
    python benchmarks/lived_session.py --regime quiet --useless     # a draft of random weights
    python benchmarks/lived_session.py --target checkpoints/bundled/target --kinds math --keep STATE
    python benchmarks/lived_session.py --no-learning --adapters STATE   # swaps the adapter that is in use there

Prints a line for every hundred requests, and the figures that the controller is judged by: the share of the
gain of the best fixed length in hindsight that it collects from the first promotion on, the lowest speed over
plain decoding in any fifty consecutive requests, and its speed within twenty requests of a promotion. --out keeps
every answer's figures, and the log with every round's seconds, for ``controller.py --noise``. With ``--target`` alone,
a head grows from nothing; --keep keeps it, with the rest of the state, for ``inflate.py --head``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from paired_server import PREFIX
from served import PROMPTS, Served, end_when_terminated, prompts, served

from checkpoints.store import AdapterStore

PROGRAM = Path(__file__).with_name("paired_server.py")
REGIMES = ("quiet", "busy-start", "comes-and-goes", "throttled")
KINDS = ("math", "code")
# Share of the requests that are of the first of two kinds.
FIRST = 0.58
# Seconds that other programs run at the start; and ranges of seconds for which they run and pause in turn.
BUSY_START_S = 60.0
ON_S, OFF_S = (5.0, 40.0), (10.0, 40.0)
# Range of seconds between two requests; of the longer pause, in which training runs; and requests between long pauses.
PAUSE_S, LONG_PAUSE_S, LONG_EVERY = (0.05, 0.5), (40.0, 70.0), 40
# Consecutive requests over which the lowest speed is taken, and requests that count as soon after a promotion.
WINDOW, SOON = 50, 20

SPIN = "import time\nend = time.time() + 7200\nwhile time.time() < end: pass"
# Uses half of one core's time, at the highest priority if the system allows it.
HALF = """
import os, sys, time
try:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(sys.argv[1]) % len(cores)]})
except AttributeError:  # not Linux
    pass
try:
    os.nice(-20)
except OSError:
    pass
end = time.time() + 7200
while time.time() < end:
    until = time.perf_counter() + 0.01
    while time.perf_counter() < until:
        pass
    time.sleep(0.01)
"""


class Disturbance:
    """Runs other programs on the machine, by the regime and a seed. ``share``: how much of the session is over."""

    def __init__(self, regime: str, seed: int) -> None:
        self.regime = regime
        self.share = 0.0
        self._random = random.Random(seed)
        self._running: list[subprocess.Popen[bytes]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Disturbance:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            if self.regime == "busy-start":
                self._start(2, SPIN)
                self._over.wait(BUSY_START_S)
            while self.regime == "comes-and-goes" and not self._over.wait(self._random.uniform(*OFF_S)):
                self._start(self._random.choice((1, 2)), SPIN)
                self._over.wait(self._random.uniform(*ON_S))
                self._stop()
            while self.regime == "throttled" and not self._over.wait(0.1):
                if any(process.poll() is not None for process in self._running):
                    raise RuntimeError("a program that was to disturb the session has ended")
                if bool(self._running) != (1 / 3 <= self.share < 2 / 3):
                    self._stop() if self._running else self._start(os.cpu_count() or 1, HALF)
        finally:
            self._stop()

    def _start(self, count: int, program: str) -> None:
        self._running = [subprocess.Popen([sys.executable, "-c", program, str(i)]) for i in range(count)]

    def _stop(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()
        self._running = []


@dataclass(frozen=True)
class Answer:
    """One answer: tokens after the first one, their seconds, rounds, and of rounds that drafted their number, drafted
    tokens and accepted tokens."""

    tokens: int
    seconds: float
    rounds: int
    drafting: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Asked:
    """One request: the session's own answer, and answers to its prompt by fixed draft lengths (0 is plain decoding)."""

    number: int
    kind: str
    at: float
    adapter: str | None
    busy: float
    session: Answer
    fixed: dict[int, Answer]


def ask(server: Served, text: str, tokens: int, length: int | None = None) -> tuple[Answer, str | None]:
    """The session's answer, or the answer by a fixed draft length, and the adapter in use at its beginning."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0.7}
    found = server.post("/v1/chat/completions", body, None if length is None else f"{PREFIX}{length}")
    timings, stats = found["timings"], found["speculative_decoding"]
    tokens = timings["predicted_n"] - 1
    answer = Answer(
        tokens=tokens,
        seconds=timings["predicted_ms"] / 1000,
        rounds=tokens - stats["num_accepted_draft_tokens"],
        drafting=stats["num_spec_steps"],
        drafted=stats["num_draft_tokens"],
        accepted=stats["num_accepted_draft_tokens"],
    )
    return answer, found["adapter"]


def session(options: argparse.Namespace, home: Path, say: Callable[[str], None]) -> list[Asked]:
    """Send all requests, or as many as there is time for; ``say`` receives a line for every hundred of them."""
    randomly = random.Random(options.seed)
    first = round(FIRST * options.requests) if len(options.kinds) > 1 else options.requests
    counts = (first, options.requests - first)
    texts = [
        (kind, text)
        for kind, count in zip(options.kinds, counts, strict=False)
        for text in cycled(kind, count, options.prompts)
    ]
    models = {name: value for name in ("target", "draft", "dtype") if (value := getattr(options, name))}
    asked: list[Asked] = []
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        disturbance = stack.enter_context(Disturbance(options.regime, options.seed))
        arguments = [part for name, value in models.items() for part in (f"--{name}", value)]
        arguments += ["--draft-length", options.draft_length]
        distill = "off" if options.no_learning else "idle"
        swaps = _Swaps(options.adapters, home, options.swap_every) if options.adapters else None
        server = stack.enter_context(served(home, arguments, [str(PROGRAM)], distill=distill))
        for number, (kind, text) in enumerate(texts):
            disturbance.share = number / len(texts)
            if swaps is not None:
                swaps.before(number, server)
            lengths: list[int | None] = [None, 0, *(options.lengths if number % options.every == 0 else [])]
            randomly.shuffle(lengths)  # the first one after a pause finds a machine with sleeping cores
            fixed = {}
            for k in lengths:
                if k is not None:
                    fixed[k], _ = ask(server, text, options.tokens, k)
                    continue
                psutil.cpu_percent()
                own, adapter = ask(server, text, options.tokens)
                busy = psutil.cpu_percent() / 100 * (os.cpu_count() or 1)
            at = time.monotonic() - began
            asked.append(Asked(number, kind, at, adapter, busy, own, dict(sorted(fixed.items()))))
            if (number + 1) % 100 == 0:
                say(line(asked[-100:]))
            if options.minutes is not None and at > 60 * options.minutes:
                break
            long = (number + 1) % LONG_EVERY == 0 and not options.no_learning
            time.sleep(randomly.uniform(*(options.long_pause if long else PAUSE_S)))
        if rest := len(asked) % 100:
            say(line(asked[-rest:]))
        for said in server.news:
            say(f"  {said}")
        if options.out is not None:
            shutil.copy(server.state / "records.db", options.out.with_suffix(".db"))
            with contextlib.suppress(FileNotFoundError):  # the part not yet checkpointed into the main file
                shutil.copy(server.state / "records.db-wal", options.out.with_suffix(".db-wal"))
    return asked


class _Swaps:
    """Puts an adapter that was made before into use and takes it out again, in turn, instead of learning."""

    def __init__(self, made: Path, home: Path, every: int) -> None:
        """``made``: the state folder with the adapter in use; ``every``: requests between two swaps."""
        self._every = every
        (folder,) = (adapters for adapters in made.glob("*/adapters") if AdapterStore(adapters).current_id())
        shutil.copytree(folder, home / folder.parent.name / "adapters")
        store = AdapterStore(home / folder.parent.name / "adapters")
        self._adapter = str(store.current_id())
        store.rollback("by the benchmark")

    def before(self, number: int, server: Served) -> None:
        """Swap where it is time to, before the request of this number."""
        if number and number % self._every == 0:
            name = "rollback" if server.get("/props")["adapter"] else f"{self._adapter}/promote"
            server.post(f"/adaptive/adapters/{name}", {})  # a body, as a form of another page cannot send


def cycled(kind: str, count: int, folder: Path = PROMPTS) -> list[str]:
    """``count`` prompts of a kind, from ``folder``; if there are fewer, they repeat."""
    found = prompts(kind, count, folder / f"{kind}.jsonl")
    return [found[i % len(found)] for i in range(count)]


def rate(answers: Sequence[Answer]) -> float:
    """Tokens per second of all answers together."""
    return sum(a.tokens for a in answers) / max(1e-9, sum(a.seconds for a in answers))


def speeds(asked: Sequence[Asked]) -> dict[int, float]:
    """By fixed length, its tokens per second over plain decoding's on the same prompts."""
    found = {}
    for k in sorted({k for a in asked for k in a.fixed}):
        both = [a for a in asked if k in a.fixed]
        found[k] = rate([a.fixed[k] for a in both]) / rate([a.fixed[0] for a in both])
    return found


def speed(asked: Sequence[Asked]) -> float:
    """The session's tokens per second over plain decoding's."""
    return over(asked, 0)


def over(asked: Sequence[Asked], length: int) -> float:
    """The session's tokens per second over those of a fixed length."""
    return rate([a.session for a in asked]) / rate([a.fixed[length] for a in asked])


def line(asked: Sequence[Asked]) -> str:
    """The line printed for these requests."""
    fixed = speeds(asked)
    best = max(fixed, key=fixed.__getitem__)
    rounds, drafting = sum(a.session.rounds for a in asked), sum(a.session.drafting for a in asked)
    accepted, drafted = sum(a.session.accepted for a in asked), sum(a.session.drafted for a in asked)
    return (
        f"{asked[-1].number + 1:4} {asked[-1].kind:5} {asked[-1].at:5.0f} s  adapter {asked[-1].adapter or 'none':5} "
        f"drafting {drafting / max(1, rounds):4.0%} of rounds, accepted {accepted / max(1, drafted):4.0%}, "
        f"{1 + accepted / max(1, rounds):.2f} tokens a round; plain {rate([a.fixed[0] for a in asked]):6.1f} tokens/s, "
        f"session {speed(asked):.2f} times, best fixed ({best}) {fixed[best]:.2f}"
    )


@dataclass(frozen=True)
class Verdict:
    """The results of the session since the first promotion.

    ``session`` is its speed over plain decoding's. ``same`` is the same on the prompts that fixed lengths answered too
    (there most answers follow another one directly; on other prompts half of the session's answers follow a pause).
    ``collected`` is the share of the ``best`` fixed length's gain that ``same`` has, None if that gain is too small.
    ``least`` is the lowest speed over plain decoding in ``WINDOW`` consecutive requests of the whole session. ``soon``
    is, by promotion, the speed in the ``SOON`` requests after it over that in the requests of the same kind from there
    to the next promotion: how predictable the text of another kind is, no controller changes. ``soon_best`` is the same
    with the speed over the best fixed length of that time, on the prompts that it answered too: how predictable the
    texts of so few requests are then matters less. ``soon_fixed`` is the same of the best fixed length over plain
    decoding. It has nothing to learn after a promotion, so its distance from 1 is the chance in the other two.
    """

    promotions: int
    session: float
    same: float
    best_length: int
    best: float
    collected: float | None
    least: float
    soon: tuple[float, ...]
    soon_best: tuple[float, ...]
    soon_fixed: tuple[float, ...]


def judge(asked: Sequence[Asked]) -> Verdict:
    """Judge the requests from the first promotion on, or all of them if there was no promotion."""
    changes = [b.number for a, b in itertools.pairwise(asked) if a.adapter != b.adapter]
    after = asked[changes[0] :] if changes else asked
    fixed = speeds(after)
    best = max((k for k in fixed if k), key=fixed.__getitem__, default=0)
    windows = [asked[i : i + WINDOW] for i in range(max(1, len(asked) - WINDOW + 1))]
    soon, soon_best, soon_fixed = [], [], []
    for begin, end in itertools.pairwise([*changes, len(asked)]):
        alike = [a for a in asked[begin:end] if a.kind == asked[begin].kind]
        if len(alike) >= 2 * SOON:
            soon.append(speed(alike[:SOON]) / speed(alike[SOON:]))
            first, later = ([a for a in part if len(a.fixed) > 1] for part in (alike[:SOON], alike[SOON:]))
            if first and later:
                of_then = speeds(first + later)
                of_best = max((k for k in of_then if k), key=of_then.__getitem__)
                soon_best.append(over(first, of_best) / over(later, of_best))
                soon_fixed.append(speeds(first)[of_best] / speeds(later)[of_best])
    same = speed([a for a in after if len(a.fixed) > 1] or after)
    return Verdict(
        promotions=len(changes),
        session=speed(after),
        same=same,
        best_length=best,
        best=fixed[best],
        collected=(same - 1) / (fixed[best] - 1) if fixed[best] > 1.02 else None,
        least=min(map(speed, windows)),
        soon=tuple(soon),
        soon_best=tuple(soon_best),
        soon_fixed=tuple(soon_fixed),
    )


@contextlib.contextmanager
def useless(options: argparse.Namespace) -> Iterator[None]:
    """With ``--useless``, replace the draft by one of random weights."""
    if not options.useless:
        yield
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from adaptive.pair import sources
    from adaptive.settings import Settings

    target, draft = sources(Settings(target=options.target, draft=options.draft))
    assert draft is not None
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(options.seed)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(draft.folder)).save_pretrained(folder)
        for file in draft.folder.iterdir():
            if "token" in file.name or file.suffix == ".jinja":
                shutil.copy(file, folder)
        options.target, options.draft = str(target.folder), folder
        yield


def _listed(shares: Sequence[float]) -> str:
    mean = f", geometric mean {statistics.geometric_mean(shares):.2f}" if len(shares) > 1 else ""
    return (", ".join(f"{share:.2f}" for share in shares) or "none") + mean


def main() -> None:
    """Run one session and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regime", choices=REGIMES, default="quiet")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--minutes", type=float, help="judge what was asked until then, if not all has been")
    parser.add_argument("--tokens", type=int, default=120, help="longest answer")
    parser.add_argument("--lengths", type=lambda s: [int(n) for n in s.split(",")], default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--every", type=int, default=2, help="requests of which one is answered by fixed lengths, too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", type=lambda s: s.split(","), default=KINDS, help="one or two, one after the other")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="folder of <kind>.jsonl")
    parser.add_argument("--useless", action="store_true", help="with a draft of random weights")
    parser.add_argument("--no-learning", action="store_true", help="no training, and no long pauses")
    parser.add_argument(
        "--long-pause",
        type=lambda s: tuple(float(n) for n in s.split(",")),
        default=LONG_PAUSE_S,
        help="seconds, from and to, of the pauses in which training finds time",
    )
    parser.add_argument("--adapters", type=Path, help="state folder with an adapter in use, to be swapped in and out")
    parser.add_argument("--swap-every", type=int, default=60, help="requests between two swaps")
    parser.add_argument("--draft-length", default="auto", help="of the session; 0 tests the comparison")
    for name in ("target", "draft", "dtype"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--keep", type=Path, help="state folder of the session, kept; temporary by default")
    parser.add_argument("--out", type=Path, help="keep every answer's figures (.json) and the log (.db)")
    options = parser.parse_args()
    end_when_terminated()

    def say(text: str) -> None:
        print(text, flush=True)

    say(f"regime {options.regime}, {options.requests} requests, seed {options.seed}")
    with tempfile.TemporaryDirectory() as home, useless(options):
        asked = session(options, options.keep or Path(home), say)
    verdict = judge(asked)
    if options.out is not None:
        kept: dict[str, Any] = {
            "regime": options.regime,
            "verdict": asdict(verdict),
            "asked": [asdict(a) for a in asked],
        }
        options.out.with_suffix(".json").write_text(json.dumps(kept), encoding="utf-8")
    collected = "nothing to collect" if verdict.collected is None else f"{verdict.collected:.0%} of that gain"
    say(
        f"{options.regime}: {verdict.promotions} changes of the adapter; since the first {verdict.session:.3f} times "
        f"plain decoding, on the same prompts {verdict.same:.3f} and the best fixed length ({verdict.best_length}) "
        f"{verdict.best:.3f}: {collected}; least over "
        f"{WINDOW} requests {verdict.least:.3f}; in the {SOON} requests after a promotion, of later ones of the kind: "
        f"{_listed(verdict.soon)} (of plain decoding) and {_listed(verdict.soon_best)} (of the best fixed length); the "
        f"best fixed length itself, of plain decoding: {_listed(verdict.soon_fixed)}"
    )


if __name__ == "__main__":
    main()
