"""A server drafts from its users' texts, keeps users apart, and forgets what another process purges."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from forked import run
from service_server import Server

# One xdist worker runs these tests, since it starts one server.
pytestmark = pytest.mark.xdist_group("history_service")

PROMPTS = ("Write a short story about a lighthouse.", "Explain how a bicycle stays upright.")
SHARED = "Write a letter to a friend about the sea."


def rounds(http: httpx.Client, prompt: str, user: str | None = None) -> int:
    """Number of rounds that an answer takes; with a match in history they are a fraction."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 100, "temperature": 0}
    answer = http.post("/v1/chat/completions", json={**body, **({"user": user} if user else {})})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    drafted = sum(one["drafted"] for one in found["drafters"].values())
    assert drafted == found["timings"]["draft_n"]
    return int(found["usage"]["completion_tokens"]) - 1 - sum(one["accepted"] for one in found["drafters"].values())


def known(http: httpx.Client, prompt: str, fresh: int, user: str | None = None) -> bool:
    """Whether history contains the answer; new records enter the index within moments."""
    for _ in range(20):
        if rounds(http, prompt, user) < 0.6 * fresh:
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("history")
    found = Server(home, "--distill", "off", "--draft-length", "12").wait_until_ready()
    try:
        yield found
    finally:
        found.stop()


@pytest.mark.thorough
def test_what_is_purged_is_drafted_from_no_more(server: Server) -> None:
    with server.http() as http:
        fresh = [rounds(http, prompt) for prompt in PROMPTS]
        assert all(known(http, prompt, n) for prompt, n in zip(PROMPTS, fresh, strict=True))
        purge = ["records", "purge", "--all", "--yes", "--state-dir", str(server.home)]
        run(*purge).check_returncode()
        again = rounds(http, PROMPTS[0])
        # The answer just given is in history again a moment later; the other one is not.
        assert rounds(http, PROMPTS[1]) > 0.6 * fresh[1]
        assert again > 0.6 * fresh[0]
        metrics = http.get("/metrics").text
    assert 'adaptive:drafted_tokens_accepted_total{drafter="history"}' in metrics


@pytest.mark.thorough
def test_users_are_kept_apart(server: Server) -> None:
    with server.http() as http:
        fresh = rounds(http, SHARED, "kim")
        assert known(http, SHARED, fresh, "kim")
        assert rounds(http, SHARED, "lee") > 0.6 * fresh
        assert rounds(http, SHARED) > 0.6 * fresh
        assert known(http, SHARED, fresh, "lee")
