"""Puts a pair to work: models, log, the adapter in use and the controller's memory, wired together.

In: settings and the loaded pair. Out: an ``OpenedPair``, ready to answer; its answers are in the log when it is closed.
Every front end uses it: the command line, the server, and ``adaptive.Assistant`` for Python.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from adaptive.assistant import Assistant, length_policy, sampling_params
from adaptive.caches import Conversations
from adaptive.control.memory import keeping
from adaptive.control.policy import FixedLength
from adaptive.drafting.archive import Archive, History
from adaptive.drafting.model import warm_up
from adaptive.engines.load import Forward, forward_of
from adaptive.engines.protocol import KeepsCaches
from adaptive.kept_caches import KeptCaches
from adaptive.measure import attentive_on, drafts_for_disk, makes_trees
from adaptive.pair import Pair
from adaptive.printable import counted
from adaptive.records.deletion import finish
from adaptive.records.features import spool_of
from adaptive.records.retention import Keep
from adaptive.records.writer import LogWriter
from adaptive.settings import Settings
from adaptive.state import PairState, open_state
from adaptive.swapper import Swapper
from adaptive.upkeep import Upkeep, last_memory
from checkpoints.store import AdapterStore

logger = logging.getLogger("adaptive")

# Most seconds that closing takes for the log, and then for caches of conversations. With all the rest it must take less
# than the 45 s after which systemd and launchd kill a service (``cli/managers.py``).
FLUSH_S, KEEP_S = 5.0, 10.0


@dataclass(frozen=True)
class OpenedPair:
    """An assistant ready to answer, its pair, the pair's state and adapter store, the swapper of promoted adapters, and
    the upkeep of measured costs. If ``hurry`` is set, on any thread, closing does not wait for caches to be written."""

    assistant: Assistant
    pair: Pair
    state: PairState
    store: AdapterStore
    swapper: Swapper
    upkeep: Upkeep
    hurry: threading.Event = field(default_factory=threading.Event)


def _log_warning(text: str) -> None:
    logger.warning("%s", text)


@contextlib.contextmanager
def opened(
    settings: Settings,
    pair: Pair,
    cache_bytes: int = 0,
    warn: Callable[[str], None] = _log_warning,
    measuring: AbstractContextManager[object] | None = None,
) -> Iterator[OpenedPair]:
    """Opens everything needed to answer with a loaded ``pair``; closes it and completes the log at the end.

    ``cache_bytes`` as in ``Assistant``. ``warn`` receives each problem as one line. ``measuring`` is entered while
    costs are measured, which happens once for a pair and a machine.
    """
    state = open_state(settings.state_dir, pair.identity.id)
    if left := finish(state):
        warn(left)
    memory = last_memory(state.controller, pair)
    disk, trees = drafts_for_disk(pair), makes_trees(pair)
    policy = length_policy(settings, memory, attentive_on(pair), pair.clock, disk, trees)
    if pair.remote is not None:
        pair.remote.say = warn
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
    kept = _kept_caches(settings, pair, state, warn) if cache_bytes and settings.keep_caches else None
    assistant = Assistant(pair, FixedLength(0), log, cache_bytes, history, kept)
    swapper = Swapper(assistant, store, pair.identity.base, lambda said: warn(f"adapter: {said}"))
    try:
        swapper.use_promoted()
        # The policy is set after the adapter, so that its estimates are doubted only if the adapter has changed.
        assistant.policy = policy
        if assistant.adapter != memory.adapter:
            policy.swapped(swapper.expected)
        sampling = sampling_params(settings, pair)
        if forward_of(pair.target) is Forward.CUDA_GRAPHS:
            warm_up(pair.target, pair.draft, sampling, policy.adviser)
        with keeping(state.controller) as mine:
            with measuring or nullcontext():  # measures only if no costs are known
                upkeep = Upkeep(pair, policy, memory, sampling)
            if mine:
                upkeep.keep = lambda: upkeep.save(state.controller, assistant.adapter)
            ready = OpenedPair(assistant, pair, state, store, swapper, upkeep)
            try:
                yield ready
            finally:
                # First what is small: the process may be killed while caches of gigabytes are written.
                if mine:
                    _save(upkeep, state, assistant.adapter, warn)
                if log is not None:
                    log.flush(FLUSH_S)
                _keep_caches(assistant.conversations, ready.hurry)
    finally:
        if archive is not None:
            archive.close()
        if log is not None:
            log.close()
            if log.problem:
                warn(f"log: {log.problem}")


def _kept_caches(settings: Settings, pair: Pair, state: PairState, warn: Callable[[str], None]) -> KeptCaches | None:
    """The store for caches of conversations on disk; None, with a warning, if there can be none."""
    target = pair.target
    if not isinstance(target, KeepsCaches) or not target.cache_layout or target.sequence().memory.states:
        warn("keep_caches: the caches of this model cannot be kept on disk; only our own forward's can")
        return None
    try:
        return KeptCaches(state.caches, settings.keep_caches, target, settings.keep_days)
    except OSError as error:
        warn(f"keep_caches: no cache is kept on disk now ({error})")
        return None


def _keep_caches(conversations: Conversations, hurry: threading.Event) -> None:
    """Write the caches that are not on disk yet, for at most KEEP_S, or until ``hurry`` is set."""
    if not conversations.unwritten:
        return
    said = counted(conversations.unwritten, "conversation")
    logger.info("writing the caches of %s to disk, for at most %.0f s; once more skips that", said, KEEP_S)
    until = time.monotonic() + KEEP_S
    conversations.keep(lambda: hurry.is_set() or time.monotonic() > until, every=True)


def _save(upkeep: Upkeep, state: PairState, adapter: str | None, warn: Callable[[str], None]) -> None:
    try:
        upkeep.save(state.controller, adapter)
    except OSError as error:
        warn(f"{state.controller} cannot be written ({error.strerror}); costs are measured anew next time")
