"""How this program was installed, and the commands that install extras or other packages beside it.

``adaptive`` is another project on the public index; this one is DISTRIBUTION there. Messages take install commands from
here, so that they work in this installation: a checkout, a wheel, or pipx's or uv's own environment.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from checkpoints.errors import AdaptiveError

DISTRIBUTION = "adaptive-speculation"


def version() -> str:
    """The installed version; 0 for a checkout that was never installed."""
    found = _found()
    return "0" if found is None else found.version


def requirements() -> list[str] | None:
    """The requirements of the installed version, in pip's notation; None if it is not installed."""
    found = _found()
    return None if found is None else list(found.requires or [])


def requirement(name: str) -> str:
    """A required package, also of an extra, with its version constraints; the bare name if it is not required."""
    from packaging.requirements import Requirement

    asked = map(Requirement, requirements() or ())
    return next((f"{one.name}{one.specifier}" for one in asked if one.name == name), name)


def install_command(*packages: str, extra: str | None = None, again: bool = False) -> str:
    """The command that installs ``packages`` beside this program, or the program with an ``extra``. Without arguments
    it installs the program itself.

    ``again``: reinstall what is there already, fetched and compiled anew, since pip would reuse what it compiled
    before.
    """
    kind, editable, spec = _source(extra)
    in_place = "--editable " * editable
    if packages:
        beside = " ".join(shlex.quote(package) for package in packages)
        if kind == "pipx":
            return f"pipx inject {'--force --pip-args=--no-cache-dir ' * again}{DISTRIBUTION} {beside}"
        if kind == "uv tool":
            together = shlex.quote(",".join(packages))
            return f"uv tool install --force {'--reinstall ' * again}{in_place}{spec} --with {together}"
        return f"{_pip(kind)} {'--force-reinstall --no-cache-dir ' * again}{beside}"
    if kind == "pipx":
        return f"pipx install --force {'--pip-args=--no-cache-dir ' * again}{in_place}{spec}"
    if kind == "uv tool":
        return f"uv tool install --force {'--reinstall ' * again}{in_place}{spec}"
    if editable:  # always built anew
        return f"{_pip(kind)} -e {spec}"
    return f"{_pip(kind)} {'--force-reinstall --no-cache-dir --no-deps ' * again}{spec}"


def build_advice() -> str:
    """How to get the compiled parts of an installation that was built without a C++ compiler."""
    wheel = Path(unquote(urlsplit(_url()).path)).name
    if wheel.endswith(".whl"):  # reinstalling the same wheel would change nothing
        return f"there is nothing compiled in {wheel}: install one with it, or from the sources with a C++ compiler"
    kinds = "`xcode-select --install`" if sys.platform == "darwin" else "g++ or clang++"
    return f"install one ({kinds}), then {install_command(again=True)}"


def check_system() -> None:
    """Raise AdaptiveError on Windows, on which nothing here has been run."""
    if sys.platform == "win32":
        raise AdaptiveError(
            "this program runs on Linux and macOS, not on Windows itself; install it in WSL, the Windows Subsystem for "
            "Linux (`wsl --install`)"
        )


def _url() -> str:
    """The URL that pip installed from; empty for an index."""
    return str(_direct().get("url", ""))


def _direct() -> dict[str, Any]:
    found = _found()
    said: dict[str, Any] = json.loads(found.read_text("direct_url.json") or "{}") if found is not None else {}
    return said


def _found() -> Distribution | None:
    try:
        return distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def _source(extra: str | None) -> tuple[str, bool, str]:
    """The installer (pip, uv, pipx, uv tool), whether a checkout is used in place, and the requirement to install."""
    prefix, found = Path(sys.prefix), _found()
    kind = "uv" if found is not None and (found.read_text("INSTALLER") or "").strip() == "uv" else "pip"
    if (prefix / "uv-receipt.toml").is_file():
        kind = "uv tool"
    elif (prefix / "pipx_metadata.json").is_file():
        kind = "pipx"
    asked = f"[{extra}]" if extra else ""
    root = Path(__file__).resolve().parent.parent
    if (root / "pyproject.toml").is_file():  # a checkout used in place
        return kind, True, shlex.quote(f"{root}{asked}")
    said, url = _direct(), urlsplit(_url())
    if "vcs_info" in said:
        revision = said["vcs_info"].get("requested_revision")
        commit = f"{said['vcs_info']['vcs']}+{said['url']}{f'@{revision}' if revision else ''}"
        return kind, False, shlex.quote(f"{DISTRIBUTION}{asked} @ {commit}")
    if url.scheme == "file":
        return kind, False, shlex.quote(f"{unquote(url.path)}{asked}")
    return kind, False, shlex.quote(f"{DISTRIBUTION}{asked}") if asked else DISTRIBUTION


def _pip(kind: str) -> str:
    """The pip command of this environment."""
    python = os.path.abspath(sys.executable)
    if kind == "uv":
        return f"uv pip install --python {shlex.quote(python)}"
    found = shutil.which("pip")
    if found is not None and Path(found).parent == Path(python).parent:
        return "pip install"
    return f"{shlex.quote(python)} -m pip install"
