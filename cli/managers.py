"""Who starts programs for a user: systemd and launchd, what is written for them, and what they are told."""

from __future__ import annotations

import os
import plistlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from adaptive.errors import AdaptiveError

# Seconds that one of their commands may take.
PATIENCE_S = 60
# Of our agent; launchd's names are written the other way round.
LABEL = "local.adaptive"

UNIT = """[Unit]
Description=adaptive: a local assistant that gets faster
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
ExecStart={command}
WorkingDirectory=%h
Restart=on-failure
RestartSec=5
# A mistake that a restart does not mend, such as a model that is not there.
RestartPreventExitStatus=2
# Running answers have 10 s; the rest is for the log and the trainer.
TimeoutStopSec=30
UMask=0077
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


class Manager(Protocol):
    """One of them. ``running`` is the state of a service that runs; ``more`` what a person may want to know."""

    running: str
    more: str
    how_to_start: str

    @property
    def file(self) -> Path:
        """What is written."""

    def write(self, command: Sequence[str]) -> None:
        """Write it, for this command. Raises AdaptiveError."""

    def start(self) -> None:
        """Start the service, now and at every login. Raises AdaptiveError."""

    def state(self) -> str:
        """What it does now, in the manager's word."""

    def stop(self) -> None:
        """Stop it, and start it no more."""

    def reload(self) -> None:
        """Have the manager see that the file is another one, or gone."""


class Systemd:
    """The user's own instance."""

    running = "active"
    how_to_start = "systemctl --user daemon-reload && systemctl --user enable --now adaptive"
    more = "its log: journalctl --user -u adaptive -f; to have it run while nobody is logged in: loginctl enable-linger"

    @property
    def file(self) -> Path:
        """The unit."""
        config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        return Path(config) / "systemd" / "user" / "adaptive.service"

    def write(self, command: Sequence[str]) -> None:
        """Raises AdaptiveError where the file cannot be written."""
        _write(self.file, unit_of(command).encode())

    def start(self) -> None:
        """Raises AdaptiveError where systemd does not."""
        self.reload()
        _tell("systemctl", "--user", "enable", "adaptive")
        _tell("systemctl", "--user", "restart", "adaptive")  # also one that runs with other options

    def state(self) -> str:
        """As ``systemctl is-active`` says it; "unknown" where systemd cannot be asked."""
        return _ask("systemctl", "--user", "is-active", "adaptive")

    def stop(self) -> None:
        """Also where it does not run."""
        _ask("systemctl", "--user", "disable", "--now", "adaptive")

    def reload(self) -> None:
        """Raises AdaptiveError where the user has no systemd, unless nothing is there to be started."""
        if self.file.is_file():
            _tell("systemctl", "--user", "daemon-reload")
        else:
            _ask("systemctl", "--user", "daemon-reload")


class Launchd:
    """The agent of one who is logged in at a screen."""

    running = "running"
    how_to_start = f"launchctl bootstrap gui/$(id -u) ~/Library/LaunchAgents/{LABEL}.plist"
    more = "its log: ~/Library/Logs/adaptive.log"

    @property
    def file(self) -> Path:
        """The property list."""
        return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    def write(self, command: Sequence[str]) -> None:
        """Raises AdaptiveError where the file cannot be written."""
        log = str(Path.home() / "Library" / "Logs" / "adaptive.log")
        agent = {
            "Label": LABEL,
            "ProgramArguments": list(command),
            "WorkingDirectory": str(Path.home()),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 60,  # seconds; also for a mistake that a restart does not mend
            "ExitTimeOut": 30,
            "Umask": 0o077,
            "StandardOutPath": log,
            "StandardErrorPath": log,
        }
        _write(self.file, plistlib.dumps(agent))

    def start(self) -> None:
        """Raises AdaptiveError where launchd does not."""
        self.stop()
        _tell("launchctl", "bootstrap", self._domain, str(self.file))

    def state(self) -> str:
        """ "running", what ``launchctl`` calls it otherwise, or "unknown"."""
        for line in _ask("launchctl", "print", f"{self._domain}/{LABEL}").splitlines():
            name, _, value = line.strip().partition(" = ")
            if name == "state":
                return value
        return "unknown"

    def stop(self) -> None:
        """Also where it does not run."""
        _ask("launchctl", "bootout", f"{self._domain}/{LABEL}")

    def reload(self) -> None:
        """It keeps nothing of a file."""

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"


def unit_of(command: Sequence[str]) -> str:
    """The unit that runs ``command``. Raises AdaptiveError for words that systemd does not take."""
    program, *arguments = command
    if any(character in program for character in "\"'\\\n"):
        raise AdaptiveError(f"{program!r} cannot be started by systemd; install adaptive in a folder without quotes")
    # In arguments a dollar stands for a variable; of the program it is a part.
    words = [_quoted(program), *(_quoted(word).replace("$", "$$") for word in arguments)]
    return UNIT.format(command=" ".join(words))


def _quoted(word: str) -> str:
    """One word as a unit has it, where ``%`` stands for something else."""
    if "\n" in word or "\0" in word:
        raise AdaptiveError(f"{word!r} cannot stand in a unit of systemd; choose a name without a line's end")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if escaped != word or not word or any(c in word for c in " \t';#$") else word


def _write(file: Path, content: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    except OSError as error:
        raise AdaptiveError(f"{file} cannot be written ({error.strerror})") from error


def _tell(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AdaptiveError(f"`{' '.join(command)}` cannot be run: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise AdaptiveError(f"`{' '.join(command)}` failed: {said[0] if said else f'status {done.returncode}'}")


def _ask(*command: str) -> str:
    """What it prints; "unknown" where it prints nothing or cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
