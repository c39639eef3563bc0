"""A real ``adaptive serve`` process for the tests, on a free port."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import httpx
from forked import start

# Seconds for a server to be ready on a busy machine; an idle machine takes a tenth. The server may not answer while it
# imports.
START_S = 120.0


class Server:
    """``adaptive serve`` on the bundled pair, with one thread. ``health`` lists each different status seen."""

    def __init__(self, home: Path, *options: str, key: str | None = None, errors: Path | None = None) -> None:
        self.home, self.key = home, key
        home.mkdir(parents=True, exist_ok=True)
        self.errors = (errors or home) / f"stderr-{time.monotonic_ns()}"
        command = ["serve", "--state-dir", str(home), "--port", "0"]
        command += ["--threads", "1", "--dtype", "float32", "--draft-length", "4", *options]
        variables = {} if key is None else {"ADAPTIVE_API_KEY": key}
        with self.errors.open("wb") as stream:
            self.process = start(*command, stderr=stream, **variables)
        self.url = self._wait_for_url()
        self.health: list[int] = []

    @property
    def said(self) -> str:
        """The server's output so far."""
        return self.errors.read_text(encoding="utf-8")

    @property
    def records(self) -> Path:
        """The log's file; there is one pair."""
        return next(self.home.glob("*/records.db"))

    def wait_until_ready(self) -> Server:
        """Wait until ``/health`` is 200. Kill the server and raise if that does not happen."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            status = httpx.get(f"{self.url}/health", timeout=START_S).status_code
            if self.health[-1:] != [status]:
                self.health.append(status)
            if status == 200:
                return self
            time.sleep(0.02)
        self.kill()
        raise AssertionError(f"the server did not start: {self.said}")

    def http(self) -> httpx.Client:
        """A client that sends the key."""
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def kill(self) -> None:
        """``kill -9``."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Send SIGTERM. Returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            found = re.search(r"listening on (http://\S+)", self.said)
            if found:
                return found.group(1)
            time.sleep(0.02)
        self.kill()
        raise AssertionError(f"the server did not listen: {self.said}")
