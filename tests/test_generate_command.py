"""``adaptive generate`` on local pairs: its JSON output and its error messages."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from conftest import BUNDLED, Command, save_model_that_says, save_random_pair
from forked import run_on_a_terminal, start

from adaptive.records.log import Log
from adaptive.settings import load_settings
from cli.prompts import read_prompts


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, draft = save_random_pair(tmp_path_factory.mktemp("pair"), "qwen2")
    return str(target), str(draft)


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "What is 7 times 8?"},
        {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]},
        {"prompt": "Write a function that adds two numbers."},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return file


def test_json_objects_agree_with_the_history(adaptive: Command, pair: tuple[str, str], prompt_file: Path) -> None:
    models = ("--target", pair[0], "--draft", pair[1], "--dtype", "float32")
    code, out, err = adaptive(
        "generate", *models, "--prompts", str(prompt_file), "--json", "--draft-length", "4", "--max-new-tokens", "30"
    )
    assert code == 0, err
    objects = [json.loads(line) for line in out.splitlines()]
    assert [type(o["prompt"]) for o in objects] == [str, list, str]
    for o in objects:
        assert set(o) == {
            "prompt", "text", "tokens", "finish_reason", "usage", "timings", "rounds", "tokens_per_round",
            "speculative_decoding", "drafters", "adapter",
        }  # fmt: skip
        assert o["finish_reason"] in ("stop", "length")
        assert o["usage"]["completion_tokens"] == len(o["tokens"]) == o["timings"]["predicted_n"]
        spec, timings = o["speculative_decoding"], o["timings"]
        assert timings["draft_n"] == spec["num_draft_tokens"] <= 4 * spec["num_spec_steps"]
        assert sum(i * n for i, n in enumerate(spec["acceptance_histogram"])) == spec["num_accepted_draft_tokens"]
        assert o["tokens_per_round"] == 1 + spec["num_accepted_draft_tokens"] / o["rounds"]
        assert o["rounds"] >= spec["num_spec_steps"]
        assert spec["mean_acceptance_length"] == 1 + spec["num_accepted_draft_tokens"] / spec["num_spec_steps"]
        assert timings["predicted_per_second"] == pytest.approx(
            (timings["predicted_n"] - 1) / timings["predicted_ms"] * 1000
        )
    code, out, err = adaptive("history", "--target", pair[0], "--draft", pair[1], "--json")
    assert code == 0, err
    totals = json.loads(out)["totals"]["speculative_decoding"]
    for key in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
        assert totals[key] == sum(o["speculative_decoding"][key] for o in objects)
    accepted, rounds = totals["num_accepted_draft_tokens"], totals["num_spec_steps"]
    assert totals["mean_acceptance_length"] == pytest.approx(1 + accepted / rounds)


def test_tokens_a_round_are_named_without_a_draft_too(adaptive: Command, pair: tuple[str, str]) -> None:
    models = ("--target", pair[0], "--draft", "none", "--dtype", "float32")
    code, _, err = adaptive("generate", "one two one two one two", *models, "--max-new-tokens", "30")
    assert code == 0, err
    assert " tokens a round, " in err


def test_no_record_leaves_no_log(adaptive: Command, pair: tuple[str, str], own_home: Path) -> None:
    code, _, err = adaptive(
        "generate", "Hi", "--target", pair[0], "--draft", pair[1], "--no-record", "--max-new-tokens", "5"
    )
    assert code == 0, err
    assert not list(own_home.rglob("records.db"))


def one_line(err: str) -> str:
    """Check that the error output is one line of ours, and return it."""
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("adaptive: ")
    return lines[0]


def test_a_broken_line_is_named_and_nothing_is_half_done(
    adaptive: Command, pair: tuple[str, str], tmp_path: Path, own_home: Path
) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_text('{"prompt": "fine"}\n{"prompt": \n', encoding="utf-8")
    code, out, err = adaptive("generate", "--target", pair[0], "--draft", pair[1], "--prompts", str(file), "--json")
    assert (code, out) == (2, "")
    assert "broken.jsonl line 2" in one_line(err)
    assert not list(own_home.rglob("records.db"))


@pytest.mark.parametrize("raw", [False, True])
def test_a_line_that_cannot_be_answered_is_named_before_the_first_answer(
    adaptive: Command, pair: tuple[str, str], tmp_path: Path, own_home: Path, raw: bool
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in ("fine", "fine, too", "word " * 3000)))
    models = ("--target", pair[0], "--draft", pair[1], "--prompts", str(file))
    code, out, err = adaptive("generate", *models, *["--raw"] * raw)
    assert (code, out) == (2, "")
    assert "prompts.jsonl line 3: the prompt has" in one_line(err)
    assert not any(Log(log).count() for log in own_home.rglob("records.db"))
    if not raw:
        code, _, err = adaptive("distill", *models)
        assert code == 2
        assert "prompts.jsonl line 3: the prompt has" in err
        assert not any(Log(log).count() for log in own_home.rglob("records.db"))


def test_raw_text_of_a_line_with_messages_is_refused(
    adaptive: Command, pair: tuple[str, str], prompt_file: Path
) -> None:
    models = ("--target", pair[0], "--draft", pair[1])
    code, out, err = adaptive("generate", *models, "--raw", "--prompts", str(prompt_file))
    assert (code, out) == (2, "")
    assert "prompts.jsonl line 2 has messages" in one_line(err)


@pytest.mark.thorough
def test_an_answer_whose_reader_ends_is_in_the_log(pair: tuple[str, str], own_home: Path, tmp_path: Path) -> None:
    command = ["generate", "Hi", "--target", pair[0], "--draft", pair[1], "--draft-length", "2"]
    command += ["--max-new-tokens", "1500", "--seed", "1"]
    reader, writer = os.pipe()
    messages = tmp_path / "messages"
    with messages.open("wb") as stream:
        running = start(*command, stdout=writer, stderr=stream)
    os.close(writer)
    assert os.read(reader, 1)
    os.close(reader)
    assert running.wait(120) == 141
    assert b"Error" not in messages.read_bytes()
    (records,) = own_home.rglob("records.db")
    with Log(records) as log:
        (kept,) = log.generations()
    assert 0 < len(kept.generation.output) < 1500


def test_missing_and_empty_folders_are_named(adaptive: Command, tmp_path: Path) -> None:
    code, _, err = adaptive("generate", "Hi", "--target", str(tmp_path / "nowhere"))
    assert code == 2
    assert "nowhere does not exist" in one_line(err)
    (tmp_path / "empty").mkdir()
    code, _, err = adaptive("generate", "Hi", "--target", str(tmp_path / "empty"))
    assert code == 2
    assert "holds no model" in one_line(err)


def test_a_damaged_checkpoint_is_one_line(adaptive: Command, pair: tuple[str, str], tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(pair[0], broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    code, _, err = adaptive("generate", "Hi", "--target", str(broken))
    assert code == 2
    assert "broken cannot be loaded" in one_line(err)


def test_tokenizers_that_differ_are_refused_with_the_first_difference(
    adaptive: Command, pair: tuple[str, str], tmp_path: Path
) -> None:
    import shutil

    other = tmp_path / "other"
    shutil.copytree(pair[1], other)
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token, i in vocabulary.items() if i in (300, 301)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    code, _, err = adaptive("generate", "Hi", "--target", pair[0], "--draft", str(other))
    assert code == 2
    assert "token 300 is" in one_line(err)


@pytest.mark.thorough
def test_padded_embedding_tables_of_one_family_pass(adaptive: Command, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    size = len(AutoTokenizer.from_pretrained(BUNDLED / "target"))
    target, _ = save_random_pair(tmp_path / "wide", "qwen2", vocab_size=size + 64)
    _, draft = save_random_pair(tmp_path / "narrow", "qwen2", vocab_size=size)
    for one, other in ((target, draft), (tmp_path / "narrow" / "target", tmp_path / "wide" / "draft")):
        for temperature in ("0", "1.0"):
            code, _, err = adaptive(
                "generate", "Hi", "--target", str(one), "--draft", str(other), "--max-new-tokens", "12",
                "--temperature", temperature,
            )  # fmt: skip
            assert code == 0, err


def test_a_draft_with_a_short_context_is_warned_about(adaptive: Command, tmp_path: Path) -> None:
    target, draft = save_random_pair(tmp_path, "qwen2")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    code, _, err = adaptive("generate", "Hi", "--target", str(target), "--draft", str(draft), "--max-new-tokens", "3")
    assert code == 0
    said = " ".join(err.split())
    assert "reads texts of up to 256 tokens, and the target of 2,048: beyond that nothing is drafted" in said


def test_a_draft_larger_than_the_target_is_warned_about(adaptive: Command, pair: tuple[str, str]) -> None:
    code, _, err = adaptive("generate", "Hi", "--target", pair[1], "--draft", pair[0], "--max-new-tokens", "3")
    assert code == 0
    assert "larger than the target" in " ".join(err.split())


def test_a_state_folder_that_cannot_be_written_is_named(
    adaptive: Command, pair: tuple[str, str], tmp_path: Path
) -> None:
    if os.geteuid() == 0:
        closed = Path("/sys/adaptive-state")  # even root cannot write there
    else:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o555)
    code, _, err = adaptive("generate", "Hi", "--target", pair[0], "--draft", pair[1], "--state-dir", str(closed))
    assert code == 2
    assert "cannot be written" in one_line(err)
    assert "--state-dir" in err


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("--draft-length", "many", "draft_length"),
        ("--temperature", "-1", "temperature"),
        ("--top-p", "0", "top_p"),
        ("--dtype", "int3", "dtype"),
        ("--device", "cuda:77", "cuda:77"),
        ("--max-new-tokens", "0", "max_new_tokens"),
        ("--feature-gb", "inf", "feature_gb"),
        ("--target", "~nosuchuser/model", "~nosuchuser/model begins with the home folder"),
    ],
)
def test_nonsense_options_are_one_clear_line(
    adaptive: Command, pair: tuple[str, str], option: str, value: str, word: str
) -> None:
    code, _, err = adaptive("generate", "Hi", "--target", pair[0], "--draft", pair[1], option, value)
    assert code == 2
    assert word in one_line(err)


def test_a_prompt_past_the_context_ends_in_one_line(adaptive: Command, pair: tuple[str, str]) -> None:
    code, _, err = adaptive("generate", "word " * 3000, "--target", pair[0], "--draft", pair[1])
    assert code == 2
    assert "context holds 2048" in one_line(err)


def test_an_answer_that_meets_the_end_of_the_context_finishes_clearly(adaptive: Command, pair: tuple[str, str]) -> None:
    code, out, err = adaptive(
        "generate", "word " * 1000, "--target", pair[0], "--draft", pair[1], "--json", "--max-new-tokens", "5000",
        "--raw",
    )  # fmt: skip
    assert code == 0, err
    answer = json.loads(out)
    assert answer["finish_reason"] in ("length", "stop")
    assert answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"] <= 2048


def test_a_seed_that_is_no_number_of_64_bits_is_refused_before_anything_is_loaded(adaptive: Command) -> None:
    code, _, err = adaptive("generate", "Hi", "--seed", str(2**64))
    assert code == 2
    assert "64 bits" in one_line(err)


def test_text_that_is_no_unicode_is_one_line(
    adaptive: Command, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = adaptive("generate", "--raw", "half of a pair: \ud83d", "--target", pair[0], "--draft", pair[1])
    assert code == 2
    assert "not valid Unicode" in one_line(err)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    code, _, err = adaptive("generate", "-", "--target", pair[0], "--draft", pair[1])
    assert code == 2
    assert "standard input is not UTF-8" in one_line(err)


def test_what_standard_output_cannot_encode_becomes_a_question_mark(
    adaptive: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = save_model_that_says("naïve", tmp_path / "says"), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    code, _, err = adaptive("generate", "Hi", "--target", str(model), "--dtype", "float32")
    assert code == 0, err
    sys.stdout.flush()
    assert out.getvalue() == b"na?ve\n"


def test_a_line_of_a_file_ends_at_a_line_feed_alone(adaptive: Command, pair: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "one\u2028line\x85"}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    arguments = ("--target", pair[0], "--draft", pair[1], "--prompts", str(file), "--json", "--max-new-tokens", "2")
    code, out, err = adaptive("generate", *arguments)
    assert code == 0, err
    assert json.loads(out)["prompt"] == "one\u2028line\x85"


@pytest.mark.thorough
def test_what_cannot_be_kept_for_next_time_is_said_and_the_answer_stands(
    adaptive: Command, pair: tuple[str, str], own_home: Path
) -> None:
    arguments = ("generate", "Hi", "--target", pair[0], "--draft", pair[1], "--max-new-tokens", "4", "--seed", "1")
    assert adaptive(*arguments)[0] == 0
    kept = next(own_home.glob("*/controller.json"))
    kept.unlink()
    (kept / "in the way").mkdir(parents=True)  # the file cannot be written, as on a full disk
    code, out, err = adaptive(*arguments)
    assert code == 0
    assert out.strip()
    assert "cannot be written" in " ".join(err.split())
    assert not list(own_home.glob("*/controller.json.*"))


@pytest.mark.thorough
def test_options_that_a_command_would_not_heed_are_none_of_its(adaptive: Command, tmp_path: Path) -> None:
    assert adaptive("demo", "--state-dir", str(tmp_path))[0] == 2
    assert adaptive("bench", "--draft-length", "4")[0] == 2
    assert adaptive("calibrate", "--no-record")[0] == 2
    for command in (("bench",), ("calibrate",), ("head", "h")):
        for option in ("--keep-days", "--keep-gb", "--feature-gb"):
            assert adaptive(*command, option, "1")[0] == 2
    assert adaptive("head", "h", "--temperature", "0")[0] == 2
    assert adaptive("export", "e", "--state-dir", str(tmp_path))[0] == 2
    for options in (
        ("--prompts", "3"),
        ("--max-tokens", "9"),
        ("--model", "m"),
        ("--wait", "9"),
        ("--api-key-file", "f"),
    ):
        assert f"{options[0]}: no server is measured" in one_line(adaptive("publish", "--engine", "vllm", *options)[2])
    assert "--encoding is for GGUF" in one_line(adaptive("publish", "--engine", "vllm", "--encoding", "bf16")[2])
    assert "--draft-length is 0" in one_line(adaptive("head", "h", "--draft-length", "0")[2])
    assert "--domain labels" in one_line(adaptive("generate", "Hi", "--domain", "d", "--no-record")[2])


@pytest.mark.parametrize("command", ["bench", "calibrate"])
def test_prompts_that_cannot_be_answered_are_named_before_anything_is_measured(
    adaptive: Command, pair: tuple[str, str], tmp_path: Path, command: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in ("fine", "word " * 3000)))
    code, out, err = adaptive(command, "--target", pair[0], "--draft", pair[1], "--prompts", str(file))
    assert (code, out) == (2, "")
    assert "prompts.jsonl line 2: the prompt has" in one_line(err)


def test_an_empty_standard_input_is_no_question(adaptive: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    code, _, err = adaptive("generate", "-")
    assert (code, "standard input is empty" in one_line(err)) == (2, True)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8-sig")
    assert read_prompts(tmp_path / "prompts.jsonl")[0].messages[0].content == "a"
    (tmp_path / "own.toml").write_text("seed = 5\n", encoding="utf-8-sig")
    assert load_settings({}, tmp_path / "own.toml").seed == 5


@pytest.mark.thorough
def test_a_bar_is_shown_for_answers_that_go_elsewhere(pair: tuple[str, str], prompt_file: Path, tmp_path: Path) -> None:
    command = ["generate", "--target", pair[0], "--draft", pair[1], "--json", "--max-new-tokens", "4"]
    with (tmp_path / "out").open("wb") as out:
        said = run_on_a_terminal(*command, "--prompts", str(prompt_file), stdout=out, TERM="xterm")
    count = len(prompt_file.read_text().splitlines())
    assert f"/{count}".encode() in said
    assert len((tmp_path / "out").read_text().splitlines()) == count
