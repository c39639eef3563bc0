"""A running chat: passes questions to the assistant, shows answers as they come, and prints their figures."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from adaptive.errors import AdaptiveError, NoMemoryError, first_line, out_of_memory
from adaptive.printable import counted

if TYPE_CHECKING:
    from rich.console import Console

    from adaptive.answering import Question
    from adaptive.decoding.loop import Step
    from adaptive.opened import OpenedPair
    from adaptive.service.calls import Reading
    from adaptive.service.trainer import Trainer
    from adaptive.settings import Settings
    from adaptive.types import Message
    from cli.chat_display import Display
    from cli.chat_input import Keyboard
    from cli.chat_talk import Talk

# Share of the context that the conversation may take after its oldest turns were taken out; the rest is for new turns.
FORGET_TO = 0.5
# Seconds of prefill after which a status line is shown. Too low: a line flickers before each answer.
SAID_AFTER_S = 0.5


class Answered(NamedTuple):
    """A message that was answered in this run: ``tokens`` of its prompt and of itself, and whether a limit cut it.
    ``text`` is all that the model said, with its thinking, which ``reading`` tells from the rest."""

    message: Message
    tokens: list[int]
    cut: bool
    text: str
    reading: Reading


class Chat:
    """``talk`` has the messages, ``name`` is the session; ``keyboard`` is None if no user types (piped input)."""

    def __init__(
        self,
        settings: Settings,
        opened: OpenedPair,
        console: Console,
        name: str | None,
        system: str | None,
        trainer: Trainer,
        plain: bool = False,
    ) -> None:
        from adaptive.assistant import sampling_params
        from adaptive.control.memory import current_costs
        from adaptive.types import StopParams
        from cli.chat_talk import Talk

        self.opened = opened
        self.console = console
        self.plain = plain
        self.trainer = trainer
        trainer.costs = lambda: current_costs(opened.assistant.policy, opened.state.controller)
        opened.assistant.between_rounds = opened.swapper.between_rounds
        self.sampling = sampling_params(settings, opened.pair)
        self.limits = StopParams(settings.answer_tokens)
        self.name = name or opened.assistant.session
        self.record = settings.record
        self.talk = Talk(system, self._earlier() if name else ())
        self.keyboard: Keyboard | None = None
        self._drafting = opened.assistant.adapter  # the last one that was named
        self._answered: Answered | None = None  # the last one; it may have left the conversation

    def _earlier(self) -> tuple[Message, ...]:
        from adaptive.records.log import Log
        from adaptive.types import Message

        if not self.opened.state.records.exists():
            return ()
        with Log(self.opened.state.records) as log:
            earlier = log.session_messages(self.name)
        if not earlier or earlier[-1].role != "assistant":
            return earlier
        try:
            _, reading = self._question(list(earlier[:-1]))
        except AdaptiveError:  # a chat that this model does not take, as asking something will say
            return earlier
        return (*earlier[:-1], Message("assistant", reading.shown(earlier[-1].content)))

    def greet(self) -> None:
        """Print the drafter, the session, and the end of a resumed conversation."""
        from adaptive.engines.protocol import ReadsFeatures
        from adaptive.speculation import growing
        from cli.chat_display import titled

        pair, assistant = self.opened.pair, self.opened.assistant
        alone = "plain decoding" if assistant.history is None else "drafted from earlier text only"
        drafting = f"adapter {assistant.adapter}" if assistant.adapter else "no adapter yet"
        if pair.remote is not None:
            drafting = f"drafted by {pair.remote.hello.id} at {pair.remote.url}, which is not trained from here"
        elif pair.draft is None:
            drafting = f"no draft model: {alone}"
        elif growing(pair):
            drafting = f"{alone}, until a head has been trained on the answers"
        elif isinstance(pair.draft, ReadsFeatures) and assistant.adapter is None:
            drafting = f"drafted by {pair.draft.words}"
        self.console.print(titled(pair.identity.id, f"{drafting} · session {self.name} · /help", "dim"))
        if self.talk.turns:
            self.show_last()

    def begin_session(self) -> None:
        """Start a new session for the messages that follow."""
        self.name = uuid.uuid4().hex[:12]

    def note(self, text: str) -> None:
        """Print a line that is not part of the conversation."""
        from adaptive.printable import printable_line

        self.console.print(printable_line(text), style="dim", markup=False)

    def show_last(self) -> None:
        """Show the last question of an earlier conversation, and its answer."""
        turns = self.talk.turns
        self.note(f"session {self.name} goes on after {counted(len(turns), 'message')}")
        asked = next((i for i in reversed(range(len(turns))) if turns[i].role == "user"), len(turns))
        for message in turns[asked:]:
            if message.role == "user":
                self.note(f"› {message.content}")
            else:
                shown = self._display()
                shown.feed(message.content)
                shown.close()

    def ask(self, text: str) -> bool:
        """Ask and show the answer; returns whether there was one. If the conversation no longer fits, its oldest turns
        are taken out if the user agrees.

        Raises AdaptiveError only with piped input, since a user who types can ask something else."""
        from adaptive.errors import ContextFullError
        from adaptive.types import Message

        while True:
            asked = [*self.talk.messages, Message("user", text)]
            try:
                question, reading = self._question(asked)
                answer = self._stream(question, reading)
            except AdaptiveError as error:
                if self.keyboard is None:
                    raise
                self.console.print(str(error), style="red", markup=False)
                if isinstance(error, ContextFullError) and self._makes_room(text):
                    continue
                return False
            self.talk.messages = [*asked, self._answer(answer, reading)]
            return True

    def _question(self, asked: list[Message]) -> tuple[Question, Reading]:
        """The request for the answer to a conversation, and how to tell the thinking in it from the rest. Raises
        AdaptiveError for a conversation that does not fit or that the chat template refuses."""
        from adaptive.answering import Question
        from adaptive.assistant import encode_chat
        from adaptive.service.calls import reading_of

        pair = self.opened.pair
        prompt = encode_chat(pair, asked)
        reading = reading_of(pair.tokenizer, None, prompt)
        marks = reading.marks(pair.tokenizer)
        return Question(prompt, tuple(asked), "", self.sampling, self.limits, self.name, marks=marks), reading

    def _makes_room(self, text: str) -> bool:
        """Take out the oldest turns, if the user agrees, until the conversation and ``text`` fit."""
        from cli.chat_talk import Talk

        shorter = Talk(None, tuple(self.talk.messages))
        while shorter.turns and not self._fits(shorter, text):
            if not shorter.forget_oldest() and shorter.take_back() is None:
                break  # a loaded conversation may have no question
        forgotten = len(self.talk.turns) - len(shorter.turns)
        assert self.keyboard is not None
        helps = forgotten and self._fits(shorter, text)
        self.note("/reset begins anew, /forget takes the oldest question and its answer out of the conversation")
        question = f"Take the oldest {counted(forgotten, 'message')} out of the conversation and ask again?"
        if not helps or not self.keyboard.agrees(question):
            return False
        self.talk = shorter
        return True

    def _fits(self, talk: Talk, text: str) -> bool:
        """Whether a conversation with one more question leaves room for what follows (FORGET_TO)."""
        from adaptive.assistant import encode_chat
        from adaptive.errors import ContextFullError
        from adaptive.types import Message

        pair = self.opened.pair
        try:
            prompt = encode_chat(pair, [*talk.messages, Message("user", text)])
        except ContextFullError:
            return False
        return len(prompt) <= FORGET_TO * pair.target.context_length

    def go_on(self) -> None:
        """Continue the last answer, which was cut. Raises AdaptiveError if it was not, or if it is not of this run."""
        from adaptive.answering import Question
        from adaptive.types import Message

        answered, messages = self._answered, self.talk.messages
        if answered is None or not messages or messages[-1] is not answered.message:
            raise AdaptiveError("nothing to continue: /more continues the last answer of this run, if it was cut")
        if not answered.cut:
            raise AdaptiveError("the last answer was not cut")
        text, reading = answered.text, answered.reading
        asked = (*messages[:-1], Message("assistant", text))  # what follows may be the rest of the thinking
        marks = reading.marks(self.opened.pair.tokenizer)
        question = Question(
            answered.tokens, asked, "", self.sampling, self.limits, self.name, goes_on=True, marks=marks
        )
        messages[-1] = self._answer(text + self._stream(question, reading, text), reading)

    def _answer(self, text: str, reading: Reading) -> Message:
        """The message of the answer that has just ended. Its thinking is no part of the conversation, as chat templates
        expect."""
        from adaptive.types import Message

        last = self.opened.assistant.last
        assert last is not None
        message, cut = Message("assistant", reading.shown(text)), last.finish_reason == "length"
        self._answered = Answered(message, [*last.request.prompt, *last.output], cut, text, reading)
        return message

    def _display(self) -> Display:
        from cli.chat_display import MarkdownDisplay, PlainDisplay

        if self.plain or not self.console.is_terminal or self.console.is_dumb_terminal or not sys.stdout.isatty():
            return PlainDisplay()
        return MarkdownDisplay(self.console)

    def _stream(self, question: Question, reading: Reading, before: str = "") -> str:
        """Show an answer while it is decoded, log it, and print its figures. Returns its text, with its thinking.
        ``before``: what it continues. ctrl-C stops the answer, and nothing else here, however often it is pressed.
        Raises NoMemoryError if memory runs out."""
        with interruptible() as interrupted:
            self.opened.swapper.between_rounds()  # a large adapter is read beside the answer, and named before the next
            if self.opened.assistant.adapter != self._drafting:
                self._drafting = self.opened.assistant.adapter
                self.console.print(f"[green]now drafting with adapter {self._drafting or 'none'}[/]")
            self.trainer.busy()
            try:
                self._show(self.opened.assistant.answer(question), reading, before, interrupted)
                self._keep()
            except Exception as error:
                if not out_of_memory(error):
                    raise
                self.opened.assistant.conversations.free_idle()
                said = f"memory has run out ({first_line(error)}); ask again, or shorten the text"
                raise NoMemoryError(said) from error
            finally:
                self.trainer.idle()
        assert self.opened.assistant.last is not None
        return self.opened.assistant.last.text

    def _show(self, steps: Iterable[Step], reading: Reading, before: str, interrupted: Callable[[], bool]) -> None:
        from adaptive.service.calls import Thought
        from cli.chat_display import Answer

        def show(parts: Iterable[Any]) -> None:
            for part in parts:
                if isinstance(part, Thought):
                    answer.think(part.text)
                elif isinstance(part, str):  # and no call, of which there are none to offer
                    answer.feed(part)

        with contextlib.closing(steps):  # type: ignore[type-var]
            with self._reading(interrupted):
                first = next(iter(steps), None)  # raises for a wrong prompt before anything is shown
            reader, answer = reading.reader(), Answer(self.console, self._display)
            reader.feed(before)
            try:
                for step in itertools.chain([] if first is None else [first], steps):
                    show(reader.feed(step.text))
                    if interrupted():
                        break
                show(reader.finish())
            finally:
                answer.close()

    @contextlib.contextmanager
    def _reading(self, interrupted: Callable[[], bool]) -> Iterator[None]:
        """During the prefill, which may be long, show a status line and allow an interruption."""
        status = self.console.status("reading")
        later = threading.Timer(SAID_AFTER_S, status.start)

        def part(left: int) -> None:
            if interrupted():
                raise AdaptiveError("stopped before the answer began; the question is not part of the conversation")
            status.update(f"reading, {counted(left, 'token')} to go")

        self.opened.assistant.reading = part
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            later.start()
        try:
            yield
        finally:
            self.opened.assistant.reading = None
            later.cancel()
            if later.is_alive():
                later.join()
            status.stop()

    def _keep(self) -> None:
        """Wait until the answer is in the log, then print how it was decoded and how it ended."""
        from cli.generate import figures, how_cut, keep

        assistant = self.opened.assistant
        keep(assistant)
        if assistant.log is not None and assistant.log.problem:
            self.console.print(f"log: {assistant.log.problem}", style="red", markup=False)
        assert assistant.last is not None
        for adapter, rounds in assistant.rounds_by_adapter:
            self.trainer.answered(adapter, rounds)
        stopped = "stopped · " if assistant.last.finish_reason == "cancelled" else ""
        self.console.print(f"[dim]{stopped}{figures(assistant)}[/]")
        typing = self.keyboard is not None
        cut = how_cut(assistant, ": /more goes on", ": /reset begins anew") if typing else how_cut(assistant)
        if cut is not None:
            self.console.print(cut, style="yellow")


@contextlib.contextmanager
def interruptible() -> Iterator[Any]:
    """Turn ctrl-C into a flag that the answer loop checks between two tokens, so that no step is interrupted."""
    pressed = False

    def note(signum: int, frame: Any) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
