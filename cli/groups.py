"""Groups of commands: alone they print their help, which is no mistake."""

from __future__ import annotations

from typing import Any

import typer


def group(text: str, **options: Any) -> typer.Typer:
    """A group with this help; without a command it prints it and exits with 0. ``options`` as of ``typer.Typer``."""
    app = typer.Typer(help=text, invoke_without_command=True, rich_markup_mode="rich", **options)

    @app.callback()
    def alone(context: typer.Context) -> None:
        print_help_if_alone(context)

    alone.__doc__ = text
    return app


def print_help_if_alone(context: typer.Context) -> None:
    """Print a group's help where no command of it was named."""
    if context.invoked_subcommand is None:
        said = context.get_help()
        if said:
            typer.echo(said)
