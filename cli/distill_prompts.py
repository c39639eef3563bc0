"""Has the target answer a file of prompts into the log, at the loop's speed (``distill --prompts``).

A note in the pair's folder says which prompts are asked and which record was the newest before them. So the same
command, after an interruption, finds the answers in the log, and asks only the other prompts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from adaptive.errors import AdaptiveError
from adaptive.printable import counted, per_second

if TYPE_CHECKING:
    from rich.console import Console

    from adaptive.settings import Settings
    from adaptive.state import PairState
    from cli.prompts import PromptLine

# Settings on which an answer depends, besides the pair.
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "answer_tokens",
)  # fmt: skip


@contextlib.contextmanager
def answers_logged(settings: Settings, prompts: Sequence[PromptLine], console: Console) -> Iterator[None]:
    """Answer every prompt with the settings' sampling, behind a progress bar; then all answers are logged.

    If this or the block is interrupted (ctrl-C, ``typer.Exit``, a kill), the next call with the same prompts and
    sampling does not ask again what was answered. Raises AdaptiveError if nothing is logged, and before the first
    answer if the target cannot answer one of the prompts.
    """
    if not settings.record:
        raise AdaptiveError("--prompts learns by way of the log, and recording is off; leave --no-record out")
    from adaptive.pair import pair_identity
    from adaptive.state import open_state

    state = open_state(settings.state_dir, pair_identity(settings).id)
    after = _begin(state, settings, prompts)
    left = _unanswered(state, prompts, after)
    if len(left) < len(prompts):
        console.print(f"going on: {len(prompts) - len(left)} of {counted(len(prompts), 'prompt')} were answered before")
    try:
        _answer(settings, left, console)
    except (KeyboardInterrupt, SystemExit):  # ctrl-C, or a signal to end
        answered = len(prompts) - len(_unanswered(state, prompts, after))
        console.print(
            f"interrupted: {answered} of {counted(len(prompts), 'prompt')} are answered; the same command again goes "
            "on with the others"
        )
        raise
    try:
        yield
    except AdaptiveError:
        state.answering.unlink(missing_ok=True)
        raise
    state.answering.unlink(missing_ok=True)


def _begin(state: PairState, settings: Settings, prompts: Sequence[PromptLine]) -> int:
    """Note that these prompts are asked, unless that was noted before. Returns the id of the newest record before their
    answers."""
    from adaptive.records.log import Log
    from checkpoints import files

    asked = [[(m.role, m.content) for m in prompt.messages] for prompt in prompts]
    how = [getattr(settings, name) for name in SAMPLING]
    key = hashlib.sha256(json.dumps([asked, how]).encode()).hexdigest()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        noted = json.loads(state.answering.read_bytes())
        if noted["key"] == key:
            return int(noted["after"])
    with contextlib.suppress(AdaptiveError), Log(state.records) as log:  # a damaged log is replaced when it is opened
        after = log.last_id()
        with contextlib.suppress(OSError):  # a full disk: interrupted, it begins anew
            files.replace_text(state.root, state.answering, json.dumps({"key": key, "after": after}))
        return after
    return 0


def _unanswered(state: PairState, prompts: Sequence[PromptLine], after: int) -> list[PromptLine]:
    """The prompts without a whole answer among the records whose id is above ``after``."""
    from adaptive.records.log import Log

    given: Counter[object] = Counter()
    with contextlib.suppress(AdaptiveError), Log(state.records) as log:
        for one in log.generations(after, with_supervision=False):
            given[one.generation.messages] += one.generation.finish_reason != "cancelled"
    left = []
    for prompt in prompts:
        if given[prompt.messages] <= 0:
            left.append(prompt)
        given[prompt.messages] -= 1
    return left


def _answer(settings: Settings, prompts: Sequence[PromptLine], console: Console) -> None:
    """Answer these prompts, if there are any."""
    if not prompts:
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from cli.opened import open_pair
    from cli.prompts import require_answerable

    with open_pair(settings, console) as session:
        from adaptive.assistant import sampling_params
        from adaptive.types import StopParams

        with console.status("checking the prompts"):
            require_answerable(prompts, session.pair)
        sampling, stop = sampling_params(settings, session.pair), StopParams(settings.answer_tokens)
        columns = (
            TextColumn("answering"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
        )
        tokens, seconds = 0, 0.0
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=len(prompts), speed="")
            for prompt in prompts:
                # Closed, so that an answer that is stopped is logged, too.
                with contextlib.closing(session.assistant.chat(prompt.messages, sampling, stop)) as steps:  # type: ignore[type-var]
                    for _ in steps:
                        pass
                done = session.assistant.last
                assert done is not None
                tokens, seconds = tokens + len(done.output), seconds + done.timings.predicted_s
                progress.update(task, advance=1, speed=f"{per_second(tokens / max(seconds, 1e-9))} tokens/s")
    console.print(f"answered {counted(len(prompts), 'prompt')}, {counted(tokens, 'token')}")
