"""A flipped byte in a promoted adapter: the next start reports it in one line and uses the last intact adapter."""

from __future__ import annotations

import io
from pathlib import Path

from conftest import save_random_adapter, save_random_pair
from rich.console import Console

from adaptive.settings import load_settings
from checkpoints.manifest import TrainedOn
from checkpoints.store import AdapterStore, NewAdapter
from cli.opened import open_pair


def publish_two(store: AdapterStore, draft: Path, base: object, tmp_path: Path) -> None:
    import shutil

    for seed in (1, 2):
        source = save_random_adapter(draft, tmp_path / f"adapter{seed}", seed)

        def write(folder: Path, source: Path = source) -> None:
            for name in ("adapter_model.safetensors", "adapter_config.json"):
                shutil.copy(source / name, folder / name)

        manifest = store.publish(
            write,
            NewAdapter(
                parent=store.current_id(),
                base=base,  # type: ignore[arg-type]
                trained_on=TrainedOn(1, 2, 2, 20),
                hyperparameters={},
                train_seconds=1.0,
                device="cpu",
                recent=None,
                older=None,
                reason="made by the test",
            ),
        )
        store.promote(manifest.id, "made by the test")


def test_a_damaged_adapter_is_said_and_the_last_good_one_used(tmp_path: Path, own_home: Path) -> None:
    target, draft = save_random_pair(tmp_path / "pair", "qwen2")
    settings = load_settings({"target": str(target), "draft": str(draft), "dtype": "float32"})
    with open_pair(settings, Console(file=io.StringIO())) as session:
        publish_two(session.store, draft, session.pair.identity.base, tmp_path)
        assert session.swapper.use_promoted()
        assert session.assistant.adapter == "0002"
        weights = session.store.path("0002") / "adapter_model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    weights.write_bytes(damaged)
    said = io.StringIO()
    with open_pair(settings, Console(file=said, width=400)) as session:
        assert session.assistant.adapter == "0001"
    lines = [line for line in said.getvalue().splitlines() if line.startswith("adapter:")]
    assert len(lines) == 1
    assert "0002" in lines[0]
    assert "0001" in lines[0]


def test_a_promotion_is_picked_up_between_two_turns(tmp_path: Path, own_home: Path) -> None:
    target, draft = save_random_pair(tmp_path / "pair", "qwen2")
    settings = load_settings({"target": str(target), "draft": str(draft), "dtype": "float32"})
    console = Console(file=io.StringIO())
    with open_pair(settings, console) as session:
        assert session.assistant.adapter is None
        publish_two(AdapterStore(session.state.adapters), draft, session.pair.identity.base, tmp_path)
        assert session.swapper.use_promoted()
        assert session.assistant.adapter == "0002"
        assert not session.swapper.use_promoted()
        session.store.rollback("the test says so")
        assert session.swapper.use_promoted()
        assert session.assistant.adapter == "0001"


def test_a_current_that_cannot_be_read_is_mended_at_the_start(tmp_path: Path, own_home: Path) -> None:
    target, draft = save_random_pair(tmp_path / "pair", "qwen2")
    settings = load_settings({"target": str(target), "draft": str(draft), "dtype": "float32"})
    with open_pair(settings, Console(file=io.StringIO())) as session:
        publish_two(session.store, draft, session.pair.identity.base, tmp_path)
        root = session.store.root
    (root / "CURRENT").write_text("")
    said = io.StringIO()
    with open_pair(settings, Console(file=said, width=400)) as session:
        assert session.assistant.adapter == "0002"
    assert "CURRENT named no adapter" in said.getvalue()
