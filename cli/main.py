"""Entry point: the command tree, and the presentation of errors.

Command modules import only Typer at the top; torch and transformers are imported inside the
commands, so that ``adaptive --help`` answers at once.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import traceback
from typing import Annotated

import typer

from adaptive.errors import AdaptiveError, first_line, out_of_memory
from adaptive.installation import check_system
from adaptive.printable import printable_line
from cli import (
    adapters,
    bench,
    calibrate,
    chat,
    config,
    demo,
    distill,
    doctor,
    draft_server,
    export,
    generate,
    head,
    history,
    learn,
    packed,
    publish,
    records,
    serve,
    service,
)
from cli.allocation import keep_buffers, look_for_cycles_less
from cli.ending import ended_in_order
from cli.groups import leave_out_types_of_flags, print_help_if_alone
from cli.logs import show_log
from cli.waiting import wait

app = typer.Typer(
    name="adaptive",
    help="Speculative decoding whose draft learns from what you use it for.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
)

# Exit status if what reads the output has ended: that of a program that the shell saw ended by SIGPIPE.
READER_ENDED = 141

# Loggers whose warnings are of no concern here: of a kernel for 4-bit weights that is not needed; and on macOS, at each
# import of transformers, of what torch cannot redirect.
OF_NO_CONCERN = ("bitsandbytes", "torch.distributed.elastic.multiprocessing.redirects")


def _version(asked: bool) -> None:
    if asked:
        from adaptive.installation import version

        typer.echo(f"adaptive {version()}")
        raise typer.Exit


@app.callback()
def adaptive(
    context: typer.Context,
    version: Annotated[  # unused: its callback ends the program if it was given
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Speculative decoding whose draft learns from what you use it for."""
    print_help_if_alone(context)


app.command()(demo.demo)
app.command()(chat.chat)
app.command()(generate.generate)
app.command()(serve.serve)
app.command("draft-server")(draft_server.draft_server)
app.command()(learn.learn)
app.command()(distill.distill)
app.command()(head.head)
app.command()(calibrate.calibrate)
app.command()(bench.bench)
app.command()(history.history)
app.add_typer(adapters.app, name="adapters")
app.command()(export.export)
app.command()(publish.publish)
app.command()(doctor.doctor)
app.add_typer(records.app, name="records")
app.add_typer(packed.app, name="packed")
app.add_typer(service.app, name="service")
app.add_typer(config.app, name="config")


def run() -> None:
    """Run the command line; a user's error prints one line on standard error and exits with 2. A signal that ends the
    program ends it in order (``cli/ending.py``)."""
    try:
        with ended_in_order():
            _run()
    except KeyboardInterrupt:  # outside a command; Typer makes an exit with the same status of one within it
        sys.exit(128 + signal.SIGINT)
    except (SystemExit, BrokenPipeError) as ending:
        if not _reader_has_ended(ending):
            raise
        for stream in (sys.__stdout__, sys.__stderr__):  # both may go into the pipe; Python flushes them at its end
            with contextlib.suppress(AttributeError, OSError, ValueError):  # closed before the start, or no file
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]
        sys.exit(READER_ENDED)


def _reader_has_ended(ending: BaseException) -> bool:
    """Whether the program ends because what reads its output has ended, as in ``adaptive history | head -1``."""
    # Typer and rich make an exit with status 1 of the error.
    if isinstance(ending, BrokenPipeError) or isinstance(ending.__context__, BrokenPipeError):
        return True
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False


def _open_what_is_closed() -> None:
    """Have standard output and error go nowhere if they are closed, as by ``>&-``."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # open until the program ends


def _replace_what_cannot_be_encoded() -> None:
    """Have standard output write a question mark for a character that its encoding lacks, instead of failing in the
    middle of an answer. (Standard error never fails.)"""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")


def _run() -> None:
    _open_what_is_closed()
    _replace_what_cannot_be_encoded()
    said = os.environ.get("ADAPTIVE_DEBUG", "").lower()
    debug = "--debug" in sys.argv or said not in ("", "0", "false", "no", "off")
    if debug:
        show_log()
    for name in OF_NO_CONCERN:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        check_system()
        wait()
        keep_buffers()
        look_for_cycles_less()
        command = typer.main.get_command(app)
        leave_out_types_of_flags(command)
        command()
    except (AdaptiveError, ModuleNotFoundError, MemoryError, RuntimeError, OSError) as error:
        text = _in_words(error)
        if text is None:
            raise
        if debug:
            traceback.print_exception(error)
        typer.echo(printable_line(f"adaptive: {text}"), err=True)
        sys.exit(2)


def _in_words(error: Exception) -> str | None:
    """The line for an error that the user can mend; None for any other."""
    if isinstance(error, AdaptiveError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return _missing(error)
    if isinstance(error, OSError):  # a path that may not be looked at, a current folder that is gone
        place = "" if error.filename is None else f"{error.filename}: "
        return None if isinstance(error, BrokenPipeError) else f"{place}{error.strerror or error}"
    return f"memory has run out: {first_line(error)}" if out_of_memory(error) else None


def _missing(error: ModuleNotFoundError) -> str | None:
    """The remedy if one of this program's own packages is missing; None for any other module."""
    from adaptive.installation import install_command, requirement

    name = (error.name or "").partition(".")[0].replace("_", "-")
    needed = requirement(name)
    return f"the package {name} is not installed; {install_command(needed)}" if needed != name else None


if __name__ == "__main__":
    run()
