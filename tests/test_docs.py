"""What the documentation says of commands, settings, JSON and versions is what the program has."""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from test_cli_help import ALL, GROUPS

from adaptive.promotions import Promotion
from adaptive.records.check import Findings, Repairs
from adaptive.records.history import Figures, History, Point, Swap
from adaptive.records.log import LogStats
from adaptive.records.merge import Merged
from adaptive.records.saved import Saved
from adaptive.records.stats import PositionAcceptance, SpeculativeStats
from adaptive.records.writer import WriterState
from adaptive.service.storage import Storage
from adaptive.service.trainer_status import TrainerStatus
from adaptive.settings import Settings
from adaptive.state import PairState
from adaptive.upstream.lengths import Advice
from checkpoints.manifest import HeldOut, Manifest
from cli.contenders import Row
from cli.distill_outcome import as_object
from cli.finding import Finding
from trainers.run import DistillOutcome

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README, SCRIPTS, SERVICE, SETTINGS = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/scripts.md", "docs/service.md", "docs/settings.md")
)
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


def typed(page: Path) -> list[str]:
    """The command lines of `adaptive` on a page: the lines of its code blocks, and what stands between backticks."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^ *```.*?\n(.*?)```", text, re.MULTILINE | re.DOTALL))
    rest = re.sub(r"^ *```.*?```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^(?:.*[|/] ?)?(adaptive .*)", blocks, re.MULTILINE) + re.findall(r"`(adaptive [^`]+)`", rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_on_a_page_exists_with_these_options(page: Path) -> None:
    for line in typed(page):
        words = shlex.split(line.replace("\\|", "|"), comments=True)[1:]
        if words[0].startswith(("-", ".")):  # --version, or any command
            continue
        name = next((name for name in (" ".join(words[:2]), words[0]) if name in ALL), None)
        assert name or words[0] in GROUPS, line
        if name is not None:
            known = {option for one in ALL[name].params for option in (*one.opts, *one.secondary_opts)}
            given = words[: words.index("--")] if "--" in words else words
            assert {word.partition("=")[0] for word in given if word.startswith("--")} <= {*known, "--help"}, line


def rows(page: str) -> dict[str, str]:
    """The rows of the tables of a page, by each name between backticks in the first column."""
    found = {}
    for first, rest in re.findall(r"^\| (`[^|]*?) \| (.*)\|$", page.replace("\\|", "/"), re.MULTILINE):
        found.update(dict.fromkeys(re.findall(r"`([^`]+)`", first), rest))
    return found


def in_words(default: Any) -> str:
    """A setting's default as the tables write it; empty for one that is not set."""
    if default is None or isinstance(default, bool):
        return "" if default is None else "on" if default else "off"
    return f"{default:g}" if isinstance(default, int | float) else str(default or "none")


def test_every_setting_is_documented_with_its_default() -> None:
    known = {**rows(SERVICE), **rows(SETTINGS)}
    assert [name for name in Settings.model_fields if name not in known] == []
    for name, field in Settings.model_fields.items():
        assert in_words(field.default) in known[name], name


def test_every_file_of_a_pair_is_documented() -> None:
    parts = [name for name, part in vars(PairState).items() if isinstance(part, property)]
    files = {getattr(PairState(ROOT), name).name for name in parts}
    assert files <= rows(SETTINGS).keys()


def keys(cell: str) -> set[str]:
    """The names between backticks."""
    return set(re.findall(r"`(\w+)`", cell))


def fields(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_the_keys_of_json_are_documented() -> None:
    known = rows(SCRIPTS)
    by_command = {
        "records stats": fields(LogStats) | {"pair", "path"},
        "records import": fields(Merged) | {"pair"},
        "records check": fields(Findings) | fields(Repairs) | {"path", "repaired"},
        "bench": fields(Row) | {"adapter", "prompts", "tokens", "rows", "advice"},
        "publish": fields(Advice) | {"expected", "expected_acceptance", "before", "after", "rolled_back"},
        "doctor": fields(Finding) | {"ok", "findings"},
        "series": fields(Point),
        "swaps": fields(Swap),
        "positions": fields(PositionAcceptance) | {"acceptance", "rounds"},
        "saved": fields(Saved),
        "promotions": fields(Promotion),
        "speculative_decoding": fields(SpeculativeStats),
    }
    missing = {name: wanted - keys(known[name]) for name, wanted in by_command.items()}
    assert {name: some for name, some in missing.items() if some} == {}
    assert distilled() | fields(History) <= known.keys()
    for begins, kind in {
        "Figures are": Figures,
        "**`manifest.json`**": Manifest,
        "`generations` (prompts;": HeldOut,
    }.items():
        text = SCRIPTS[SCRIPTS.index(begins) :].partition("\n\n")[0]
        assert fields(kind) - {"speculation"} <= keys(text), begins


def distilled() -> set[str]:
    """The keys of ``adaptive distill --json``."""
    return {*as_object(DistillOutcome(None, None, "", True, 0, 0, 0, 0, 0, 0.0, 0.0))}


def test_the_state_of_the_server_is_documented() -> None:
    known = rows(SERVICE)
    for path, kind in (("/health", WriterState), ("/adaptive/trainer", TrainerStatus), ("/adaptive/storage", Storage)):
        assert fields(kind) <= keys(known[path]), path
