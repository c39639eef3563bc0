"""Models whose thinking stands between special tokens: what ``adaptive chat``, ``generate`` and the Python API make of
it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import save_model_that_says
from rich.console import Console
from test_chat import played, run_and_exit

from adaptive.api import Assistant
from adaptive.opened import OpenedPair
from adaptive.records.log import Log
from adaptive.service.trainer import Trainer
from adaptive.settings import load_settings
from cli.chat_session import Chat
from cli.main import run
from cli.opened import open_pair

# In Magistral's form. gpt-oss and Gemma 4 have such tokens, too; those of other families are no special tokens.
MARKS = ("[THINK]", "[/THINK]")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{# [THINK] #}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_that_says("[THINK]a dog[/THINK]The cat", tmp_path_factory.mktemp("thinks"), MARKS, TEMPLATE)


@pytest.fixture
def opened(model: Path, tmp_path: Path) -> Iterator[OpenedPair]:
    given = {"target": str(model), "draft": "none", "dtype": "float32", "home": str(tmp_path)}
    with open_pair(load_settings(given), Console(file=io.StringIO())) as opened:
        yield opened


@pytest.mark.parametrize(
    "keys", ["What?\r", "/set max_tokens 2\rWhat?\r/set max_tokens 20\r/more\r"], ids=["at once", "cut within it"]
)
def test_thinking_is_shown_apart_and_is_no_part_of_the_conversation(
    keys: str, opened: OpenedPair, capsys: pytest.CaptureFixture[str]
) -> None:
    chat, said = played(opened, keys, max_new_tokens=20)
    assert [m.content for m in chat.talk.messages] == ["What?", "The cat"]
    assert capsys.readouterr().out.split() == ["The", "cat"]
    assert "dog" in said
    assert opened.assistant.log is not None
    opened.assistant.log.flush()
    with Log(opened.state.records) as log:
        assert "".join(one.generation.text for one in log.generations()) == "[THINK]a dog[/THINK]The cat"
    settings = load_settings({})
    resumed = Chat(settings, opened, Console(file=io.StringIO()), chat.name, None, Trainer(settings, opened.state, 0))
    assert resumed.talk.messages == chat.talk.messages


def test_what_programs_read_tells_the_thinking_from_the_answer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--target", str(model), "--draft", "none", "--dtype", "float32", "--no-record"]
    monkeypatch.setattr("sys.argv", ["adaptive", "generate", "What?", "--json", *given])
    assert run_and_exit(run) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "[THINK]a dog[/THINK]The cat"
    with Assistant(model, "none", dtype="float32", home=str(tmp_path)) as assistant:
        assert assistant.ask("What?") == "[THINK]a dog[/THINK]The cat"
