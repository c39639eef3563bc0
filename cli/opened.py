"""Opening an assistant for a command: models with a progress bar, the log, the adapter in use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from cli.state import show_migrations

if TYPE_CHECKING:
    from adaptive.assistant import Assistant
    from adaptive.pair import Pair
    from adaptive.settings import Settings
    from adaptive.state import PairState
    from adaptive.swapper import Swapper
    from adaptive.upkeep import Upkeep
    from checkpoints.store import AdapterStore


@dataclass(frozen=True)
class OpenedPair:
    """An assistant ready to answer, where its pair's state lives, what brings promoted adapters into use, and what
    keeps the controller's costs true."""

    assistant: Assistant
    pair: Pair
    state: PairState
    store: AdapterStore
    swapper: Swapper
    upkeep: Upkeep


def load_with_progress(settings: Settings, console: Console) -> Pair:
    """Load the pair behind one progress bar; prints what the user should know about the pair."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("loading {task.description:10}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("models", total=1.0)
        # transformers takes seconds to import, so the bar stands before it.
        from adaptive.pair import load_pair

        pair = load_pair(settings, lambda what, share: progress.update(task, description=what, completed=share))
    for warning in pair.warnings:
        console.print(f"[yellow]warning:[/] {warning}")
    return pair


@contextlib.contextmanager
def open_pair(settings: Settings, console: Console, cache_bytes: int = 0) -> Iterator[OpenedPair]:
    """Everything a command needs to answer prompts; what was said is in the log when it ends.

    ``cache_bytes`` as in ``Assistant``.
    """
    from adaptive.pair import pair_identity
    from adaptive.state import open_state
    from checkpoints.store import AdapterStore

    # Whatever can be wrong without the weights is found before they are read.
    identity = pair_identity(settings)
    state = open_state(settings.state_dir, identity.id)
    pair = load_with_progress(settings, console)

    from adaptive.assistant import Assistant, length_policy, sampling_params
    from adaptive.control.memory import keeping
    from adaptive.control.policy import FixedLength
    from adaptive.drafting.archive import Archive, History
    from adaptive.measure import attentive_on
    from adaptive.records.features import spool_of
    from adaptive.records.retention import Keep
    from adaptive.records.writer import LogWriter
    from adaptive.swapper import Swapper
    from adaptive.upkeep import Upkeep, last_memory

    show_migrations()
    memory = last_memory(state.controller, pair)
    policy = length_policy(settings, memory, attentive_on(pair))
    store = AdapterStore(state.adapters)
    keep = Keep(settings.keep_days, settings.keep_gb)
    spool, after = spool_of(state, settings.feature_gb), store.last_record()
    log = LogWriter(state.records, after=after, keep=keep, spool=spool) if settings.record else None
    archive = None
    if settings.history == "auto" and log is not None:
        archive = Archive(state.records, pair.target.vocab_size)
        log.on_stored = archive.poke
        archive.start()
    history = None if settings.history == "off" else History(archive, memory.matches)
    assistant = Assistant(pair, FixedLength(0), log, cache_bytes, history)
    swapper = Swapper(assistant, store, identity.base, lambda said: console.print(f"[yellow]adapter:[/] {said}"))
    try:
        swapper.use_promoted()
        # Only now does the policy come in: what it remembers is in doubt only if the adapter is another one.
        assistant.policy = policy
        if assistant.adapter != memory.adapter:
            policy.swapped(swapper.expected)
        with keeping(state.controller) as mine:
            with console.status("measuring what a round costs here, once"):  # where nothing is known of it
                upkeep = Upkeep(pair, policy, memory, sampling_params(settings, pair))
            try:
                yield OpenedPair(assistant, pair, state, store, swapper, upkeep)
            finally:
                if mine:
                    _save(upkeep, state.controller, assistant.adapter, console)
    finally:
        if archive is not None:
            archive.close()
        if log is not None:
            log.close()
            if log.problem:
                console.print(f"log: {log.problem}", style="red", markup=False)


def _save(upkeep: Upkeep, file: Path, adapter: str | None, console: Console) -> None:
    try:
        upkeep.save(file, adapter)
    except OSError as error:
        said = f"{file} cannot be written ({error.strerror}); costs are measured anew next time"
        console.print(said, style="yellow", markup=False)
