"""The commands that messages recommend install this project, from whatever source, into the current environment."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from adaptive.installation import DISTRIBUTION, install_command, version

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment in a folder with a space in its name, with this project installed from a wheel without kernels."""
    pytest.importorskip("setuptools", minversion="77", reason="pyproject.toml is built by setuptools 77 or later")
    folder = tmp_path_factory.mktemp("of its own")
    copy = folder / "source"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".*", "setup.py", "*.so", "build", "tests", "docs", "*.egg-info")
    )
    pip = (sys.executable, "-m", "pip", "-q")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(copy))
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=True)
    run(*pip, "--python", str(folder / "env"), "install", "--no-deps", str(wheel))
    return folder / "env"


def said(environment: Path, arguments: str) -> str:
    code = f"from adaptive.installation import install_command; print(install_command({arguments}))"
    return run(str(environment / "bin" / "python"), "-I", "-c", code)


def test_a_checkout_is_installed_in_place() -> None:
    command = shlex.split(install_command(extra="llamacpp"))
    assert command[-2:] == ["-e", f"{ROOT}[llamacpp]"]
    assert version() != "0"


def test_the_command_for_a_wheel_works_in_its_environment(environment: Path) -> None:
    command = shlex.split(said(environment, "extra='llamacpp'"))
    assert command[:4] == [str(environment / "bin" / "python"), "-m", "pip", "install"]
    assert command[-1].endswith(".whl[llamacpp]")
    run(*command, "--dry-run", "--no-deps", "--no-index")
    assert said(environment, "'gguf>=0.17'").endswith("-m pip install 'gguf>=0.17'")


@pytest.mark.parametrize(
    ("marker", "with_extra", "beside"),
    [
        ("pipx_metadata.json", "pipx install --force ", f"pipx inject {DISTRIBUTION} gguf"),
        ("uv-receipt.toml", "uv tool install --force ", "--with gguf"),
    ],
)
def test_tools_that_have_an_environment_of_their_own_are_told_by_it(
    environment: Path, marker: str, with_extra: str, beside: str
) -> None:
    file = environment / marker
    file.touch()
    try:
        assert said(environment, "extra='llamacpp'").startswith(with_extra)
        assert said(environment, "'gguf'").endswith(beside)
    finally:
        file.unlink()


def test_a_wheel_with_nothing_compiled_is_not_installed_again(environment: Path) -> None:
    advice = run(
        str(environment / "bin" / "python"), "-I", "-c",
        "from adaptive.installation import build_advice; print(build_advice())",
    )  # fmt: skip
    assert ".whl" in advice
    assert "pip install" not in advice


def test_from_the_index_it_has_a_name_of_its_own(environment: Path) -> None:
    (direct,) = environment.glob("lib/python*/site-packages/*.dist-info/direct_url.json")
    moved = direct.rename(direct.with_suffix(".moved"))
    try:
        assert said(environment, "extra='llamacpp'").endswith(f"pip install '{DISTRIBUTION}[llamacpp]'")
    finally:
        moved.rename(direct)
    assert DISTRIBUTION != "adaptive"
