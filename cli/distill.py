"""``adaptive distill``: one training run, from the log or from files, and the gate's verdict on it."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from adaptive.errors import AdaptiveError
from cli.distill_outcome import as_object, show
from cli.options import shared_options, typed
from cli.output import print_json
from cli.waiting import wait

if TYPE_CHECKING:
    from datasets import Dataset
    from rich.console import Console
    from transformers import PreTrainedModel

    from adaptive.engines.head.foreign import ForeignHead
    from adaptive.engines.head.module import Head
    from adaptive.settings import Settings
    from cli.prompts import PromptLine
    from trainers.fit import Progress
    from trainers.recipe import Recipe
    from trainers.run import DistillOutcome, Promotion

TRAINING = "Training"

# Options that decide how prompts are answered, and what is kept of that.
ANSWERING = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "history", "record")

# Draft length of the table if none was given: the usual one of fixed-length engines.
TABLE_DRAFT_LENGTH = 4


@shared_options()
def distill(
    settings: Settings,
    context: typer.Context,
    prompts: Annotated[
        Optional[Path],
        typer.Option(help="The target answers these first: JSON lines with a prompt or messages each.", metavar="FILE"),
    ] = None,
    data: Annotated[
        Optional[Path], typer.Option(help="Learn from chat messages too: JSON lines of messages.", metavar="FILE")
    ] = None,
    records: Annotated[
        Optional[int],
        typer.Option(
            help="Newest records to learn from; by default 2,000, or all that --prompts asks for.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    epochs: Annotated[
        Optional[float], typer.Option(help="Times over the training set, at most.", rich_help_panel=TRAINING)
    ] = None,
    max_seconds: Annotated[
        Optional[float], typer.Option(help="Seconds of training, at most.", rich_help_panel=TRAINING)
    ] = None,
    rank: Annotated[
        Optional[int], typer.Option(help="Rank of the adapter; by default from the width.", rich_help_panel=TRAINING)
    ] = None,
    lr: Annotated[
        Optional[float],
        typer.Option(help="Peak learning rate; by default from the draft's width.", rich_help_panel=TRAINING),
    ] = None,
    loss: Annotated[
        Optional[str],
        typer.Option(help="auto, forward-kl, reverse-kl, js, tv, kl-tv or cross-entropy.", rich_help_panel=TRAINING),
    ] = None,
    rehearsed: Annotated[
        Optional[int],
        typer.Option(help="Texts by the draft itself in each update, to keep what it knows.", rich_help_panel=TRAINING),
    ] = None,
    from_current: Annotated[
        bool,
        typer.Option(
            "--from-current", help="Continue from the adapter in use, not from zero.", rich_help_panel=TRAINING
        ),
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Train other recipes too; the gate gets the best result.", rich_help_panel=TRAINING
        ),
    ] = False,
    no_promote: Annotated[bool, typer.Option("--no-promote", help="Leave the adapter a candidate.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Promote whatever the gate says.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train the draft on the target's answers, and use the result if it guesses held-out answers better.

    ctrl-C stops at once and keeps the best weights so far as a candidate. The same command again continues an
    interrupted run; prompts that have an answer are not answered again. Under torchrun (torchrun -m cli.main distill)
    several processes train together.

    Example: adaptive distill

    Example: adaptive distill --prompts prompts.jsonl --temperature 0.7

    Example: adaptive distill --data chats.jsonl --max-seconds 120
    """
    if no_promote and force:
        raise AdaptiveError("--no-promote and --force contradict each other; give one of them")
    if prompts is None:
        if unused := typed(context, *ANSWERING):
            raise AdaptiveError(f"{unused}: nothing is answered without --prompts; give a file, or leave that out")
        require_trainable_length(settings, context)
    from rich.console import Console

    # Of processes that torchrun has started, only the first one speaks.
    console = Console(stderr=True, highlight=False, quiet=os.environ.get("RANK", "0") != "0")
    if prompts is None:
        wait(spins=0)  # beside another busy process, a training step takes tenths of seconds; with spinning, seconds
    with console.status("starting"):
        from adaptive.remote import untrained
        from trainers import processes

    elsewhere = untrained(settings)
    if elsewhere is not None:
        raise AdaptiveError(elsewhere)
    recipe = _recipe(settings, records, epochs, max_seconds, rank, lr, loss, rehearsed, from_current)
    promotion: Promotion = "never" if no_promote else "force" if force else "gate"
    settings = settings.model_copy(update={"draft_device": processes.join(settings.draft_device or settings.device)})
    if prompts is not None and processes.count() > 1:
        raise AdaptiveError("--prompts answers in one process; run `adaptive generate --prompts` first, then distil")
    speaks = processes.first()
    console.quiet = not speaks
    asked = None if prompts is None else _prompts(prompts)
    if asked is not None and records is None:
        recipe = replace(recipe, buffer=max(recipe.buffer, len(asked)))
    extra = None if data is None else chats_of(settings, data, console)
    from cli.distill_prompts import answers_logged

    with nullcontext() if asked is None else answers_logged(settings, asked, console):
        outcome = run(settings, recipe, promotion, console, extra, compare)
        processes.leave()
        if as_json and speaks:
            print_json(as_object(outcome), indent=2)
        elif not as_json:
            show(outcome, settings, Console(highlight=False, quiet=not speaks))
        if outcome.stopped:
            raise typer.Exit(130)


def run(
    settings: Settings,
    recipe: Recipe,
    promotion: Promotion,
    console: Console,
    extra: Dataset | None = None,
    compare: bool = False,
) -> DistillOutcome:
    """One training run for the pair of ``settings``, with a progress bar on ``console``; ctrl-C stops it.

    ``compare`` trains the recipe's rivals too. Raises AdaptiveError for a pair with nothing to learn from, before
    a model is loaded.
    """
    # PEFT imports bitsandbytes, which warns about a missing 4-bit kernel; nothing here uses 4 bits.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from rich.markup import escape

    with console.status("starting"):
        from adaptive.engines.cpu.torch_threads import set_threads
        from adaptive.pair import load_draft_for_training, load_tokenizer, pair_identity
        from adaptive.records.deletion import finish
        from adaptive.records.features import spool_of
        from adaptive.service.doubts import end_doubt
        from adaptive.state import open_state
        from checkpoints.store import AdapterStore
        from trainers import processes
        from trainers.dataset import read_log
        from trainers.lock import only_trainer
        from trainers.rehearsal import rehearsal_of
        from trainers.run import distill as train
        from trainers.run import tidy

    if processes.count() == 1:  # several have the number that their launcher gave each
        set_threads(settings.threads)
    identity = pair_identity(settings)
    state = open_state(settings.state_dir, identity.id)
    if processes.first() and (left := finish(state)):
        console.print(f"[yellow]note:[/] {escape(left)}")
    if extra is None and not state.records.exists():
        read_log(state.records, recipe.buffer)
    store = AdapterStore(state.adapters)
    with only_trainer(state) if processes.first() else nullcontext():
        with console.status("loading the draft"):
            draft = load_draft_for_training(settings)
        with stoppable() as should_stop, progress_bar(console) as report:
            outcome = train(
                state.records,
                store,
                identity.base,
                draft,
                recipe,
                on_progress=report,
                should_stop=should_stop,
                extra=extra,
                promotion=promotion,
                state=state.training,
                rivals=_rivals(recipe, draft) if compare else (),
                spool=spool_of(state, settings.feature_gb),
                rehearsal=rehearsal_of(load_tokenizer(settings), state.rehearsal, identity.base.weights),
            )
        notes = list(outcome.notes)
        if processes.first() and outcome.promoted:
            end_doubt(store, state.doubts, notes.append)
        return replace(outcome, notes=(*notes, *tidy(store, state, settings.keep_adapters)))


def _rivals(recipe: Recipe, draft: PreTrainedModel | Head | ForeignHead) -> tuple[Recipe, ...]:
    """The other recipes to try. For a head that is grown, only another loss: rank and start do not apply to it."""
    from adaptive.engines.head.module import Head
    from trainers.lora import width_of

    found = recipe.rivals(width_of(draft))
    return tuple(r for r in found if r.loss != recipe.loss) if isinstance(draft, Head) else found


def require_trainable_length(settings: Settings, context: typer.Context) -> None:
    """Raise AdaptiveError for a draft length on the command line that plays no part in training: 0, or a tree."""
    from adaptive.settings import fixed_draft_length

    said = fixed_draft_length(settings.draft_length)
    if said is not None and (said[1] or not said[0]) and typed(context, "draft_length"):
        raise AdaptiveError(
            f"--draft-length is {settings.draft_length}, by which nothing is trained; give a number from 1 to 64"
        )


def _prompts(file: Path) -> list[PromptLine]:
    from cli.prompts import read_prompts

    return read_prompts(file)


def chats_of(settings: Settings, file: Path, console: Console) -> Dataset:
    """The chats in ``file``, as rows to train on. Raises AdaptiveError."""
    from adaptive.pair import load_tokenizer, sources
    from trainers.chats import end_tokens, read_chats

    with console.status("reading the chats"):
        return read_chats(file, load_tokenizer(settings), end_tokens(sources(settings)[0]))


def _recipe(
    settings: Settings,
    records: int | None,
    epochs: float | None,
    max_seconds: float | None,
    rank: int | None,
    lr: float | None,
    loss: str | None,
    rehearsed: int | None,
    from_current: bool,
) -> Recipe:
    """The default recipe with the given choices. Raises AdaptiveError, which names a value that cannot work."""
    from trainers.recipe import Recipe

    length = settings.draft_length
    asked: dict[str, Any] = {
        "buffer": records,
        "epochs": epochs,
        "max_seconds": max_seconds,
        "rank": rank,
        "learning_rate": lr,
        "loss": loss,
        "rehearsed": rehearsed,
        "seed": settings.seed,
        "start": "parent" if from_current else None,
        "draft_length": int(length) if length.isdecimal() and int(length) > 0 else TABLE_DRAFT_LENGTH,
    }
    return Recipe(**{name: value for name, value in asked.items() if value is not None})


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """A ``should_stop`` that ctrl-C (or a terminate signal) sets; a second one ends the program at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number: int, frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def progress_bar(console: Console, doing: str = "distilling") -> Iterator[Callable[[Progress], None]]:
    """A bar with loss, held-out acceptance and time left; yields the ``on_progress`` that updates it. ``doing`` names
    the activity."""
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn(doing),
        BarColumn(),
        TextColumn("{task.fields[steps]}  loss {task.fields[loss]}"),
        TextColumn("held-out acceptance {task.fields[acceptance]}  {task.fields[left]}"),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_interactive) as bar:
        task = bar.add_task("", total=None, steps="…", loss="…", acceptance="…", left="")

        def report(progress: Progress) -> None:
            bar.update(
                task,
                completed=progress.step,
                total=progress.steps,
                steps=f"{progress.step}/{progress.steps} {progress.counted}",
                loss=_known(progress.loss),
                acceptance=_known(progress.held_out_acceptance),
                left=_left(progress.seconds_left),
            )

        yield report


def _known(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "…"


def _left(seconds: float) -> str:
    if not math.isfinite(seconds):
        return ""
    return f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"
