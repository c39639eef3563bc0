"""Groups of commands: without a command they print their help and exit with 0."""

from __future__ import annotations

from typing import Any

import typer


def group(text: str, **options: Any) -> typer.Typer:
    """A group with this help text, printed if no command is given. ``options`` are those of ``typer.Typer``."""
    app = typer.Typer(help=text, invoke_without_command=True, rich_markup_mode="rich", **options)

    @app.callback()
    def alone(context: typer.Context) -> None:
        print_help_if_alone(context)

    alone.__doc__ = text
    return app


def print_help_if_alone(context: typer.Context) -> None:
    """Print a group's help if none of its commands was named."""
    if context.invoked_subcommand is None:
        said = context.get_help()
        if said:
            typer.echo(said)
