"""A server with a target and no draft trains a head from its answers, drafts with it, and gives the same answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import BUNDLED, save_random_pair
from forked import run
from service_server import Server
from test_service_learning import ask, until

from adaptive.records.features import FeatureSpool
from adaptive.records.log import Log
from checkpoints.store import AdapterStore

pytestmark = pytest.mark.thorough

ANSWERS = 64


def greedy(http: object, prompt: str) -> str:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 60, "temperature": 0}
    answer = http.post("/v1/chat/completions", json=body)  # type: ignore[attr-defined]
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_a_server_on_a_target_alone_grows_a_head_and_decodes_with_it(tmp_path: Path) -> None:
    lines = (BUNDLED / "prompts" / "math.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[: ANSWERS + 6]]
    asked, others = prompts[:ANSWERS], prompts[ANSWERS:]
    settings = tmp_path / "adaptive.toml"
    settings.write_text(
        f"distill_after = {ANSWERS}\ndistill_idle_seconds = 0.3\ndistill_nice = 0\ndistill_seconds = 25\n"
    )
    options = ("--target", str(BUNDLED / "target"), "--config", str(settings), "--history", "off")
    server = Server(tmp_path / "home", *options).wait_until_ready()
    try:
        with server.http() as http:
            assert http.get("/health").json()["drafter"] == {"name": "head", "growing": True, "adapter": None}
            before = [greedy(http, prompt) for prompt in others]
            for prompt in asked:
                assert ask(http, prompt)["drafters"] == {}  # no head yet, so nothing is drafted
            assert "has not been trained yet" in http.get("/props").json()["speculation"]["sentence"]
            until(lambda: http.get("/adaptive/trainer").json()["runs"] == 1, server)
            store = AdapterStore(next(server.home.glob("*/adapters")))
            grown = store.current()
            assert grown is not None, http.get("/adaptive/trainer").json()["last_run"]
            assert grown.kind == "head"
            until(lambda: http.get("/props").json()["adapter"] == grown.id, server)
            assert http.get("/health").json()["drafter"] == {"name": "head", "growing": False, "adapter": grown.id}
            assert [greedy(http, prompt) for prompt in others] == before
            drafted = [ask(http, prompt)["drafters"] for prompt in others]
            assert sum(one["head"]["accepted"] for one in drafted) > 0
    finally:
        assert server.stop() == 0
    with Log(server.records) as log:
        last = [logged.generation for logged in log.generations()][-1]
        assert {r.drafter for r in last.rounds if r.drafted} == {"head"}
        assert len(FeatureSpool(server.records.parent / "features", 0).ids()) == log.count()


def test_none_decodes_plainly_and_keeps_no_hidden_states(tmp_path: Path) -> None:
    server = Server(tmp_path / "home", "--target", str(BUNDLED / "target"), "--draft", "none").wait_until_ready()
    try:
        with server.http() as http:
            assert http.get("/health").json()["drafter"] == {"name": None, "growing": False, "adapter": None}
            ask(http, "What is 2 + 2?")
            assert http.get("/adaptive/trainer").json()["reason"] == "there is no draft to train"
    finally:
        server.stop()
    assert not (server.records.parent / "features").exists()


@pytest.mark.parametrize("draft", [(), ("--draft", "auto")], ids=["default", "auto"])
def test_a_target_on_which_none_can_be_grown_decodes_alone_or_says_so(tmp_path: Path, draft: tuple[str, ...]) -> None:
    target, _ = save_random_pair(tmp_path / "pair", "gpt_neox")
    done = run("generate", "What?", "--target", str(target), *draft, "--max-new-tokens", "8")
    said = " ".join(done.stderr.split())
    if draft:
        assert done.returncode == 2
        assert "no head can be grown on a GPTNeoXForCausalLM" in said
        assert "Traceback" not in said
    else:
        assert done.returncode == 0, said
        assert "no model drafts" in said
