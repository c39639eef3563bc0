"""What the parts share: prompts with their plain greedy answers, clients, and what must be true afterwards."""

from __future__ import annotations

import json
import os
import random
import re
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import service_server
from conftest import BUNDLED
from service_server import Server

from adaptive.records.log import Log
from checkpoints.store import AdapterStore

TOKENS = 24
CLIENTS = 4
PATIENCE_S = 300.0
# A machine that does something else, too, may take minutes to load the libraries.
service_server.START_S = PATIENCE_S
MODELS = ("--dtype", "float32", "--temperature", "0")
# What a folder may hold that has been used and never damaged; server.json while a server runs.
USUAL = re.compile(
    r"records\.db(-wal|-shm)?|(server|trainer|records|controller|doubts)\.lock|trainer\.log|(controller|doubts|server)\.json|"
    r"training\.safetensors|adapters|adapters/(CURRENT|PREVIOUS|PRUNED|UNKEPT|\.lock|\d{4})|"
    r"adapters/\d{4}/(manifest\.json|adapter_config\.json|adapter_model\.safetensors|README\.md)"
)
# What may stand there besides, where a sentence has named it.
ASIDE = re.compile(r"records\.db\.damaged\d*(-wal)?|adapters/\d{4}\.damaged(-again)*(/.*)?")


@dataclass
class Campaign:
    """One part: where it works, how much it does, and what it has found. ``expected`` maps prompts to answers."""

    home: Path
    scale: float
    minutes: float
    rng: random.Random
    expected: dict[str, str]
    failures: list[str] = field(default_factory=list)

    def times(self, most: int) -> int:
        """How often, at this scale, for what is done ``most`` times at scale 1."""
        return max(1, round(most * self.scale))

    def check(self, holds: object, what: str) -> None:
        """Note ``what`` as found unless it holds."""
        if not holds:
            self.failures.append(what)


def prompts() -> list[str]:
    """Prompts of every kind."""
    kinds = ("math", "code", "roleplay", "tools", "instructions")
    files = (BUNDLED / "prompts" / f"{kind}.jsonl" for kind in kinds)
    return [json.loads(line)["prompt"] for file in files for line in file.read_text("utf-8").splitlines()[:6]]


def environment() -> dict[str, str]:
    """As the server has it, so that both compute alike."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def reference(folder: Path) -> dict[str, str]:
    """Each prompt's answer by plain greedy decoding of the target alone."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts()), encoding="utf-8")
    command = [sys.executable, "-m", "cli.main", "generate", "--prompts", str(file), "--raw", "--json", "--no-record"]
    command += ["--draft-length", "0", "--max-new-tokens", str(TOKENS), *MODELS, "--state-dir", str(folder / "plain")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    said = [json.loads(line) for line in done.stdout.splitlines()]
    return {one["prompt"]: one["text"] for one in said}


class Clients:
    """Four clients that ask without a pause, each answer under a name of its own; ``given`` came whole."""

    def __init__(self, campaign: Campaign) -> None:
        self.given: dict[str, tuple[str, str]] = {}
        self.errors: Counter[str] = Counter()
        self.url: str | None = None
        self._campaign = campaign
        self._over = threading.Event()
        seeds = [campaign.rng.random() for _ in range(CLIENTS)]
        self._threads = [threading.Thread(target=self._ask, args=(seed,), daemon=True) for seed in seeds]

    @contextmanager
    def asking(self) -> Iterator[Clients]:
        """They ask while the block runs."""
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(PATIENCE_S)

    def _ask(self, seed: float) -> None:
        rng = random.Random(seed)
        while not self._over.is_set():
            url, prompt, name = self.url, rng.choice(list(self._campaign.expected)), uuid.uuid4().hex
            if url is None:
                time.sleep(0.05)
                continue
            body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
            try:
                got = httpx.post(f"{url}/v1/completions", json=body, headers={"X-Session-Id": name}, timeout=60)
            except httpx.HTTPError as error:  # the server was killed meanwhile
                self.errors[type(error).__name__] += 1
                time.sleep(0.02)
                continue
            if got.status_code == 200:
                self.given[name] = prompt, got.json()["choices"][0]["text"]
            else:
                self.errors[str(got.status_code)] += 1
                time.sleep(0.05)


def started(campaign: Campaign, home: Path, *options: str) -> Server:
    """A server that answers; what it writes lies where there is always room."""
    errors = campaign.home / "said"
    errors.mkdir(exist_ok=True)
    return Server(home, *options, errors=errors).wait_until_ready()


def until(what: Callable[[], object], said: Callable[[], str]) -> None:
    """Until something is so; after a while that is an error."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > deadline:
            raise AssertionError(f"it did not come to it: {said()[-600:]}")
        time.sleep(0.05)


def check_state(campaign: Campaign, root: Path, given: dict[str, tuple[str, str]], said: str, where: str) -> str:
    """The log holds every answer that was given exactly once, answers are the target's, the store is valid, and the
    folder holds nothing unusual that was not named. Returns a line about it."""
    with Log(root / "records.db") as log:
        logged = [entry.generation for entry in log.generations(with_supervision=False)]
        damaged = dict(log.damaged)
    times = Counter(g.session for g in logged)
    lost = [name for name in given if times[name] != 1]
    campaign.check(not lost, f"{where}: {len(lost)} of {len(given)} answers are not in the log exactly once")
    texts = {g.session: g.text for g in logged}
    other = [name for name, (_, text) in given.items() if name in texts and texts[name] != text]
    campaign.check(not other, f"{where}: {len(other)} answers are other ones in the log")
    wrong = [prompt for prompt, text in given.values() if campaign.expected[prompt] != text]
    ended = [g for g in logged if g.finish_reason != "cancelled"]
    wrong += [g.prompt_text for g in ended if campaign.expected[g.prompt_text] != g.text]
    campaign.check(not wrong, f"{where}: {len(wrong)} answers differ from plain greedy decoding")
    campaign.check(not damaged, f"{where}: {len(damaged)} records are damaged")
    sound = sqlite3.connect(root / "records.db").execute("PRAGMA integrity_check").fetchone()[0]
    campaign.check(sound == "ok", f"{where}: the log is damaged: {sound}")
    check_store(campaign, root, where)
    strange = unusual(root, said)
    campaign.check(not strange, f"{where}: left in the folder: {', '.join(strange)}")
    return f"{len(given)} answers given, {len(logged)} in the log"


def check_said(campaign: Campaign, said: str) -> None:
    """No traceback in what a server has written."""
    at = said.find("Traceback")
    campaign.check(at < 0, f"a traceback in the server's log: {said[at : at + 3000]}")


def check_store(campaign: Campaign, root: Path, where: str) -> None:
    """Every adapter is whole, and what is in use is promoted."""
    store = AdapterStore(root / "adapters")
    for manifest in store.list():
        store.verify(manifest.id)
    current = store.current_id()
    campaign.check(current is None or store.show(current).status == "promoted", f"{where}: {current} is not promoted")


def unusual(root: Path, said: str) -> list[str]:
    """What stands in the state folder and would not in a fresh one; what ``said`` names as set aside may."""
    names = [path.relative_to(root).as_posix() for path in root.rglob("*")]
    strange = [name for name in names if not USUAL.fullmatch(name)]
    aside = re.compile(r"records\.db\.damaged\d*|\d{4}\.damaged(-again)*")
    named = {name for name in strange if ASIDE.fullmatch(name) and aside.search(name).group() in said}  # type: ignore[union-attr]
    return [name for name in strange if name not in named]
