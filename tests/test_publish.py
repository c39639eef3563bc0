"""``adaptive publish`` puts a draft into another server, measures it there, and takes it out again if it is worse."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BUNDLED, save_random_adapter
from foreign_heads import save_eagle, save_eagle_target
from quantised_checkpoints import FP8, fp8, quantise
from records_factory import generation
from store_factory import NEW
from test_models import VISION, several_kinds
from tiny_models import tiny_model
from upstream_server import CLOSE, Heard, Scripted, plain, scripted

from adaptive.errors import AdaptiveError
from adaptive.pair import load_draft_for_training, pair_identity
from adaptive.records.writer import LogWriter
from adaptive.settings import load_settings
from adaptive.state import PairState, open_state
from adaptive.types import SamplingParams
from adaptive.upstream.kinds import LLAMA_SERVER
from adaptive.upstream.measure import Answered, Measured
from adaptive.upstream.publishing import restart
from checkpoints.manifest import BaseDraft
from checkpoints.store import AdapterStore
from cli import publish_notes
from cli.peer import check_peer
from cli.publish import _held_out, _key, _prompts
from cli.publish_drafts import AdaptedDraft
from trainers.dataset import Example, read_log, split
from trainers.lora import Recipe, attach


def measured(drafted: int, accepted: int, rounds: int = 100, seconds: float = 1.0) -> Measured:
    return Measured((Answered(rounds + accepted, seconds, None, None),), drafted, accepted, None)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_adapter(BUNDLED / "draft", tmp_path_factory.mktemp("adapter"))


@pytest.fixture
def state(own_home: Path, adapter: Path) -> PairState:
    """The state of the bundled pair, with a log and an adapter in use."""
    return state_with(own_home, adapter, {}, answers=30)


def state_with(home: Path, adapter: Path, names: dict[str, str], answers: int = 0) -> PairState:
    """The state of the pair that ``names`` name (or the bundled pair's), with this adapter in use and a log of so many
    answers."""
    identity = pair_identity(load_settings(names))
    found = open_state(home, identity.id)
    with LogWriter(found.records) as log:
        for number in range(answers):
            made = generation(number, asked=f"question {number}", tokens=12, supervised=False)
            log.write(
                dataclasses.replace(made, sampling=SamplingParams(), prompt=np.arange(5, 9 + number, dtype=np.int32))
            )
    draft = names.get("draft", str(BUNDLED / "draft"))
    use(AdapterStore(found.adapters), adapter, dataclasses.replace(identity.base, id=draft))
    return found


def use(store: AdapterStore, adapter: Path, base: BaseDraft) -> None:
    """Put this adapter for ``base`` in use."""

    def write(folder: Path) -> None:
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            (folder / file).write_bytes((adapter / file).read_bytes())

    store.promote(store.publish(write, dataclasses.replace(NEW, base=base)).id, "for the test")


def test_the_newest_prompts_held_out_of_training_are_asked(own_home: Path) -> None:
    state = open_state(own_home, "pair")
    with LogWriter(state.records) as log:
        for number in range(200):
            log.write(generation(number, asked=f"question {number}"))
    parts = split(read_log(state.records, 200))
    held = sorted([*parts.gate["id"], *parts.validation["id"]])
    assert min(parts.gate["id"][-1], parts.validation["id"][-1]) > held[-8]
    newest = [list(range(id - 1, id + 2)) for id in reversed(held[-8:])]  # the prompts of ``generation``
    assert _prompts(_held_out(state), 8) == newest


@pytest.fixture
def box(tmp_path: Path) -> Iterator[tuple[Scripted, Path, Path]]:
    """A server that runs the start file as of its last restart. Tokens of the adapter's draft are accepted at a rate of
    0.1, with "better" in the start file at 0.9, and of any other draft at 0.5. Yields the server, the start file, and a
    copy of the start file as last run."""
    start, running = tmp_path / "start.sh", tmp_path / "running"
    start.write_text('#!/bin/sh\nvllm serve target --speculative-config \'{"model": "old"}\'\n')
    start.chmod(0o750)
    running.write_text(start.read_text())
    totals = [0, 0]

    def script(heard: Heard, connection: socket.socket) -> None:
        rate = 0.9 if "better" in running.read_text() else 0.1 if "draft-0001" in running.read_text() else 0.5
        if heard.path == "/metrics":
            names = ("draft", "accepted")
            text = "".join(
                f'vllm:spec_decode_num_{name}_tokens_total{{a="b"}} {total}\n'
                for name, total in zip(names, totals, strict=True)
            )
            connection.sendall(plain(text.encode(), "text/plain", more=CLOSE))
            return
        asked = json.loads(heard.body)
        assert asked["temperature"] == 0
        assert asked["model"] == "m"
        accepted = int(40 * rate) if asked["max_tokens"] > 1 else 0
        totals[0] += 40 if asked["max_tokens"] > 1 else 0
        totals[1] += accepted
        said = {"choices": [{"index": 0, "text": "x"}], "usage": {"completion_tokens": 20 + accepted}}
        connection.sendall(plain(json.dumps(said).encode(), more=CLOSE))

    with scripted(script, "vllm") as server:
        yield server, start, running


def test_a_draft_that_is_accepted_less_comes_out_again(adaptive: Any, state: PairState, box: Any) -> None:
    server, start, running = box
    before = start.read_text()
    status, out, errors = adaptive(
        "publish", "--upstream", f"{server.url}/v1", "--start", str(start), "--restart", f"cp {start} {running}",
        "--prompts", "4", "--draft-length", "3", "--json",
    )  # fmt: skip
    assert status == 1, errors
    said = json.loads(out)
    assert said["rolled_back"]
    assert (said["before"]["acceptance"], said["after"]["acceptance"]) == (0.5, 0.1)
    assert start.read_text() == running.read_text() == before
    assert stat.S_IMODE(start.stat().st_mode) == 0o750
    assert "fell" in errors
    assert not (state.root / "published.json").exists()
    bodies = [json.loads(heard.body)["prompt"] for heard in server.asked("/v1/completions")]
    assert bodies[:8] == bodies[8:]  # the same prompts before and after, each asked twice
    assert len({tuple(body) for body in bodies}) == 4


def test_a_draft_that_is_accepted_more_stays(adaptive: Any, state: PairState, box: Any, tmp_path: Path) -> None:
    server, start, running = box
    better = tmp_path / "better"
    arguments = ("--upstream", server.url, "--start", str(start), "--restart", f"cp {start} {running}", "--to")
    status, out, errors = adaptive("publish", *arguments, str(better), "--draft-length", "3", "--json")
    assert status == 0, errors
    said = json.loads(out)
    assert not said["rolled_back"]
    assert said["draft_length"] == 3
    told = shlex.split(running.read_text(), comments=True)
    config = json.loads(told[told.index("--speculative-config") + 1])
    (draft,) = better.glob("draft-0001-*")
    assert config == {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    assert json.loads((state.root / "published.json").read_text())[server.url]["draft"] == str(draft)
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(draft, dtype="float32").state_dict()
    plain_draft = AutoModelForCausalLM.from_pretrained(BUNDLED / "draft", dtype="float32").state_dict()
    assert any(not np.array_equal(merged[name].numpy(), plain_draft[name].numpy()) for name in merged)


def test_the_key_of_the_settings_is_the_servers(
    adaptive: Any, state: PairState, box: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, *_ = box
    (tmp_path / "key").write_text("secret\n")
    monkeypatch.setenv("ADAPTIVE_API_KEY_FILE", str(tmp_path / "key"))
    status, _, errors = adaptive("publish", "--upstream", server.url, "--draft-length", "3", "--prompts", "2")
    assert status == 0, errors
    assert all("authorization: bearer secret" in heard.head.lower() for heard in server.heard)


def test_a_server_gets_back_what_it_had_and_not_what_another_had(adaptive: Any, state: PairState, box: Any) -> None:
    server, start, running = box
    of_another = publish_notes.Put("llama-server", "0001", "/drafts/other.gguf", 3)
    publish_notes.remember(state, "http://127.0.0.1:1", of_another)
    publish_notes.remember(state, server.url, of_another)  # a server of another kind was at this address
    given = start.with_name("given")
    restart = f'cp {start} {running}; echo "<$ADAPTIVE_DRAFT> <$ADAPTIVE_DRAFT_LENGTH>" >> {given}'
    asked = ("--upstream", server.url, "--start", str(start), "--restart", restart, "--draft-length", "3")
    status, _, errors = adaptive("publish", *asked)
    assert status == 1, errors
    assert given.read_text().splitlines()[-1] == "<> <>"
    assert publish_notes.earlier(state, "http://127.0.0.1:1", LLAMA_SERVER) == of_another


def test_sglang_gets_no_head_and_lm_studio_its_file_by_hand(adaptive: Any, state: PairState, tmp_path: Path) -> None:
    head = save_eagle(BUNDLED / "target", tmp_path / "head", "speculators")
    status, _, errors = adaptive("publish", "--engine", "sglang", "--head", str(head), "--to", str(tmp_path / "to"))
    assert status == 2
    assert "norm_before_residual" in errors
    assert not (tmp_path / "to").exists()
    studio = ("publish", "--engine", "lm-studio", "--to", str(tmp_path / "to"))
    status, out, errors = adaptive(*studio, "--json")
    assert status == 0, errors
    said = json.loads(out)
    assert said["options"] is None
    assert Path(said["draft"]).read_bytes()[:4] == b"GGUF"
    status, out, _ = adaptive(*studio)
    assert (status, "by hand" in out) == (0, True)
    (tmp_path / "start.sh").write_text("lms server start\n")
    status, _, errors = adaptive(*studio, "--start", str(tmp_path / "start.sh"))
    assert (status, "by hand" in errors) == (2, True)


@pytest.mark.thorough
def test_vllm_gets_a_draft_with_as_many_rows_as_its_target(
    adaptive: Any, own_home: Path, adapter: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target: Any = AutoModelForCausalLM.from_pretrained(BUNDLED / "target")
    target.resize_token_embeddings(4128, mean_resizing=False)
    target.save_pretrained(tmp_path / "target")
    AutoTokenizer.from_pretrained(BUNDLED / "target").save_pretrained(tmp_path / "target")
    names = {"target": str(tmp_path / "target"), "draft": str(BUNDLED / "draft")}
    state_with(own_home, adapter, names, answers=4)
    pair = [part for name, value in names.items() for part in (f"--{name}", value)]
    made = []
    for kind in ("vllm", "sglang"):
        status, out, errors = adaptive("publish", "--engine", kind, "--to", str(tmp_path / kind), *pair, "--json")
        assert status == 0, errors
        made.append(AutoModelForCausalLM.from_pretrained(json.loads(out)["draft"], dtype="float32"))
    assert [model.config.vocab_size for model in made] == [4128, 4096]
    tokens = torch.arange(3, 200)[None]
    with torch.no_grad():
        ours, plain_draft = (model(tokens).logits for model in made)
    assert torch.equal(ours[..., :4096], plain_draft)
    assert torch.equal(ours.argmax(-1), plain_draft.argmax(-1))


@pytest.mark.thorough
def test_a_head_is_put_into_the_start_file_as_a_head_by_its_whole_path(
    adaptive: Any, state: PairState, box: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, start, running = box
    head = save_eagle(BUNDLED / "target", tmp_path / "head", "speculators")
    monkeypatch.chdir(tmp_path)
    asked = ("--upstream", server.url, "--start", str(start), "--restart", f"cp {start} {running}", "--head", "head")
    status, out, errors = adaptive("publish", *asked, "--to", "better", "--draft-length", "3", "--json")
    assert status == 0, errors
    told = shlex.split(running.read_text(), comments=True)
    config = json.loads(told[told.index("--speculative-config") + 1])
    (draft,) = (tmp_path / "better").iterdir()
    assert config == {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3}
    assert json.loads(out)["draft"] == str(draft)
    assert (draft / "config.json").is_file()
    assert head.is_dir()


def test_a_head_of_another_target_is_refused_before_anything_is_written(
    adaptive: Any, state: PairState, tmp_path: Path
) -> None:
    save_eagle(save_eagle_target(tmp_path / "target"), tmp_path / "head", "speculators")
    asked = ("--engine", "llama-server", "--head", str(tmp_path / "head"), "--to", str(tmp_path / "to"))
    status, _, errors = adaptive("publish", *asked)
    assert status == 2
    assert "is for a target of width" in errors.splitlines()[-1]
    assert not (tmp_path / "to").exists()


def test_answers_are_not_read_with_the_tokenizer_of_another_pair(
    adaptive: Any, own_home: Path, adapter: Path, box: Any, tmp_path: Path
) -> None:
    """Without --target the pair that was used last is published, whose tokenizer the bundled one need not be."""
    names = {name: str(tmp_path / name) for name in ("target", "draft")}
    for name, folder in names.items():
        shutil.copytree(BUNDLED / name, folder)
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    (tmp_path / "draft" / "config.json").write_text(json.dumps({**config, "comment": "another pair"}))
    state_with(own_home, adapter, names, answers=30)
    server, start, _ = box
    asked = ("--upstream", server.url, "--start", str(start), "--to", str(tmp_path / "better"), "--json")
    status, out, errors = adaptive("publish", *asked, "--draft-length", "3")
    assert status == 0, errors
    assert json.loads(out)["expected_acceptance"] is None


def test_answers_longer_than_a_pass_are_cut(own_home: Path, state: PairState) -> None:
    answer = np.resize(np.arange(300, 400, dtype=np.int32), 2100)
    example = Example(1, "", np.array([5, 6, 7], np.int32), answer, SamplingParams(), True, None)
    (replays,) = AdaptedDraft(load_settings({"device": "cpu"}), AdapterStore(state.adapters)).replays([example])
    assert replays[0].acceptance.shape[1] == 1023
    assert not replays[0].limited


def test_a_server_that_does_not_come_back_gets_its_old_draft(adaptive: Any, state: PairState, box: Any) -> None:
    server, start, running = box
    before = start.read_text()
    command = f'cp {start} {running}; test -z "$ADAPTIVE_DRAFT" #[/x] [red]'  # fails with any draft of ours
    asked = ("--upstream", server.url, "--start", str(start), "--restart", command, "--draft-length", "3")
    status, _, errors = adaptive("publish", *asked)
    assert status == 1
    assert "ended with status 1" in errors
    assert command in errors  # whatever rich takes for a tag
    assert start.read_text() == running.read_text() == before


def test_without_a_restart_it_says_what_to_type(adaptive: Any, state: PairState, tmp_path: Path) -> None:
    status, out, errors = adaptive("publish", "--engine", "llama-server", "--to", str(tmp_path / "to"))
    assert status == 0, errors
    words = shlex.split(out)
    file = Path(words[words.index("--spec-draft-model") + 1])
    assert file.read_bytes()[:4] == b"GGUF"
    assert words[words.index("--spec-draft-n-max") + 1] == "4"
    assert "tokens a round by replay" in errors
    assert os.listdir(tmp_path / "to") == [file.name]


@pytest.mark.thorough
def test_drafts_of_several_pairs_may_be_in_one_folder(
    adaptive: Any, own_home: Path, adapter: Path, tmp_path: Path
) -> None:
    """A pair whose state was deleted and trained anew gives its adapters the same ids."""
    told = []
    for weights in (adapter, adapter, save_random_adapter(BUNDLED / "draft", tmp_path / "other", std=0.1)):
        found = state_with(own_home, weights, {}, answers=4)
        status, out, errors = adaptive("publish", "--engine", "vllm", "--to", str(tmp_path / "to"), "--json")
        assert status == 0, errors
        told.append(Path(json.loads(out)["draft"]))
        shutil.rmtree(found.root)
    assert told[0] == told[1] != told[2]
    assert sorted((tmp_path / "to").iterdir()) == sorted({*told})
    weights = [(folder / "model.safetensors").read_bytes() for folder in told]
    assert weights[0] != weights[2]


def test_what_the_restart_command_says_is_kept_out_of_the_output(capfd: pytest.CaptureFixture[str]) -> None:
    with scripted(lambda heard, connection: None, "vllm") as server:
        restart("echo restarting", server.url, None, None, 0, 10.0)
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "restarting\n")


@pytest.mark.thorough
def test_a_long_draft_is_expected_to_bring_what_it_does_by_replay(
    adaptive: Any, own_home: Path, tmp_path: Path
) -> None:
    """All of 66 tokens are accepted: in 4 rounds of at most 16 tokens and one more, or in 2 rounds of 32 and one."""
    from transformers import AutoModelForCausalLM

    draft = AutoModelForCausalLM.from_pretrained(BUNDLED / "draft", dtype="float32")
    texts = draft.generate(
        torch.arange(5, 13)[None], do_sample=False, max_new_tokens=67, min_new_tokens=67, eos_token_id=None
    )
    found = state_with(own_home, save_random_adapter(BUNDLED / "draft", tmp_path / "adapter", std=0.0), {})
    with LogWriter(found.records) as log:
        made = generation(1, tokens=67, supervised=False)
        output = texts[0, 8:].numpy().astype(np.int32)
        prompt = np.arange(5, 13, dtype=np.int32)
        log.write(dataclasses.replace(made, sampling=SamplingParams(), prompt=prompt, output=output))
    for length, tokens in ((16, "16.75"), (32, "33.00")):
        given = ("--draft-length", str(length), "--to", str(tmp_path / "to"))
        status, out, errors = adaptive("publish", "--engine", "vllm", *given)
        assert status == 0, errors
        assert f"draft length {length}: {tokens} tokens a round by replay" in errors
        assert f'"num_speculative_tokens":{length}' in out


@pytest.mark.parametrize("kind", ["vision", "fp8"])
def test_of_a_draft_with_vision_or_quantised_the_language_model_is_published(
    adaptive: Any, own_home: Path, tmp_path: Path, kind: str
) -> None:
    """With the names and the format that its config describes, so that other programs can read it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names = {"target": str(BUNDLED / "target"), "draft": str(tmp_path / "draft")}
    vocab = {"vocab_size": 4096}
    if kind == "vision":
        several_kinds("gemma3_text", "gemma3", vocab, **VISION["gemma3"]).save_pretrained(tmp_path / "draft")
    else:
        tiny_model("llama", **vocab).save_pretrained(tmp_path / "dense")
        quantise(tmp_path / "dense", tmp_path / "draft", fp8, FP8)
    AutoTokenizer.from_pretrained(BUNDLED / "target").save_pretrained(tmp_path / "draft")
    language: Any = load_draft_for_training(load_settings({**names, "device": "cpu"}))
    trained = attach(language, Recipe(rank=4))
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.05)
    trained.save_pretrained(str(tmp_path / "adapter"))
    state_with(own_home, tmp_path / "adapter", names, answers=4)

    pair = [part for name, value in names.items() for part in (f"--{name}", value)]
    status, _, errors = adaptive("publish", "--engine", "vllm", "--to", str(tmp_path / "to"), *pair)
    assert status == 0, errors
    assert "tokens a round by replay" in errors
    (draft,) = (tmp_path / "to").iterdir()
    merged, loading = AutoModelForCausalLM.from_pretrained(draft, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert merged.dtype == torch.float32
    tokens = torch.arange(3, 40)[None]
    plain: Any = load_draft_for_training(load_settings({**names, "device": "cpu"}))
    with torch.no_grad():
        expected = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))(tokens).logits
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-3, atol=1e-3)


def test_mistakes_are_one_line(adaptive: Any, own_home: Path, tmp_path: Path) -> None:
    key, empty = tmp_path / "key", tmp_path / "empty"
    key.write_text("schlüssel", encoding="utf-8")
    empty.touch()
    for arguments, said in (
        ((), "--engine"),
        (("--restart", "true", "--engine", "vllm"), "--upstream"),
        (("--upstream", "http://127.0.0.1:9", "--target", "x"), "does not answer"),
        (("--upstream", "http://127.0.0.1:80a80"), "must be an address"),
        (("--upstream", "http://127.0.0.1:9", "--draft-length", "0"), "--draft-length is 0"),
        (("--upstream", "http://127.0.0.1:9", "--draft-length", "tree:8"), "takes no tree"),
        (("--upstream", "http://127.0.0.1:9", "--encoding", "q4"), "--encoding is 'q4'"),
        (("--upstream", "http://127.0.0.1:9", "--api-key-file", str(key)), "holds no key"),
        (("--upstream", "http://127.0.0.1:9", "--api-key-file", str(empty)), "holds no key"),
        (
            ("--upstream", "http://127.0.0.1:9", "--api-key-file", "nowhere"),
            "nowhere cannot be read: No such file or directory\n",
        ),
    ):
        status, _, errors = adaptive("publish", *arguments)
        assert status == 2
        assert said in errors
        assert errors.count("\n") == 1


def test_a_key_of_the_settings_is_one_as_that_of_a_file() -> None:
    assert _key(load_settings({"api_key": " k\n"}), None) == "k"
    with pytest.raises(AdaptiveError, match="the setting api_key holds no key"):
        _key(load_settings({"api_key": "k\ny"}), None)


@pytest.mark.parametrize("place", ["127.0.0.1:1", "nowhere.invalid"])
def test_an_address_of_a_peer_is_said_without_its_login(place: str) -> None:
    with pytest.raises(AdaptiveError) as raised:
        check_peer(f"http://me:secret@{place}")
    assert place in str(raised.value)
    assert "secret" not in str(raised.value)
