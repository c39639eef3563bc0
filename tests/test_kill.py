"""kill -9 while the assistant generates: every answer shown as done is in the log, and the next run works."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
from conftest import save_random_pair
from forked import start

from adaptive.records.log import Log


def generate(models: tuple[Path, Path], file: Path) -> list[str]:
    """The command that answers every prompt of the file."""
    return [
        "generate", "--target", str(models[0]), "--draft", str(models[1]),
        "--prompts", str(file), "--json", "--max-new-tokens", "24", "--draft-length", "2", "--dtype", "float32",
    ]  # fmt: skip


def kill_at_a_random_moment(command: list[str], out: Path, rng: random.Random) -> list[dict[str, object]]:
    """Start the command, let it print at least one answer, kill it. Returns the complete answers that it printed."""
    with out.open("wb") as stream:
        process = start(*command, stdout=stream)
        deadline = time.monotonic() + 120
        while out.read_bytes().count(b"\n") < 1:
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < deadline, "it never answered"
            time.sleep(0.005)
        time.sleep(rng.random() * 0.5)
        assert process.poll() is None, "it ended before it was killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]


def kill_repeatedly(times: int, tmp_path: Path, home: Path) -> None:
    models = save_random_pair(tmp_path / "pair", "qwen2")
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"Question {i}"}) for i in range(2000)), encoding="utf-8")
    shown: list[dict[str, object]] = []
    for turn in range(times):
        shown += kill_at_a_random_moment(generate(models, file), tmp_path / f"out{turn}", random.Random(turn))
        (records,) = home.rglob("records.db")
        logged = [entry.generation for entry in Log(records).generations()]
        assert len(logged) >= len(shown)
        in_log = {(g.messages[-1].content, tuple(g.output.tolist())) for g in logged}
        for answer in shown:
            assert (answer["prompt"], tuple(answer["tokens"])) in in_log  # type: ignore[arg-type]
        for g in logged:
            assert len(g.output) == g.timings.predicted_n
            assert g.supervision is not None
            assert len(g.supervision.ids) == len(g.output)
        print(f"kill {turn + 1}: {len(shown)} answers shown so far, {len(logged)} in the log, log whole")


@pytest.mark.thorough
def test_a_kill_during_generation_loses_nothing_shown(tmp_path: Path, own_home: Path) -> None:
    kill_repeatedly(3, tmp_path, own_home)


@pytest.mark.long
def test_twenty_kills_during_generation_lose_nothing_shown(tmp_path: Path, own_home: Path) -> None:
    kill_repeatedly(20, tmp_path, own_home)
