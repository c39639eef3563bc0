"""``adaptive config show``: every setting, its value, and its source."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer

from cli.groups import group
from cli.output import print_json

app = group("Show every setting, and where its value came from.\n\nExample: adaptive config show")


@app.command()
def show(
    config: Annotated[Optional[Path], typer.Option(help="Settings file, instead of adaptive.toml.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Every setting with its value and its source: the environment, a settings file, or the default.

    A flag of a command wins over all of them, and is not seen here.

    Example: adaptive config show

    Example: adaptive config show --config server.toml
    """
    from adaptive.settings import settings_from
    from adaptive.settings_file import config_files

    # The values are only shown, not used, so a doubtful file needs no confirmation.
    files = config_files(config)
    values = settings_from({}, files).model_dump(mode="json")
    sources = _sources(list(values), files, trusted=config is not None)
    if as_json:
        found = {name: {"value": value, "source": sources[name]} for name, value in values.items()}
        print_json(found, indent=2)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from adaptive.printable import printable_line

    table = Table(box=None, pad_edge=False)
    for head in ("setting", "value", "from"):
        table.add_column(head, overflow="fold")
    for name, value in values.items():
        given = sources[name] != "default"
        said = "not set" if value is None else json.dumps(value) if isinstance(value, bool) else str(value)
        # They may be those of somebody else's file.
        shown = (escape(printable_line(text)) for text in (said, sources[name]))
        table.add_row(name, *shown, style=None if given else "dim")
    Console(highlight=False).print(table)


def _sources(names: list[str], files: Sequence[Path], trusted: bool) -> dict[str, str]:
    """The source of each setting, by the precedence of ``load_settings``. For files that are not ``trusted`` as a
    whole, settings that need a confirmation are marked."""
    from adaptive.settings import set_in_environment, written_in
    from adaptive.settings_file import doubtful

    environment = set_in_environment()
    found = dict.fromkeys(names, "default")
    for file in files:
        written = written_in(file)
        asked = {} if trusted else doubtful(file, written, environment)
        found |= {name: f"{file} (asked about before it is used)" if name in asked else str(file) for name in written}
    return found | {name: f"ADAPTIVE_{name.upper()}" for name in environment}
