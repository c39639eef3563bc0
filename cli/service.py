"""``adaptive service``: have the system start and supervise ``adaptive serve`` for the user who logs in."""

from __future__ import annotations

import shlex
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from adaptive.errors import AdaptiveError
from cli.groups import group
from cli.options import shared_options

if TYPE_CHECKING:
    from adaptive.settings import Settings
    from cli.managers import Manager

app = group("Have the system start the server, by systemd or launchd.\n\nExample: adaptive service install")

# Options of ``serve`` whose value is a path: relative paths would have another meaning where the service starts.
PLACES = ("--target", "--draft", "--draft-checkpoint", "--draft-key-file", "--config", "--state-dir", "--api-key-file")
# Variables of the environment that are not ours and decide where models and state are found, or what may be used.
OTHERS = (
    "CUDA_VISIBLE_DEVICES", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "HTTPS_PROXY",
    "OMP_NUM_THREADS", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
)  # fmt: skip
# Seconds from the start to the question whether it runs. Too low: a service that ends for a reason such as a missing
# model has not ended yet. Too high: the user waits.
LOOKED_AFTER_S = 10.0


@app.command()
def install(
    options: Annotated[
        Optional[list[str]], typer.Argument(help="Options of `adaptive serve`, behind --.", metavar="-- OPTIONS")
    ] = None,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Start it now, and at every login.")] = True,
) -> None:
    """Write a service of your user, and start it. Repeated, it replaces the one before.

    Exit status 1 if it does not run some seconds after the start.

    Example: adaptive service install --no-start

    Example: adaptive service install -- --target ./my-target --draft ./my-draft --port 8081
    """
    from rich.console import Console

    manager = _manager()
    command = [*_program(), "serve", *_checked(_absolute(options or []))]
    manager.write(command)
    typer.echo(f"wrote {manager.file}: {shlex.join(command)}")
    for names, place in ((_environment(), "adaptive.toml"), (_others(), manager.environment)):
        if names:
            typer.echo(f"not handed on from this environment: {', '.join(names)}; put them into {place}", err=True)
    if said := _left_behind(options or []):
        typer.echo(said, err=True)
    if not start:
        typer.echo(f"start it with: {manager.how_to_start}")
        return
    manager.start()
    with Console(stderr=True).status("waiting to see whether it keeps running"):
        time.sleep(LOOKED_AFTER_S)
    if (state := manager.state()) not in (manager.running, "unknown"):
        typer.echo(f"started, but it does not run ({state}); {manager.more}", err=True)
        raise typer.Exit(1)
    typer.echo(f"started; {manager.more}")


@app.command()
@shared_options("home")
def status(
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Whether it is installed, whether it runs, and what is served where. Exit status 1 where it does not run.

    Example: adaptive service status
    """
    import json

    from adaptive.service.notices import servers

    manager = _manager()
    installed, state = manager.file.is_file(), manager.state()
    found = servers(settings.state_dir)
    if as_json:
        running = [{"pair": one.pair, "url": one.url, "pid": one.pid} for one in found]
        print(json.dumps({"installed": installed, "file": str(manager.file), "state": state, "servers": running}))
    else:
        print(f"{manager.file}: {state}" if installed else "not installed; `adaptive service install` does it")
        for one in found:
            print(f"{one.pair} at {one.url}, process {one.pid}")
    if not installed or state != manager.running:
        raise typer.Exit(1)


@app.command()
def remove() -> None:
    """Stop the service and delete what was written for it. Answers and adapters stay.

    Example: adaptive service remove
    """
    manager = _manager()
    if not manager.file.is_file():
        raise AdaptiveError(f"there is no service to remove; {manager.file} does not exist")
    try:
        manager.stop()
    except AdaptiveError as error:
        raise AdaptiveError(f"{error}; {manager.file} stays, because the service may be running") from error
    manager.file.unlink()
    manager.reload()
    typer.echo(f"removed {manager.file}")


def _manager() -> Manager:
    """This system's service manager. Raises AdaptiveError for systems other than Linux and macOS."""
    from cli.managers import Launchd, Systemd

    if sys.platform.startswith("linux"):
        return Systemd()
    if sys.platform == "darwin":
        return Launchd()
    raise AdaptiveError(
        f"services are for systemd (Linux) and launchd (macOS), not for {sys.platform}; have `adaptive serve` started "
        "at login by other means"
    )


def _program() -> list[str]:
    """The command that starts this program from any folder."""
    from pathlib import Path

    script = Path(sys.executable).with_name("adaptive")
    return [str(script)] if script.is_file() else [sys.executable, "-m", "cli.main"]


def _absolute(words: list[str]) -> list[str]:
    """The same options, with absolute paths for files and folders that exist, and for the state folder, which ``serve``
    creates. Raises AdaptiveError for the home folder of an unknown user."""
    found: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name in PLACES:
            found.append(f"{name}={_from_root(name, value)}")
        else:
            found.append(_from_root(found[-1], word) if found and found[-1] in PLACES else word)
    return found


def _from_root(option: str, name: str) -> str:
    from adaptive.settings import expanded

    there = expanded(name)
    return str(there.resolve()) if option == "--state-dir" or there.exists() else name


def _left_behind(words: list[str]) -> str | None:
    """A sentence on the ``adaptive.toml`` of the current folder, which a service that runs in the home folder does not
    read; None if there is none, or the options name a settings file."""
    from pathlib import Path

    from adaptive.settings_file import user_folder

    file = Path("adaptive.toml").resolve()
    named = any(word.partition("=")[0] == "--config" for word in words)
    if named or not file.is_file() or file.parent in (Path.home().resolve(), user_folder().resolve()):
        return None
    return f"not handed on: {file}; to use it, install again with --config {shlex.quote(str(file))} behind --"


def _checked(words: list[str]) -> list[str]:
    """Return ``words``. Raises AdaptiveError for options, values or a settings file that ``serve`` would refuse later,
    when the service starts; ``--help`` prints its help and ends the program."""
    from adaptive.settings import Settings, change_settings, written_in
    from adaptive.settings_file import config_files
    from cli import serve

    alone = typer.Typer()
    alone.command()(serve.serve)
    command: Any = typer.main.get_command(alone)
    try:
        given = command.make_context("adaptive serve", list(words)).params
    except typer.Exit:  # --help
        raise
    except Exception as error:  # the parser's errors have no common class
        said = str(getattr(error, "message", error)).rstrip(".")
        raise AdaptiveError(f"adaptive serve {shlex.join(words)}: {said}") from error
    if any(word.partition("=")[0] == "--api-key" for word in words):
        raise AdaptiveError(
            "--api-key would stand in the service's file and in the list of processes; write the key into a file and "
            "give --api-key-file FILE"
        )
    named = {name: value for name, value in given.items() if name in Settings.model_fields and value not in (None, ())}
    file = given["config"]
    written = written_in(config_files(file)[0]) if file else {}
    # Neither this environment nor the current folder's file is the service's.
    change_settings(Settings.model_construct(), {**written, **named})
    return words


def _environment() -> list[str]:
    """The variables of settings in this environment, which a service does not inherit."""
    from adaptive.settings import set_in_environment

    return sorted(f"ADAPTIVE_{name.upper()}" for name in set_in_environment())


def _others() -> list[str]:
    """The OTHERS in this environment."""
    import os

    return [name for name in OTHERS if os.environ.get(name)]
