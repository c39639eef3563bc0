"""The service managers systemd and launchd: the files written for them, and the commands given to them."""

from __future__ import annotations

import os
import plistlib
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from adaptive.errors import AdaptiveError

# Seconds that one of their commands may take.
PATIENCE_S = 60
# The state of a service if its manager does not say one.
UNKNOWN = "unknown"
# Name of our launchd agent; launchd's names are in reverse domain order.
LABEL = "local.adaptive"
# Seconds that a service may take to end until it is killed.
ENDING_S = 45

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
# Ended while it was about to load the models.
SuccessExitStatus=143
# If the kernel ends the training process for memory, the server goes on.
OOMPolicy=continue
# The server ends the training process itself, when that has kept what it has.
KillMode=mixed
# Running answers have 10 s, and caches that are kept on disk 10 s; the rest is for the log and the trainer.
TimeoutStopSec={ending}
UMask=0077
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


class Manager(Protocol):
    """A service manager. ``running`` is its word for a running service; ``more`` is a hint for the user;
    ``environment`` is the place for variables of a service's environment."""

    running: str
    more: str
    how_to_start: str
    environment: str

    @property
    def file(self) -> Path:
        """The service's file."""

    def write(self, command: Sequence[str]) -> None:
        """Write the file, for this command. Raises AdaptiveError."""

    def start(self) -> None:
        """Start the service, now and at every login. Raises AdaptiveError."""

    def state(self) -> str:
        """The service's state, in the manager's word."""

    def stop(self) -> None:
        """Stop the service, and do not start it again at login. Raises AdaptiveError if it may still run."""

    def reload(self) -> None:
        """Have the manager read the file again after it was changed or removed."""


class Systemd:
    """The user's own systemd instance."""

    running = "active"
    how_to_start = "systemctl --user daemon-reload && systemctl --user enable --now adaptive"
    more = "its log: journalctl --user -u adaptive -f; to have it run while nobody is logged in: loginctl enable-linger"
    environment = "~/.config/environment.d/adaptive.conf, as NAME=VALUE, and install again"

    @property
    def file(self) -> Path:
        """The unit file."""
        config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        return Path(config) / "systemd" / "user" / "adaptive.service"

    def write(self, command: Sequence[str]) -> None:
        """Raises AdaptiveError if the file cannot be written."""
        _write(self.file, unit_of(command).encode())

    def start(self) -> None:
        """Raises AdaptiveError if systemd does not start it."""
        self.reload()
        _tell("systemctl", "--user", "enable", "adaptive")
        _ask("systemctl", "--user", "reset-failed", "adaptive")  # a start by hand does not count for StartLimitBurst
        _tell("systemctl", "--user", "restart", "adaptive")  # also a service that runs with other options

    def state(self) -> str:
        """The word of ``systemctl is-active``; UNKNOWN if systemd cannot be queried."""
        return _ask("systemctl", "--user", "is-active", "adaptive")

    def stop(self) -> None:
        """Raises AdaptiveError if systemd cannot be told."""
        _tell("systemctl", "--user", "disable", "--now", "adaptive")

    def reload(self) -> None:
        """Raises AdaptiveError if the user has no systemd instance, unless there is no unit file."""
        if self.file.is_file():
            _tell("systemctl", "--user", "daemon-reload")
        else:
            _ask("systemctl", "--user", "daemon-reload")


class Launchd:
    """The launchd agent of a user with a graphical session."""

    running = "running"
    how_to_start = f"launchctl bootstrap gui/$(id -u) ~/Library/LaunchAgents/{LABEL}.plist"
    more = "its log: ~/Library/Logs/adaptive.log"
    environment = "launchd's environment, by `launchctl setenv NAME VALUE`, and install again"

    @property
    def file(self) -> Path:
        """The property list."""
        return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    def write(self, command: Sequence[str]) -> None:
        """Raises AdaptiveError if the file cannot be written."""
        log = str(Path.home() / "Library" / "Logs" / "adaptive.log")
        agent = {
            "Label": LABEL,
            "ProgramArguments": list(command),
            "WorkingDirectory": str(Path.home()),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 60,  # seconds between restarts, even for an error that a restart does not cure
            "ExitTimeOut": ENDING_S,
            "ProcessType": "Interactive",  # others may use less of the processor and the disk, by launchd.plist(5)
            "Umask": 0o077,
            "StandardOutPath": log,
            "StandardErrorPath": log,
        }
        _write(self.file, plistlib.dumps(agent))

    def start(self) -> None:
        """Raises AdaptiveError if launchd does not start it."""
        self.stop()
        _tell("launchctl", "bootstrap", self._domain, str(self.file))

    def state(self) -> str:
        """The word of ``launchctl print``, "running" for a running agent; UNKNOWN if there is none, or if it
        cannot be queried."""
        for line in _ask("launchctl", "print", f"{self._domain}/{LABEL}").splitlines():
            name, _, value = line.strip().partition(" = ")
            if name == "state":
                return value
        return UNKNOWN

    def stop(self) -> None:
        """Returns when launchd has forgotten the agent: until then it starts none of the same name. Raises
        AdaptiveError if the agent goes on running."""
        try:
            _tell("launchctl", "bootout", f"{self._domain}/{LABEL}")
        except AdaptiveError:
            if self.state() == self.running:  # else there was nothing to stop, or it is ending
                raise
        until = time.monotonic() + ENDING_S + PATIENCE_S
        while self.state() != UNKNOWN:
            if time.monotonic() > until:
                raise AdaptiveError(f"launchd does not end {LABEL}; see `launchctl print {self._domain}/{LABEL}`")
            time.sleep(0.2)

    def reload(self) -> None:
        """Nothing to do: launchd reads the file when the agent starts."""

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"


def unit_of(command: Sequence[str]) -> str:
    """The unit that runs ``command``. Raises AdaptiveError for words that systemd does not accept."""
    program, *arguments = command
    if any(character in program for character in "\"'\\\n"):
        raise AdaptiveError(f"{program!r} cannot be started by systemd; install adaptive in a folder without quotes")
    # In arguments a dollar sign marks a variable and is doubled; in the program's path it is literal.
    words = [_quoted(program), *(_quoted(word).replace("$", "$$") for word in arguments)]
    return UNIT.format(command=" ".join(words), ending=ENDING_S)


def _quoted(word: str) -> str:
    """One word, quoted for a unit file, in which ``%`` has a special meaning."""
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
    """The command's output; UNKNOWN if it is empty or the command cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return UNKNOWN
    return done.stdout.strip() or UNKNOWN
