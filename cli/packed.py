"""``adaptive packed``: list and delete the weights that ``--memory`` has packed for reading layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from adaptive.errors import AdaptiveError
from cli.groups import group
from cli.options import shared_options
from cli.output import print_json

if TYPE_CHECKING:
    from pathlib import Path

    from adaptive.settings import Settings

app = group("List and delete the packed weights that --memory has written.\n\nExample: adaptive packed list")


@app.command("list")
@shared_options("home")
def list_packed(
    settings: Settings, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """List packed weights and what each takes, unfinished ones too.

    Example: adaptive packed list
    """
    from cli.cells import size

    found: list[dict[str, Any]] = [
        {
            "name": folder.name,
            "bytes": sum(file.stat().st_size for file in folder.iterdir()),
            "unfinished": _is_unfinished(folder),
        }
        for folder in _folders(settings)
    ]
    if as_json:
        print_json(found, indent=2)
        return
    if not found:
        print("there are no packed weights: a target is packed when it first runs with --memory")
    for one in found:
        unfinished = "  (unfinished: being written, or left by a program that was killed)" if one["unfinished"] else ""
        print(f"{size(one['bytes']):>10}  {one['name']}{unfinished}")


@app.command()
@shared_options("home")
def delete(
    settings: Settings,
    name: Annotated[Optional[str], typer.Argument(help="As `adaptive packed list` shows it.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete all of them.")] = False,
) -> None:
    """Delete packed weights. They are written again when the target next runs with --memory. Unfinished ones are
    deleted unless a program is writing them.

    Example: adaptive packed delete --all
    """
    from adaptive.state import packed_root
    from checkpoints.files import remove, sweep

    if everything == (name is not None):
        raise AdaptiveError("say which packed weights to delete: a NAME of `adaptive packed list`, or --all")
    chosen = [folder for folder in _folders(settings) if everything or folder.name == name]
    if name is not None and not chosen:
        raise AdaptiveError(f"there are no packed weights {name!r}; `adaptive packed list` shows those there are")
    if any(_is_unfinished(folder) for folder in chosen):
        sweep(packed_root(settings.state_dir))
    for folder in chosen:
        if not _is_unfinished(folder):
            remove(folder)
    kept = [folder for folder in chosen if folder.exists()]
    typer.echo(f"adaptive: deleted {len(chosen) - len(kept)}", err=True)
    if kept:
        raise AdaptiveError(
            f"not deleted: {', '.join(map(str, kept))}; another program is writing there, or the system refused it"
        )


def _is_unfinished(folder: Path) -> bool:
    from checkpoints.files import UNFINISHED

    return folder.name.startswith(UNFINISHED)


def _folders(settings: Settings) -> list[Path]:
    from adaptive.state import packed_root

    root = packed_root(settings.state_dir)
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
