"""A draft server that comes back with another draft is not used; one with another adapter is, and is described so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from draft_servers import served_here
from slow_disk import until
from test_lossless_sampled import PROMPT, VOCAB, models
from test_remote_draft import GREEDY, NOBODY, Holder

from adaptive import remote as line
from adaptive.drafting import remote as drafting
from adaptive.drafting.remote import RemoteDrafter
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.remote import Remote
from adaptive.vocabulary import Vocabulary
from adaptive.wire import Hello

assert models  # a fixture
Models = tuple[TransformersEngine, TransformersEngine]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timeout decides a test, and a lost server is looked for often."""
    monkeypatch.setattr(drafting, "LINE_S", 30.0)
    monkeypatch.setattr(drafting, "UNKNOWN_S", 30.0)
    monkeypatch.setattr(line, "LONGEST_S", 0.1)


@contextmanager
def drafting_with(
    engine: TransformersEngine, now: dict[str, Any], looks: list[Hello]
) -> Iterator[tuple[RemoteDrafter, list[str]]]:
    """A drafter whose server says ``now`` of its draft, each time added to ``looks``; and what is said to users."""

    def change(hello: Hello) -> Hello:
        looks.append(hello.model_copy(update=now))
        return looks[-1]

    with served_here(engine, Vocabulary(tokens={}, probe=[]), change=change) as url:
        remote, said = Remote(url, None), list[str]()
        remote.say = said.append
        yield RemoteDrafter(remote, Holder(), VOCAB, GREEDY), said


def test_another_draft_at_the_address_is_not_used_and_said_once(models: Models) -> None:
    """Also if the connection did not fail in between, and after a refused proposal, which is reported itself."""
    now, looks = dict[str, Any](), list[Hello]()
    with drafting_with(models[1], now, looks) as (drafter, said):
        remote = drafter.remote
        assert drafter.propose(PROMPT, 3) is not None
        remote.refuse("nonsense", 0.0)
        now["weights"] = "1"
        assert drafter.propose(PROMPT, 3) is None
        until(lambda: len(said) == 2)
        assert "is back with another draft" in said[1]
        looked = len(looks)
        until(lambda: len(looks) > looked + 2)
        assert not remote.connected
        assert drafter.propose(PROMPT, 3) is None
        assert len(said) == 2
        del now["weights"]
        until(lambda: remote.ready)
        assert drafter.propose(PROMPT, 3) is not None
        assert remote.hello.weights == "0"


def test_the_adapter_in_use_is_that_of_the_last_answer(models: Models) -> None:
    now: dict[str, Any] = {"adapter": "0001"}
    with drafting_with(models[1], now, []) as (drafter, said):
        assert drafter.propose(PROMPT, 3) is not None
        assert drafter.remote.as_object()["adapter"] == "0001"
        for adapter in ("0002", None):
            now["adapter"] = adapter
            assert drafter.propose(PROMPT, 3) is not None
            assert drafter.remote.as_object()["adapter"] == adapter
        assert not said


@pytest.mark.parametrize("url", [NOBODY, NOBODY.replace("http:", "https:")])
@pytest.mark.parametrize("content", [None, "no certificate"], ids=["missing", "other"])
def test_certificates_that_cannot_be_read_are_one_line(
    adaptive: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, content: str | None
) -> None:
    file = tmp_path / "certificates.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    status, _, err = adaptive("generate", "Hi", "--max-new-tokens", "4", "--draft", url)
    assert (status, err.count("\n")) == (2, 1), err
    assert str(file) in err
    assert "SSL_CERT_FILE" in err
