"""200 kills of the server and of its training process, at random moments, under four clients."""

from __future__ import annotations

import contextlib
import time

import psutil
from service_server import Server

from .common import Campaign, Clients, check_said, check_state, started, until

SETTINGS = "distill_after = 30\ndistill_idle_seconds = 0\ndistill = 'always'\ndistill_seconds = 20\n"
KILLS = 200
# Answers before the first kill: a training run needs so many.
FIRST = 30
# Kills between two looks at the whole state.
LOOK = 10


def run(campaign: Campaign) -> None:
    """Kill, start again, go on; now and then hold the log to what was given."""
    settings = campaign.home / "adaptive.toml"
    settings.write_text(SETTINGS, encoding="utf-8")
    state, said, counts = campaign.home / "state", "", {"server": 0, "trainer": 0}
    server, clients = started(campaign, state, "--config", str(settings)), Clients(campaign)
    root = server.records.parent
    with clients.asking():
        clients.url = server.url
        until(lambda: len(clients.given) > FIRST, lambda: server.said)  # there is something to train on
        for number in range(1, campaign.times(KILLS) + 1):
            time.sleep(campaign.rng.uniform(0.1, 3.0))
            worker = training_process(server) if campaign.rng.random() < 0.5 else None
            if worker is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()
                counts["trainer"] += 1
            else:
                server.kill()
                counts["server"] += 1
                clients.url = None
                said += server.said
                server = started(campaign, state, "--config", str(settings))
                clients.url = server.url
            if number % LOOK == 0:
                print(f"kill {number}: {counts}, {len(clients.given)} answers given so far", flush=True)
    said += server.said
    campaign.check(server.stop() == 0, "the server did not end by itself")
    check_said(campaign, said + server.said)
    print(f"{sum(counts.values())} kills ({counts}): {check_state(campaign, root, clients.given, said, 'kills')}")


def training_process(server: Server) -> psutil.Process | None:
    """The training process of a server, where one runs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(server.process.pid).children():
            if "trainers.worker" in " ".join(child.cmdline()):
                return child
    return None
