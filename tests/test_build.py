"""What ``setup.py`` asks of the compiler and the linker on each system."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

setuptools = pytest.importorskip("setuptools")

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("linux", "-Wl,--version-script=adaptive/engines/cpu/native/exports.map"),
        ("darwin", "-Wl,-exported_symbol,_PyInit_{name}"),
        ("freebsd14", None),
    ],
)
def test_a_linker_is_given_only_options_that_it_knows(
    system: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option that it does not know would leave out the module without an error."""
    asked: dict[str, Any] = {}
    monkeypatch.chdir(ROOT)
    # Only a build has it.
    monkeypatch.setitem(sys.modules, "nanobind", SimpleNamespace(include_dir=lambda: "nanobind/include"))
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr(setuptools, "setup", lambda **given: asked.update(given))
    runpy.run_path("setup.py")
    assert len(asked["ext_modules"]) > 1
    for module in asked["ext_modules"]:
        name = module.name.rpartition(".")[2]
        assert module.extra_link_args == ([] if expected is None else [expected.format(name=name)])
