"""``adaptive config show``: every setting, its value, and where it came from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

app = typer.Typer(
    help="See what the settings are and where each came from.\n\nExample: adaptive config show", no_args_is_help=True
)


@app.callback()
def config() -> None:
    """See what the settings are and where each came from."""


@app.command()
def show(
    config: Annotated[Optional[Path], typer.Option(help="Settings file, instead of adaptive.toml.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Every setting with its value and its source: the environment, the settings file, or the default.

    A flag of a command wins over all of them, and is not seen here.

    Example: adaptive config show

    Example: adaptive config show --config server.toml
    """
    from adaptive.settings import config_file, load_settings

    values = load_settings({}, config).model_dump(mode="json")
    sources = _sources(list(values), config_file(config))
    if as_json:
        found = {name: {"value": value, "source": sources[name]} for name, value in values.items()}
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head in ("setting", "value", "from"):
        table.add_column(head, overflow="fold")
    for name, value in values.items():
        given = sources[name] != "default"
        said = "not set" if value is None else json.dumps(value) if isinstance(value, bool) else str(value)
        table.add_row(name, said, sources[name], style=None if given else "dim")
    Console(highlight=False).print(table)


def _sources(names: list[str], file: Path | None) -> dict[str, str]:
    """Where each setting came from, by the order that ``load_settings`` follows."""
    from pydantic_settings import TomlConfigSettingsSource

    from adaptive.settings import Settings

    written: dict[str, Any] = {} if file is None else TomlConfigSettingsSource(Settings, file).toml_data
    set_here = {name.upper() for name, value in os.environ.items() if value}

    def source(name: str) -> str:
        variable = f"ADAPTIVE_{name.upper()}"
        if variable in set_here:
            return variable
        return str(file) if name in written else "default"

    return {name: source(name) for name in names}
