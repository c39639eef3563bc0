"""``adaptive learn`` in front of a real ``adaptive serve``: real clients, real records, and training on them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from conftest import BUNDLED
from forked import start
from service_server import START_S, Server
from upstream_server import served, until

from adaptive.records.log import Log
from adaptive.types import Generation
from adaptive.upstream import publishing
from checkpoints.store import AdapterStore

# One xdist worker runs these tests, since it starts one server and one proxy.
pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group("upstream_learn")]
PAIR = ("--target", str(BUNDLED / "target"), "--draft", str(BUNDLED / "draft"))


class Learning:
    """``adaptive learn`` as a process, in front of ``server``."""

    def __init__(self, home: Path, url: str, *options: str, **variables: str) -> None:
        home.mkdir(parents=True)
        self.home, self.errors = home, home / "stderr"
        command = ["learn", "--upstream", f"{url}/v1", "--port", "0", *PAIR]
        command += ["--state-dir", str(home), *options]
        with self.errors.open("wb") as stream:
            self.process = start(*command, stderr=stream, **variables)
        deadline = time.monotonic() + START_S
        while (found := re.search(r"listening on (http://[^,\s]+)", self.said)) is None:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)
        self.url = found.group(1)

    @property
    def said(self) -> str:
        return self.errors.read_text(encoding="utf-8")

    @property
    def status(self) -> dict[str, Any]:
        """The proxy's own status."""
        said: dict[str, Any] = httpx.get(f"{self.url}/adaptive/upstream").json()
        return said

    def stop(self) -> int:
        """Send SIGTERM; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = Server(tmp_path_factory.mktemp("upstream"), *PAIR, "--distill", "off", "--history", "off")
    try:
        yield one.wait_until_ready()
    finally:
        one.stop()


def learning_at(url: str, home: Path) -> Iterator[Learning]:
    """A proxy in front of ``url``; afterwards it must have ended without an error message."""
    one = Learning(home, url, "--distill", "off")
    try:
        yield one
    finally:
        ended = one.stop()
    assert ended == 0, one.said
    assert "Traceback" not in one.said


@pytest.fixture(scope="module")
def learning(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learning]:
    yield from learning_at(server.url, tmp_path_factory.mktemp("learn") / "home")


def pairs(server: Server, learning: Learning, count: int) -> list[tuple[Generation, Generation]]:
    """The newest ``count`` records of the server, each with the proxy's record of the same answer."""

    def logged() -> bool:
        log = learning.status["log"]
        return not log["waiting"] and log.get("logged", 0) + log.get("missed", 0) >= count

    until(logged)
    found = []
    for records in (server.records, next(learning.home.glob("*/records.db"))):
        with Log(records) as log:
            found.append([one.generation for one in log.generations()][-count:])
    return list(zip(*found, strict=True))


def plain(body: bytes) -> bytes:
    """An answer without the parts that vary between answers: ids and times."""
    body = re.sub(rb'"(chat)?cmpl-[0-9a-f]+"', b'"ID"', body)
    return re.sub(
        rb'"(created|\w+_ms|\w+_per_second|\w*seconds|cached_tokens|prompt_n|cache_n)": [0-9.e+-]+', rb'"\1": 0', body
    )


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_answers_and_their_records_are_the_servers_own(
    server: Server, learning: Learning, path: str, streamed: bool
) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me a story."}]}
    if path == "completions":
        asked = {"prompt": "Once upon a time"}
    body = {**asked, "max_tokens": 24, "temperature": 0.7, "seed": 3, "stream": streamed}
    direct, through = (httpx.post(f"{url}/v1/{path}", json=body, timeout=60) for url in (server.url, learning.url))
    assert through.status_code == direct.status_code == 200
    assert plain(through.content) == plain(direct.content)
    before = learning.status["log"]
    assert before.get("missed", 0) == 0, before
    ((theirs, ours),) = pairs(server, learning, 1)
    assert ours.prompt.tolist() == theirs.prompt.tolist()
    assert ours.output.tolist() == theirs.output.tolist()
    assert (ours.messages, ours.prompt_text, ours.text) == (theirs.messages, theirs.prompt_text, theirs.text)
    assert ours.finish_reason == theirs.finish_reason
    assert ours.sampling.temperature == pytest.approx(0.7)
    assert ours.engine == "upstream adaptive"
    mine, whole = ours.supervision, theirs.supervision
    assert mine is not None
    assert whole is not None
    kept = mine.ids.shape[1]
    assert kept >= 15
    for row, values, all_ids, all_values in zip(mine.ids, mine.logprobs, whole.ids, whole.logprobs, strict=True):
        known = dict(zip(all_ids.tolist(), all_values.tolist(), strict=True))
        assert [known[token] for token in row.tolist()] == pytest.approx(values.tolist(), abs=1e-3)
    left = 1 - np.exp(mine.logprobs.astype(np.float64)).sum(axis=1)
    assert np.exp(mine.rest.astype(np.float64)) == pytest.approx(np.maximum(left, 0), abs=0.01)
    assert np.median(np.abs(mine.chosen.astype(float) - whole.chosen.astype(float))) < 0.02


def test_a_real_client_streams_through_it(server: Server, learning: Learning) -> None:
    client = openai.OpenAI(base_url=f"{learning.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    asked: Any = {"model": model, "messages": [{"role": "user", "content": "Write a poem."}], "max_tokens": 12}
    said = [part.choices[0] for part in client.chat.completions.create(**asked, temperature=0, stream=True)]
    whole = client.chat.completions.create(**asked, temperature=0)
    assert "".join(choice.delta.content or "" for choice in said) == whole.choices[0].message.content
    assert all(choice.logprobs is None for choice in said)
    more = client.chat.completions.create(**asked, temperature=0, logprobs=True, top_logprobs=3)
    assert more.choices[0].logprobs is not None
    assert len(more.choices[0].logprobs.content[0].top_logprobs) == 3  # type: ignore[index]
    three = pairs(server, learning, 3)
    assert all(ours.output.tolist() == theirs.output.tolist() for theirs, ours in three)
    assert three[2][1].supervision is not None
    assert three[2][1].supervision.ids.shape[1] == 3


def test_what_was_logged_is_trained_on(server: Server, learning: Learning) -> None:
    """The trainer reads another server's records like our own."""
    from trainers.dataset import examples, read_log

    asked = {"prompt": "A long time ago", "max_tokens": 24, "temperature": 0.7, "seed": 4}
    for number in range(3):
        assert httpx.post(f"{learning.url}/v1/completions", json={**asked, "seed": number}, timeout=60).is_success
    pairs(server, learning, 3)
    log = read_log(next(learning.home.glob("*/records.db")), 100)
    found = examples(log, 512)
    assert len(found) == len(log) >= 3
    assert all(example.replayable for example in found)


def test_it_says_what_training_does(learning: Learning) -> None:
    assert learning.status["training"]["activity"] == "off"
    assert learning.status["engine"] == "adaptive"


def test_nothing_is_kept_without_a_record(tmp_path: Path, server: Server) -> None:
    from adaptive.settings import load_settings
    from adaptive.state import open_state
    from adaptive.upstream.proxy import Proxy
    from adaptive.upstream.server import logbook

    state = open_state(tmp_path, "pair")
    with logbook(load_settings({"record": False}), state, server.url) as book:
        assert book is None
        with served(Proxy(server.url, book, 4)) as url:
            asked = {"prompt": "Once", "max_tokens": 4}
            assert httpx.post(f"{url}/v1/completions", json=asked, timeout=60).status_code == 200
            assert httpx.get(f"{url}/adaptive/upstream").json()["log"] is None
    assert not state.records.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--upstream"),
        (("--upstream", "ftp://x"), "must be an address"),
        (("--upstream", "http://[::1"), "must be an address"),
        (("--upstream", "http://127.0.0.1:99999"), "must be an address"),
        (("--upstream", "http://me:sec#ret@x"), "must be an address"),
        (("--upstream", "http://x", "--engine", "abacus"), "llama-server"),
        (("--upstream", "http://x", "--host", "0.0.0.0"), "--api-key-file"),
    ],
)
def test_a_mistake_is_one_line(adaptive: Any, options: tuple[str, ...], said: str) -> None:
    status, out, errors = adaptive("learn", *options)
    assert (status, out) == (2, "")
    assert said in errors
    assert errors.count("\n") == 1
    assert "sec#ret" not in errors


def test_the_target_may_be_a_folder_of_config_and_tokenizer(tmp_path: Path) -> None:
    from adaptive.pair import pair_identity
    from adaptive.settings import load_settings

    thin = tmp_path / "thin"
    thin.mkdir()
    for file in (BUNDLED / "target").iterdir():
        if file.suffix != ".safetensors":
            (thin / file.name).symlink_to(file)
    identity = pair_identity(load_settings({"target": str(thin), "draft": str(BUNDLED / "draft")}))
    assert identity.id.startswith("thin--draft-")


@pytest.mark.long
def test_a_draft_learns_from_a_server_while_it_is_used_and_goes_into_it(
    tmp_path: Path, prompts: list[str], adaptive: Any
) -> None:
    """The whole way: answers through the proxy, training beside it, and a server restart with the draft."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, start, pid = f"http://127.0.0.1:{port}", tmp_path / "start.sh", tmp_path / "pid"
    start.write_text(
        f"exec {sys.executable} -m cli.main serve --target {BUNDLED / 'target'} --draft {BUNDLED / 'draft'} "
        f"--draft-length 4 --port {port} --state-dir {tmp_path / 'served'} --distill off --dtype float32 --threads 1 "
        f"> {tmp_path / 'served.txt'} 2>&1\n"
    )
    again = f"test ! -e {pid} || kill $(cat {pid}); sleep 2; sh {start} & echo $! > {pid}"
    publishing.restart(again, url, None, None, 0, START_S)
    home = tmp_path / "home" / "learn"
    options = {"ADAPTIVE_DISTILL_AFTER": "60", "ADAPTIVE_DISTILL_SECONDS": "30", "ADAPTIVE_DISTILL_IDLE_SECONDS": "0"}
    learning = Learning(home, url, "--distill", "always", **options)
    try:
        with httpx.Client(base_url=learning.url, timeout=120) as client:
            for number in range(60):
                asked = {"messages": [{"role": "user", "content": f"{prompts[number % 20]} {number}"}]}
                body = {**asked, "max_tokens": 24, "temperature": 0.7}
                assert client.post("/v1/chat/completions", json=body).status_code == 200
        store = AdapterStore(next(home.glob("*/records.db")).parent / "adapters")
        until(lambda: learning.status["training"]["runs"] == 1, 400)
        assert learning.status["log"] == {
            "logged": 60, "supervised": 60, "waiting": 0, "why_not": {}, "problem": None, "lost": 0, "stripped": 0,
        }  # fmt: skip
        (manifest,) = store.list()
        assert manifest.recent is not None
        if manifest.status != "promoted":
            store.promote(manifest.id, "for the test")
        assert learning.stop() == 0
        status, out, errors = adaptive(
            "publish", *PAIR, "--state-dir", str(home), "--upstream", url, "--start", str(start), "--restart", again,
            "--prompts", "8", "--max-tokens", "40", "--draft-length", "4", "--json",
        )  # fmt: skip
        said = json.loads(out)
        assert said["after"] is not None, errors
        assert said["before"]["each_accepted"] > 0
        assert (status == 1) == said["rolled_back"]
        fell = said["after"]["each_accepted"] < said["before"]["each_accepted"] - 0.005
        assert said["rolled_back"] == fell
        expected = str(BUNDLED / "draft") if fell else said["draft"]
        assert httpx.get(f"{url}/props").json()["draft"] == expected
        print(said["before"], said["after"], said["expected"])
    finally:
        learning.stop()
        os.kill(int(pid.read_text()), signal.SIGTERM)
