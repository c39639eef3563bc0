"""``adaptive config show`` names the source of each value, and never shows a key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adaptive.errors import AdaptiveError
from adaptive.settings import load_settings, model_name, training_window
from cli.main import app


def test_every_value_names_its_source_and_the_key_stays_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "adaptive.toml"
    file.write_text('port = 9001\ndistill = "22:00-06:00"\n')
    monkeypatch.setenv("ADAPTIVE_API_KEY", "very-secret")
    monkeypatch.setenv("ADAPTIVE_PORT", "9002")
    found = CliRunner().invoke(app, ["config", "show", "--json"])
    assert found.exit_code == 0, found.output
    settings = json.loads(found.stdout)
    assert settings["port"] == {"value": 9002, "source": "ADAPTIVE_PORT"}
    assert settings["distill"] == {"value": "22:00-06:00", "source": "adaptive.toml"}
    assert settings["queue"]["source"] == "default"
    table = CliRunner().invoke(app, ["config", "show"])
    assert "very-secret" not in found.output + table.output
    assert "ADAPTIVE_PORT" in table.output


@pytest.mark.parametrize("policy", ["sometimes", "25:00-06:00", "22:00", "22:00-6:00"])
def test_a_training_policy_that_means_nothing_is_refused(policy: str) -> None:
    with pytest.raises(AdaptiveError, match="distill"):
        load_settings({"distill": policy})


def test_a_window_in_which_nothing_could_be_trained_is_refused() -> None:
    with pytest.raises(AdaptiveError, match="distill is '22:00-22:00', a window that ends when it begins"):
        load_settings({"distill": "22:00-22:00"})


def test_a_window_is_minutes_after_midnight() -> None:
    assert training_window("22:30-06:00") == (1350, 360)
    assert training_window("idle") is None


def test_origins_are_a_list_in_the_file_and_separated_by_commas_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('cors = ["https://chat.example", "http://pc:3000"]\n')
    assert load_settings({}, file).cors == ("https://chat.example", "http://pc:3000")
    monkeypatch.setenv("ADAPTIVE_CORS", "https://chat.example, app://obsidian.md")
    assert load_settings({}, file).cors == ("https://chat.example", "app://obsidian.md")
    assert load_settings({"cors": ["http://[::1]:3000"]}).cors == ("http://[::1]:3000",)


@pytest.mark.parametrize("origin", ["*", "chat.example", "https://chat.example/", "https://*.example", "null"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(AdaptiveError, match="cors"):
        load_settings({"cors": [origin]})


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({}, "bundled"),
        ({"target": "Qwen/Qwen2.5-14B-Instruct"}, "Qwen2.5-14B-Instruct"),
        ({"target": "/models/my model/"}, "my-model"),
        ({"target": "owner/repository/gemma-4-31B-it-Q4_K_M.gguf"}, "gemma-4-31B-it-Q4_K_M"),
        ({"target": "Qwen/Qwen2.5-14B-Instruct", "name": "qwen/mine:14b"}, "qwen/mine:14b"),
    ],
)
def test_a_model_goes_by_its_own_name_unless_it_is_given_one(said: dict[str, str], name: str) -> None:
    assert model_name(load_settings(said)) == name


@pytest.mark.parametrize("name", ["", "two words", "line\nbreak", "x" * 129])
def test_a_name_that_no_client_could_send_is_refused(name: str) -> None:
    with pytest.raises(AdaptiveError, match="name"):
        load_settings({"name": name})
