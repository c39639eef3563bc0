"""``adaptive --help`` answers at once, and every command's help shows a command line that exists."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.main import app

# Packages that are slow to import, so they are imported only when a command runs. (Typer itself imports pydantic.)
HEAVY = (
    "torch",
    "transformers",
    "peft",
    "datasets",
    "accelerate",
    "bitsandbytes",
    "numpy",
    "pandas",
    "pyarrow",
    "scipy",
    "pydantic_settings",
    "plotext",
    "safetensors",
    "fastapi",
    "prompt_toolkit",
    "huggingface_hub",
)


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every leaf command of the tree, with its path."""
    command = command or typer.main.get_command(app)
    for name, child in getattr(command, "commands", {}).items():
        if hasattr(child, "commands"):
            yield from commands(child, (*path, name))
        else:
            yield (*path, name), child


ALL = {" ".join(path): command for path, command in commands()}
# The groups of commands, which have a help of their own.
GROUPS = sorted({name.split()[0] for name in ALL if " " in name})


@pytest.mark.parametrize("words", ["--help", "adapters --help", "doctor --help", "adapters list --help"])
def test_help_loads_nothing_heavy(words: str) -> None:
    printed = loading(HEAVY, *words.split())
    assert any("Usage" in line for line in printed)
    assert printed[-1] == "LOADED []"


@pytest.mark.parametrize("words", ["packed list", "adapters list", "records stats", "history"])
def test_a_list_of_what_is_on_disk_loads_no_library_of_models(tmp_path: Path, words: str) -> None:
    assert loading(("torch", "transformers", "peft"), *words.split(), "--state-dir", str(tmp_path))[-1] == "LOADED []"


def loading(libraries: tuple[str, ...], *words: str) -> list[str]:
    """The lines that a command prints; the last one says which of the ``libraries`` it has loaded."""
    script = f"""
import sys
from cli.main import run
sys.argv = ["adaptive", *{words!r}]
try:
    run()
except SystemExit as end:
    assert end.code in (None, 0, 2), end.code  # 2: there is nothing to list
print("LOADED", [name for name in {libraries!r} if name in sys.modules])
"""
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.parametrize("name", ALL)
def test_help_has_an_example_that_can_be_typed(name: str) -> None:
    command = ALL[name]
    examples = [line.strip() for line in command.help.splitlines() if line.strip().startswith("Example: ")]
    assert examples, f"the help of `adaptive {name}` has no line `Example: adaptive {name} ...`"
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for example in examples:
        words = shlex.split(example.removeprefix("Example: "))
        words = words[words.index("adaptive") :]  # a launcher may precede it
        assert words[: 1 + len(name.split())] == ["adaptive", *name.split()], example
        for word in words[: words.index("--") if "--" in words else None]:
            assert not word.startswith("--") or word.partition("=")[0] in options, f"{word} in {example!r}"


@pytest.mark.parametrize("name", GROUPS)
def test_help_of_a_group_has_an_example_of_its_commands(name: str) -> None:
    text = typer.main.get_command(app).commands[name].help  # type: ignore[attr-defined]
    examples = [line.strip().removeprefix("Example: ") for line in text.splitlines() if "Example: " in line]
    assert examples, f"the help of `adaptive {name}` has no line `Example: adaptive {name} ...`"
    assert all(" ".join(example.split()[1:3]) in ALL for example in examples)


def test_a_flag_is_shown_without_a_type_and_h_asks_for_help() -> None:
    command = [sys.executable, "-m", "cli.main", "history", "-h"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"})
    lines = [" ".join(line.strip("│ ").split()) for line in done.stdout.splitlines()]
    assert "--json Print everything as one JSON object." in lines
    assert "--help -h Show this message and exit." in lines


def test_every_option_says_what_it_does() -> None:
    silent = [(name, p.name) for name, command in ALL.items() for p in command.params if not getattr(p, "help", None)]
    assert silent == []
