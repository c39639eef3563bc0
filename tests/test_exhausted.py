"""Where file descriptors, threads or memory run out, the adapter in use stays, and the next one comes later."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from conftest import BUNDLED
from draft_servers import served_here
from rich.console import Console
from safetensors.numpy import save_file
from service_server import Server
from shortages import replaced_by_a_folder, short_of_files, short_of_memory, short_of_threads
from test_service_learning import ask, publish_random_adapter, until

from adaptive import draft_server, swapper
from adaptive.draft_server import Drafts, Promoted
from adaptive.drafting.ahead import Worker
from adaptive.engines.hf.lora import read_lora
from adaptive.engines.load import load_engine
from adaptive.errors import AdaptiveError
from adaptive.machine import LEAST_S, LoadMeter, LoadWatch
from adaptive.opened import OpenedPair
from adaptive.pair import draft_alone
from adaptive.records.features import FeatureSpool
from adaptive.records.log import Log
from adaptive.remote import Remote
from adaptive.settings import load_settings
from adaptive.types import SamplingParams, StopParams
from adaptive.vocabulary import Vocabulary
from adaptive.wire import Asked
from checkpoints.manifest import BaseDraft, Manifest, TrainedOn
from checkpoints.store import AdapterStore, NewAdapter
from cli.opened import open_pair

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")


@pytest.fixture
def said() -> io.StringIO:
    """What the session of the test says to the user."""
    return io.StringIO()


@pytest.fixture
def session(own_home: Path, monkeypatch: pytest.MonkeyPatch, said: io.StringIO) -> Iterator[OpenedPair]:
    monkeypatch.setattr(swapper, "LOOK_S", 0.0)
    monkeypatch.setattr(swapper, "AGAIN_S", 0.0)
    monkeypatch.setattr(swapper, "WAIT_S", 60.0)  # an adapter is read in the gap in which it was noticed
    settings = load_settings({"dtype": "float32", "draft_length": "4", "history": "off"})
    with open_pair(settings, Console(file=said, width=1000)) as opened:
        yield opened


def promoted(store: AdapterStore, folder: Path, seed: int = 0) -> str:
    """A random adapter for the bundled draft, promoted."""
    name = publish_random_adapter(store, folder, seed)
    store.promote(name, "the test says so")
    return name


@pytest.mark.parametrize("left", range(4))
def test_without_file_descriptors_the_adapter_in_use_stays_and_this_is_said_once(
    session: OpenedPair, said: io.StringIO, tmp_path: Path, left: int
) -> None:
    names = [promoted(session.store, tmp_path / str(seed), seed) for seed in (1, 2)]
    session.store.promote(names[0], "by hand")
    assert session.swapper.use_promoted()
    with short_of_files(left):
        for _ in range(5):
            assert session.swapper.between_rounds()
    assert session.assistant.adapter == session.store.current_id() == names[0]
    count = said.getvalue().count(f"adapter {names[0]} stays in use")
    assert count == 1 if left == 0 else count <= 1  # threads of the session may have taken what was left
    session.store.promote(names[1], "by hand")
    assert session.swapper.use_promoted()
    assert session.assistant.adapter == names[1]


@pytest.mark.parametrize("left", range(4))
def test_an_adapter_that_is_promoted_while_there_are_no_file_descriptors_comes_into_use_later(
    session: OpenedPair, tmp_path: Path, left: int
) -> None:
    names = [promoted(session.store, tmp_path / str(seed), seed) for seed in (1, 2)]
    session.store.promote(names[0], "by hand")
    assert session.swapper.use_promoted()
    session.store.promote(names[1], "by hand")
    with short_of_files(left):
        for _ in range(5):
            session.swapper.between_rounds()
        assert session.assistant.adapter in names
    session.swapper.use_promoted()
    assert session.assistant.adapter == session.store.current_id() == names[1]


class Crowded(AdapterStore):
    """A store after whose first verification of an adapter the process has no file descriptors, until the next look."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.crowd = ExitStack()
        self.looks = 0

    def current_id(self) -> str | None:
        self.crowd.close()
        return super().current_id()

    def usable(self, base: BaseDraft | None) -> tuple[Manifest | None, list[str]]:
        found = super().usable(base)
        self.looks += 1
        return found

    def path(self, name: str) -> Path:
        found = super().path(name)
        if self.looks == 1:
            self.looks += 1
            self.crowd.enter_context(short_of_files(0))
        return found


def test_an_adapter_that_was_verified_but_cannot_be_read_then_comes_into_use_later(
    session: OpenedPair, said: io.StringIO, tmp_path: Path
) -> None:
    name = promoted(session.store, tmp_path / "adapter")
    session.swapper.store = crowded = Crowded(session.store.root)
    with crowded.crowd:
        assert not session.swapper.use_promoted()
    assert "Too many open files" in said.getvalue()
    assert "adapter none stays in use" in said.getvalue()
    assert session.swapper.use_promoted()
    assert session.assistant.adapter == session.store.current_id() == name


def test_weights_for_which_there_is_no_file_descriptor_are_not_said_to_be_missing(
    session: OpenedPair, tmp_path: Path
) -> None:
    promoted(session.store, tmp_path)
    folder = session.store.path("0001")
    config = (folder / "adapter_config.json").read_text()
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")  # the weights are read when the test has written the config
    with ThreadPoolExecutor(1) as thread, ExitStack() as crowd:
        found = thread.submit(read_lora, folder)
        with (folder / "adapter_config.json").open("w") as stream:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)
            crowd.callback(resource.setrlimit, resource.RLIMIT_NOFILE, most)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))
            stream.write(config)
        with pytest.raises(AdaptiveError, match=r"adapter_model\.safetensors cannot be read: .*Too many open files"):
            found.result()
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").write_text(config)
    assert read_lora(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdaptiveError, match=r"it has no adapter_model\.safetensors"):
        read_lora(folder)


def test_an_adapter_for_whose_reader_there_is_no_thread_comes_into_use_later(
    session: OpenedPair, said: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = promoted(session.store, tmp_path / "adapter")
    with short_of_threads():
        for _ in range(3):
            assert session.swapper.between_rounds()
        monkeypatch.setattr(swapper, "AGAIN_S", 1000.0)
        assert session.swapper.between_rounds()
    assert said.getvalue().count("can't start new thread); adapter none stays in use") == 1
    assert session.swapper.between_rounds()  # does not try again so soon
    assert session.assistant.adapter is None
    assert session.swapper.use_promoted()
    assert session.assistant.adapter == name


def test_without_a_thread_nothing_is_drafted_ahead_until_there_is_one() -> None:
    worker, stepped = Worker(), threading.Event()

    def step() -> bool:
        stepped.set()
        return False

    with short_of_threads():
        worker.go_on(step)
    assert not worker.stop()
    worker.go_on(step)
    assert stepped.wait(10)


def test_a_draft_server_for_whose_requests_there_is_no_thread_is_asked_later() -> None:
    settings = load_settings({"draft": str(BUNDLED / "draft"), "dtype": "float32"})
    engine = load_engine(draft_alone(settings)[0], settings, "cpu", lambda share: None, draft=True)
    asked = Asked("it", 0, [3, 4, 5], 1, False, engine.vocab_size, SamplingParams())
    with served_here(engine, Vocabulary(tokens={}, probe=[])) as url:
        remote = Remote(url, None)
        with short_of_threads():
            assert remote.ask(lambda whole: asked.to_bytes()) is None
        assert remote.ready
        call = remote.ask(lambda whole: asked.to_bytes())
        assert call is not None
        assert call.done.wait(30)
        assert call.answer is not None


def test_a_garbled_current_is_mended_though_the_first_look_at_it_failed(session: OpenedPair, tmp_path: Path) -> None:
    name = promoted(session.store, tmp_path / "adapter")
    (session.store.root / "CURRENT").write_text("garbage")
    said: list[str] = []
    started = swapper.Swapper(session.assistant, session.store, session.pair.identity.base, said.append)
    with short_of_files(1):  # enough to verify an adapter, not to read it, nor to write to the store
        assert not started.use_promoted()
    assert started.use_promoted()
    assert session.assistant.adapter == name
    assert len(said) == 2
    assert f"CURRENT named no adapter; adapter {name} is used" in said[1]


@pytest.mark.thorough
def test_while_memory_is_too_short_for_an_adapter_the_one_in_use_stays(
    session: OpenedPair, said: io.StringIO, tmp_path: Path
) -> None:
    rank, width = 60_000, 256

    def write(folder: Path) -> None:
        shapes = {"lora_A": (rank, width), "lora_B": (width, rank)}
        name = "base_model.model.model.layers.0.self_attn.q_proj"
        tensors = {f"{name}.{part}.weight": np.zeros(shape, np.float32) for part, shape in shapes.items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 1, "target_modules": ["q_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(config))

    small = promoted(session.store, tmp_path / "adapter")
    assert session.swapper.use_promoted()
    large = session.store.publish(write, NewAdapter(session.pair.identity.base, TrainedOn(None, None, 0, 0))).id
    session.store.promote(large, "by hand")
    with short_of_memory(2 * rank * width * 4 + (30 << 20)):  # enough to map the file, not to copy it
        for _ in range(3):
            assert session.swapper.between_rounds()
    assert said.getvalue().count("the promoted adapter cannot be read now") == 1
    assert "llocate memory" in said.getvalue()
    assert session.assistant.adapter == small
    session.store.promote(small, "by hand")
    assert not session.swapper.use_promoted()


def test_a_draft_server_without_file_descriptors_keeps_its_adapter(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(draft_server, "LOOK_S", 0.0)
    monkeypatch.setattr(draft_server, "AGAIN_S", 0.0)
    settings = load_settings({"draft": str(BUNDLED / "draft"), "dtype": "float32"})
    engine = load_engine(draft_alone(settings)[0], settings, "cpu", lambda share: None, draft=True)
    drafts, store = Drafts(engine, 10**9), AdapterStore(tmp_path / "adapters")
    names = [promoted(store, tmp_path / str(seed), seed) for seed in (1, 2)]
    store.promote(names[0], "by hand")
    look = Promoted(drafts, store)
    look()
    assert drafts.adapter == names[0]
    with short_of_files(0):
        look()
        look()
    assert drafts.adapter == store.current_id() == names[0]
    assert caplog.text.count(f"(Too many open files); adapter {names[0]} stays in use") == 1
    store.promote(names[1], "by hand")
    with short_of_files(1):  # enough to verify an adapter, not to read it
        look()
    assert drafts.adapter == names[0]
    look()
    assert drafts.adapter == names[1]
    store.promote(names[0], "by hand")
    crowded = Crowded(store.root)
    look = Promoted(drafts, crowded)
    with crowded.crowd:
        look()
    assert drafts.adapter == names[1]
    look()
    assert drafts.adapter == names[0]
    store.promote(names[1], "by hand")
    caplog.clear()
    with replaced_by_a_folder(store.path(names[1]) / "adapter_model.safetensors"):  # its disk is away for a while
        for _ in range(3):
            look()
        assert drafts.adapter == names[0]
    assert caplog.text.count("cannot be read (Is a directory)") == 1
    look()
    assert drafts.adapter == names[1]

    def burst(changed: frozenset[str]) -> None:
        engine.adapter.listeners.remove(burst)  # type: ignore[attr-defined]
        raise MemoryError("no room")

    store.promote(names[0], "by hand")
    engine.adapter.listeners.append(burst)  # type: ignore[attr-defined]
    look()
    assert drafts.adapter is None
    look()
    assert drafts.adapter == names[0]


def told(server: Server) -> int:
    """How often a server said that its adapter stays; its lines are as wide as a terminal."""
    return len(re.findall(r"stays\s+in\s+use", server.said))


@pytest.mark.thorough
def test_a_server_with_an_adapter_survives_more_connections_than_it_has_file_descriptors(tmp_path: Path) -> None:
    home = tmp_path / "home"
    server = Server(home, "--distill", "off").wait_until_ready()
    try:
        store = AdapterStore(next(home.glob("*/records.db")).parent / "adapters")
        name = promoted(store, tmp_path / "adapter")
        with server.http() as http:
            until(lambda: http.get("/props").json()["adapter"] == name, server)
            process = server.process.pid
            used = max(map(int, os.listdir(f"/proc/{process}/fd")))
            most = resource.prlimit(process, resource.RLIMIT_NOFILE)[1]
            resource.prlimit(process, resource.RLIMIT_NOFILE, (used + 10, most))
            place = httpx.URL(server.url)
            flood = [socket.create_connection((place.host, place.port)) for _ in range(50)]
            until(lambda: told(server) > 0, server)
            time.sleep(4 * swapper.LOOK_S)
            for one in flood:
                one.close()
            until(lambda: http.get("/health").status_code == 200, server)
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200  # on another connection
            assert ask(http, "What is 2 + 3?")["adapter"] == store.current_id() == name
            assert told(server) == 1
    finally:
        server.stop()


def test_without_file_descriptors_the_load_of_other_programs_is_read_later() -> None:
    """It is looked at in every answer, which must not fail for it."""
    meter = LoadMeter()
    watch = LoadWatch(meter)
    time.sleep(1.5 * LEAST_S)
    with short_of_files(0):
        assert not watch.look()
    assert watch.look()


@pytest.mark.thorough
def test_an_answer_whose_hidden_states_cannot_be_copied_is_logged_without_them(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = load_settings({"target": str(BUNDLED / "target"), "dtype": "float32", "history": "off"})
    copy = torch.Tensor.cpu
    with open_pair(settings, Console(file=io.StringIO())) as session:
        width = session.pair.target.feature_width

        def full(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape[1:] == (width,):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return copy(tensor)

        greedy, few = SamplingParams(temperature=0.0), StopParams(4, ignore_eos=True)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "cpu", full)
            assert len(list(session.assistant.complete("Once upon a time", greedy, few))) == 4
        assert len(list(session.assistant.complete("Once upon a time", greedy, few))) == 4
        assert session.assistant.log is not None
        assert session.assistant.log.flush()
        with Log(session.state.records) as log:
            _, second = [entry.id for entry in log.generations()]
        assert FeatureSpool(session.state.features, 0).ids() == [second]
    assert "an answer is logged without its hidden states, which could not be copied: CUDA out of memory" in caplog.text
