"""``adaptive chat``: an assistant in the terminal whose draft improves while it runs."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from adaptive.errors import AdaptiveError
from cli.options import shared_options

if TYPE_CHECKING:
    from adaptive.settings import Settings
    from cli.chat_session import Chat


@shared_options()
def chat(
    settings: Settings,
    question: Annotated[Optional[str], typer.Argument(help="The first question.")] = None,
    session: Annotated[Optional[str], typer.Option(help="Name of the session; an earlier one is resumed.")] = None,
    system: Annotated[Optional[str], typer.Option(help="System message of the conversation.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Show answers as they are, not as Markdown.")] = False,
    distill: Annotated[
        Optional[str],
        typer.Option(help="When to train: idle (the default), always, off, or a window like 22:00-06:00."),
    ] = None,
) -> None:
    """An assistant in the terminal. Its answers are logged, and the draft is trained on them while you read and type.

    Text that comes through a pipe is one question, and only its answer is written to standard output.

    Example: adaptive chat --target Qwen/Qwen2.5-14B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct --quantize nf4

    Example: adaptive chat --session holiday-plans

    Example: git diff | adaptive chat "Write a commit message for this"
    """
    from rich.console import Console

    from adaptive.settings import change_settings
    from cli.chat_input import echo, piped, unseen
    from cli.chat_session import Chat
    from cli.logs import hold_warnings
    from cli.opened import open_pair

    question = (question or "").strip()
    typing = sys.stdin is not None and sys.stdin.isatty()  # None if it is closed, as by <&-
    if not typing:
        question = "\n\n".join(text for text in (question, piped()) if text)
        if not question:
            raise AdaptiveError("nothing is asked: standard input is empty; give a question, or start it in a terminal")
    # If the answer is redirected or the question is piped, standard output is for the answer only.
    console = Console(highlight=False, stderr=not (typing and sys.stdout.isatty()))
    if distill is not None:
        settings = change_settings(settings, {"distill": distill})
    with contextlib.ExitStack() as stack:
        if typing:
            stack.enter_context(unseen())
        show_warnings = stack.enter_context(hold_warnings(console))
        opened = stack.enter_context(open_pair(settings, console, warn=logging.getLogger("adaptive").warning))
        # This import loads torch, which takes a second, so it waits until a progress bar was shown.
        from adaptive.service.trainer import background

        trainer = stack.enter_context(background(settings, opened.state))
        under_way = Chat(settings, opened, console, session, system, trainer, plain)
        show_warnings()
        if typing:
            with echo():
                converse(under_way, question, show_warnings)
        else:
            under_way.ask(question)
            last = opened.assistant.last
            if last is not None and last.finish_reason == "cancelled":  # ctrl-C: what reads the answer must not go on
                raise typer.Exit(130)


def converse(chat: Chat, question: str = "", before: Callable[[], None] = lambda: None) -> None:
    """Ask the ``question``, if given, and then what the user types, until ctrl-D or /exit. ctrl-C ends what is under
    way, and no more. ``before`` is called before each prompt."""
    from cli.chat_commands import COMMANDS, carry_out
    from cli.chat_input import Keyboard, is_command

    chat.greet()
    chat.keyboard = Keyboard([*COMMANDS], chat.opened.state.typed if chat.record else None, before)
    chat.trainer.idle()
    first = [question] if question else []
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            for text in itertools.chain(first, chat.keyboard.messages()):
                first = []
                if not is_command(text):
                    chat.ask(text)
                elif not carry_out(chat, text):
                    return
            return
