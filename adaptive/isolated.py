"""Starts one of our modules as a separate process that imports nothing from the current folder.

``python -m trainers.worker`` looks for ``trainers`` in the current folder first, so a folder of that name would be run
instead. Here Python starts in isolated mode with this very file as its script, and takes the list of import folders as
its argument: isolated mode alone would lose packages that were installed for one user, and those that PYTHONPATH names.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

# The folder that contains ``adaptive`` and its sister packages: installed packages, or a checkout.
ROOT = Path(__file__).resolve().parent.parent


def command(module: str) -> list[str]:
    """The command that runs ``module`` (by its full name) with this process's imports, except the current folder's."""
    return [sys.executable, "-I", str(Path(__file__).resolve()), module, json.dumps(import_path())]


def import_path() -> list[str]:
    """``sys.path`` as absolute folders, without the current one, and with ROOT first if it is not among them."""
    here = os.path.realpath(os.curdir)
    known = [os.path.abspath(entry) for entry in sys.path if entry]
    path = [entry for entry in known if os.path.realpath(entry) != here or entry == str(ROOT)]
    return path if str(ROOT) in path else [str(ROOT), *path]


if __name__ == "__main__":
    _, started, path = sys.argv
    sys.path[:] = json.loads(path)
    sys.argv[1:] = []
    runpy.run_module(started, run_name="__main__", alter_sys=True)
