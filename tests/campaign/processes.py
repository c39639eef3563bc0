"""Eight processes that promote, roll back, purge and generate in one state folder at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from adaptive.pair import pair_identity
from adaptive.settings import load_settings
from adaptive.state import open_state
from checkpoints.manifest import TrainedOn
from checkpoints.store import AdapterStore, NewAdapter

from .common import TOKENS, Campaign, check_state, environment, until

SECONDS = 600

HEAD = """
import contextlib, json, random, sys, time
from pathlib import Path
from adaptive.errors import AdaptiveError
from adaptive.records.log import Log
from adaptive.state import PairState
from checkpoints.store import AdapterStore
state, over, rng = PairState(Path(sys.argv[1])), Path(sys.argv[2]), random.Random(sys.argv[3])
done = refused = 0
store = AdapterStore(state.adapters)
while not over.exists():
    try:
"""
TAIL = """
        done += 1
    except AdaptiveError as error:
        refused += 1
        assert "\\n" not in str(error)
    time.sleep(rng.uniform(0, 0.1))
print(json.dumps({"done": done, "refused": refused}))
"""
PROMOTES = HEAD + "        store.promote(f'{rng.randint(1, 4):04d}', 'by the campaign')" + TAIL
ROLLS_BACK = HEAD + "        store.rollback('by the campaign')" + TAIL
PURGES = (
    HEAD
    + """        with Log(state.records) as log:
            names = [one.id for one in log.sessions() if one.id.startswith("p")]
            log.purge(session=rng.choice(names or ["none"]))
        time.sleep(0.5)"""
    + TAIL
)
# Answers without a pause; half of them in sessions that may be purged. Prints those that were acknowledged.
GENERATES = """
import json, random, sys, time, uuid
from pathlib import Path
from rich.console import Console
from adaptive.types import SamplingParams, StopParams
from adaptive.settings import load_settings
from cli.opened import open_pair
over, rng = Path(sys.argv[2]), random.Random(sys.argv[3])
prompts = json.loads(Path(sys.argv[5]).read_text())
settings = load_settings({"home": sys.argv[4], "dtype": "float32", "draft_length": "4"})
with open_pair(settings, Console(stderr=True)) as session:
    while not over.exists():
        session.swapper.use_promoted()
        prompt, name = rng.choice(prompts), ("p" if rng.random() < 0.5 else "k") + uuid.uuid4().hex
        for _ in session.assistant.complete(prompt, SamplingParams(), StopParams(int(sys.argv[6])), session=name):
            pass
        if session.assistant.log.flush(30):
            print(json.dumps([name, prompt, session.assistant.last.text]), flush=True)
"""


def run(campaign: Campaign) -> None:
    """Two of each, for a while, then a look at what they left."""
    identity = pair_identity(load_settings({}))
    state = open_state(campaign.home / "state", identity.id)
    publish(AdapterStore(state.adapters), campaign.home / "adapters")
    file = campaign.home / "prompts.json"
    file.write_text(json.dumps(list(campaign.expected)), encoding="utf-8")
    seconds = max(10.0, SECONDS * campaign.scale)
    codes = [PROMOTES, PROMOTES, ROLLS_BACK, ROLLS_BACK, PURGES, PURGES, GENERATES, GENERATES]
    said = [campaign.home / f"said-{number}" for number in range(len(codes))]
    over = campaign.home / "over"
    running = []
    for number, code in enumerate(codes):
        command = [sys.executable, "-c", code, str(state.root), str(over), str(campaign.rng.random())]
        command += [str(campaign.home / "state"), str(file), str(TOKENS)]
        with said[number].open("w") as out, said[number].with_suffix(".errors").open("w") as errors:
            running.append(subprocess.Popen(command, stdout=out, stderr=errors, env=environment()))
    # The time begins when both generate: loading takes a while.
    until(
        lambda: all(file.stat().st_size for file in said[6:]), lambda: said[7].with_suffix(".errors").read_text("utf-8")
    )
    time.sleep(seconds)
    over.touch()
    deadline = time.monotonic() + 300
    for number, process in enumerate(running):
        process.wait(max(1.0, deadline - time.monotonic()))
        errors_said = said[number].with_suffix(".errors").read_text("utf-8")[-300:]
        ended = f"processes: number {number} ended with {process.returncode}: {errors_said}"
        campaign.check(process.returncode == 0, ended)
    counts = [json.loads(file.read_text("utf-8") or "{}") for file in said[:6]]
    given = {}
    for file in said[6:]:
        for line in file.read_text("utf-8").splitlines():
            name, prompt, text = json.loads(line)
            given[name] = prompt, text
    kept = {name: answer for name, answer in given.items() if name.startswith("k")}
    line = check_state(campaign, state.root, kept, "", "processes")
    print(f"{seconds:.0f} s, promotes {counts[:2]}, rolls back {counts[2:4]}, purges {counts[4:]}, ", end="")
    print(f"{len(given)} answers, of which {len(given) - len(kept)} may be purged: {line}")


def publish(store: AdapterStore, folder: Path, count: int = 4) -> None:
    """Candidates of random weights."""
    from conftest import BUNDLED, save_random_adapter

    base = pair_identity(load_settings({})).base
    for seed in range(count):
        made = save_random_adapter(BUNDLED / "draft", folder / str(seed), seed)
        new = NewAdapter(base=base, trained_on=TrainedOn(1, 10, 10, 100))
        store.publish(lambda to, made=made: shutil.copytree(made, to, dirs_exist_ok=True), new)  # type: ignore[misc]
