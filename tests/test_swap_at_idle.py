"""A promoted adapter is read beside a request, also if it was noticed before the request came."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console
from service_server import Server
from slow_disk import promoted_on_a_slow_disk
from slow_disk import until as soon
from test_service_learning import ask, until

from adaptive.service.trainer import Trainer
from adaptive.settings import load_settings
from checkpoints.store import AdapterStore
from cli.chat_session import Chat
from cli.opened import open_pair

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")


@pytest.mark.thorough
def test_a_request_does_not_wait_for_an_adapter_that_an_idle_server_reads(tmp_path: Path) -> None:
    server = Server(tmp_path / "home", "--distill", "off").wait_until_ready()
    try:
        with server.http() as http:
            ask(http, "What is 2 + 2?")
            store = AdapterStore(next(server.home.glob("*/records.db")).parent / "adapters")
            name, slow = promoted_on_a_slow_disk(store, tmp_path / "adapter")
            soon(lambda: slow.opened == 2)
            assert ask(http, "What is 2 + 3?")["adapter"] is None
            assert not slow.in_vain, "the request waited for the disk"
            slow.answer(2)
            until(lambda: http.get("/props").json()["adapter"] == name, server)
    finally:
        server.stop()


def test_a_question_in_a_chat_does_not_wait_for_an_adapter_that_is_read(own_home: Path, tmp_path: Path) -> None:
    settings = load_settings({"dtype": "float32", "draft_length": "4", "max_new_tokens": 16, "temperature": 0.0})
    console = Console(file=io.StringIO())
    with open_pair(settings, console) as opened:
        chat = Chat(settings, opened, console, None, None, Trainer(settings, opened.state, 0))
        name, slow = promoted_on_a_slow_disk(opened.store, tmp_path / "adapter")
        assert chat.ask("What is 2 + 2?")
        assert not slow.in_vain, "the question waited for the disk"
        slow.answer(2)
        soon(lambda: slow.reads == 3)
        while opened.assistant.adapter is None:
            chat.ask("And 2 + 3?")
        chat.ask("And 2 + 4?")
        said = console.file.getvalue()  # type: ignore[attr-defined]
        assert said.count(f"now drafting with adapter {name}") == 1
