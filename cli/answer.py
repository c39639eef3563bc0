"""Has the target answer a file of prompts into the log, at the loop's speed (``distill --prompts``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from adaptive.errors import AdaptiveError
from adaptive.printable import counted

if TYPE_CHECKING:
    from rich.console import Console

    from adaptive.settings import Settings
    from cli.prompts import PromptLine


def answer_into_log(settings: Settings, prompts: Sequence[PromptLine], console: Console) -> None:
    """Answer every prompt with the settings' sampling, behind a progress bar; all answers are logged on return.

    ctrl-C keeps the answers so far in the log and is passed on. Raises AdaptiveError if nothing is logged, and before
    the first answer if the target cannot answer one of the prompts.
    """
    if not settings.record:
        raise AdaptiveError("--prompts learns by way of the log, and recording is off; leave --no-record out")
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
                for _ in session.assistant.chat(prompt.messages, sampling, stop):
                    pass
                done = session.assistant.last
                assert done is not None
                tokens, seconds = tokens + len(done.output), seconds + done.timings.predicted_s
                progress.update(task, advance=1, speed=f"{tokens / max(seconds, 1e-9):.0f} tokens/s")
    console.print(f"answered {counted(len(prompts), 'prompt')}, {counted(tokens, 'token')}")
