"""Groups of commands: without a command they print their help and exit with 0. And how a command's help looks."""

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


def leave_out_types_of_flags(command: Any, parent: typer.Context | None = None) -> None:
    """Have the help of a command, or of a group's commands, show nothing after a flag. Typer shows ``<bool>``, as if it
    took a value."""
    context = typer.Context(command, parent=parent, **command.context_settings)
    for option in command.get_params(context):
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for child in getattr(command, "commands", {}).values():
        leave_out_types_of_flags(child, context)
