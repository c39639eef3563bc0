"""``adaptive draft-server``: serves a draft model to programs on other machines, or to other processes here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from cli.logs import show_log
from cli.options import PAIR, shared_options

if TYPE_CHECKING:
    from adaptive.settings import Settings

SERVER = "Server"
# Next to the default ports of the assistant (8080) and the proxy (8090).
PORT = 8095


@shared_options(
    *PAIR, "trust_remote_code", "device", "draft_device", "dtype", "draft_quantize",
    without=("draft_checkpoint", "draft_key_file"), asks=False,
)  # fmt: skip
def draft_server(
    settings: Settings,
    adapter: Annotated[
        Optional[Path], typer.Option(help="Folder of a LoRA adapter of the draft (PEFT).", rich_help_panel=SERVER)
    ] = None,
    host: Annotated[
        Optional[str], typer.Option(help="Address to listen on, by default 127.0.0.1.", rich_help_panel=SERVER)
    ] = None,
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", rich_help_panel=SERVER)] = PORT,
    api_key_file: Annotated[
        Optional[Path],
        typer.Option(
            help="File with the key that programs must send (--draft-key-file there).", rich_help_panel=SERVER
        ),
    ] = None,
    cache_mb: Annotated[
        Optional[int],
        typer.Option(help="Megabytes for the caches of conversations, by default 1024.", rich_help_panel=SERVER),
    ] = None,
    ahead: Annotated[
        bool,
        typer.Option("--ahead/--no-ahead", help="Continue to draft while the target verifies.", rich_help_panel=SERVER),
    ] = True,
    threads: Annotated[
        Optional[int], typer.Option(help="Threads of the model on a CPU.", rich_help_panel=SERVER)
    ] = None,
) -> None:
    """Serve a draft model to `adaptive ... --draft http://HOST:PORT`.

    With --target too, the adapter that is promoted for the pair here is used, also one that is promoted later.

    Example: adaptive draft-server --draft ./my-draft

    Example: adaptive draft-server --draft Qwen/Qwen2.5-0.5B-Instruct --port 0
    """
    from adaptive.settings import change_settings

    given = {
        "host": host,
        "port": port,
        "api_key_file": api_key_file,
        "cache_mb": cache_mb,
        "threads": threads,
    }
    settings = change_settings(settings, {name: value for name, value in given.items() if value is not None})
    show_log()

    from adaptive import draft_server as server
    from adaptive.engines.cpu.torch_threads import set_threads

    set_threads(settings.threads)
    server.serve(settings, adapter, ahead)
