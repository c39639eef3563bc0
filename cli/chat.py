"""``adaptive chat``: an assistant in the terminal that picks up better drafts while it runs."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from adaptive.errors import AdaptiveError
from cli.options import shared_options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from adaptive.service.trainer import Trainer
    from adaptive.settings import Settings
    from adaptive.types import Message
    from cli.opened import OpenedPair

HELP = """[bold]/help[/]      this list
[bold]/stats[/]     what this session and the log say about speed and acceptance
[bold]/training[/]  what background training does now, and why
[bold]/reset[/]     forget the conversation and start a new session
[bold]/sessions[/]  earlier sessions; resume one with: adaptive chat --session NAME
[bold]/exit[/]      leave (so does ctrl-D)
ctrl-C stops an answer. A line that ends with \\ goes on in the next."""


@shared_options()
def chat(
    settings: Settings,
    session: Annotated[Optional[str], typer.Option(help="Name of the session; an earlier one is resumed.")] = None,
    system: Annotated[Optional[str], typer.Option(help="System message of the conversation.")] = None,
    distill: Annotated[
        Optional[str], typer.Option(help="When to train: idle, always, off, or a window like 22:00-06:00.")
    ] = None,
) -> None:
    """Talk with the assistant. What it says is logged, and the draft learns from it while you read and type.

    Example: adaptive chat --target Qwen/Qwen2.5-14B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct --quantize nf4

    Example: adaptive chat --session holiday-plans
    """
    from rich.console import Console

    from adaptive.service.trainer import background
    from adaptive.settings import change_settings
    from cli.opened import open_pair

    console = Console(highlight=False)
    if distill is not None:
        settings = change_settings(settings, {"distill": distill})
    with open_pair(settings, console) as opened, background(settings, opened.state) as trainer:
        Chat(settings, opened, console, session, system, trainer).run()


class Chat:
    """The messages so far, and the loop that asks and answers."""

    def __init__(
        self,
        settings: Settings,
        opened: OpenedPair,
        console: Console,
        name: str | None,
        system: str | None,
        trainer: Trainer,
    ) -> None:
        from adaptive.assistant import sampling_params
        from adaptive.control.memory import current_costs
        from adaptive.types import StopParams

        self.opened = opened
        self.console = console
        self.trainer = trainer
        trainer.costs = lambda: current_costs(opened.assistant.policy, opened.state.controller)
        self.sampling = sampling_params(settings, opened.pair)
        self.limits = StopParams(settings.max_new_tokens)
        self.name = name or opened.assistant.session
        self.system = system
        self.messages = self._beginning()
        earlier = self._earlier() if name else []
        if earlier:
            self.messages = earlier
            console.print(f"resumed session {self.name}: {len(self.messages)} messages", style="dim", markup=False)

    def _beginning(self) -> list[Message]:
        from adaptive.types import Message

        return [Message("system", self.system)] if self.system else []

    def _earlier(self) -> list[Message]:
        from adaptive.records.log import Log

        if not self.opened.state.records.exists():
            return []
        with Log(self.opened.state.records) as log:
            return list(log.session_messages(self.name))

    def run(self) -> None:
        """Until ctrl-D or /exit."""
        self._greet()
        self.opened.assistant.between_rounds = self.opened.swapper.between_rounds
        self.trainer.idle()
        for text in lines_from_person():
            if text.startswith("/"):
                if not self._command(text.split()[0]):
                    return
                continue
            if self.opened.swapper.use_promoted():
                self.console.print(f"[green]now drafting with adapter {self.opened.assistant.adapter or 'none'}[/]")
            self.trainer.busy()
            try:
                self._answer(text)
            except AdaptiveError as error:  # a prompt past the context, say: the conversation goes on
                self.console.print(str(error), style="red", markup=False)
            finally:
                self.trainer.idle()

    def _greet(self) -> None:
        pair, assistant = self.opened.pair, self.opened.assistant
        drafting = f"adapter {assistant.adapter}" if assistant.adapter else "no adapter yet"
        if pair.draft is None:
            drafting = "no draft model: plain decoding"
        self.console.print(_titled(pair.identity.id, f"{drafting} · session {self.name} · /help", "dim"))

    def _answer(self, text: str) -> None:
        from adaptive.printable import printable
        from adaptive.types import Message
        from cli.generate import figures, keep

        assistant = self.opened.assistant
        asked = [*self.messages, Message("user", text)]
        steps = assistant.chat(asked, self.sampling, self.limits, session=self.name)
        with interruptible() as interrupted, contextlib.closing(steps):  # type: ignore[type-var]
            for step in steps:
                sys.stdout.write(printable(step.text))
                sys.stdout.flush()
                if interrupted():
                    break
        sys.stdout.write("\n")
        keep(assistant)
        if assistant.log is not None and assistant.log.problem:
            self.console.print(f"log: {assistant.log.problem}", style="red", markup=False)
        assert assistant.last is not None
        for adapter, rounds in assistant.rounds_by_adapter:
            self.trainer.answered(adapter, rounds)
        self.messages = [*asked, Message("assistant", assistant.last.text)]
        stopped = "stopped · " if assistant.last.finish_reason == "cancelled" else ""
        self.console.print(f"[dim]{stopped}{figures(assistant)}[/]")

    def _command(self, name: str) -> bool:
        """Carry out a command; False means leave."""
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            import uuid

            self.messages, self.name = self._beginning(), uuid.uuid4().hex[:12]
            self.console.print(f"[dim]new session {self.name}[/]")
        elif name == "/training":
            status = self.trainer.status
            self.console.print(f"{status.activity}: {status.reason}", markup=False)
            if status.last_round:
                self.console.print(f"last round: {status.last_round}", style="dim", markup=False)
            self.console.print(f"live acceptance: {status.watch}", style="dim", markup=False)
        elif name in ("/stats", "/sessions"):
            self._from_log(name)
        else:
            if name != "/help":
                self.console.print(f"there is no {name}", markup=False)
            self.console.print(HELP)
        return True

    def _from_log(self, name: str) -> None:
        from adaptive.records.log import Log
        from adaptive.speculation import speculation
        from cli.history import print_summary

        log_writer = self.opened.assistant.log
        if log_writer is None:
            self.console.print("nothing is logged in this session (--no-record)")
            return
        log_writer.flush()
        if name == "/stats":
            print_summary(self.opened.state, self.console, session=self.name)
            self.console.print(f"last answer: {speculation(self.opened.assistant).sentence}")
            return
        with Log(self.opened.state.records) as log:
            for session in log.sessions():
                when = time.strftime("%Y-%m-%d %H:%M", time.localtime(session.last))
                answers = f"{session.generations} answer{'' if session.generations == 1 else 's'}"
                line = _titled(session.id, f"{when} · {answers} · {' '.join(session.opening.split())}")
                self.console.print(line, no_wrap=True, overflow="ellipsis")


def _titled(title: str, text: str, style: str = "") -> Text:
    """One line that is shown as it is, brackets and all."""
    from rich.text import Text

    from adaptive.printable import printable_line

    return Text.assemble((printable_line(title), "bold"), "  ", (printable_line(text), style))


@contextlib.contextmanager
def interruptible() -> Iterator[Any]:
    """Turn ctrl-C into a question the answer loop asks between two tokens, so that nothing is cut in half."""
    pressed = False

    def note(signum: int, frame: Any) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def lines_from_person() -> Iterator[str]:
    """What is typed, one message at a time; plain lines where standard input is not a terminal."""
    if not sys.stdin.isatty():
        try:
            yield from (line.strip() for line in sys.stdin if line.strip())
        except UnicodeDecodeError as error:
            raise AdaptiveError("standard input is not UTF-8 text") from error
        return
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.formatted_text import HTML

    completer = WordCompleter(["/help", "/stats", "/training", "/reset", "/sessions", "/exit"], sentence=True)
    prompt: PromptSession[str] = PromptSession(HTML("<b>› </b>"), completer=completer)
    while True:
        try:
            text = prompt.prompt()
            while text.endswith("\\"):
                text = text[:-1] + "\n" + prompt.prompt("… ")
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if text.strip():
            yield text.strip()
