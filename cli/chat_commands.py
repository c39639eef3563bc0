"""The commands of ``adaptive chat``, by name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from adaptive.errors import AdaptiveError
from adaptive.printable import counted, printable_line

if TYPE_CHECKING:
    from rich.console import Group

    from adaptive.types import SamplingParams
    from cli.chat_session import Chat

# The name that ``/set`` accepts besides the sampling parameters.
MOST_TOKENS = "max_tokens"
# Sampling parameters that ``/set`` cannot set, since they are not plain numbers.
NO_NUMBERS = ("logit_bias", "constrained")


class Command(NamedTuple):
    """``run`` gets the chat and the text after the command's name; it returns False to leave the chat."""

    arguments: str
    help: str
    run: Callable[[Chat, str], bool | None]


def _help(chat: Chat, said: str) -> None:
    chat.console.print(help_text())


def _system(chat: Chat, said: str) -> None:
    if said:
        chat.talk.system = "" if said == "off" else said
    chat.note(f"system message: {chat.talk.system or 'none'}")


def _set(chat: Chat, said: str) -> None:
    words = said.replace("=", " ").split()
    names = [f.name for f in dataclasses.fields(chat.sampling) if f.name not in NO_NUMBERS]
    if len(words) == 2:
        if words[0] == MOST_TOKENS:
            chat.limits = dataclasses.replace(chat.limits, max_new_tokens=_whole(words[1]))
        elif words[0] in names:
            chat.sampling = _with(chat.sampling, *words)
        else:
            raise AdaptiveError(f"there is no {words[0]} to set; there are {', '.join([*names, MOST_TOKENS])}")
    elif words:
        raise AdaptiveError("give a name and a value, as in /set temperature 0.2")
    now = {name: getattr(chat.sampling, name) for name in names} | {MOST_TOKENS: chat.limits.max_new_tokens}
    chat.note(" · ".join(f"{name} {value}" for name, value in now.items() if value is not None))


def _with(sampling: SamplingParams, name: str, value: str) -> SamplingParams:
    changed: Any = None
    if name != "seed" or value != "off":
        changed = _whole(value) if name in ("top_k", "seed") else _number(value)
    return dataclasses.replace(sampling, **{name: changed})


def _whole(value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise AdaptiveError(f"{value!r} is no whole number") from error


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise AdaptiveError(f"{value!r} is no number") from error


def _retry(chat: Chat, said: str) -> None:
    before = list(chat.talk.messages)
    question = chat.talk.take_back()
    if question is None:
        raise AdaptiveError("nothing has been asked yet")
    answered = False
    try:
        chat.note(f"again: {question}")
        answered = chat.ask(question)
    finally:  # also after ctrl-C
        if not answered:
            chat.talk.messages = before


def _undo(chat: Chat, said: str) -> None:
    question = chat.talk.take_back()
    chat.note("nothing has been asked yet" if question is None else f"{_taken_out(chat)}: {question}")


def _more(chat: Chat, said: str) -> None:
    chat.go_on()


def _forget(chat: Chat, said: str) -> None:
    if chat.talk.forget_oldest():
        chat.note(f"{_taken_out(chat)}: the oldest question and its answer")
    else:
        chat.note("there is nothing but the last question")


def _taken_out(chat: Chat) -> str:
    kept = "" if chat.opened.assistant.log is None else " (the log keeps it)"
    return f"taken out of the conversation{kept}"


def _save(chat: Chat, said: str) -> None:
    file = _file(said, "/save talk.json")
    if not chat.talk.messages:
        raise AdaptiveError("there is nothing to save yet")
    chat.talk.save(file)
    chat.note(f"saved {counted(len(chat.talk.messages), 'message')} to {file}; /load {file} brings them back")


def _load(chat: Chat, said: str) -> None:
    file = _file(said, "/load talk.json")
    there = chat.talk.load(file)
    if there > 1:
        chat.note(f"{file} holds {there} conversations; this is the first")
    chat.begin_session()
    chat.show_last()


def _file(said: str, example: str) -> Path:
    if not said:
        raise AdaptiveError(f"name a file, as in {example}")
    return Path(said)


def _reset(chat: Chat, said: str) -> None:
    chat.talk = type(chat.talk)(chat.talk.system)
    chat.begin_session()
    chat.note(f"new session {chat.name}")


def _training(chat: Chat, said: str) -> None:
    status = chat.trainer.status
    chat.console.print(f"{status.activity}: {status.reason}", markup=False)
    if status.last_run:
        chat.note(f"last training run: {status.last_run}")
    chat.note(f"live acceptance: {status.watch}")


def _stats(chat: Chat, said: str) -> None:
    from adaptive.drafting.ahead import AheadDrafter
    from adaptive.speculation import speculation
    from cli.history import print_summary

    if _logged(chat):
        print_summary(chat.opened.state, chat.console, session=chat.name)
        chat.console.print(f"last answer: {speculation(chat.opened.assistant).sentence}")
    last = chat.opened.assistant.last
    if last is not None and isinstance(last.drafter, AheadDrafter):
        chat.console.print(f"last answer: {last.drafter.sentence}")
    if chat.opened.pair.remote is not None:
        chat.console.print(printable_line(chat.opened.pair.remote.sentence), markup=False)
    held = chat.opened.assistant.conversations.memory
    parts = {
        "keys and values": held.keys,
        "recurrent states": held.states,
        "their checkpoints": held.checkpoints,
        "hidden states": held.features,
    }
    said = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in parts.items() if size)
    chat.console.print(f"memory of this conversation: {said or 'none yet'}")


def _sessions(chat: Chat, said: str) -> None:
    from adaptive.records.log import Log
    from cli.cells import moment
    from cli.chat_display import titled

    if not _logged(chat):
        return
    with Log(chat.opened.state.records) as log:
        for session in log.sessions():
            answers = counted(session.generations, "answer")
            line = titled(session.id, f"{moment(session.last)} · {answers} · {' '.join(session.opening.split())}")
            chat.console.print(line, no_wrap=True, overflow="ellipsis")


def _logged(chat: Chat) -> bool:
    """Whether there is a log; flushes it, so that it contains the whole conversation."""
    writer = chat.opened.assistant.log
    if writer is None:
        chat.console.print("nothing is logged in this session (--no-record)")
        return False
    writer.flush()
    return True


def _exit(chat: Chat, said: str) -> bool:
    return False


COMMANDS = {
    "/help": Command("", "this list", _help),
    "/retry": Command("", "answer the last question again", _retry),
    "/undo": Command("", "take the last question and its answer out of the conversation", _undo),
    "/more": Command("", "go on with an answer that was cut", _more),
    "/forget": Command("", "take the oldest question and its answer out of the conversation", _forget),
    "/reset": Command("", "leave this conversation and start a new session", _reset),
    "/system": Command("[TEXT|off]", "show or change the system message", _system),
    "/set": Command("[NAME VALUE]", "show or change sampling, as in /set temperature 0.2", _set),
    "/save": Command("FILE", "keep the conversation in a file", _save),
    "/load": Command("FILE", "go on with one that was kept", _load),
    "/stats": Command("", "what this session and the log say about speed and acceptance", _stats),
    "/training": Command("", "what background training does now, and why", _training),
    "/sessions": Command("", "earlier sessions, which --session NAME resumes", _sessions),
    "/exit": Command("", "leave (so does ctrl-D)", _exit),
}


def help_text() -> Group:
    """The list of commands, for a console of any width."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, command in COMMANDS.items():
        table.add_row(Text.assemble((name, "bold"), f" {command.arguments}"), Text(command.help))
    keys = "ctrl-C stops an answer. A line that ends with \\ goes on in the next."
    return Group(table, Text(keys), Text('Several lines stand between """ and """.'))


def carry_out(chat: Chat, text: str) -> bool:
    """Carry out a typed command; False means leave the chat."""
    name, *said = text.split(maxsplit=1)
    command = COMMANDS.get("/exit" if name == "/quit" else name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        chat.console.print(f"there is no {name}; {meant}/help lists what there is", markup=False)
        return True
    try:
        return command.run(chat, "".join(said).strip()) is not False
    except AdaptiveError as error:
        chat.console.print(str(error), style="red", markup=False)
        return True
