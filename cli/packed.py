"""``adaptive packed``: list and delete the weights that ``--memory`` has packed for reading layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import typer

from adaptive.errors import AdaptiveError
from cli.groups import group
from cli.options import shared_options

if TYPE_CHECKING:
    from pathlib import Path

    from adaptive.settings import Settings

app = group("Packed weights of targets that are streamed (--memory): list them, delete them.")


@app.command("list")
@shared_options("home")
def list_packed(settings: Settings) -> None:
    """List packed weights and what each takes.

    Example: adaptive packed list
    """
    from cli.finding import size

    found = _folders(settings)
    if not found:
        print("there are no packed weights: a target is packed when it first runs with --memory")
    for folder in found:
        print(f"{size(sum(file.stat().st_size for file in folder.iterdir())):>10}  {folder.name}")


@app.command()
@shared_options("home")
def delete(
    settings: Settings,
    name: Annotated[Optional[str], typer.Argument(help="As `adaptive packed list` shows it.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete all of them.")] = False,
) -> None:
    """Delete packed weights. They are written again when the target next runs with --memory.

    Example: adaptive packed delete --all
    """
    from checkpoints.files import remove

    if everything == (name is not None):
        raise AdaptiveError("say which packed weights to delete: a NAME of `adaptive packed list`, or --all")
    chosen = [folder for folder in _folders(settings) if everything or folder.name == name]
    if name is not None and not chosen:
        raise AdaptiveError(f"there are no packed weights {name!r}; `adaptive packed list` shows those there are")
    for folder in chosen:
        remove(folder)
    typer.echo(f"adaptive: deleted {len(chosen)}", err=True)


def _folders(settings: Settings) -> list[Path]:
    from adaptive.engines.streamed.packed import packed_root

    root = packed_root(settings.state_dir)
    return sorted(path for path in root.iterdir() if not path.name.startswith(".")) if root.is_dir() else []
