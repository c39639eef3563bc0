"""Our own processes run our own modules, wherever the server is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from test_worker import Taught, taught, training, until, worker_of

__all__ = ["taught"]  # a fixture


@pytest.mark.thorough
def test_a_folder_named_like_ours_where_the_server_is_started_is_not_run(
    taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    for package in ("trainers", "adaptive", "json"):
        (elsewhere / package).mkdir(parents=True)
        (elsewhere / package / "__init__.py").write_text("raise SystemExit('somebody else was run')")
    monkeypatch.chdir(elsewhere)
    monkeypatch.syspath_prepend("")  # as `python -m` does for the server itself
    with training(taught) as trainer:
        trainer.idle()
        worker = psutil.Process(worker_of(trainer))
        assert worker.cmdline()[1] == "-I"
        until(lambda: trainer.status.acceptance is not None, trainer)


def test_what_pythonpath_names_is_found_by_a_process_in_isolated_mode(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text("import sys; print('found', sys.flags.isolated)")
    code = "import subprocess; from adaptive import isolated; subprocess.run(isolated.command('named'), check=True)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd="/", check=True
    )
    assert ran.stdout.split() == ["found", "1"]
