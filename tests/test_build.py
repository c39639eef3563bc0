"""What ``setup.py`` asks of the compiler and the linker on each system."""

from __future__ import annotations

import _osx_support
import platform
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

setuptools = pytest.importorskip("setuptools")

ROOT = Path(__file__).resolve().parent.parent


def asked_for(system: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The modules that ``setup.py`` wants compiled on this system."""
    asked: dict[str, Any] = {}
    monkeypatch.chdir(ROOT)
    # Only a build has it.
    monkeypatch.setitem(sys.modules, "nanobind", SimpleNamespace(include_dir=lambda: "nanobind/include"))
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr(setuptools, "setup", lambda **given: asked.update(given))
    runpy.run_path("setup.py")
    return list(asked["ext_modules"])


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
    modules = asked_for(system, monkeypatch)
    assert len(modules) > 1
    for module in modules:
        name = module.name.rpartition(".")[2]
        ours = ["-arch", platform.machine(), "-mmacosx-version-min=11.0"] if system == "darwin" else []
        assert module.extra_link_args == [*ours, *([] if expected is None else [expected.format(name=name)])]


def test_a_mac_compiles_for_its_own_processor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's installers for macOS compile for Intel's processors too, for which the kernels for ARM are none, and for
    systems that have no allocation of aligned memory."""
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    modules = asked_for("darwin", monkeypatch)
    assert {module.name.rpartition(".")[2] for module in modules} == {"neon", "neondot", "suffixes"}
    pythons_own = ["clang++", "-arch", "arm64", "-arch", "x86_64", "-O3"]
    for module in modules:
        for options in (module.extra_compile_args, module.extra_link_args):
            assert _osx_support.compiler_fixup([*pythons_own], ["-c", *options]) == ["clang++", "-O3"]
            assert options[options.index("-arch") + 1] == "arm64"
            assert "-mmacosx-version-min=11.0" in options
    assert not any("-arch" in module.extra_compile_args for module in asked_for("linux", monkeypatch))


def test_windows_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="WSL"):
        asked_for("win32", monkeypatch)
