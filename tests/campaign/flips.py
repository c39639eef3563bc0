"""One flipped bit in every kind of file of the state folder, and many in the log; then a start and an answer."""

from __future__ import annotations

import io
import logging
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from adaptive.pair import pair_identity
from adaptive.records.check import check
from adaptive.settings import load_settings
from adaptive.state import PairState, open_state
from adaptive.types import SamplingParams, StopParams
from checkpoints.store import AdapterStore
from cli.opened import open_pair

from .common import TOKENS, Campaign, environment, unusual
from .processes import publish

LOG_FLIPS, FLIPS = 200, 20
ANSWERS = 60
KINDS = (
    "controller.json", "adapters/CURRENT", "adapters/PREVIOUS", "adapters/0002/manifest.json",
    "adapters/0002/adapter_model.safetensors", "adapters/0002/adapter_config.json", "adapters/0001/manifest.json",
    "training.safetensors", "server.json", "trainer.log",
)  # fmt: skip

# Fills a state folder and is killed, so that the write-ahead log is there.
FILLS = """
import os, signal, sys
from pathlib import Path
import json, torch
from rich.console import Console
from adaptive.types import SamplingParams, StopParams
from adaptive.settings import load_settings
from adaptive.state import PairState
from cli.opened import open_pair
from trainers.resume import Standing, TrainingState
prompts = json.loads(Path(sys.argv[2]).read_text())
settings = load_settings({"home": sys.argv[1], "dtype": "float32", "draft_length": "auto"})
def say(session, number, name):
    prompt, limits = prompts[number % len(prompts)], StopParams(int(sys.argv[4]))
    for _ in session.assistant.complete(prompt, SamplingParams(), limits, session=f"{name}{number}"):
        pass
with open_pair(settings, Console(stderr=True)) as session:
    for number in range(int(sys.argv[3])):
        say(session, number, "s")
    assert session.assistant.log.flush()
    weight = torch.nn.Parameter(torch.ones(64, 64))
    TrainingState(session.state.training).save(Standing(), [weight], torch.optim.SGD([weight]))
with open_pair(settings, Console(stderr=True)) as session:
    for number in range(6):
        say(session, number, "t")
    assert session.assistant.log.flush()
    (session.state.root / "server.json").write_text('{"pid": 1, "url": "http://127.0.0.1:1", "since": 1.0}')
    (session.state.root / "trainer.log").write_text("a line of the last training run\\n")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(campaign: Campaign) -> None:
    """Each flip begins with a copy of the same folder."""
    whole = template(campaign)
    root = whole / pair_identity(load_settings({})).id
    said: dict[str, int] = {}
    for name in KINDS:
        for _ in range(campaign.times(FLIPS)):
            said[name] = said.get(name, 0) + bool(flip_and_start(campaign, root, name))
        flips = campaign.times(FLIPS)
        print(f"{name}: {flips} flips, {flips} starts, {said[name]} with a sentence", flush=True)
    kept: list[int] = []
    for number in range(campaign.times(LOG_FLIPS)):
        name = "records.db-wal" if number % 4 == 3 else "records.db"
        told = flip_and_start(campaign, root, name, kept)
        said[name] = said.get(name, 0) + bool(told)
    flips, told_of = campaign.times(LOG_FLIPS), [said.get(name, 0) for name in ("records.db", "records.db-wal")]
    print(f"the log: {flips} flips, {flips} starts, {told_of[0]} + {told_of[1]} (its write-ahead log) with a sentence")
    print(f"records read afterwards, of {ANSWERS + 6}: fewest {min(kept)}, mean {sum(kept) / len(kept):.1f}")


def template(campaign: Campaign) -> Path:
    """A folder that was used and killed."""
    import json

    whole = campaign.home / "whole"
    state = open_state(whole, pair_identity(load_settings({})).id)
    store = AdapterStore(state.adapters)
    publish(store, campaign.home / "adapters", 2)
    for name in ("0001", "0002"):
        store.promote(name, "by the campaign")
    file = campaign.home / "prompts.json"
    file.write_text(json.dumps(list(campaign.expected)), encoding="utf-8")
    command = [sys.executable, "-c", FILLS, str(whole), str(file), str(ANSWERS), str(TOKENS)]
    killed = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-600:]
    return whole


def flip_and_start(campaign: Campaign, root: Path, name: str, kept: list[int] | None = None) -> str:
    """Flip one bit of a file, start on the folder, answer; what was said."""
    home = campaign.home / "flipped"
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(root, home / root.name)
    file = home / root.name / name
    if name == "records.db":  # as a server that was stopped leaves it; else most pages stand in the write-ahead log too
        sqlite3.connect(file).execute("PRAGMA wal_checkpoint(TRUNCATE)").connection.close()
    data = bytearray(file.read_bytes())
    # Half of them where a flip does most: at the beginning.
    at = campaign.rng.randrange(len(data) if campaign.rng.random() < 0.5 else min(len(data), 4096))
    bit = campaign.rng.randrange(8)
    data[at] ^= 1 << bit
    file.write_bytes(data)
    where = f"{name} byte {at} bit {bit}"
    prompt = campaign.rng.choice(list(campaign.expected))
    try:
        with listening() as said, open_pair(start_settings(home), Console(file=said)) as session:
            for _ in session.assistant.complete(prompt, SamplingParams(), StopParams(TOKENS), session="after"):
                pass
            assert session.assistant.last is not None
            campaign.check(session.assistant.last.text == campaign.expected[prompt], f"{where}: another answer")
    except Exception as error:  # whatever it is, it was no start
        campaign.failures.append(f"{where}: no start: {type(error).__name__}: {error}")
        return ""
    state = PairState(home / root.name)
    look_at(campaign, state, said.getvalue(), where, kept)
    return said.getvalue()


def look_at(campaign: Campaign, state: PairState, said: str, where: str, kept: list[int] | None) -> None:
    """Nothing is missing that was not said or is not found by ``records check``, and nothing strange is left."""
    strange = unusual(state.root, said)
    campaign.check(not strange, f"{where}: left in the folder: {', '.join(strange)}")
    found = check(state.records)
    campaign.check(found.file is None, f"{where}: the log is still damaged: {found.file}")
    whole = found.records - len(found.damaged) - 1
    if kept is not None:
        kept.append(whole)
    campaign.check(whole == ANSWERS + 6 or said or found.damaged, f"{where}: {whole} records and nothing was said")


def start_settings(home: Path) -> object:
    """On a folder of its own."""
    return load_settings({"home": str(home), "dtype": "float32", "draft_length": "4"})


@contextmanager
def listening() -> Iterator[io.StringIO]:
    """What is shown and logged at the warning level."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logger = logging.getLogger("adaptive")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
