"""``adaptive serve``: the assistant behind an HTTP port; its draft is trained while no request runs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from cli.logs import show_log
from cli.options import shared_options

if TYPE_CHECKING:
    from adaptive.opened import OpenedPair
    from adaptive.settings import Settings

SERVER = "Server"


@shared_options(asks=False)
def serve(
    settings: Settings,
    name: Annotated[
        Optional[str], typer.Option(help="Model id that clients see; else the target's name.", rich_help_panel=SERVER)
    ] = None,
    host: Annotated[
        Optional[str], typer.Option(help="Address to listen on, by default 127.0.0.1.", rich_help_panel=SERVER)
    ] = None,
    port: Annotated[
        Optional[int], typer.Option(help="Port, by default 8080; 0 takes a free one.", rich_help_panel=SERVER)
    ] = None,
    api_key: Annotated[Optional[str], typer.Option(help="Key that clients must send.", rich_help_panel=SERVER)] = None,
    api_key_file: Annotated[
        Optional[Path], typer.Option(help="File with that key, safer than a flag.", rich_help_panel=SERVER)
    ] = None,
    cors: Annotated[
        Optional[list[str]],
        typer.Option(help="Web origin whose pages may use the server; may be repeated.", rich_help_panel=SERVER),
    ] = None,
    queue: Annotated[
        Optional[int],
        typer.Option(
            help="Requests that may wait, by default 64; further ones get status 429.", rich_help_panel=SERVER
        ),
    ] = None,
    slots: Annotated[
        Optional[str],
        typer.Option(
            help="Requests answered at once; auto (the default): 4, or as many as fit.", rich_help_panel=SERVER
        ),
    ] = None,
    cache_mb: Annotated[
        Optional[int],
        typer.Option(help="Megabytes for the caches of conversations, by default 1024.", rich_help_panel=SERVER),
    ] = None,
    keep_caches: Annotated[
        Optional[str],
        typer.Option(
            help="Keep caches on disk across restarts, up to a size like 2GB; by default none.", rich_help_panel=SERVER
        ),
    ] = None,
    distill: Annotated[
        Optional[str],
        typer.Option(
            help="When to train: idle (the default), always, off, or a window like 22:00-06:00.", rich_help_panel=SERVER
        ),
    ] = None,
    threads: Annotated[
        Optional[int], typer.Option(help="Threads of the models on a CPU.", rich_help_panel=SERVER)
    ] = None,
) -> None:
    """Serve the pair through OpenAI's and Anthropic's API, with a dashboard and background training.

    Example: adaptive serve

    Example: adaptive serve --target Qwen/Qwen2.5-14B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct --quantize nf4
    """
    from rich.console import Console

    from adaptive.settings import change_settings

    given = {
        "name": name,
        "host": host,
        "port": port,
        "api_key": api_key,
        "api_key_file": api_key_file,
        "cors": cors or None,
        "queue": queue,
        "slots": slots,
        "cache_mb": cache_mb,
        "keep_caches": keep_caches,
        "threads": threads,
        "distill": distill,
    }
    said: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    if api_key is not None and api_key_file is None:
        said["api_key_file"] = None  # a file that the settings name
    settings = change_settings(settings, said)

    show_log()
    console = Console(stderr=True, highlight=False)

    from adaptive.pair import pair_identity
    from adaptive.service import server
    from adaptive.state import open_state
    from cli.opened import open_pair

    settings = server.with_key(settings)
    state = open_state(settings.state_dir, pair_identity(settings).id)

    def opened() -> AbstractContextManager[OpenedPair]:
        return open_pair(settings, console, cache_bytes=settings.cache_mb * 10**6)

    server.serve(settings, state, opened)
