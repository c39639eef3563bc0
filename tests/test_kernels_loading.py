"""Compiled kernels are found wherever they are installed, and refused if they were built from other sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from adaptive.engines.cpu import kernels
from adaptive.engines.cpu.kernels import built, runnable

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(kernels.library() is None, reason="the kernels are not built, or not for this machine")

SAY = """
import torch
from adaptive.engines.cpu import kernels
found = kernels.library()
print("problem:", kernels.problem())
print("library:", found and found.name)
if found:
    print("same:", torch.allclose(kernels.NativeLinear(torch.eye(40))(torch.eye(40)), torch.eye(40)))
"""


def copy_of(folder: Path) -> Path:
    """The package with its kernels, as in an editable installation."""
    shutil.copytree(ROOT / "adaptive", folder / "adaptive", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pyproject.toml").touch()
    return folder


def said(*path: Path) -> str:
    """The reported state of the kernels, where packages in ``path`` take precedence over installed ones."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run([sys.executable, "-c", SAY], env=env, cwd=path[0], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.thorough
def test_an_odd_path_is_one_like_any_other(tmp_path: Path) -> None:
    """The package lies under a name with spaces and other special characters."""
    odd = tmp_path / "my env (2), ünd 'more'"
    copy_of(odd)
    assert said(odd) == f"problem: None\nlibrary: {runnable()[0]}\nsame: True\n"


@pytest.mark.thorough
def test_kernels_of_other_sources_are_refused_and_what_rebuilds_them_is_said(tmp_path: Path) -> None:
    """As after ``git pull`` in an editable installation, which leaves the old compiled kernels in place."""
    folder = copy_of(tmp_path / "checkout")
    assert said(folder).startswith("problem: None\n")
    with (folder / "adaptive" / "engines" / "cpu" / "native" / "decoder.h").open("a") as header:
        header.write("// changed\n")
    problem, found, *computed = said(folder).splitlines()
    assert "another version of this program" in problem
    assert f"pip install -e {folder}" in problem
    assert found == "library: None"
    assert not computed


@pytest.mark.thorough
def test_a_library_that_cannot_be_loaded_is_told_from_one_that_was_not_built(tmp_path: Path) -> None:
    folder = copy_of(tmp_path / "checkout")
    native = folder / "adaptive" / "engines" / "cpu" / "native"
    for file in native.glob("*.so"):
        file.write_bytes(b"no library")
    assert "cannot be loaded" in said(folder).splitlines()[0]
    for file in native.glob("*.so"):
        file.unlink()
    assert "C++ compiler" in said(folder).splitlines()[0]


@pytest.mark.parametrize("name", runnable())
def test_a_library_exports_nothing_but_its_module(name: str) -> None:
    """Other exported names could be confused with, or replaced by, those of another library."""
    file = built(name)
    if file is None:
        pytest.skip("was not built: the compiler does not know these instructions")
    listed = subprocess.run(["nm", "-D", "--defined-only", file], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in listed.splitlines()] == [f"PyInit_{name}"]


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [[], ["-march=armv8.2-a+dotprod"]], ids=["neon", "neondot"])
def test_the_kernels_compile_for_arm(flags: list[str], tmp_path: Path) -> None:
    """``scripts/emulated_arm.sh`` runs them, too."""
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("there is no compiler for ARM on this machine")
    everything = tmp_path / "everything.cpp"
    everything.write_text('#include "draft.h"\n#include "verify.h"\n', encoding="utf-8")
    subprocess.run(
        [compiler, "-std=c++17", "-fsyntax-only", "-Wall", *flags, f"-I{kernels.NATIVE}", everything], check=True
    )
