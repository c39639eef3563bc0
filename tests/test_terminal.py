"""Terminal output in narrow terminals and without a terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys

import pytest
from conftest import Command
from rich.console import Console
from test_cli_help import GROUPS

from cli.adapters import _table as table_of_adapters
from cli.cells import COLUMNS, print_table
from cli.history import LEAST
from cli.history import _table as table_of_history
from cli.logs import HELD, hold_warnings, show_log

ROW = ("12345", "1234567", "1234.5", "2.34", "56.7%", "1234567", "2026-11-23")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_table_keeps_the_columns_that_matter(width: int) -> None:
    table, out = table_of_history("pair", "adapter", COLUMNS), io.StringIO()
    table.add_row("0007", *ROW)
    print_table(Console(file=out, width=width, force_terminal=True, color_system=None), table, *LEAST)
    said = out.getvalue()
    assert "…" not in said
    assert all(len(line) <= width for line in said.splitlines())
    for heading, cell in zip(COLUMNS, ROW, strict=True):
        left_out = width == 60 and heading in LEAST[:2]
        assert (cell in said) is not left_out or heading == "drafted", heading
    assert ("on a wider terminal: first" in said) is (width == 60)


def test_a_file_gets_every_column() -> None:
    table, out = table_of_history("pair", "adapter", COLUMNS), io.StringIO()
    table.add_row("0007", *ROW)
    print_table(Console(file=out, width=40), table, *LEAST)
    assert all(cell in out.getvalue() for cell in ROW)
    assert "wider" not in out.getvalue()


def test_an_empty_table_of_adapters_fits() -> None:
    out = io.StringIO()
    narrow = Console(file=out, width=40, force_terminal=True, color_system=None)
    print_table(narrow, table_of_adapters((), None), "age", "older records", "answers")
    assert "on a wider terminal: age, older records" in " ".join(out.getvalue().split())


@pytest.mark.parametrize("group", [[], *([name] for name in GROUPS)])
def test_a_group_alone_prints_its_help(group: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "cli.main", *group], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Usage:" in done.stdout
    assert not done.stderr


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("distill",), "starting"),
        (("head", "made"), "starting"),
        (("publish",), "starting"),
        (("doctor", "--target", "nowhere"), "looking at this machine"),
    ],
)
def test_what_takes_seconds_is_shown_at_once(
    command: tuple[str, ...], shown: str, adaptive: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes every stream for a terminal
    monkeypatch.setenv("TERM", "xterm")
    _, out, err = adaptive(*command)
    assert shown in err
    assert shown not in out


def test_the_version_is_the_installed_one() -> None:
    from adaptive.installation import version

    command = [sys.executable, "-m", "cli.main", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"adaptive {version()}\n"


def test_a_log_line_is_written_above_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich replaces standard error while it draws a bar, later than the log was set up."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(logging.getLogger("adaptive"), "level", logging.INFO)
    show_log()
    stands_there = io.StringIO()
    with contextlib.redirect_stderr(stands_there):
        logging.getLogger("adaptive").info("ready")
    assert stands_there.getvalue().endswith("INFO ready\n")


def test_warnings_are_held_back_until_they_are_asked_for_and_to_the_end() -> None:
    out, log = io.StringIO(), logging.getLogger("adaptive.trainer")
    with hold_warnings(Console(file=out, width=200)) as show:
        for number in range(HELD + 5):
            log.warning("run %d has\nfailed", number)
        log.info("not a warning")
        assert not out.getvalue()
        show()
        assert out.getvalue().splitlines() == [f"run {number} has␊failed" for number in range(5, HELD + 5)]
        log.warning("one more")
    assert out.getvalue().splitlines()[HELD:] == ["one more"]
    log.warning("to nobody")
    assert "to nobody" not in out.getvalue()
