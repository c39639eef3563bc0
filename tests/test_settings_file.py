"""A settings file in the current folder alone selects no model, runs no code and opens no port."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from adaptive.errors import AdaptiveError
from adaptive.settings import load_settings

HOSTILE = 'target = "somebody/model"\ntrust_remote_code = true\n'


def adaptive(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``adaptive`` without a terminal, so that it cannot ask."""
    command = [sys.executable, "-m", "cli.main", *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["config", "show"], ["chat"], ["generate", "-", "--grammar", "none"]])
def test_a_closed_standard_input_is_no_terminal(arguments: list[str]) -> None:
    command = f'"$0" -m cli.main {shlex.join(arguments)} <&-'
    ran = subprocess.run(["/bin/sh", "-c", command, sys.executable], capture_output=True, text=True, check=False)
    assert "Traceback" not in ran.stderr
    assert ran.returncode == (0 if arguments[0] == "config" else 2), ran.stderr


def test_a_tilde_is_the_home_folder_wherever_it_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.delenv("ADAPTIVE_HOME")
    file = tmp_path / "own.toml"
    file.write_text('home = "~/state"\napi_key_file = "~/key"\ndraft_key_file = "~/draft-key"\n')
    found = load_settings({}, file)
    folder = tmp_path / "me"
    assert (found.state_dir, found.api_key_file, found.draft_key_file) == (
        folder / "state", folder / "key", folder / "draft-key",
    )  # fmt: skip
    assert load_settings({"home": Path("~/x")}, file).state_dir == folder / "x"
    monkeypatch.setenv("ADAPTIVE_HOME", "~nosuchuser/x")
    with pytest.raises(AdaptiveError, match="~nosuchuser/x begins with the home folder"):
        load_settings({})


@pytest.mark.parametrize("name", ["feature_gb", "max_body_mb"])
def test_a_size_without_an_end_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(f"{name} = inf\n")
    with pytest.raises(AdaptiveError, match=f"setting {name}: .*finite"):
        load_settings({}, tmp_path / "own.toml")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('slots = "²"', "slots"),
        ("port = 99999", "port"),
        (f'draft_length = "{"4" * 5000}"', "draft_length"),
        (f'memory = "{"9" * 5000}GB"', "memory"),
        ("api_key = 12345678", "api_key"),
        ('apikey = "12345678"', "apikey"),
    ],
)
def test_an_error_in_settings_names_the_setting_and_shows_no_key(
    line: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not line.startswith("api"):
        monkeypatch.setenv("ADAPTIVE_API_KEY", "12345678")
    (tmp_path / "own.toml").write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(AdaptiveError, match=named) as raised:
        load_settings({}, tmp_path / "own.toml")
    assert "12345678" not in f"{raised.value}{raised.value.__cause__}"
    others = "" if named == "apikey" else f"flags, ADAPTIVE_{named.upper()} or "
    assert str(raised.value).endswith(f" ({others}{tmp_path / 'own.toml'})")
    assert ("there is no setting" in str(raised.value)) is (named == "apikey")
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("name", ["api_key", "draft_key", "apikey"])
def test_a_key_in_a_file_of_the_current_folder_is_not_shown(name: str, tmp_path: Path) -> None:
    (tmp_path / "adaptive.toml").write_text(f'{name} = "hunter2"\napi_key_file = "there"\n')
    with pytest.raises(AdaptiveError, match=rf"{name} = \*\*\*\*, api_key_file = 'there'"):
        load_settings({})


def own_file(tmp_path: Path, text: str) -> Path:
    """The file in the user's settings folder."""
    file = tmp_path / "config" / "adaptive" / "adaptive.toml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return file


def test_a_file_in_the_current_folder_replaces_only_what_it_sets(tmp_path: Path) -> None:
    own = own_file(tmp_path, 'record = false\ntemperature = 0.9\ntarget = "mine"\n')
    local = tmp_path / "adaptive.toml"
    local.write_text("temperature = 0.2\n")
    found = load_settings({})
    assert (found.record, found.temperature, found.target) == (False, 0.2, "mine")
    shown = json.loads(adaptive("config", "show", "--json").stdout)
    sources = {name: shown[name]["source"] for name in ("record", "temperature", "top_k")}
    assert sources == {"record": str(own), "temperature": "adaptive.toml", "top_k": "default"}
    assert load_settings({}, local).record  # --config names the only file
    local.write_text("port = 99999\n")
    with pytest.raises(AdaptiveError, match=r"ADAPTIVE_PORT or .*config/adaptive/adaptive\.toml or adaptive\.toml"):
        load_settings({})


def test_a_file_in_the_current_folder_may_switch_the_log_off_but_not_on(tmp_path: Path) -> None:
    local = tmp_path / "adaptive.toml"
    local.write_text("record = false\n")
    assert not load_settings({}).record
    local.unlink()
    own_file(tmp_path, "record = false\n")
    local.write_text("record = true\n")
    with pytest.raises(AdaptiveError, match="record = 'True'"):
        load_settings({})


def test_the_own_file_may_be_a_link(tmp_path: Path) -> None:
    own = own_file(tmp_path, "")
    (tmp_path / "dotfiles.toml").write_text('target = "mine"\n')
    own.unlink()
    own.symlink_to(tmp_path / "dotfiles.toml")
    assert load_settings({}).target == "mine"


def test_a_draft_length_may_be_a_number(tmp_path: Path) -> None:
    (tmp_path / "adaptive.toml").write_text("draft_length = 4\n")
    assert load_settings({}).draft_length == "4"
    assert load_settings({"draft_length": 0}).draft_length == "0"
    with pytest.raises(AdaptiveError, match="draft_length is '65'"):
        load_settings({"draft_length": 65})


def test_values_of_a_foreign_file_are_shown_as_they_are_without_controls(tmp_path: Path) -> None:
    (tmp_path / "adaptive.toml").write_text(r'target = "\u001b]0;title\u0007[/x] [red]"')
    shown = adaptive("config", "show")
    assert shown.returncode == 0, shown.stderr
    assert "\x1b" not in shown.stdout
    assert "]0;title" in shown.stdout
    assert "[/x] [red]" in shown.stdout


@pytest.mark.parametrize(
    "line",
    [
        'target = "somebody/model"',
        'draft = "somebody/model"',
        'draft_checkpoint = "somebody/model"',
        'revision = "evil"',
        "trust_remote_code = true",
        'home = "/tmp/for-all-to-read"',
        'host = "0.0.0.0"',
        'api_key = "known-to-somebody"',
        'cors = ["https://evil.example"]',
    ],
)
def test_what_comes_with_a_checkout_is_not_taken_without_a_word(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ADAPTIVE_HOME")
    (tmp_path / "adaptive.toml").write_text(f"max_new_tokens = 7\n{line}\n")
    with pytest.raises(AdaptiveError, match=f"{line.split()[0]}.*--config"):
        load_settings({})


def test_a_command_without_a_terminal_and_a_server_refuse(tmp_path: Path) -> None:
    (tmp_path / "adaptive.toml").write_text(HOSTILE)
    for command in ("generate", "serve"):
        ran = adaptive(command, *(["hello"] if command == "generate" else []))
        assert ran.returncode == 2
        assert ran.stderr.count("\n") == 1
        assert "trust_remote_code" in ran.stderr
        assert "--config adaptive.toml" in ran.stderr


def test_a_server_does_not_ask_even_at_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "adaptive.toml").write_text(HOSTILE)
    server = pexpect.spawn(sys.executable, ["-m", "cli.main", "serve"], timeout=60, dimensions=(24, 400))
    server.expect(pexpect.EOF)
    assert b"[y/N]" not in server.before
    assert b"trust_remote_code" in server.before  # the reason of the refusal
    server.close()
    assert server.exitstatus == 2


def test_a_person_is_asked_once_until_the_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "adaptive.toml"
    file.write_text(HOSTILE)
    asked: list[str] = []

    def yes(question: str) -> bool:
        asked.append(question)
        return True

    assert load_settings({}, ask=yes).trust_remote_code
    assert load_settings({}, ask=yes).target == "somebody/model"
    assert load_settings({}).target == "somebody/model"
    assert len(asked) == 1
    assert "trust_remote_code = 'True'" in asked[0]
    assert str(file) in asked[0]
    file.write_text(HOSTILE.replace("somebody", "somebody-else"))
    load_settings({}, ask=yes)
    assert len(asked) == 2
    file.write_text(HOSTILE.replace("somebody", "a-third"))
    with pytest.raises(AdaptiveError):
        load_settings({}, ask=lambda question: False)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"file": 1}'])
def test_damaged_consents_are_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "adaptive.toml").write_text(HOSTILE)
    consents = tmp_path / "config" / "adaptive" / "trusted.json"
    consents.parent.mkdir(parents=True)
    consents.write_text(content)
    with pytest.raises(AdaptiveError):
        load_settings({})
    assert load_settings({}, ask=lambda question: True).target == "somebody/model"
    assert load_settings({}).target == "somebody/model"
    assert [file.name for file in consents.parent.iterdir()] == ["trusted.json"]


def test_the_question_reaches_a_terminal_and_a_no_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "adaptive.toml").write_text('home = "elsewhere"\n')
    environment = {name: value for name, value in os.environ.items() if name != "ADAPTIVE_HOME"}
    arguments = ["-m", "cli.main", "records", "stats"]
    command = pexpect.spawn(sys.executable, arguments, timeout=60, dimensions=(24, 400), env=environment)
    command.expect(r"home = .*elsewhere.*\[y/N\]")
    command.sendline("n")
    command.expect(r"taken only from your own settings")
    command.expect(pexpect.EOF)
    command.close()
    assert command.exitstatus == 2


def test_a_path_in_a_file_is_one_of_its_folder_wherever_the_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ADAPTIVE_HOME")
    folder = tmp_path / "there"
    (folder / "models" / "big").mkdir(parents=True)
    file = folder / "adaptive.toml"
    file.write_text('home = "state"\ntarget = "models/big"\ndraft = "owner/small"\napi_key_file = "key"\n')
    found = load_settings({}, file)
    assert (found.home, found.api_key_file) == (folder / "state", folder / "key")
    assert (found.target, found.draft) == (str(folder / "models" / "big"), "owner/small")
    assert load_settings({"home": "state"}, file).home == Path("state")  # a flag is one of the current folder
    monkeypatch.chdir(folder)
    found = load_settings({}, Path("adaptive.toml"))
    assert (found.home, found.target) == (Path("state"), "models/big")


def test_named_overridden_own_and_harmless_settings_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "adaptive.toml"
    file.write_text(HOSTILE)
    assert load_settings({}, file).target == "somebody/model"  # --config
    assert load_settings({"target": "mine", "trust_remote_code": False}).target == "mine"
    monkeypatch.setenv("ADAPTIVE_TRUST_REMOTE_CODE", "0")
    assert load_settings({"target": "mine"}).trust_remote_code is False
    file.write_text("temperature = 0.25\nport = 9001\n")
    assert load_settings({}).temperature == 0.25
    file.unlink()
    own = own_file(tmp_path, 'target = "mine"\n')
    assert load_settings({}).target == "mine"
    monkeypatch.chdir(own.parent)
    assert load_settings({}).target == "mine"


def test_a_key_hides_a_file_that_is_named_where_less_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "adaptive.toml"
    file.write_text('api_key_file = "old"', encoding="utf-8")
    assert load_settings({}, file).api_key_file is not None
    assert load_settings({"api_key": "new"}, file).api_key_file is None
    monkeypatch.setenv("ADAPTIVE_API_KEY", "new")
    found = load_settings({}, file)
    assert found.api_key is not None
    assert found.api_key_file is None
    assert str(load_settings({"api_key_file": "given"}, file).api_key_file) == "given"
