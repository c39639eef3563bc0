"""Every message that advises an installation is followed literally in a fresh environment, and then the failed command
works.

The environment is made as a new user would make it: from the sources by pip, on a machine without a C++ compiler. Each
test removes something, runs a command that needs it, runs the command in the error message, and runs the first command
again. Needs a package index, a C++ compiler and about twelve minutes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("install advice")]

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("adaptive", "checkpoints", "cli", "trainers", "pyproject.toml", "setup.py", "README.md", "LICENSE")
# The command within a message: from Python's path or pip's name to the end or to a remark in brackets.
COMMAND = re.compile(r"(\S*python\S* -m pip install .*?|\bpip install .*?)(?: \(|$)", re.MULTILINE)
NO_COMPILER = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}


class Fresh:
    """A new environment with ``adaptive`` installed from the sources, and a folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.env = folder, folder / "env"
        source = folder / "source"
        source.mkdir()
        leave = shutil.ignore_patterns("*.so", "__pycache__")
        for name in PACKAGES:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=leave)
            else:
                shutil.copy(ROOT / name, source)
        # The same build of torch as runs these tests, so that pip does not fetch a larger one.
        constraints = folder / "constraints.txt"
        constraints.write_text(f"torch=={torch.__version__}\n")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        path = f"{self.env / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**kept, "PATH": path, "PIP_CONSTRAINT": str(constraints), "HF_HUB_OFFLINE": "1"}
        venv.create(self.env, with_pip=True)
        self.run("pip", "install", "-q", str(source), **NO_COMPILER)

    def try_to(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        program = str(self.env / "bin" / command[0])
        done = subprocess.run(
            [program, *command[1:]], cwd=self.folder, env={**self.environment, **environment}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def run(self, *command: str, **environment: str) -> str:
        done = self.try_to(*command, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def fails(self, *command: str) -> str:
        """The line with which a command ends that fails with status 2."""
        done = self.try_to(*command)
        assert done.returncode == 2, done.stdout + done.stderr
        return done.stderr.strip().splitlines()[-1]

    def follow(self, message: str) -> None:
        """Run the command that a message contains, as a shell would."""
        found = COMMAND.search(message)
        assert found is not None, f"no command in: {message}"
        print("followed:", found[1])
        done = subprocess.run(
            found[1], shell=True, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{found[1]}\n{done.stdout}{done.stderr}"

    def remove(self, *packages: str) -> None:
        self.run("pip", "uninstall", "-q", "-y", *packages)

    def doctor(self) -> dict[str, dict[str, str]]:
        said = self.try_to("adaptive", "doctor", "--json").stdout
        return {one["name"]: one for one in json.loads(said)["findings"]}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    return Fresh(tmp_path_factory.mktemp("fresh"))


GENERATE = ("adaptive", "generate", "Hello", "--max-new-tokens", "4", "--no-record")


def test_a_compiler_and_the_command_bring_the_kernels(fresh: Fresh) -> None:
    found = fresh.doctor()["kernels"]
    if found["value"].startswith("torch's;"):
        pytest.skip("there are no kernels for this processor")
    assert found["status"] == "note"
    fresh.follow(found["advice"])
    assert fresh.doctor()["kernels"]["value"].startswith("our own, for ")


def test_quantising_without_bitsandbytes_says_how_to_get_it(fresh: Fresh) -> None:
    fresh.remove("bitsandbytes")
    fresh.follow(fresh.fails(*GENERATE, "--quantize", "nf4"))
    fresh.run(*GENERATE, "--quantize", "nf4")


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("llguidance", (*GENERATE, "--regex", "[a-z]+")),
        ("torch", GENERATE),
        ("peft", None),  # only training needs it
    ],
)
def test_a_missing_package_is_one_line_that_brings_it(
    fresh: Fresh, package: str, command: Sequence[str] | None
) -> None:
    """Both as the failing command advises and as doctor advises."""
    if command is not None:
        fresh.remove(package)
        fresh.follow(fresh.fails(*command))
        fresh.run(*command)
    fresh.remove(package)
    fresh.follow(fresh.doctor()[package]["advice"])
    assert fresh.doctor()[package]["status"] == "ok"
    if command is not None:
        fresh.run(*command)


def test_a_version_that_is_too_old_is_replaced(fresh: Fresh) -> None:
    fresh.run("pip", "install", "-q", "--no-deps", "typer==0.15.4", "platformdirs==4.1.0")
    found = fresh.doctor()["platformdirs"]
    assert found["status"] == "broken"
    fresh.follow(found["advice"])
    fresh.follow(fresh.doctor()["typer"]["advice"])
    assert {fresh.doctor()[name]["status"] for name in ("platformdirs", "typer")} == {"ok"}


def test_a_torch_that_is_damaged_is_installed_anew(fresh: Fresh) -> None:
    (library,) = fresh.env.glob("lib/python*/site-packages/torch/lib/libtorch_cpu.so")
    library.write_bytes(b"")
    fresh.follow(fresh.doctor()["torch"]["advice"])
    fresh.run(*GENERATE)


def test_writing_gguf_files_says_what_it_needs(fresh: Fresh) -> None:
    fresh.follow(fresh.fails("adaptive", "export", "gguf"))
    fresh.run("adaptive", "export", "gguf")


def test_running_gguf_files_says_what_it_needs(fresh: Fresh) -> None:
    """For an engine that is not installed and for one that does not load."""
    given = [*GENERATE, "--target", str(next((fresh.folder / "gguf").glob("*target*.gguf"))), "--draft", "none"]
    fresh.follow(fresh.fails(*given))
    fresh.run(*given)
    (library,) = fresh.env.glob("lib/python*/site-packages/llama_cpp/lib/libllama.so")
    library.write_bytes(b"")
    fresh.follow(fresh.fails(*given))
    fresh.run(*given)


def test_kernels_of_other_sources_are_built_anew(fresh: Fresh) -> None:
    for file in fresh.env.glob("lib/python*/site-packages/adaptive/engines/cpu/native/*.so"):
        file.write_bytes(b"")
    found = fresh.doctor()["kernels"]
    assert found["status"] == "note"
    fresh.follow(found["advice"])
    assert fresh.doctor()["kernels"]["value"].startswith("our own, for ")
