"""A disk that is full at 20 random moments, under four clients and training; it has room again a while later."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import httpx

from .common import Campaign, Clients, check_said, check_state, started, until

FILLS = 20
SIZE = 64 << 20
SETTINGS = "distill_after = 30\ndistill_idle_seconds = 0\ndistill = 'always'\ndistill_seconds = 5\n"


def run(campaign: Campaign) -> None:
    """On a file system of its own, which shrinks to what is on it and grows again."""
    disk = campaign.home / "disk"
    disk.mkdir()
    settings = campaign.home / "adaptive.toml"
    settings.write_text(SETTINGS, encoding="utf-8")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)], check=True)
    try:
        _run(campaign, disk, settings)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _run(campaign: Campaign, disk: Path, settings: Path) -> None:
    server, clients = started(campaign, disk / "state", "--config", str(settings)), Clients(campaign)
    root = server.records.parent
    seen = most = 0
    with clients.asking():
        clients.url = server.url
        for number in range(campaign.times(FILLS)):
            time.sleep(campaign.rng.uniform(0.2, 4.0))
            fill(disk, campaign.rng.randrange(0, 200_000))
            time.sleep(campaign.rng.uniform(1.0, 4.0))
            log = httpx.get(f"{server.url}/health", timeout=60).json()["log"]
            seen, most = seen + (not log["writable"]), max(most, log["waiting"])
            if number % 4 == 3:  # also a start on the full disk
                server.kill()
                clients.url = None
                # What waited in memory is gone with the process, and nobody was told that it is in the log.
                waiting = {name for name in clients.given if not _logged(root, name)}
                for name in waiting:
                    clients.given.pop(name)
                server = started(campaign, disk / "state", "--config", str(settings))
                clients.url = server.url
            assert resize(disk, SIZE)
    until(lambda: httpx.get(f"{server.url}/health", timeout=60).json()["log"]["waiting"] == 0, lambda: server.said)
    said = server.said
    campaign.check(server.stop() == 0, "the server did not end by itself")
    check_said(campaign, said)
    line = check_state(campaign, root, clients.given, said, "full")
    print(f"{campaign.times(FILLS)} times full, shown by /health {seen} times, at most {most} waiting: {line}")


def _logged(root: Path, name: str) -> bool:
    from adaptive.records.log import Log

    with Log(root / "records.db") as log:
        return log.count(session=name) == 1


def fill(disk: Path, room: int) -> None:
    """Leave room for so many bytes. The kernel refuses where more has been written meanwhile."""
    while not resize(disk, shutil.disk_usage(disk).used + room):
        pass


def resize(disk: Path, size: int) -> bool:
    """Let the file system hold so many bytes and no more; False where it holds more already."""
    command = ["mount", "-o", f"remount,size={max(size, 4096)}", str(disk)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0
