"""Starts a module of ours as a process of its own that imports nothing from the folder where it is started.

``python -m trainers.worker`` looks for ``trainers`` in the current folder first (before Python 3.11 nothing
turns that off for a module), so that a folder of that name would be run in its place. Here Python starts in
isolated mode with this very file as its script, and takes the list of folders to import from as its argument:
isolated mode alone would lose packages that were installed for one user, and those that PYTHONPATH names.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

# Where ``adaptive`` and its sisters lie: a folder of installed packages, or a checkout.
ROOT = Path(__file__).resolve().parent.parent


def command(module: str) -> list[str]:
    """The command that runs ``module`` (by its full name) with this process's imports, less the current folder's."""
    return [sys.executable, "-I", str(Path(__file__).resolve()), module, json.dumps(import_path())]


def import_path() -> list[str]:
    """``sys.path`` as absolute folders, without the current one, and with ours first where it is not among them."""
    here = os.path.realpath(os.curdir)
    known = [os.path.abspath(entry) for entry in sys.path if entry]
    path = [entry for entry in known if os.path.realpath(entry) != here or entry == str(ROOT)]
    return path if str(ROOT) in path else [str(ROOT), *path]


if __name__ == "__main__":
    _, started, path = sys.argv
    sys.path[:] = json.loads(path)
    sys.argv[1:] = []
    runpy.run_module(started, run_name="__main__", alter_sys=True)
