"""Opening an assistant for a command: models with a progress bar, the log, the adapter in use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from cli.state import show_migrations

if TYPE_CHECKING:
    from adaptive.assistant import Assistant
    from adaptive.pair import Pair
    from adaptive.settings import Settings
    from adaptive.state import PairState
    from adaptive.swapper import Swapper
    from checkpoints.store import AdapterStore


@dataclass(frozen=True)
class OpenedPair:
    """An assistant ready to answer, where its pair's state lives, and what brings promoted adapters into use."""

    assistant: Assistant
    pair: Pair
    state: PairState
    store: AdapterStore
    swapper: Swapper


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
    from adaptive.control.costs import CostModel
    from adaptive.control.goodput import GoodputLength
    from adaptive.control.memory import load, remembered, save
    from adaptive.control.policy import FixedLength
    from adaptive.measure import attentive_on, measure, where_it_runs
    from adaptive.records.retention import Keep
    from adaptive.records.writer import LogWriter
    from adaptive.swapper import Swapper

    show_migrations()
    memory = load(state.controller, where_it_runs(pair))
    policy = length_policy(settings, memory, attentive_on(pair))
    store = AdapterStore(state.adapters)
    keep = Keep(settings.keep_days, settings.keep_gb)
    log = LogWriter(state.records, after=store.last_record(), keep=keep) if settings.record else None
    assistant = Assistant(pair, FixedLength(0), log, cache_bytes)
    swapper = Swapper(assistant, store, identity.base, lambda said: console.print(f"[yellow]adapter:[/] {said}"))
    session = OpenedPair(assistant, pair, state, store, swapper)
    try:
        swapper.use_promoted()
        # Only now does the policy come in: what it remembers is in doubt only if the adapter is another one.
        session.assistant.policy = policy
        if session.assistant.adapter != memory.adapter:
            policy.swapped()
        if isinstance(policy, GoodputLength) and pair.draft is not None and memory.costs is None:
            policy.costs = CostModel(measure(pair, sampling_params(settings, pair)).costs)
        yield session
    finally:
        if log is not None:
            log.close()
            if log.problem:
                console.print(f"log: {log.problem}", style="red", markup=False)
        if isinstance(policy, GoodputLength) and pair.draft is not None:
            try:
                save(state.controller, remembered(policy, memory.device, session.assistant.adapter))
            except OSError as error:
                said = f"{state.controller} cannot be written ({error.strerror}); costs are measured anew next time"
                console.print(said, style="yellow", markup=False)
