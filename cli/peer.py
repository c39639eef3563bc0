"""A llama.cpp server that `adaptive bench --peer` compares with, asked through its own HTTP API."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar

from adaptive.errors import AdaptiveError
from adaptive.printable import without_login

# Seconds that the server may take for one answer, and for saying that it is there.
PATIENCE, HEALTH_PATIENCE = 600.0, 10.0
T = TypeVar("T")


def check_peer(url: str) -> None:
    """Raise AdaptiveError if no server answers at ``url``."""
    try:
        _answered(url, "/health", None, HEALTH_PATIENCE, lambda said: None)
    except AdaptiveError as error:
        if not isinstance(error.__cause__, urllib.error.HTTPError):  # with a status it answers
            raise


def complete(url: str, asked: dict[str, Any]) -> tuple[list[int], int]:
    """The token ids that the server at ``url`` says to ``/completion``, and how many of them it had drafted. Raises
    AdaptiveError if no such server answers there."""

    def tokens(said: Any) -> tuple[list[int], int]:
        return [int(token) for token in said["tokens"]], int(said.get("timings", {}).get("draft_n_accepted", 0))

    return _answered(url, "/completion", asked, PATIENCE, lambda said: tokens(json.loads(said)))


def _answered(url: str, path: str, asked: dict[str, Any] | None, patience: float, read: Callable[[bytes], T]) -> T:
    try:
        url = without_login(url)  # which urllib would take for a part of the server's name
        body = None if asked is None else json.dumps(asked).encode()
        request = urllib.request.Request(url.rstrip("/") + path, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=patience) as response:
            return read(response.read())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, http.client.HTTPException) as error:
        raise AdaptiveError(
            f"no llama.cpp server answers at {url} ({error}); start one, or leave --peer out"
        ) from error
