"""One training run in its own process: ``python -m trainers.worker``.

A program that answers (``serve``, ``chat``, ``learn``, ``Assistant``) starts it at low priority and exchanges orders
and reports over its pipes (``adaptive.pipe``). On ``busy`` it pauses. On Linux, where the system ends it together with
its parent, it stops at once, in the middle of a pass; elsewhere it pauses before the next pass. It ends when its parent
has ended. The log and the store stay valid however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from adaptive.errors import AdaptiveError
from adaptive.hub import adopt
from adaptive.pipe import BUSY, IDLE, Order, Report
from adaptive.settings import Settings
from adaptive.state import PairState

if TYPE_CHECKING:
    from checkpoints.manifest import BaseDraft
    from trainers.fit import Progress
    from trainers.run import DistillOutcome

# Bytes that must stay available while training: with less, the system begins to swap out the pages of
# the models that answer. On small machines a twentieth of the memory is used instead.
SPARE_MEMORY = 512 << 20


class Brake:
    """Applies the parent's commands. The run calls ``should_stop`` between two passes; it blocks while paused.

    The process is not frozen while ``steady``, which is reentrant, is held: it changes the adapter store or reads the
    log then, and other processes may be waiting for that. ``clock`` is in seconds and stands still during pauses.
    """

    def __init__(self, commands: IO[str], paused: bool, freezes: bool = False) -> None:
        """``freezes``: stop this whole process (SIGSTOP) on ``busy``; the parent continues it."""
        self.steady = threading.RLock()
        self._freezes = freezes
        self.stopped = False
        self.out_of_memory = False
        self._go = threading.Event()
        self._counting = threading.Lock()
        self._stood_s = 0.0  # in pauses so far
        self._stands_since: float | None = None  # when the present pause began
        if not paused:
            self._go.set()
        threading.Thread(target=self._follow, args=(commands,), name="orders", daemon=True).start()

    def should_stop(self) -> bool:
        """Wait while the assistant is busy, then return whether the run must end."""
        if not self._go.is_set():
            self._stand()
            self._go.wait()
            self._go_on()
        if not self.stopped and not self.out_of_memory:
            self.out_of_memory = memory_is_short()
        return self.stopped or self.out_of_memory

    def clock(self) -> float:
        """Seconds since some moment, without the pauses."""
        with self._counting:
            now = time.perf_counter() if self._stands_since is None else self._stands_since
            return now - self._stood_s

    def _stand(self) -> None:
        with self._counting:
            if self._stands_since is None:
                self._stands_since = time.perf_counter()

    def _go_on(self) -> None:
        with self._counting:
            if self._stands_since is not None:
                self._stood_s += time.perf_counter() - self._stands_since
                self._stands_since = None

    def _follow(self, commands: IO[str]) -> None:
        for line in commands:
            command = line.strip()
            if command == BUSY:
                self._go.clear()
                if self._freezes:
                    with self.steady:
                        self._stand()  # until the next command, as this thread may go on for a moment
                        os.kill(os.getpid(), signal.SIGSTOP)
            elif command == IDLE:
                self._go_on()
                self._go.set()
            else:
                break
        self.stopped = True  # a stop command, or the parent has ended
        self._go.set()


def die_with_parent() -> bool:
    """Have the system kill this process when the thread that started it ends; False where that is not possible.

    A frozen process would otherwise outlive its parent for ever.
    """
    if sys.platform != "linux":
        return False
    PR_SET_PDEATHSIG = 1  # noqa: N806 - its name in <linux/prctl.h>
    try:
        return bool(ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) == 0)
    except (OSError, AttributeError):
        return False


def memory_is_short() -> bool:
    """Whether the machine (``machine.memory``), or the GPU in use, has less memory available than must stay free."""
    import torch

    from adaptive.machine import memory

    left: list[tuple[int, int]] = [memory()]
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        left.append((free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated(), total))
    return any(free < min(SPARE_MEMORY, total // 20) for free, total in left)


def step_behind(niceness: int) -> None:
    """Run at the lowest priority, so that everything else on the machine goes first."""
    with contextlib.suppress(OSError, AttributeError):  # Windows has no nice
        os.nice(niceness)
    with contextlib.suppress(OSError):  # where memory runs out, Linux ends this process before the server
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")


def train(order: Order, brake: Brake, report: IO[str]) -> Report:
    """Carry out one order. Intermediate reports are written to ``report``; the last one is returned."""
    from trainers.lock import AnotherTrainerError, only_trainer

    settings = Settings(**order.settings)
    step_behind(settings.distill_nice)  # first: the imports below take seconds
    try:
        with only_trainer(PairState(Path(order.state))):
            return _train(order, settings, brake, report)
    except AnotherTrainerError as error:
        return Report("taken", str(error))


def _train(order: Order, settings: Settings, brake: Brake, report: IO[str]) -> Report:
    """``train`` while no other process trains this pair."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    from adaptive.records.log import around_reads
    from trainers.dataset import TooLittleError

    adopt(order.models)
    state = PairState(Path(order.state))

    def tell(said: Report) -> None:
        report.write(said.line())
        report.flush()

    tell(Report("loading", "loading the draft and the records"))
    try:
        with around_reads(brake.steady):
            if brake.should_stop():
                return _ended(brake, None)
            if order.review:
                return _review(settings, state, brake, order.doubted)
            outcome = _round(settings, state, brake, tell)
    except TooLittleError as error:
        return Report("refused", str(error), more=error.more)
    except AdaptiveError as error:
        return Report("failed", str(error))
    return _ended(brake, outcome)


def _base(settings: Settings, state: PairState) -> BaseDraft:
    """The model that adapters in ``state`` belong to. Raises AdaptiveError if other models are in the folders by now
    than those that ``state`` is named after: their adapters belong elsewhere."""
    from adaptive.pair import pair_identity

    identity = pair_identity(settings)
    if identity.id != state.root.name:
        raise AdaptiveError(
            f"the models' files have changed since this program started (they were {state.root.name}, and are "
            f"{identity.id}); start it again"
        )
    return identity.base


def _round(settings: Settings, state: PairState, brake: Brake, tell: Callable[[Report], None]) -> DistillOutcome:
    from adaptive.pair import load_draft_for_training, load_tokenizer
    from adaptive.records.features import spool_of
    from checkpoints.store import AdapterStore
    from trainers.fit import STEPS
    from trainers.recipe import Recipe
    from trainers.rehearsal import rehearsal_of
    from trainers.run import distill, tidy

    def progress(at: Progress) -> None:
        share = at.step / at.steps if at.steps else 0.0
        loss = at.loss if math.isfinite(at.loss) else None
        message = f"step {at.step} of at most {at.steps}"
        if at.counted != STEPS:
            share, message = 0.0, f"the draft writes text to keep what it knows: {at.step} of {at.steps}"
        acceptance = at.held_out_acceptance if math.isfinite(at.held_out_acceptance) else None  # before the first one
        tell(Report("training", message, share, loss, acceptance))

    store = AdapterStore(state.adapters, around_changes=brake.steady)
    base = _base(settings, state)
    outcome = distill(
        state.records,
        store,
        base,
        load_draft_for_training(settings),
        Recipe(max_seconds=settings.distill_seconds),
        on_progress=progress,
        should_stop=brake.should_stop,
        state=state.training,
        spool=spool_of(state, settings.feature_gb),
        rehearsal=rehearsal_of(load_tokenizer(settings), state.rehearsal, base.weights),
        clock=brake.clock,
    )
    return replace(outcome, notes=(*outcome.notes, *tidy(store, state, settings.keep_adapters)))


def _review(settings: Settings, state: PairState, brake: Brake, doubted: str | None) -> Report:
    from adaptive.pair import load_draft_for_training
    from adaptive.records.features import spool_of
    from checkpoints.store import AdapterStore
    from trainers.dataset import Stopped
    from trainers.review import review
    from trainers.run import adapter_in_use

    store = AdapterStore(state.adapters, around_changes=brake.steady)
    base, spool = _base(settings, state), spool_of(state, settings.feature_gb)
    draft = load_draft_for_training(settings)
    adapter_in_use(store, base)
    current = store.current_id()
    try:
        found = review(state.records, store, base, draft, doubted, brake.should_stop, spool)
    except Stopped:
        return _ended(brake, None)
    better = found.best != current
    return Report("done", found.message, share=1.0, adapter=found.best, compared=current, better=better)


def _ended(brake: Brake, outcome: DistillOutcome | None) -> Report:
    """The last report of a run."""
    if outcome is None or outcome.stopped:
        message = "stopped before the run began" if outcome is None else outcome.message
        if brake.out_of_memory:
            return Report("memory", f"stepped aside, the machine is short of memory; {message}")
        return Report("stopped", message)
    manifest = outcome.manifest
    return Report(
        "done",
        "; ".join((outcome.message, *outcome.notes)),
        share=1.0,
        adapter=manifest.id if manifest else None,
        until=outcome.until,
        promoted=outcome.promoted is not None,
    )


def main() -> None:
    """Read an order from standard input, carry it out, and report how it ended."""
    # Libraries may print to standard output. Redirect it to standard error; reports use a copy of the original.
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    order = Order.of(sys.stdin.readline())
    brake = Brake(sys.stdin, order.paused, freezes=die_with_parent())
    try:
        last = train(order, brake, reports)
        with contextlib.suppress(BrokenPipeError):
            reports.write(last.line())
            reports.flush()
        status = 0
    except BaseException:
        traceback.print_exc()  # its last line is what the trainer says of this run
        sys.stderr.flush()
        status = 1
    # The thread that reads orders is still blocked in a read; a normal exit would wait for that file's lock.
    os._exit(status)


if __name__ == "__main__":
    main()
