"""A draft server changes no token, whatever it proposes and whenever it disappears."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BUNDLED, Command
from draft_servers import DraftServer, impostor, say, served_here
from pydantic import SecretStr
from records_factory import generation
from test_lossless_sampled import PARAMS, VOCAB, exact_distribution, models, p_value, run_loop

from adaptive.assistant import Assistant, length_policy
from adaptive.control.nodes import NodesByCost
from adaptive.control.policy import FixedLength, LengthPolicy
from adaptive.draft_server import Drafts, UnknownError
from adaptive.drafting import remote as drafting
from adaptive.drafting.remote import RemoteDrafter
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.load import Source, load_engine
from adaptive.errors import AdaptiveError
from adaptive.measure import drafts_for_disk
from adaptive.pair import Pair, load_pair, pair_identity
from adaptive.records.writer import LogWriter
from adaptive.remote import Remote
from adaptive.settings import load_settings
from adaptive.types import REMOTE, REMOTE_TREE, Message, SamplingParams, StopParams
from adaptive.vocabulary import Vocabulary
from adaptive.wire import Asked, drafted_bytes

assert models  # a fixture
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, seed=3)
NOBODY = "http://127.0.0.1:1"
SETTINGS = {"target": str(BUNDLED / "target"), "dtype": "float32"}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timeout decides a test."""
    monkeypatch.setattr(drafting, "LINE_S", 30.0)
    monkeypatch.setattr(drafting, "UNKNOWN_S", 30.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DraftServer]:
    """A server of the bundled draft."""
    one = DraftServer(tmp_path_factory.mktemp("draft-server"))
    yield one
    one.stop()


@pytest.fixture(scope="module")
def pair(server: DraftServer) -> Pair:
    """The bundled target, and the draft on that server."""
    return load_pair(load_settings({**SETTINGS, "draft": server.url}))


def tokens(assistant: Assistant, prompt: str, sampling: SamplingParams, most: int) -> list[int]:
    """The tokens of an answer. The reader waits after the first one until the draft server has read the prompt, since a
    short answer would end before that."""
    stop, remote, found = StopParams(max_new_tokens=most, ignore_eos=True), assistant.pair.remote, []
    for step in assistant.chat([Message("user", prompt)], sampling, stop):
        found.append(step.token)
        until = time.monotonic() + 30 if len(found) == 1 else 0.0
        while remote is not None and remote.connected and not remote.ready and time.monotonic() < until:
            time.sleep(0.001)
    return found


def accepted_while_equal(
    pair: Pair, prompts: list[str], sampling: SamplingParams, policy: LengthPolicy, most: int
) -> int:
    """Number of accepted draft tokens, in answers checked to be those of the target alone."""
    plain, drafted, accepted = Assistant(pair, FixedLength(0), None), Assistant(pair, policy, None), 0
    for prompt in prompts:
        assert tokens(drafted, prompt, sampling, most) == tokens(plain, prompt, sampling, most)
        assert drafted.last is not None
        accepted += drafted.last.accepted
        assert {one.drafter for one in drafted.last.rounds} <= {REMOTE_TREE if policy.tree else REMOTE, "none"}
    return accepted


CHAINS, TREES = FixedLength(5), FixedLength(24, True)


@pytest.mark.parametrize(
    ("sampling", "policy"),
    [
        (GREEDY, CHAINS),
        pytest.param(GREEDY, TREES, marks=pytest.mark.thorough),
        pytest.param(SAMPLED, CHAINS, marks=pytest.mark.thorough),
        (replace(SAMPLED, repetition_penalty=1.3), TREES),
    ],
    ids=["greedy-chains", "greedy-trees", "seed-chains", "seed-penalty-trees"],
)
def test_the_text_is_the_targets_own(
    pair: Pair, prompts: list[str], sampling: SamplingParams, policy: LengthPolicy
) -> None:
    assert accepted_while_equal(pair, prompts[:2], sampling, policy, 30) > 5


@pytest.mark.long
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "seed"])
@pytest.mark.parametrize("policy", [FixedLength(5), FixedLength(32, True)], ids=["chains", "trees"])
def test_twenty_answers_of_two_hundred_tokens_are_the_targets_own(
    pair: Pair, prompts: list[str], sampling: SamplingParams, policy: LengthPolicy
) -> None:
    assert accepted_while_equal(pair, prompts, sampling, policy, 200) > 500


@pytest.mark.thorough
def test_the_whole_loop_samples_from_the_target(models: tuple[TransformersEngine, TransformersEngine]) -> None:
    """The server's draws depend on chance and on time, so one sample in a thousand fails although the rule is right. A
    second one is drawn then."""
    runs, params = 1000, PARAMS[3]

    def counts(seed: int) -> Counter[tuple[int, ...]]:
        with served_here(models[1], Vocabulary(tokens={}, probe=[])) as url:
            remote = Remote(url, None)
            drafter = RemoteDrafter(remote, PROMPT_HOLDER, VOCAB, params)
            found = run_loop(models, params, 2, runs, certain=drafter, seed=seed)  # type: ignore[arg-type]
        assert remote.figures.proposals > runs
        assert not remote.figures.refused
        return found

    exact = exact_distribution(models[0], params)
    assert any(p_value(counts(seed), exact) > 0.001 for seed in (12, 13))


class Holder:
    """Identifies a conversation."""


PROMPT_HOLDER = Holder()


def closes(handler: Any, asked: bytes) -> None:
    """Break off in the middle of an answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"half of")
    handler.close_connection = True


def garbage(handler: Any, asked: bytes) -> None:
    say(handler, b"<html>It works!</html>")


def fails(handler: Any, asked: bytes) -> None:
    say(handler, b"", 500)


def endless(handler: Any, asked: bytes) -> None:
    """An answer without an end."""
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(bytes(1 << 20))


def no_distribution(handler: Any, asked: bytes) -> None:
    wanted = Asked.from_bytes(asked)
    row = np.zeros(wanted.vocab, np.float32)
    row[5] = 2.0
    count = wanted.length
    say(handler, drafted_bytes([5] * count, None, [row] * count if count else None))


@pytest.mark.parametrize("answer", [closes, garbage, fails, endless, no_distribution])
def test_a_server_that_says_nonsense_is_not_listened_to_and_said_once(
    answer: Callable[[Any, bytes], None], server: DraftServer, pair: Pair, prompts: list[str]
) -> None:
    sampling = SamplingParams(temperature=0.7, seed=1) if answer is not no_distribution else GREEDY
    with impostor(server.url, answer) as url:
        remote, said = Remote(url, None), list[str]()
        remote.say = said.append
        assistant = Assistant(replace(pair, remote=remote), FixedLength(4), None)
        plain = Assistant(pair, FixedLength(0), None)
        right = tokens(plain, prompts[0], sampling, 60)
        assert tokens(assistant, prompts[0], sampling, 60) == right
        assert assistant.last is not None
        if answer is no_distribution:  # greedy decoding reads the tokens alone
            assert remote.figures.proposals > 0
            assert len(tokens(assistant, prompts[0], SamplingParams(temperature=0.7), 60)) == 60
        else:
            assert not assistant.last.accepted
        assert not remote.figures.proposals or answer is no_distribution
        assert len(said) == 1, said
        assert ("has gone" in said[0]) == (answer is closes)


@pytest.mark.thorough
def test_a_server_that_is_too_slow_is_waited_for_no_longer_than_a_pass_is_worth(
    server: DraftServer, pair: Pair, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "LINE_S", 0.01)
    monkeypatch.setattr(drafting, "UNKNOWN_S", 0.05)

    def slowly(handler: Any, asked: bytes) -> None:
        time.sleep(1.5)
        say(handler, drafted_bytes([], None, None))

    with impostor(server.url, slowly) as url:
        remote = Remote(url, None)
        assistant = Assistant(replace(pair, remote=remote), FixedLength(4), None)
        right = tokens(Assistant(pair, FixedLength(0), None), prompts[0], GREEDY, 40)
        for _ in range(2):
            assert tokens(assistant, prompts[0], GREEDY, 40) == right
        assert assistant.last is not None
        waited = sum(one.draft_s for one in assistant.last.rounds)
        assert waited < 1.0
        assert not remote.figures.proposals


@pytest.mark.thorough
def test_drafting_goes_on_where_the_server_comes_back(server: DraftServer, pair: Pair, prompts: list[str]) -> None:
    """A new process at the same address does not hold the conversation, so the whole of it is sent again."""
    assert pair.remote is not None
    real, away = pair.remote, [False]
    import httpx

    with httpx.Client(base_url=server.url) as line:

        def passed_on(handler: Any, asked: bytes) -> None:
            if away[0]:
                closes(handler, asked)
                return
            there = line.post(handler.path, content=asked, headers={"Content-Type": handler.headers["Content-Type"]})
            say(handler, there.content, there.status_code)

        with impostor(server.url, passed_on) as url:
            remote = Remote(url, None)
            remote.say = lambda said: None
            assistant = Assistant(replace(pair, remote=remote), FixedLength(4), None)
            right, said = tokens(Assistant(pair, FixedLength(0), None), prompts[1], GREEDY, 150), list[int]()
            before: list[int] = []
            for step in assistant.chat([Message("user", prompts[1])], GREEDY, StopParams(150, ignore_eos=True)):
                said.append(step.token)
                if len(said) == 40:
                    away[0] = True
                if len(said) == 80:
                    before.append(remote.figures.proposals)
                    away[0] = False
                    deadline = time.monotonic() + 60
                    while not remote.connected and time.monotonic() < deadline:
                        time.sleep(0.05)
            assert said == right
            assert remote.figures.lost > 0
            assert remote.figures.proposals > before[0] > 0
    assert real.connected


@pytest.mark.parametrize("room_for_all", [True, False])
def test_what_was_drafted_ahead_counts_as_memory_of_its_conversation(room_for_all: bool) -> None:
    """With room for the caches of two conversations alone, the older one is forgotten."""
    settings = load_settings({**SETTINGS, "draft": str(BUNDLED / "draft")})
    engine = load_engine(Source("it", BUNDLED / "draft", "none"), settings, "cpu", lambda share: None, draft=True)
    drafts = Drafts(engine, 10**9)
    asked = Asked("a", 0, list(range(3, 40)), 8, False, engine.vocab_size, SamplingParams(temperature=1.0))
    for name in ("a", "b"):
        assert drafts.propose(replace(asked, conversation=name)) is not None
        while drafts.step():
            pass
    held = drafts._held.values()
    drafts._cache_bytes = sum(one.memory if room_for_all else one.sequence.memory.total for one in held)
    with nullcontext() if room_for_all else pytest.raises(UnknownError):
        drafts.propose(replace(asked, common=37, tokens=[5]))


@pytest.mark.thorough
def test_a_server_killed_at_ten_moments_leaves_every_answer_what_it_is(
    tmp_path: Path, server: DraftServer, pair: Pair, prompts: list[str]
) -> None:
    rng, port, proposals = random.Random(5), 0, 0
    plain = Assistant(pair, FixedLength(0), None)
    for moment in range(10):
        doomed = DraftServer(tmp_path / "doomed", port=port)
        remote = Remote(doomed.url, None)
        remote.say = lambda said: None
        assistant = Assistant(replace(pair, remote=remote), FixedLength(4), None)
        prompt, at = prompts[moment], rng.randrange(1, 60)
        right, said = tokens(plain, prompt, GREEDY, 80), list[int]()
        for step in assistant.chat([Message("user", prompt)], GREEDY, StopParams(80, ignore_eos=True)):
            said.append(step.token)
            if len(said) == at:
                time.sleep(rng.random() * 0.01)
                doomed.kill()
        assert said == right
        assert remote.figures.lost
        proposals += remote.figures.proposals
    assert proposals


@pytest.mark.thorough
def test_what_cannot_be_asked_is_one_line(
    server: DraftServer,
    adaptive: Command,
    tmp_path: Path,
    models: tuple[TransformersEngine, TransformersEngine],
) -> None:
    def refused(*options: str) -> str:
        status, _, err = adaptive("generate", "Hi", "--max-new-tokens", "4", *options)
        assert (status, err.count("\n")) == (2, 1), err
        return err

    assert "nothing answers there" in refused("--draft", NOBODY)
    assert "must be an address" in refused("--draft", "http://")
    for address in ("http://127.0.0.1:99999", "http://192.168..7:8095", "http://a\u200bb:8095", f"http://{'a' * 64}:1"):
        said = refused("--draft", address)
        assert "must be an address" in said
        assert said.isascii()
    for address in ("http://:secret@127.0.0.1:1", "http://me:secret@127.0.0.1:1"):
        said = refused("--draft", address)
        assert "must be an address" in said
        assert "secret" not in said
    other = Vocabulary(tokens={"one": 3, "two": 4}, probe=[3])
    with served_here(models[1], other) as url:
        assert "different tokenizers: token 3 is" in refused("--draft", url)
    key, wrong = tmp_path / "key", tmp_path / "wrong"
    key.write_text("correct-horse\n")
    wrong.write_text("battery-staple\n")
    settings = load_settings({}).model_copy(update={"api_key": SecretStr("correct-horse")})
    with served_here(models[1], other, settings) as url:
        for given in ((), ("--draft-key-file", str(wrong))):
            assert "refuses the key" in refused("--draft", url, *given)
        assert "different tokenizers" in refused("--draft", url, "--draft-key-file", str(key))
    status, _, err = adaptive("draft-server", "--host", "0.0.0.0", "--port", "0")
    assert (status, "set an API key" in err) == (2, True)
    status, _, err = adaptive("distill", "--draft", server.url)
    assert (status, err.count("\n")) == (2, 1)
    assert "is not trained from here" in err


@pytest.mark.thorough
def test_what_reads_the_log_of_a_server_with_a_key_is_given_the_key(
    adaptive: Command, own_home: Path, tmp_path: Path, models: tuple[TransformersEngine, TransformersEngine]
) -> None:
    (tmp_path / "key").write_text("correct-horse\n")
    settings = load_settings({}).model_copy(update={"api_key": SecretStr("correct-horse")})
    with served_here(models[1], Vocabulary(tokens={}, probe=[]), settings) as url:
        given = ("--draft", url, "--draft-key-file", str(tmp_path / "key"))
        named = load_settings({"draft": url, "draft_key_file": tmp_path / "key"})
        with LogWriter(own_home / pair_identity(named).id / "records.db") as log:
            log.write(generation())
        for command in (("history",), ("records", "stats")):
            status, out, err = adaptive(*command, "--json", *given)
            assert status == 0, err
            assert "records.db" in out or json.loads(out)["totals"]["generations"] == 1
            status, _, err = adaptive(*command, "--draft", url)
            assert (status, "refuses the key" in err) == (2, True)
        found = drafter_by_doctor(adaptive, *given)
        assert (found["status"], url in found["value"]) == ("ok", True)
        assert "refuses the key" in drafter_by_doctor(adaptive, "--draft", url)["value"]
    found = drafter_by_doctor(adaptive, "--draft", "http://192.168..7:8095")
    assert (found["status"], "must be an address" in found["value"]) == ("broken", True)


def drafter_by_doctor(adaptive: Command, *options: str) -> dict[str, str]:
    """What doctor finds of the draft."""
    findings = json.loads(adaptive("doctor", "--json", *options)[1])["findings"]
    return next(finding for finding in findings if finding["name"] == "draft")


@pytest.mark.thorough
def test_what_tls_says_is_passed_on_and_an_authority_of_ones_own_is_believed(
    adaptive: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    models: tuple[TransformersEngine, TransformersEngine],
) -> None:
    def refused(url: str) -> str:
        status, _, err = adaptive("generate", "Hi", "--max-new-tokens", "4", "--draft", url)
        assert (status, err.count("\n")) == (2, 1), err
        return err

    other = Vocabulary(tokens={"one": 3, "two": 4}, probe=[3])
    with served_here(models[1], other) as url:
        assert "TLS failed with [SSL" in refused(url.replace("http:", "https:"))
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes certificates, is not here")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    extensions = ("subjectAltName=IP:127.0.0.1", "keyUsage=critical,digitalSignature,keyCertSign")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=here"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *(part for one in extensions for part in ("-addext", one))], check=True)
    with served_here(models[1], other, ssl_certfile=str(certificate), ssl_keyfile=str(key)) as url:
        secure = url.replace("http:", "https:")
        assert "certificate verify failed" in refused(secure)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert "different tokenizers" in refused(secure)


def test_what_is_said_is_logged_where_the_same_draft_here_would_learn_from_it(
    server: DraftServer, pair: Pair, adaptive: Command, own_home: Path
) -> None:
    options = (
        "--max-new-tokens",
        "20",
        "--temperature",
        "0",
        "--dtype",
        "float32",
        "--draft-length",
        "4",
        "--history",
        "off",
    )
    status, out, _ = adaptive("generate", "Once upon", "--json", "--draft", server.url, *options)
    assert status == 0
    assert set(json.loads(out)["drafters"]) == {REMOTE}
    here = load_settings({**SETTINGS, "draft": str(BUNDLED / "draft")})
    assert pair_identity(here).id == pair.identity.id
    assert (own_home / pair.identity.id / "records.db").exists()
    status, out, _ = adaptive("history", "--draft", server.url, "--json")
    assert status == 0


@pytest.mark.thorough
def test_the_policy_is_that_of_a_draft_whose_costs_are_seen_in_rounds(pair: Pair) -> None:
    policy = length_policy(load_settings({}), disk=drafts_for_disk(pair))
    assert not isinstance(policy, NodesByCost)  # the target is in memory
    assert not policy.tree
    assert accepted_while_equal(pair, ["What is a plum?"], GREEDY, policy, 50) > 0
    assert pair.remote is not None
    chains = Remote(pair.remote.url, None)
    chains.hello = chains.hello.model_copy(update={"trees": False})
    with pytest.raises(AdaptiveError, match="no passes over trees"):
        Assistant(replace(pair, remote=chains), FixedLength(8, True), None)
