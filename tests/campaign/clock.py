"""A clock that jumps, by minutes and by years, forth and back, under four clients and training."""

from __future__ import annotations

import glob
import os
import time

from .common import Campaign, Clients, check_said, check_state, started

JUMPS = 20
SETTINGS = "distill_after = 30\ndistill_idle_seconds = 0\ndistill = 'always'\ndistill_seconds = 10\n"
# Seconds that the clock is off; the steps of a monotonic clock stay what they are, as the system keeps them.
OFF = (0, 3600, -3600, 86_400, -86_400, 31_536_000, -31_536_000, 400_000_000, -900_000_000)


def run(campaign: Campaign) -> None:
    """By libfaketime, which a package of the system brings."""
    found = glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1")
    if not found:
        print("libfaketime is not installed: this part was not run")
        campaign.failures.append("clock: libfaketime is not installed")
        return
    offset = campaign.home / "offset"
    offset.write_text("+0", encoding="ascii")
    settings = campaign.home / "adaptive.toml"
    settings.write_text(SETTINGS, encoding="utf-8")
    os.environ.update(
        LD_PRELOAD=found[0], FAKETIME_TIMESTAMP_FILE=str(offset), FAKETIME_NO_CACHE="1", DONT_FAKE_MONOTONIC="1"
    )
    try:
        server = started(campaign, campaign.home / "state", "--config", str(settings))
    finally:
        for name in ("LD_PRELOAD", "FAKETIME_TIMESTAMP_FILE", "FAKETIME_NO_CACHE", "DONT_FAKE_MONOTONIC"):
            del os.environ[name]
    clients = Clients(campaign)
    with clients.asking():
        clients.url = server.url
        for _ in range(campaign.times(JUMPS)):
            offset.write_text(f"{campaign.rng.choice(OFF):+d}", encoding="ascii")
            time.sleep(campaign.rng.uniform(1.0, 4.0))
    root, said = server.records.parent, server.said
    runs = said.count(" training run: ")
    campaign.check(server.stop() == 0, "the server did not end by itself")
    check_said(campaign, said)
    dates = {line[:4] for line in said.splitlines() if line[:2].isdigit()}
    line = check_state(campaign, root, clients.given, said, "clock")
    print(f"{campaign.times(JUMPS)} jumps, years in the server's log {sorted(dates)}, {runs} training runs: {line}")
