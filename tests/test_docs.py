"""What the documentation says of commands, settings and versions is what the program has."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_what_is_required_runs_on_the_oldest_python_that_is_named() -> None:
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert f"need Python {oldest} or later" in README
    wanted = [Requirement(one) for one in PROJECT["dependencies"]]
    needs = {one.name: metadata(one.name)["Requires-Python"] or "" for one in wanted}
    assert [name for name, python in needs.items() if not SpecifierSet(python).contains(oldest)] == []


def test_the_pinned_versions_are_among_those_that_are_required() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", "\n".join(lines), re.MULTILINE))
    assert len(pinned) == sum(not line.startswith("#") for line in lines)
    extras = PROJECT["optional-dependencies"].values()
    wanted = [Requirement(one) for named in (PROJECT["dependencies"], *extras) for one in named]
    assert [one.name for one in wanted if not one.specifier.contains(pinned[one.name])] == []
