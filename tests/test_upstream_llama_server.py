"""``adaptive learn`` in front of a real llama-server, where there is one (docs/llamacpp.md says how it is built)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import BUNDLED
from gguf_pair import write_bundled
from test_upstream_learn import Learning
from transformers import AutoModelForCausalLM, AutoTokenizer
from upstream_server import until

from adaptive.records.log import Log
from adaptive.types import Generation
from adaptive.upstream.kinds import LLAMA_SERVER
from adaptive.upstream.measure import find_kind, measure

PROGRAM = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="there is no llama-server"),
    pytest.mark.xdist_group("llama_server"),
]
START_S = 60.0
TOKENS = 24
GREEDY = {"temperature": 0, "max_tokens": TOKENS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama_server")
    for part in ("target", "draft"):
        write_bundled(part, folder, "f32")
    return folder


@contextlib.contextmanager
def llama_server(folder: Path, *options: str) -> Iterator[str]:
    """The server on the bundled target; its address."""
    assert PROGRAM is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [PROGRAM, "--model", str(folder / "target-f32.gguf"), "--host", "127.0.0.1", "--port", port]
    command += ["--ctx-size", "2048", "--parallel", "1", "--threads", "1", *options]
    errors = folder / "server.txt"
    with errors.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            assert process.poll() is None, errors.read_text()
            assert time.monotonic() < deadline, errors.read_text()
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def requests(prompts: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Chats and texts, in one piece and in a stream."""
    found = []
    for prompt, begun in zip(prompts[::7], ("a dog", "a king", "the sea"), strict=True):
        text = f"Once upon a time there was {begun}"
        for streamed in (False, True):
            chat = {"messages": [{"role": "user", "content": prompt}], "stream": streamed, **GREEDY}
            found.append(("chat/completions", chat))
            found.append(("completions", {"prompt": text, "stream": streamed, **GREEDY}))
    return found


def same(body: bytes) -> bytes:
    """An answer without what differs from one answer to the next."""
    body = re.sub(rb'"(id|system_fingerprint)":"[^"]*"', b"", body)
    return re.sub(rb'"(created|cached_tokens|timings)":(\d+|\{[^}]*\})', b"", body)


def learned(url: str, home: Path, asked: list[tuple[str, dict[str, Any]]]) -> tuple[list[Generation], dict[str, Any]]:
    """What is logged of these requests, each of which is answered as the server itself answers it."""
    learning = Learning(home, url, "--distill", "off")
    try:
        with httpx.Client(timeout=120, trust_env=False) as client:
            for path, body in asked:
                direct, through = (client.post(f"{base}/v1/{path}", json=body) for base in (url, learning.url))
                assert direct.status_code == through.status_code == 200
                assert same(through.content) == same(direct.content)
        until(lambda: learning.status["log"].get("logged", 0) + learning.status["log"].get("missed", 0) >= len(asked))
        status = learning.status
    finally:
        assert learning.stop() == 0, learning.said
    with Log(next(home.glob("*/records.db"))) as log:
        return [one.generation for one in log.generations()], status


def test_answers_are_logged_with_the_targets_own_distribution(folder: Path, tmp_path: Path, prompts: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    target = AutoModelForCausalLM.from_pretrained(BUNDLED / "target", dtype=torch.float32)
    with llama_server(folder) as url:
        generations, status = learned(url, tmp_path / "home", requests(prompts))
    assert status["log"]["logged"] == len(requests(prompts)), status
    assert status["log"]["supervised"] == len(generations)
    for generation in generations:
        assert tokenizer.decode(generation.output, skip_special_tokens=True) == generation.text
        supervision, held = generation.supervision, len(generation.prompt)
        assert supervision is not None
        with torch.inference_mode():
            ids = torch.tensor([[*generation.prompt, *generation.output]], dtype=torch.long)
            right = target(ids).logits[0, held - 1 : -1].log_softmax(-1)
        listed = right.gather(-1, torch.from_numpy(supervision.ids).long())
        torch.testing.assert_close(torch.from_numpy(supervision.logprobs).float(), listed, atol=0.05, rtol=0.01)
        assert (generation.output == supervision.ids[:, 0]).all()


def test_answers_with_a_draft_are_logged_whole_and_without_supervision(
    folder: Path, tmp_path: Path, prompts: list[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    draft = ("--spec-type", "draft-simple", "--spec-draft-model", str(folder / "draft-f32.gguf"))
    with llama_server(folder, *draft, "--spec-draft-n-max", "3") as url:
        assert find_kind(url, None) is LLAMA_SERVER
        texts = [tokenizer.encode(body["prompt"]) for path, body in requests(prompts) if path == "completions"]
        measured = measure(url, None, texts[::2], TOKENS)  # what ``adaptive publish`` compares
        assert [one.tokens for one in measured.answers] == [TOKENS] * len(prompts[::7])
        assert measured.acceptance is not None
        assert 0.1 < measured.acceptance < 0.9
        assert measured.tokens_per_second > 1
        generations, status = learned(url, tmp_path / "home", requests(prompts))
    assert status["log"]["logged"] + status["log"].get("missed", 0) == len(requests(prompts))
    assert status["log"]["logged"] >= 0.8 * len(requests(prompts)), status
    assert not status["log"].get("supervised")
    for generation in generations:
        assert generation.supervision is None
        assert tokenizer.decode(generation.output, skip_special_tokens=True) == generation.text
        assert len(generation.output) in (TOKENS, TOKENS - 1) or generation.finish_reason == "stop"
