"""The options that commands share, added to a command by ``@shared_options``.

A decorated command takes ``settings: Settings`` as its first argument and does not get the single
flags. Only Typer is imported here; settings (pydantic) are loaded when a command actually runs.
"""

from __future__ import annotations

import functools
import inspect
import shlex
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from adaptive.settings import Settings

# The settings that name a pair.
PAIR = ("target", "draft", "draft_checkpoint", "draft_key_file", "revision", "draft_revision")

# Options that decide how the weights of a pair are held.
HELD = ("quantize", "draft_quantize", "device", "draft_device", "dtype", "memory")

MODELS = "Models"
SAMPLING = "Sampling"
RUNNING = "Running"

SHARED: dict[str, Any] = {
    "target": Annotated[
        Optional[str], typer.Option(help="Target model: a folder, a hub id, or a GGUF file.", rich_help_panel=MODELS)
    ],
    "draft": Annotated[
        Optional[str],
        typer.Option(
            help="Draft: a folder or hub id of a model or head, a GGUF file, or http://HOST:PORT of a draft server. "
            "mtp: the head in the target's checkpoint. auto: that head, or one grown here. none: no draft model.",
            rich_help_panel=MODELS,
        ),
    ],
    "draft_checkpoint": Annotated[
        Optional[str],
        typer.Option(help="Checkpoint of a GGUF draft, for training: a folder or a hub id.", rich_help_panel=MODELS),
    ],
    "draft_key_file": Annotated[
        Optional[Path], typer.Option(help="File with the key of the draft server.", rich_help_panel=MODELS)
    ],
    "device": Annotated[Optional[str], typer.Option(help="auto, cpu, cuda, cuda:1, mps.", rich_help_panel=MODELS)],
    "draft_device": Annotated[
        Optional[str], typer.Option(help="Device of the draft, if another.", rich_help_panel=MODELS)
    ],
    "dtype": Annotated[
        Optional[str],
        typer.Option(help="auto (the default), float32, bfloat16, float16, float64.", rich_help_panel=MODELS),
    ],
    "quantize": Annotated[
        Optional[str], typer.Option(help="Target's weights: none, int8, nf4.", rich_help_panel=MODELS)
    ],
    "draft_quantize": Annotated[
        Optional[str], typer.Option(help="Draft's weights: auto, none, int8, nf4.", rich_help_panel=MODELS)
    ],
    "cuda_graphs": Annotated[
        Optional[str],
        typer.Option(help="auto replays short passes on CUDA as graphs; off does not.", rich_help_panel=MODELS),
    ],
    "revision": Annotated[Optional[str], typer.Option(help="Hub revision of the target.", rich_help_panel=MODELS)],
    "draft_revision": Annotated[Optional[str], typer.Option(help="Hub revision of the draft.", rich_help_panel=MODELS)],
    "memory": Annotated[
        Optional[str],
        typer.Option(
            help="Most memory for the target's weights, such as 4GB; other layers are read from disk (CPU).",
            rich_help_panel=MODELS,
        ),
    ],
    "trust_remote_code": Annotated[
        Optional[bool],
        typer.Option("--trust-remote-code", help="Run code that comes with a checkpoint.", rich_help_panel=MODELS),
    ],
    "draft_length": Annotated[
        Optional[str],
        typer.Option(
            help="Tokens drafted a round: auto (the default), a number, or tree:N for a tree of N.",
            rich_help_panel=SAMPLING,
        ),
    ],
    "history": Annotated[
        Optional[str],
        typer.Option(
            help="Draft from earlier text: auto (the default), session (this one), off.", rich_help_panel=SAMPLING
        ),
    ],
    "seed": Annotated[
        Optional[int],
        typer.Option(
            help="Seed of sampling (the same prompt gets the same text), or of training.", rich_help_panel=SAMPLING
        ),
    ],
    "max_new_tokens": Annotated[
        Optional[int],
        typer.Option(
            help="Longest answer, in tokens; by default 512, in a server as many as fit.", rich_help_panel=SAMPLING
        ),
    ],
    "temperature": Annotated[Optional[float], typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)],
    "top_k": Annotated[
        Optional[int], typer.Option(help="Keep the k likeliest tokens; 0 is off.", rich_help_panel=SAMPLING)
    ],
    "top_p": Annotated[
        Optional[float], typer.Option(help="Keep the smallest set of this mass; 1 is off.", rich_help_panel=SAMPLING)
    ],
    "min_p": Annotated[
        Optional[float], typer.Option(help="Keep tokens above this share of the likeliest.", rich_help_panel=SAMPLING)
    ],
    "home": Annotated[
        Optional[Path], typer.Option("--state-dir", help="Folder of the log and the adapters.", rich_help_panel=RUNNING)
    ],
    "record": Annotated[
        Optional[bool],
        typer.Option("--record/--no-record", help="Keep prompts and answers in the log.", rich_help_panel=RUNNING),
    ],
    "keep_days": Annotated[
        Optional[float],
        typer.Option(help="Delete records that are older than this number of days.", rich_help_panel=RUNNING),
    ],
    "keep_gb": Annotated[
        Optional[float], typer.Option(help="Delete the oldest records beyond this size in GB.", rich_help_panel=RUNNING)
    ],
    "feature_gb": Annotated[
        Optional[float],
        typer.Option(
            help="Most GB of the target's hidden states, for a head's training; by default 2.", rich_help_panel=RUNNING
        ),
    ],
    "config": Annotated[
        Optional[Path], typer.Option(help="Settings file, instead of adaptive.toml.", rich_help_panel=RUNNING)
    ],
    "debug": Annotated[
        bool,
        typer.Option(
            "--debug", help="Show the program's own messages, and the traceback of an error.", rich_help_panel=RUNNING
        ),
    ],
}


def as_typed(settings: Settings, *names: str) -> str:
    """The command-line options that give these settings again; settings without a value are left out."""
    values = {name: getattr(settings, name) for name in names}
    flags = {name: "--state-dir" if name == "home" else f"--{name.replace('_', '-')}" for name in names}
    return " ".join(f"{flags[name]} {shlex.quote(str(value))}" for name, value in values.items() if value is not None)


def changed(settings: Settings, *names: str) -> list[str]:
    """Those of these settings that do not have their default value."""
    fields = type(settings).model_fields
    return [name for name in names if getattr(settings, name) != fields[name].default]


def typed(context: typer.Context, *names: str) -> str:
    """Those of these options that are on the command line, as one types them, with commas."""
    found = []
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source is not None and source.name == "COMMANDLINE":
            found.append("/".join((*option.opts, *option.secondary_opts)))
    return ", ".join(found)


def shared_options(
    *names: str, without: tuple[str, ...] = (), asks: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these shared options (all of them if none is named), except those in ``without``.

    The command must take ``settings`` first; it is called with a ``Settings`` object and its own
    parameters. ``home``, ``config`` and ``debug`` are always included, unless in ``without``. With ``asks``, the user
    at a terminal may be asked about a settings file in the current folder.
    """
    named = {*(names or SHARED), "home", "config", "debug"} - set(without)
    chosen = {name: option for name, option in SHARED.items() if name in named}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        # Commands import Settings for the type checker only, so that --help does not load pydantic.
        hints = typing.get_type_hints(command, localns={"Settings": object}, include_extras=True)
        own = [
            p.replace(annotation=hints[n]) for n, p in inspect.signature(command).parameters.items() if n != "settings"
        ]
        shared = [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=False if n == "debug" else None, annotation=a)
            for n, a in chosen.items()
        ]
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            from adaptive.settings import load_settings

            given = {n: values.pop(n) for n in chosen}
            given.pop("debug")
            config = given.pop("config")
            said = {k: v for k, v in given.items() if v is not None}
            settings = load_settings(said, config, _confirm if asks and _at_a_terminal() else None)
            command(settings, **values)

        wrapper.__signature__ = inspect.Signature(own + shared)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in own + shared}
        return wrapper

    return decorate


def _at_a_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))  # None: it is closed


def _confirm(question: str) -> bool:
    from adaptive.printable import printable_line

    return typer.confirm(printable_line(question), err=True)
