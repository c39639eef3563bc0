"""``adaptive learn`` in front of a real llama-server, if one is installed (docs/llamacpp.md says how to build it)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from conftest import BUNDLED
from test_upstream_learn import Learning, learning_at
from transformers import AutoModelForCausalLM, AutoTokenizer
from upstream_server import until

from adaptive.records.log import Log
from adaptive.settings import load_settings
from adaptive.types import Generation
from adaptive.upstream.kinds import LLAMA_SERVER
from adaptive.upstream.measure import find_kind, measure
from cli.publish_drafts import PublishedHead
from cli.publish_replay import answered_examples, expected_acceptance
from trainers.replay import replay

PROGRAM = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="there is no llama-server (LLAMA_SERVER names one)"),
    pytest.mark.thorough,
    pytest.mark.xdist_group("llama_server"),
]
START_S = 60.0
TOKENS = 24
GREEDY = {"temperature": 0, "max_tokens": TOKENS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf", reason="GGUF files cannot be written")
    folder = tmp_path_factory.mktemp("llama_server")
    subprocess.run([sys.executable, "-m", "cli.main", "export", str(folder), "--encoding", "f32"], check=True)
    return folder


@contextlib.contextmanager
def llama_server(folder: Path, *options: str) -> Iterator[str]:
    """Run the server on the bundled target; yields its address."""
    with running(folder, *options) as (url, _):
        yield url


@contextlib.contextmanager
def running(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run the server; yields its address and its process."""
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
        yield url, process
    finally:
        process.terminate()
        process.wait(60)


def requests(prompts: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Chats and texts, whole and streamed."""
    found = []
    for prompt, begun in zip(prompts[::7], ("a dog", "a king", "the sea"), strict=True):
        text = f"Once upon a time there was {begun}"
        for streamed in (False, True):
            chat = {"messages": [{"role": "user", "content": prompt}], "stream": streamed, **GREEDY}
            found.append(("chat/completions", chat))
            found.append(("completions", {"prompt": text, "stream": streamed, **GREEDY}))
    return found


def same(body: bytes) -> bytes:
    """An answer without the parts that vary between answers."""
    body = re.sub(rb'"(id|system_fingerprint)":"[^"]*"', b"", body)
    return re.sub(rb'"(created|cached_tokens|timings)":(\d+|\{[^}]*\})', b"", body)


def learned(url: str, home: Path, asked: list[tuple[str, dict[str, Any]]]) -> tuple[list[Generation], dict[str, Any]]:
    """The records of these requests and the proxy's status. Each answer is checked to equal the server's own."""
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
        measured = measure(url, None, texts[::2], TOKENS)  # the texts that ``adaptive publish`` compares
        assert [one.tokens for one in measured.answers] == [TOKENS] * len(prompts[::7])
        assert measured.acceptance is not None
        assert 0.1 < measured.acceptance < 0.9
        known = answered_examples(tokenizer, texts[::2], measured)
        replayed = replay(AutoModelForCausalLM.from_pretrained(BUNDLED / "draft", dtype=torch.float32), known)
        expected = expected_acceptance(replayed, 3, LLAMA_SERVER, TOKENS)
        assert measured.acceptance == pytest.approx(expected, abs=0.02)
        assert measured.tokens_per_second > 1
        generations, status = learned(url, tmp_path / "home", requests(prompts))
    assert status["log"]["logged"] + status["log"].get("missed", 0) == len(requests(prompts))
    assert status["log"]["logged"] >= 0.8 * len(requests(prompts)), status
    assert not status["log"].get("supervised")
    for generation in generations:
        assert generation.supervision is None
        assert tokenizer.decode(generation.output, skip_special_tokens=True) == generation.text
        assert len(generation.output) in (TOKENS, TOKENS - 1) or generation.finish_reason == "stop"


def test_a_head_that_was_grown_here_drafts_there_as_replay_predicts(folder: Path, tmp_path: Path) -> None:
    lines = (BUNDLED / "prompts" / "tools.jsonl").read_text(encoding="utf-8").splitlines()
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("\n".join(lines[:80]), encoding="utf-8")
    target, head, file = str(BUNDLED / "target"), tmp_path / "head", tmp_path / "head.gguf"
    pair, exact = ("--target", target, "--state-dir", str(tmp_path / "state")), ("--dtype", "float32")
    for command in (
        (
            "generate",
            "--prompts",
            str(asked),
            "--temperature",
            "0.7",
            "--max-new-tokens",
            "48",
            "--draft",
            "none",
            *exact,
        ),
        ("head", str(head), "--epochs", "2", "--draft", "none", *exact),
        ("adapters", "export", "draft", str(file), "--format", "gguf", "--encoding", "f32", "--draft", str(head)),
    ):
        subprocess.run([sys.executable, "-m", "cli.main", *command, *pair], check=True)
    settings = load_settings({"target": target, "draft": str(head), "dtype": "float32", "device": "cpu"})
    tokenizer = AutoTokenizer.from_pretrained(target)
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines[80:96]]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    draft = ("--spec-type", "draft-eagle3", "--spec-draft-model", str(file))
    with llama_server(folder, *draft, "--spec-draft-n-max", "3") as url:
        measured = measure(url, None, texts, 60)
    known = answered_examples(tokenizer, texts, measured)
    assert len(known) >= 8
    (replayed,) = PublishedHead(settings, head).replays(known)
    expected = expected_acceptance(replayed, 3, LLAMA_SERVER, 60)
    assert expected is not None
    assert 0.1 < expected < 0.9
    assert measured.acceptance == pytest.approx(expected, abs=0.03)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    with llama_server(folder) as url:
        yield url


@pytest.fixture(scope="module")
def learning(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learning]:
    yield from learning_at(server, tmp_path_factory.mktemp("learn") / "home")


@contextlib.contextmanager
def new_records(learning: Learning, count: int) -> Iterator[list[Generation]]:
    """Yields a list that holds the records of the ``count`` requests made inside once the block has ended."""
    found: list[Generation] = []
    before = learning.status["log"].get("logged", 0)
    yield found
    until(lambda: learning.status["log"].get("logged", 0) >= before + count, 60)
    with Log(next(learning.home.glob("*/records.db"))) as log:
        found += [one.generation for one in log.generations()][-count:]


def drawn_from(target: Any, record: Generation) -> np.ndarray[Any, Any]:
    """The log-probability of each output token under the distribution that llama.cpp's server samples: the ``top_k``
    likeliest tokens, of these ``top_p`` of the mass, of these those with at least ``min_p`` times the likeliest's
    probability, and then the temperature."""
    sampling, held = record.sampling, len(record.prompt)
    with torch.inference_mode():
        ids = torch.tensor([[*record.prompt, *record.output]], dtype=torch.long)
        logits = target(ids).logits[0, held - 1 : -1].double()
    found = []
    for row, token in zip(logits, record.output.tolist(), strict=True):
        values, order = row.sort(descending=True)
        values, order = values[: sampling.top_k], order[: sampling.top_k]
        probs = values.softmax(-1)
        kept = (probs.cumsum(-1) - probs) < sampling.top_p
        values, order = values[kept], order[kept]
        kept = values >= values[0] + np.log(sampling.min_p)
        values, order = values[kept], order[kept]
        drawn = (values / sampling.temperature).log_softmax(-1)
        found.append(float(drawn[order == token].sum()) if bool((order == token).any()) else -np.inf)
    return np.array(found)


def test_what_a_token_was_drawn_from_is_known(server: str, learning: Learning, prompts: list[str]) -> None:
    """With the server's default sampling and with a request's own."""
    target = AutoModelForCausalLM.from_pretrained(BUNDLED / "target", dtype=torch.float32)
    own = httpx.get(f"{server}/props").json()["default_generation_settings"]["params"]
    asked: list[dict[str, Any]] = [{}, {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02, "top_k": 20}]
    with new_records(learning, 2) as records:
        for more in asked:
            body = {"messages": [{"role": "user", "content": prompts[0]}], "max_tokens": 60, "seed": 5, **more}
            (
                _,
                direct,
                through,
            ) = (  # the first one fills the server's cache: a prompt computed anew gives other roundings
                httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
                for url in (server, server, learning.url)
            )
            assert same(through.content) == same(direct.content)
    for record, more in zip(records, asked, strict=True):
        for name in ("temperature", "top_p", "min_p", "top_k"):
            assert getattr(record.sampling, name) == pytest.approx(more.get(name, own[name]))
        assert record.supervision is not None
        right = drawn_from(target, record)
        wrong = np.abs(record.supervision.chosen.astype(float) - right)
        assert np.median(wrong) < 0.01
        assert np.quantile(wrong, 0.9) < 0.1


def test_a_real_client_chats_streams_and_completes(server: str, learning: Learning, prompts: list[str]) -> None:
    client = openai.OpenAI(base_url=f"{learning.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    chat: Any = {"model": model, "messages": [{"role": "user", "content": prompts[1]}], **GREEDY}
    with new_records(learning, 5) as records:
        whole = client.chat.completions.create(**chat).choices[0]
        parts = [part.choices[0] for part in client.chat.completions.create(**chat, stream=True) if part.choices]
        asked = client.chat.completions.create(**chat, logprobs=True, top_logprobs=3).choices[0]
        text = client.completions.create(model=model, prompt="Once upon a time", **GREEDY).choices[0]
        named = client.completions.create(model=model, prompt="Once upon a time", logprobs=2, **GREEDY).choices[0]
    assert whole.logprobs is None
    assert all(part.logprobs is None for part in parts)
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content == asked.message.content
    assert asked.logprobs is not None
    assert {len(entry.top_logprobs) for entry in asked.logprobs.content or ()} == {3}
    assert text.text == named.text
    assert [one.supervision.ids.shape[1] for one in records if one.supervision] == [20, 20, 3, 20, 2]
    chats = httpx.post(f"{server}/apply-template", json={"messages": chat["messages"]}).json()["prompt"]
    for record, prompt in zip(records, [chats] * 3 + ["Once upon a time"] * 2, strict=True):
        for ids, said, special in ((record.prompt, prompt, True), (record.output, record.text, False)):
            body = {"content": said, "add_special": special, "parse_special": True}
            theirs = httpx.post(f"{server}/tokenize", json=body).json()["tokens"]
            assert theirs == ids.tolist()[: len(theirs)]
            assert len(ids) - len(theirs) <= (not special)  # the end token has no text


def test_a_client_that_leaves_frees_the_server(server: str, learning: Learning) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 1800, "ignore_eos": True, "temperature": 0, "stream": True}
    with new_records(learning, 1) as records:
        with httpx.stream("POST", f"{learning.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            for _ in range(20):
                next(lines)
            assert httpx.get(f"{server}/slots").json()[0]["is_processing"]
        until(lambda: not httpx.get(f"{server}/slots").json()[0]["is_processing"], 5)
    (record,) = records
    assert record.finish_reason == "cancelled"
    assert 9 <= len(record.output) < 1800
    assert record.supervision is not None


def test_a_server_that_is_killed_ends_the_stream_and_is_said(folder: Path, tmp_path: Path) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 1800, "ignore_eos": True, "temperature": 0, "stream": True}
    with running(folder) as (url, process):
        learning = Learning(tmp_path / "home", url, "--distill", "off")
        try:
            with (
                new_records(learning, 1) as records,
                httpx.stream("POST", f"{learning.url}/v1/completions", json=body, timeout=60) as answer,
            ):
                lines = answer.iter_lines()
                for _ in range(20):
                    next(lines)
                process.kill()
                with pytest.raises(httpx.RemoteProtocolError):
                    list(lines)
            assert records[0].finish_reason == "cancelled"
            down = httpx.post(f"{learning.url}/v1/completions", json={**body, "stream": False}, timeout=60)
            assert down.status_code == 502
            assert url in down.json()["error"]["message"]
        finally:
            assert learning.stop() == 0


@pytest.mark.parametrize("requests", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_requests_at_once_lose_none(server: str, learning: Learning, requests: int) -> None:
    async def ask() -> list[tuple[int, str]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=600) as client:
            answers = await asyncio.gather(
                *(
                    client.post(
                        f"{learning.url}/v1/completions",
                        json={
                            "prompt": f"There were {n} dogs",
                            "max_tokens": 4,
                            "temperature": 0,
                            "stream": n % 2 == 0,
                        },
                    )
                    for n in range(requests)
                )
            )
        return [(answer.status_code, answer.text) for answer in answers]

    with new_records(learning, requests) as records:
        answers = asyncio.run(ask())
    assert {status for status, _ in answers} == {200}
    assert all(text.endswith("[DONE]\n\n") for _, text in answers[::2])
    assert {record.prompt_text for record in records} == {f"There were {n} dogs" for n in range(requests)}
    assert {len(record.output) for record in records} <= {1, 2, 3, 4}
