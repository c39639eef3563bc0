"""A draft on trial in another server ends with the draft length that the server's times favour, and replay predicts the
acceptance that the server counts."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from upstream_server import CLOSE, Heard, plain, scripted

from adaptive.upstream.kinds import LLAMA_SERVER
from adaptive.upstream.publishing import StartFile
from cli.publish_replay import expected_acceptance
from cli.publish_trial import Server, Tried, settle
from trainers.replay import Replay

ROUNDS = 1000
CHANCE = 0.6
# Tokens a round at draft lengths 0, 1, ...: each drafted token is accepted with probability CHANCE.
TOKENS = [sum(CHANCE**i for i in range(k + 1)) for k in range(17)]
Cost = Callable[[int], float]  # seconds of a round by its number of drafted tokens
Try = Callable[..., tuple[Tried, int, list[int]]]


@pytest.fixture
def try_it(tmp_path: Path) -> Try:
    """Try a draft in a server whose rounds take ``cost`` seconds. Returns the result, the draft length that the server
    runs with in the end, and the lengths that it was restarted with."""
    start, running, restarts = tmp_path / "start.sh", tmp_path / "running", tmp_path / "restarts"
    start.write_text("llama-server -m target.gguf\n")
    running.write_text(start.read_text())

    def length() -> int:
        found = re.search(r"--spec-draft-n-max (\d+)", running.read_text())
        return int(found[1]) if found else 0

    def trial(
        cost: Cost, first: int, tokens: list[float] | None = TOKENS, if_only: str = "true"
    ) -> tuple[Tried, int, list[int]]:
        def script(heard: Heard, connection: socket.socket) -> None:
            k = length()
            accepted = round(ROUNDS * (TOKENS[k] - 1))
            timings = {"predicted_ms": 1000 * ROUNDS * cost(k)}
            timings |= {"draft_n": ROUNDS * k, "draft_n_accepted": accepted} if k else {}
            said = {"choices": [{"text": "x", "finish_reason": "length"}], "timings": timings}
            said |= {"usage": {"completion_tokens": ROUNDS + accepted}}
            connection.sendall(plain(json.dumps(said).encode(), more=CLOSE))

        with scripted(script) as one:
            note = f"echo ${{ADAPTIVE_DRAFT_LENGTH:-0}} >> {restarts}"
            command = f"cp {start} {running}; {note}; {if_only.format(restarts)}"
            server = Server(one.url, None, LLAMA_SERVER, command, StartFile.read(start), 10.0, [[1, 2]], 100)
            found = settle(server, server.measure(), tmp_path / "draft.gguf", first, tokens, None)
        return found, length(), [int(line) for line in restarts.read_text().split()]

    return trial


def test_the_length_is_corrected_by_what_rounds_take_in_the_restarted_server(try_it: Try) -> None:
    """The cost of a drafted token is unknown while the server drafts nothing."""
    found, runs, tried = try_it(lambda k: 0.01 + 0.0025 * k, 8)
    assert found.worse is None
    rates = [tokens / (0.01 + 0.0025 * k) for k, tokens in enumerate(TOKENS)]
    assert runs == found.length == int(np.argmax(rates)) == 2
    assert tried == [8, 2]


def test_a_length_that_kept_less_than_it_promised_makes_way_for_the_faster_one(try_it: Try) -> None:
    found, runs, tried = try_it(lambda k: 0.01 + 0.01 * (k > 0), 8)
    assert (found.worse, found.length, runs) == (None, 8, 8)
    assert len(tried) >= 3
    assert tried[0] == tried[-1] == 8


def test_a_server_that_does_not_come_back_with_the_faster_length_gets_its_earlier_draft(try_it: Try) -> None:
    second_time_fails = "test -z $ADAPTIVE_DRAFT || test $(grep -c ^8$ {}) -lt 2"
    found, runs, tried = try_it(lambda k: 0.01 + 0.01 * (k > 0), 8, if_only=second_time_fails)
    assert found.worse is not None
    assert "the restart command ended with status 1" in found.worse
    assert runs == 0
    assert [tried[0], *tried[-2:]] == [8, 8, 0]


def test_a_length_that_was_asked_for_is_the_only_one_that_is_tried(try_it: Try) -> None:
    found, runs, tried = try_it(lambda k: 0.01 + 0.001 * k, 1, None)
    assert (found.worse, found.length, runs, tried) == (None, 1, 1, [1])


def test_a_draft_that_is_too_slow_at_every_length_goes(try_it: Try) -> None:
    found, runs, tried = try_it(lambda k: 0.01 + 0.008 * k, 8)
    assert found.worse is not None
    assert runs == 0
    assert tried == [8, 0]


INTERRUPTED = """
import signal, sys
from pathlib import Path
from adaptive.upstream.kinds import LLAMA_SERVER
from adaptive.upstream.publishing import StartFile
from cli.ending import ended_in_order
from cli.publish_trial import Server, settle

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell turns off for what it runs in the background
url, start, command = sys.argv[1:]
server = Server(url, None, LLAMA_SERVER, command, StartFile.read(Path(start)), 60.0, [[1, 2]], 100)
with ended_in_order():
    settle(server, server.measure(), Path("draft.gguf"), 4, None, None)
"""


@pytest.mark.parametrize(
    ("moment", "by"),
    [
        ("restart", signal.SIGINT),
        ("measurement", signal.SIGINT),
        ("measurement", signal.SIGTERM),
        ("measurement", signal.SIGHUP),
        ("and cannot be restarted", signal.SIGINT),
        ("and cannot be edited", signal.SIGINT),
    ],
)
def test_what_is_interrupted_is_undone_or_said_to_stay(tmp_path: Path, moment: str, by: signal.Signals) -> None:
    """ctrl-C, or the end of the terminal or of a timer, during the restart, and during the measurement after it."""
    start, running, there = tmp_path / "start.sh", tmp_path / "running", tmp_path / "there"
    start.write_text("llama-server -m target.gguf\n")
    running.write_text(start.read_text())
    over = threading.Event()

    def script(heard: Heard, connection: socket.socket) -> None:
        if "draft.gguf" in running.read_text():
            there.touch()
            over.wait(60)
        said = {"choices": [{"text": "x"}], "usage": {"completion_tokens": 20}, "timings": {"predicted_ms": 100}}
        connection.sendall(plain(json.dumps(said).encode(), more=CLOSE))

    command = f"cp {start} {running}"
    if moment == "restart":
        command += f'; test -z "$ADAPTIVE_DRAFT" || {{ touch {there}; exec sleep 60; }}'
    elif moment == "and cannot be restarted":
        command += '; test -n "$ADAPTIVE_DRAFT"'
    with scripted(script) as one:
        words = [sys.executable, "-c", INTERRUPTED, one.url, str(start), command]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + 60
            while not there.exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            if moment == "and cannot be edited":
                start.unlink()
                start.mkdir()
            process.send_signal(by)
            said = process.communicate(timeout=60)[1]
        finally:
            over.set()
            process.kill()
            process.wait()
    assert process.returncode == (-by if by == signal.SIGINT else 128 + by)
    ours = [line for line in said.splitlines() if line.startswith("adaptive: ")]
    assert "the server's earlier state is being restored" in ours[0]
    if moment == "and cannot be edited":
        assert "draft.gguf" in running.read_text()
        assert f"uses draft.gguf, unmeasured, or does not run, and {start} is still edited" in ours[1]
        return
    assert start.read_text() == running.read_text() == "llama-server -m target.gguf\n"
    if moment == "and cannot be restarted":
        assert "ended with status 1" in ours[1]
        assert "uses draft.gguf, unmeasured, or does not run" in ours[1]
    else:
        assert len(ours) == 1


def test_a_signal_that_is_ignored_interrupts_nothing() -> None:
    """As under nohup."""
    script = "import os, signal\nfrom cli.ending import ended_in_order\nwith ended_in_order():\n"
    script += "    os.kill(os.getpid(), signal.SIGHUP)\n"
    for handler, status in (("SIG_IGN", 0), ("SIG_DFL", 128 + signal.SIGHUP)):
        words = [sys.executable, "-c", f"import signal\nsignal.signal(signal.SIGHUP, signal.{handler})\n{script}"]
        assert subprocess.run(words, stderr=subprocess.DEVNULL, check=False).returncode == status


def sample_and_accept(output: list[int], at: int, draft: list[int], end: int) -> list[int]:
    """llama.cpp's rule, on tokens: ``output`` is the target's output, and the draft begins at index ``at``."""
    result = []
    for place, drafted in enumerate(draft):
        said = output[at + place] if at + place < len(output) else 0
        result.append(said)
        if drafted != said or (said == end and place + 1 < len(draft)):
            return result
    return [*result, output[at + len(draft)] if at + len(draft) < len(output) else 0]


@pytest.mark.parametrize("length", [1, 2, 3, 7])
@pytest.mark.parametrize("ended", [True, False])
def test_acceptance_is_expected_as_llama_cpp_counts_it(length: int, ended: bool) -> None:
    rng, end, most = random.Random(length), 99, 24
    replays, drafted, accepted = [], 0, 0
    for number in range(40):
        count = rng.randint(3, most - 1) if ended else most
        output = [rng.randint(1, 9) for _ in range(count)]
        if ended:
            output[-1] = end
        right = [rng.random() < 0.7 for _ in output]
        made = 1
        while made < count:
            room = min(length, most - made - 1)
            draft = [output[i] if i < count and right[i] else -1 for i in range(made, made + room)]
            result = sample_and_accept(output, made, draft, end)
            drafted, accepted = drafted + len(draft), accepted + len(result) - 1
            made += len(result)
        replays.append(Replay(number, np.array([right[1:]], np.float32), limited=not ended))
    assert expected_acceptance(replays, length, LLAMA_SERVER, most) == accepted / drafted
    assert expected_acceptance([], length, LLAMA_SERVER, most) is None
