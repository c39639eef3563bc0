"""Hours under four clients and training, with the server's memory sampled."""

from __future__ import annotations

import statistics
import time

import psutil

from .common import Campaign, Clients, check_said, check_state, started
from .kills import SETTINGS

# Seconds between two samples, and of the start that is left out: caches fill, libraries are loaded.
EVERY_S, WARM_S = 5.0, 60.0
# Share by which the last tenth may lie above the first.
GROWTH = 0.10


def run(campaign: Campaign) -> None:
    """As long as the minutes say, at this scale."""
    settings = campaign.home / "adaptive.toml"
    settings.write_text(SETTINGS, encoding="utf-8")
    server, clients = started(campaign, campaign.home / "state", "--config", str(settings)), Clients(campaign)
    process, samples = psutil.Process(server.process.pid), []
    seconds = 60 * campaign.minutes * campaign.scale
    with clients.asking():
        clients.url, began = server.url, time.monotonic()
        while time.monotonic() - began < seconds:
            time.sleep(EVERY_S)
            samples.append((time.monotonic() - began, process.memory_info().rss / 1e6))
    warm = [size for at, size in samples if at >= min(WARM_S, seconds / 3)]
    part = max(1, len(warm) // 10)
    first, last = statistics.median(warm[:part]), statistics.median(warm[-part:])
    campaign.check(last <= first * (1 + GROWTH), f"memory grew from {first:.0f} to {last:.0f} MB")
    root, said = server.records.parent, server.said
    campaign.check(server.stop() == 0, "the server did not end by itself")
    check_said(campaign, said)
    line = check_state(campaign, root, clients.given, said, "soak")
    print(
        f"{seconds / 60:.1f} minutes, {said.count(' training run: ')} training runs, errors {dict(clients.errors)}; ",
        end="",
    )
    print(f"{first:.0f} MB after the start, {last:.0f} MB at the end, {max(warm):.0f} MB at most: {line}")
