"""``adaptive learn``: a proxy in front of an external server, from whose answers a draft learns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from adaptive.errors import AdaptiveError
from cli.logs import show_log
from cli.options import PAIR, shared_options

if TYPE_CHECKING:
    from adaptive.settings import Settings

PROXY = "Proxy"

# Next to the usual ports of the servers themselves (8080, 8000, 30000, 1234).
PORT = 8090


@shared_options(*PAIR, "trust_remote_code", "device", "draft_device", "record", "keep_days", "keep_gb", asks=False)
def learn(
    settings: Settings,
    upstream: Annotated[
        Optional[str],
        typer.Option(help="Address of the server.", metavar="URL", envvar="ADAPTIVE_UPSTREAM", rich_help_panel=PROXY),
    ] = None,
    engine: Annotated[
        Optional[str],
        typer.Option(
            help="llama-server, vllm, sglang, lm-studio, adaptive or unknown; found out if left out.",
            rich_help_panel=PROXY,
        ),
    ] = None,
    model: Annotated[
        Optional[str],
        typer.Option(
            help="The target's name at a server with several models, whose others are not logged; by default the first "
            "one that it lists.",
            metavar="NAME",
            rich_help_panel=PROXY,
        ),
    ] = None,
    connections: Annotated[
        int, typer.Option(min=1, help="Requests that the server gets at a time; others wait.", rich_help_panel=PROXY)
    ] = 64,
    host: Annotated[
        Optional[str], typer.Option(help="Address to listen on, by default 127.0.0.1.", rich_help_panel=PROXY)
    ] = None,
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", rich_help_panel=PROXY)] = PORT,
    api_key_file: Annotated[
        Optional[Path],
        typer.Option(help="File with the server's key, which clients must send.", rich_help_panel=PROXY),
    ] = None,
    distill: Annotated[
        Optional[str],
        typer.Option(
            help="When to train: idle (the default), always, off, or a window like 22:00-06:00.", rich_help_panel=PROXY
        ),
    ] = None,
) -> None:
    """A proxy in front of llama-server, vLLM, SGLang or LM Studio that logs the answers and trains a draft on them.

    --target is the model that the server runs (its config and tokenizer are enough), --draft the checkpoint to train.

    Example: adaptive learn --upstream http://127.0.0.1:8080 --target Qwen/Qwen2.5-14B-Instruct --draft ./draft
    """
    from adaptive.settings import change_settings

    if upstream is None:
        raise AdaptiveError("name the server with --upstream, such as http://127.0.0.1:8080")
    given = {"host": host, "port": port, "api_key_file": api_key_file, "distill": distill}
    settings = change_settings(settings, {name: value for name, value in given.items() if value is not None})

    show_log()

    from adaptive.pair import pair_identity, sources
    from adaptive.state import open_state
    from adaptive.upstream import server
    from cli.state import show_migrations, tell_of_earlier_log

    url, kind = server.checked_url(upstream), server.checked_kind(engine)
    draft = sources(settings)[1]
    if draft is not None and draft.head is not None:
        raise AdaptiveError(
            f"the draft is {draft.head.words}, which learns from the target's hidden states, and a server does not say "
            "them; name a draft model with --draft, or none, and grow a head on the log with `adaptive head`"
        )
    show_migrations()
    state = open_state(settings.state_dir, pair_identity(settings).id)
    tell_of_earlier_log(settings, state)
    server.learn(settings, state, url, kind, connections, model)
