"""``adaptive generate``: answers one prompt, or a file of them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from adaptive.errors import AdaptiveError, why_unread
from adaptive.printable import counted, per_second
from cli.bars import counting_bar
from cli.ending import uninterrupted
from cli.options import shared_options
from cli.output import print_json, shown

if TYPE_CHECKING:
    from rich.console import Console

    from adaptive.assistant import Assistant
    from adaptive.decoding.loop import Decoding, Step
    from adaptive.grammar import Grammar
    from adaptive.settings import Settings
    from cli.prompts import PromptLine

FORMAT = "Format of the answer"


@shared_options()
def generate(
    settings: Settings,
    prompt: Annotated[Optional[str], typer.Argument(help="The prompt; - reads it from standard input.")] = None,
    prompts: Annotated[Optional[Path], typer.Option(help="JSON lines with a prompt or messages each.")] = None,
    skip: Annotated[
        int,
        typer.Option(min=0, help="Leave out the first N prompts of the file, as after an interruption.", metavar="N"),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt.")] = False,
    stop: Annotated[Optional[list[str]], typer.Option(help="End at this text; may be repeated.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    domain: Annotated[Optional[str], typer.Option(help="Label of this kind of text in the log.")] = None,
    json_schema: Annotated[
        Optional[Path], typer.Option(help="JSON schema that answers keep to.", rich_help_panel=FORMAT)
    ] = None,
    grammar: Annotated[
        Optional[Path], typer.Option(help="Grammar that answers keep to: Lark or GBNF.", rich_help_panel=FORMAT)
    ] = None,
    regex: Annotated[
        Optional[str], typer.Option(help="Regular expression that answers match.", rich_help_panel=FORMAT)
    ] = None,
) -> None:
    """Answer one prompt, or every prompt of a file.

    ctrl-C says how many prompts of a file are answered; --skip leaves these out the next time.

    Example: adaptive generate "Write a haiku about rain" --temperature 0.7

    Example: adaptive generate --prompts prompts.jsonl --json --draft-length 4

    Example: adaptive generate --prompts prompts.jsonl --json --skip 2

    Example: adaptive generate "Name a fruit and its colour" --json-schema fruit.json
    """
    from rich.console import Console

    from cli.prompts import bare_prompt, read_prompts, require_answerable

    if (prompt is None) == (prompts is None):
        raise AdaptiveError("give one prompt, or a file of them with --prompts")
    if domain is not None and not settings.record:
        raise AdaptiveError("--domain labels what is logged, and recording is off; leave one of them out")
    if skip and prompts is None:
        raise AdaptiveError("--skip leaves out prompts of a file; give one with --prompts")
    if prompts is not None:
        asked = read_prompts(prompts)
        if skip >= len(asked):
            raise AdaptiveError(f"--skip {skip} leaves nothing of the {counted(len(asked), 'prompt')} in {prompts}")
        if raw and (chat := next((one for one in asked if not one.bare), None)):
            raise AdaptiveError(f'{chat.where} has messages, and --raw continues a "prompt" text; leave --raw out')
    else:
        asked = [bare_prompt(_standard_input() if prompt == "-" else prompt or "")]
        if prompt == "-" and not asked[0].messages[0].content.strip():
            raise AdaptiveError("nothing is asked: standard input is empty")

    from cli.opened import open_pair

    keeps_to = _grammar(json_schema, grammar, regex)
    console = Console(stderr=True)
    with open_pair(settings, console) as session:
        from adaptive.assistant import sampling_params
        from adaptive.service.calls import thinking_marks
        from adaptive.types import StopParams

        if prompts is not None:
            with console.status("checking the prompts"):
                require_answerable(asked, session.pair, raw)
        sampling = sampling_params(settings, session.pair)
        limits = StopParams(settings.answer_tokens, tuple(stop or ()))
        given: dict[str, Any] = {"domain": domain, "grammar": keeps_to}
        if not raw:
            given["marks"] = thinking_marks(session.pair.tokenizer)
        done = skip
        # Answers that are written to the terminal show the progress themselves.
        bar = counting_bar(console, "answering", hidden=prompts is None or not as_json or sys.stdout.isatty())
        task = bar.add_task("", total=len(asked), completed=done)
        try:
            with bar:
                for one in asked[skip:]:
                    if raw:
                        steps = session.assistant.complete(one.messages[-1].content, sampling, limits, **given)
                    else:
                        steps = session.assistant.chat(one.messages, sampling, limits, **given)
                    _decode(steps, as_json)
                    with uninterrupted():  # or an answer would be written and not counted
                        _finish(one, session.assistant, as_json, console)
                        done += 1
                    bar.update(task, completed=done)
        except (AdaptiveError, KeyboardInterrupt, SystemExit) as error:  # one that fails, ctrl-C, a signal to end
            if prompts is not None:
                said = f"interrupted: {done} of {counted(len(asked), 'prompt')} are answered"
                console.print(f"{said}; --skip {done} answers the others", style="yellow", highlight=False)
                if isinstance(error, AdaptiveError):
                    raise AdaptiveError(f"{asked[done].where}: {error}") from error
            raise


def _decode(steps: Iterator[Step], as_json: bool) -> None:
    """Decode one answer. Without ``as_json`` its text is written meanwhile."""
    with contextlib.closing(steps):  # type: ignore[type-var]  # an answer that is stopped is logged, too
        if as_json:
            for _ in steps:
                pass
        else:
            show(steps)


def _finish(prompt: PromptLine, assistant: Assistant, as_json: bool, console: Console) -> None:
    """Write an answer's figures or its JSON object; it is in the log before."""
    keep(assistant)
    if as_json:
        print_json(as_object(prompt, assistant))
    else:
        console.print(f"[dim]{figures(assistant)}[/]", highlight=False)
        if cut := how_cut(assistant):
            console.print(cut, style="yellow", highlight=False)


def _grammar(json_schema: Path | None, grammar: Path | None, regex: str | None) -> Grammar | None:
    """The grammar of the answers. Raises AdaptiveError for a file that cannot be read, or if several are given."""
    from adaptive.grammar import Grammar, notation

    if sum(given is not None for given in (json_schema, grammar, regex)) > 1:
        raise AdaptiveError("--json-schema, --grammar and --regex: an answer keeps to one of them")
    if regex is not None:
        return Grammar("regex", regex)
    file = json_schema or grammar
    if file is None:
        return None
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AdaptiveError(f"{file} cannot be read: {why_unread(error)}") from error
    return notation(text) if json_schema is None else Grammar("json_schema", text)


def _standard_input() -> str:
    if sys.stdin is None:  # closed, as by <&-
        return ""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise AdaptiveError("standard input is not UTF-8 text") from error


def show(steps: Iterable[Step]) -> None:
    """Write the answer while it is decoded; on a terminal, without control sequences."""
    for step in steps:
        sys.stdout.write(shown(step.text))
        sys.stdout.flush()
    sys.stdout.write("\n")


def keep(assistant: Assistant) -> None:
    """Wait until the answer is in the log, so that an answer shown as done is never lost."""
    if assistant.log is not None:
        assistant.log.flush()


def figures(assistant: Assistant) -> str:
    """One line on the last answer: speed, how it was decoded and why, tokens a round, acceptance, adapter."""
    from adaptive.records.stats import count_rounds, in_words
    from adaptive.speculation import speculation

    done = last(assistant)
    parts = [counted(len(done.output), "token")]
    if done.rounds:
        parts.append(f"{per_second(done.timings.per_second)} tokens/s")
    if done.cached:
        parts.append(f"{counted(done.cached, 'prompt token')} from the cache")
    if done.rounds:  # an answer of one token has no rounds, since the prefill yields it
        parts.append(speculation(assistant).sentence)
        parts.append(in_words(count_rounds(done.rounds)))
    if assistant.pair.draft is not None:
        adapter = None if assistant.latest is None else assistant.latest.adapter  # another one may be in use by now
        parts.append(f"adapter {adapter}" if adapter else "no adapter")
    return " · ".join(parts)


def how_cut(assistant: Assistant, more: str = ": --max-new-tokens allows more", anew: str = "") -> str | None:
    """What cut the last answer, and the remedy: ``more`` at the token limit, ``anew`` at the end of the context; None
    if it was not cut."""
    done = last(assistant)
    if done.finish_reason != "length":
        return None
    full = len(done.request.prompt) + len(done.output) >= assistant.pair.target.context_length
    return f"cut where the context is full{anew}" if full else f"cut at the limit{more}"


def as_object(prompt: PromptLine, assistant: Assistant) -> dict[str, Any]:
    """The JSON object of one answer; figures as in ``history``, times in milliseconds."""
    from adaptive.records.stats import figures_object

    done = last(assistant)
    timings = done.timings
    return {
        "prompt": prompt.as_given(),
        "text": done.text,
        "tokens": done.output,
        "finish_reason": done.finish_reason,
        "usage": {"prompt_tokens": len(done.request.prompt), "completion_tokens": len(done.output)},
        "timings": {
            "prompt_n": timings.prompt_n,
            "prompt_ms": timings.prompt_s * 1000,
            "predicted_n": timings.predicted_n,
            "predicted_ms": timings.predicted_s * 1000,
            "predicted_per_second": timings.per_second,
            "draft_n": done.drafted,
            "draft_n_accepted": done.accepted,
        },
        **figures_object(done.rounds),
        "adapter": assistant.adapter,
    }


def last(assistant: Assistant) -> Decoding:
    """The answer that has just ended."""
    assert assistant.last is not None
    return assistant.last
