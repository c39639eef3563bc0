"""Commands of ``adaptive`` as processes of their own that start in half a second.

Importing torch and transformers takes a command five seconds of a processor. Here a process that has imported them
forks: what runs is the command's entry point, in a real process with its own streams, environment and working folder,
which ends as any other and can be killed. Not for tests of what happens at import: those start Python anew.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

# Elsewhere a process that has loaded the system's libraries may not fork.
FORKS = sys.platform == "linux"
# Bytes of an order's length, which precedes it, of a process id and of an exit status.
NUMBER = 8
Stream = IO[Any] | int


class Forked:
    """A command that runs. The interface is that of ``subprocess.Popen``, as far as tests use it."""

    def __init__(self, arguments: Sequence[str], streams: Sequence[Stream], environment: dict[str, str]) -> None:
        order = {"arguments": list(arguments), "environment": environment, "folder": str(Path.cwd())}
        self.returncode: int | None = None
        self._watcher, theirs = os.pipe()
        with open(os.devnull, "r+b", buffering=0) as nothing:
            given = [nothing if one == subprocess.DEVNULL else one for one in streams]
            files = [one if isinstance(one, int) else one.fileno() for one in given]
            _send(_fork_server(), json.dumps(order).encode(), [*files, theirs])
        os.close(theirs)
        self.pid = self._told()

    def poll(self) -> int | None:
        """The exit status if it has ended (below zero: the signal that ended it), else None."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has ended. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        if self.returncode is None:
            if not select.select([self._watcher], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("adaptive", timeout or 0.0)
            self.returncode = self._told()
            os.close(self._watcher)
        return self.returncode

    def _told(self) -> int:
        """The next number from the process that watches the command."""
        said = os.read(self._watcher, NUMBER)
        assert len(said) == NUMBER, "the fork server, or the process that watches this command, has ended"
        return int.from_bytes(said, "big", signed=True)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """``kill -9``."""
        self.send_signal(signal.SIGKILL)


def start(
    *arguments: str,
    stdin: Stream = subprocess.DEVNULL,
    stdout: Stream = subprocess.DEVNULL,
    stderr: Stream = subprocess.DEVNULL,
    **variables: str,
) -> Forked | subprocess.Popen[bytes]:
    """Start ``adaptive`` with these arguments, in the current folder. ``variables`` are added to the environment."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    if FORKS:
        return Forked(arguments, (stdin, stdout, stderr), environment)
    command = [sys.executable, "-m", "cli.main", *arguments]
    return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=environment)


def run(*arguments: str, timeout: float = 300.0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``adaptive`` to its end, with what it writes as text."""
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        status = start(*arguments, stdout=out, stderr=err, **variables).wait(timeout)
        said = []
        for stream in (out, err):
            stream.seek(0)
            said.append(stream.read().decode())
    return subprocess.CompletedProcess(arguments, status, *said)


def run_on_a_terminal(*arguments: str, typed: str = "", stdout: Stream | None = None, **variables: str) -> bytes:
    """Run ``adaptive`` to its end, which must be in order. Returns what it writes to a terminal: what goes to stdout,
    or, where that is given, to stderr. ``typed`` comes from a file."""
    leader, follower = os.openpty()
    with tempfile.TemporaryFile() as keys:
        keys.write(typed.encode())
        keys.seek(0)
        streams = {"stdout": follower} if stdout is None else {"stdout": stdout, "stderr": follower}
        process = start(*arguments, stdin=keys, **streams, **variables)
    os.close(follower)
    said = b""
    with contextlib.suppress(OSError):  # with which Linux ends a terminal
        while part := os.read(leader, 65536):
            said += part
    os.close(leader)
    assert process.wait(60) == 0, said
    return said


@functools.cache
def _fork_server() -> socket.socket:
    """The connection to this process's fork server, which starts with the first command and ends with this process."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    atexit.register(server.wait)
    atexit.register(ours.close)
    return ours


def _send(connection: socket.socket, order: bytes, files: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    connection.sendmsg([len(order).to_bytes(NUMBER, "big")], rights)
    connection.sendall(order)


def _serve(connection: socket.socket) -> list[str]:
    """Carry out orders until the connection ends, and exit. Returns in the processes of commands only: the command's
    arguments."""
    while True:
        header, files, _, _ = socket.recv_fds(connection, NUMBER, 4)
        if not header:
            os._exit(0)
        with connection.makefile("rb") as stream:
            order = json.loads(stream.read(int.from_bytes(header, "big")))
        *streams, watcher = files
        between = os.fork()
        if between == 0:
            connection.close()
            _become_the_command(streams, watcher)
            os.chdir(order["folder"])
            os.environ.clear()
            os.environ.update(order["environment"])
            return list(order["arguments"])
        for one in files:
            os.close(one)
        os.waitpid(between, 0)


def _become_the_command(streams: list[int], watcher: int) -> None:
    """Fork twice, so that the fork server waits for nobody: into a process that writes the command's id and how it
    ended to ``watcher``, and into the command, with its streams, in which alone this returns."""
    if os.fork():
        os._exit(0)
    command = os.fork()
    if command:
        for one in (*streams, 0, 1, 2):
            os.close(one)
        with contextlib.suppress(BrokenPipeError):
            os.write(watcher, command.to_bytes(NUMBER, "big", signed=True))
            _, status = os.waitpid(command, 0)
            os.write(watcher, os.waitstatus_to_exitcode(status).to_bytes(NUMBER, "big", signed=True))
        os._exit(0)
    os.close(watcher)
    for place, one in enumerate(streams):
        os.dup2(one, place)
        os.close(one)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for place, name in enumerate(("stdin", "stdout", "stderr")):
        buffering = 1 if place == 2 or os.isatty(place) else -1
        stream = open(place, "w" if place else "r", buffering, encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)


def _import_what_commands_import() -> None:
    import uvicorn  # noqa: F401

    import adaptive.opened
    import adaptive.service.app  # noqa: F401


if __name__ == "__main__":
    from quick_costs import MEASURE, QUICK, WHOLE, measure_by

    from cli.main import run as run_command

    _import_what_commands_import()
    gc.freeze()
    sys.argv = ["adaptive", *_serve(socket.socket(fileno=int(sys.argv[1])))]
    measure_by(WHOLE if os.environ.get(MEASURE) == "whole" else QUICK)
    run_command()
