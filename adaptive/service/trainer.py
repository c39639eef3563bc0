"""Schedules background training: starts the training process, pauses it during requests, and reports its state.

In: notifications of the engine (``busy``, ``idle``, ``answered``) and the log. Out: a worker process for each run, a
``TrainerStatus`` for display, and a rollback if live acceptance fell. Used by ``serve``, ``chat``, ``learn`` and
``adaptive.api``.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

from adaptive.control.costs import CostTable
from adaptive.control.memory import last_costs
from adaptive.devices import free_bytes
from adaptive.engines.budget import TRAINING_LIBRARIES, TRAINING_PER_BYTE
from adaptive.engines.head.kinds import HeadKind
from adaptive.engines.head.parts import parts_bytes
from adaptive.engines.hf.quantised import float32_bytes
from adaptive.errors import AdaptiveError
from adaptive.hub import resolved
from adaptive.pair import grows_on, no_head_on, sources, trained_draft
from adaptive.pipe import BUSY, FAILED, IDLE, LAST, STOP, Order, Report, start_worker
from adaptive.records.log import Log
from adaptive.records.stats import count_rounds
from adaptive.remote import untrained
from adaptive.service.doubts import Doubts
from adaptive.service.gains import Gains, why_not
from adaptive.service.presence import Presence
from adaptive.service.trainer_status import Activity, TrainerStatus
from adaptive.service.watch import Watch
from adaptive.settings import Settings, training_window
from adaptive.state import PairState
from adaptive.types import Round
from checkpoints.folder import UnreadableAdapter
from checkpoints.store import AdapterStore

logger = logging.getLogger("adaptive.trainer")

# Seconds between two checks of the log and the clock. Nothing is urgent: ``busy`` acts at once. Once nobody has been
# answered and no run was there for QUIET_S, checks are SELDOM_S apart: a server that nobody uses should cost nothing.
LOOK_S, SELDOM_S, QUIET_S = 0.5, 5.0, 60.0
# Seconds after a run that failed before the next one; doubled with each consecutive failure, up to the second number.
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 30.0, 3600.0
# Seconds that a worker may take to stop: one pass of a large draft, and writing a candidate.
STOP_S = 5.0


class Trainer:
    """Starts and supervises training runs, on a thread of its own. Any thread may call ``busy`` and ``idle``."""

    def __init__(self, settings: Settings, state: PairState, draft_bytes: int, why_none: str | None = None) -> None:
        """``draft_bytes`` is the size of the draft's float32 weights, 0 where there is no draft; ``why_none`` says why
        there is none."""
        self.settings = settings
        self.state = state
        self.store = AdapterStore(state.adapters)
        self.runs = self.crashes = 0
        self._need = TRAINING_LIBRARIES + TRAINING_PER_BYTE * draft_bytes
        self._has_draft = draft_bytes > 0
        self._why_none = why_none or "there is no draft to train"
        self.costs: Callable[[], CostTable | None] = lambda: last_costs(state.controller)  # last known costs of a round
        self._gains = Gains(state)
        self._watch = Watch()
        self._lock = threading.Lock()  # guards the worker's input, and the fields that ``busy`` and ``idle`` set
        self._process: subprocess.Popen[str] | None = None
        self._report: Report | None = None
        self._paused = self._stopping = False
        self._busy = True  # until the models are loaded
        self._answers = False  # somebody is answered here
        self._presence = Presence(state.in_use)
        self._quiet_since = self._happened = time.monotonic()
        self._last_run: str | None = None
        self._doubts = Doubts(self.store, state.doubts, self._warn)
        self._remembered = False
        self._reviewing = self._put_off = False  # ``_put_off``: the last run was a review that failed
        self._seen = self._newest = self._read_until = 0  # ids: trained up to, newest, newest at the start of this run
        self._failures = 0
        self._not_before = 0.0
        self._reason = "starting"
        self._judged = "no adapter in use"
        self._warned: set[str] = set()
        self._activity: Activity = "waiting"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the trainer. A run's best draft so far becomes a candidate if the worker writes it within STOP_S."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def busy(self) -> None:
        """A request has arrived: pause the worker, at once if the system supports it (SIGSTOP)."""
        self._presence.tell()
        with self._lock:
            self._busy = self._answers = True
            if self._process is not None and not self._paused and self.settings.distill != "always":
                self._paused = True
                self._say(BUSY)

    def idle(self) -> None:
        """No request is left; the worker continues after ``distill_idle_seconds``."""
        self._presence.tell()
        with self._lock:
            self._busy = self._answers = False
            self._quiet_since = time.monotonic()

    def answered(self, adapter: str | None, rounds: tuple[Round, ...]) -> None:
        """See ``Listener.answered``."""
        self._watch.observe(adapter, count_rounds(rounds))

    @property
    def status(self) -> TrainerStatus:
        """The trainer's current state."""
        report, running = self._report, self._process is not None
        activity: Activity = ("paused" if self._paused else "training") if running else self._activity
        reason = self._reason
        if running:
            reason = report.message if report else "starting the training process"
            if self._paused:
                reason = f"somebody waits for an answer, or did a moment ago; {reason}"
        return TrainerStatus(
            activity=activity,
            reason=reason,
            policy=self.settings.distill,
            new_generations=max(0, self._newest - self._seen),
            share=report.share if running and report else None,
            acceptance=report.acceptance if running and report else None,
            last_run=self._last_run,
            runs=self.runs,
            crashes=self.crashes,
            watch=self._judged,
        )

    def _run(self) -> None:
        with Log(self.state.records) as log:
            self._tried(lambda: self._remember(log))
            while not self._closing.wait(self._until_next_look()):
                self._look(log)
        self._end_worker()

    def _until_next_look(self) -> float:
        """Seconds from one look to the next."""
        now = time.monotonic()
        if self._process is not None or self._answers or self._others_answer():
            self._happened = now
        return LOOK_S if now - max(self._happened, self._quiet_since) < QUIET_S else SELDOM_S

    def _tried(self, step: Callable[[], None]) -> None:
        """Carry out one step of a look. An error of any kind is reported, and affects neither answers nor the other
        steps."""
        try:
            step()
        except Exception as error:
            said = str(error) if isinstance(error, AdaptiveError) else f"{type(error).__name__}: {error}"
            self._activity, self._reason = "waiting", said
            self._warn(said)

    def _remember(self, log: Log) -> None:
        """Restore from the store and the log, until that has succeeded once: the newest record trained on, and live
        acceptance."""
        if self._remembered:
            return
        self._newest = log.last_id()
        self._doubts.remember(self._newest)
        self._seen = max(self._seen, self._trained_until())
        self._watch.restore(log, self.store.current_id(), self._doubts.now.settled)
        self._remembered = True

    def _trained_until(self) -> int:
        """The newest record that training has used, in any process; 0 for none."""
        # Only judged adapters: a stopped run leaves an unjudged one, and will continue with the same records.
        judged = max((one.last_record for one in self.store.trained() if one.judged), default=0)
        return max(judged, self._doubts.trained_until(self._newest))

    def _look(self, log: Log) -> None:
        """Check everything once. The worker comes first, since it may stand still until it is told to continue."""
        runs = self._process is not None
        if self._answers:
            self._presence.tell()
        self._tried(self._attend)
        self._tried(self._doubts.refresh)
        self._tried(lambda: self._remember(log))
        self._tried(lambda: self._roll_back_if_worse(log))
        self._tried(lambda: self._note_promotion(log))
        self._tried(lambda: self._schedule(log, runs))

    def _schedule(self, log: Log, runs: bool) -> None:
        """Begin a run, or say why not. ``runs``: a run was there at the beginning of this look."""
        self._newest = log.last_id()
        if runs:
            return
        waits_for = self._wait_for()
        if waits_for is None:  # another process may have trained on these answers since
            self._seen = max(self._seen, self._trained_until())
            waits_for = self._wait_for()
        if waits_for is None:
            self._begin()
        else:
            self._activity, self._reason = waits_for

    def _wait_for(self) -> tuple[Activity, str] | None:
        """The reason why training waits, with the activity to show; None if a run can begin."""
        new, quiet = max(0, self._newest - self._seen), time.monotonic() - self._quiet_since
        if not self._has_draft:
            return "off", untrained(self.settings) or self._why_none
        if self.settings.distill == "off":
            return "off", "switched off (distill is off)"
        if time.monotonic() < self._not_before:
            return "backing off", f"{self._last_run}; next try in {self._not_before - time.monotonic():.0f} s"
        useless = why_not(self.costs()) if self.settings.draft_length == "auto" else None
        if useless is not None:
            self._warn(useless)
            return "waiting", useless
        if new < self._needed() and not self._doubts.due(self._newest):
            return "waiting", f"{new} new answers of the {self._needed()} that a training run needs"
        if not self._in_window():
            return "waiting", f"{new} new answers; training runs {self.settings.distill} only"
        in_use = self._busy or quiet < self.settings.distill_idle_seconds or self._others_answer()
        if self.settings.distill != "always" and in_use:
            return "waiting", f"{new} new answers; the assistant is in use"
        available = free_bytes(self.settings.draft_device or self.settings.device)
        if available < self._need:
            return (
                "waiting",
                f"{available / 1e6:.0f} MB of memory are available and a training run needs {self._need / 1e6:.0f}",
            )
        return None

    def _others_answer(self) -> bool:
        """Whether another process on this folder answers somebody, or did a moment ago."""
        return self._presence.others(max(self.settings.distill_idle_seconds, 2 * LOOK_S))

    def _needed(self) -> int:
        return self._doubts.needed(self._seen, self.settings.distill_after)

    def _in_window(self) -> bool:
        window = training_window(self.settings.distill)
        if window is None:
            return True
        now = time.localtime()
        minute, (begin, end) = 60 * now.tm_hour + now.tm_min, window
        return begin <= minute < end if begin <= end else minute >= begin or minute < end

    def _review_is_next(self) -> bool:
        """Whether a review comes before training: if it is due, and if it has not just failed while training is due."""
        trains = self._newest - self._seen >= self._needed()
        return self._doubts.due(self._newest) and not (self._put_off and trains)

    def _begin(self) -> None:
        """Start a worker. Its standard error goes to ``trainer.log``, which is overwritten by each run."""
        settings, process = self.settings.for_worker(), start_worker(self.state.root / "trainer.log")
        self._read_until, self._reviewing = self._newest, self._review_is_next()
        if self._reviewing:
            logger.info("the draft in use is compared with others on the newest answers")
        else:
            logger.info("a training run begins: %d new answers", self._newest - self._seen)
        with self._lock:
            self._process, self._report, self._stopping = process, None, False
            self._paused = self._busy and self.settings.distill != "always"
            doubted, root = self._doubts.now.adapter, str(self.state.root)
            order = Order(settings, root, self._paused, self._reviewing, doubted, resolved())
            self._say(order.line().rstrip("\n"))
        threading.Thread(target=self._read, args=(process,), name="trainer-reports", daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError, TypeError):
                self._report = Report.of(line)

    def _attend(self) -> None:
        """Continue a paused worker if nobody is answered, pause it while another process answers, stop it outside its
        window, and handle its end."""
        process = self._process
        if process is None:
            return
        others = self._others_answer()
        with self._lock:
            quiet = time.monotonic() - self._quiet_since
            if self._paused and not self._busy and not others and quiet >= self.settings.distill_idle_seconds:
                self._paused = False
                self._say(IDLE)
            elif not self._paused and others and self.settings.distill != "always":
                self._paused = True
                self._say(BUSY)
            elif not self._paused:
                self._wake()  # it may react late to ``busy`` and stop after the request is over
            if not self._stopping and not self._in_window():
                self._stopping = True
                self._say(STOP)
        if process.poll() is not None:
            self._conclude(process)

    def _conclude(self, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 1.0
        while (self._report is None or self._report.stage not in LAST) and time.monotonic() < deadline:
            time.sleep(0.01)  # the worker's last line may still be in the pipe
        report = self._report
        with self._lock:
            self._process, self._report, self._paused = None, None, False
        if process.returncode != 0 or report is None or report.stage not in LAST:
            self.crashes += 1
            self._back_off(f"the training process {self._why(process.returncode)}")
        elif report.stage in FAILED:
            self._back_off(report.message)
        else:
            self._over(report)

    def _over(self, report: Report) -> None:
        """A run has ended as it should."""
        self._failures, self._put_off = 0, False
        self._last_run = report.message
        if report.stage == "taken":
            self._not_before = time.monotonic() + FIRST_BACKOFF_S
        elif report.stage != "stopped" and self._reviewing:
            self._doubts.reviewed(self._read_until, self._newest)
            if report.better and self._doubts.exchange(report.adapter, report.compared, report.message):
                self._watch.forgive()
        elif report.stage != "stopped":
            self.runs += report.stage == "done"
            self._seen = self._read_until if report.until is None else report.until
            self._doubts.trained(self._seen, self._newest, report.more or 0)
            if report.promoted:
                self._doubts.promoted()
        logger.info("training run: %s", report.message)

    def _back_off(self, problem: str) -> None:
        """A run has failed, for a reason that may pass: the next one comes later, and is of the other kind if both are
        due."""
        self._failures, self._put_off = self._failures + 1, self._reviewing
        pause = min(FIRST_BACKOFF_S * 2 ** (self._failures - 1), LONGEST_BACKOFF_S)
        self._not_before = time.monotonic() + pause
        self._last_run = problem
        logger.warning("training run: %s; next try in %.0f s", problem, pause)

    def _why(self, status: int) -> str:
        if status < 0:
            return f"was killed by signal {-status}"
        with contextlib.suppress(OSError, IndexError):
            lines = (self.state.root / "trainer.log").read_text(encoding="utf-8", errors="replace").split("\n")
            return f"failed: {[line for line in lines if line.strip()][-1].strip()[:300]}"
        return f"failed with status {status}"

    def _roll_back_if_worse(self, log: Log) -> None:
        current = self.store.current_id()
        try:
            manifest = None if current is None else self.store.show(current)
        except UnreadableAdapter as error:  # it may be whole, and readable a moment later
            self._warn(str(error))
            return
        except AdaptiveError:  # damaged while in use: the last good one replaces it, as at startup
            for problem in self.store.usable(None)[1]:
                self._warn(problem)
            return
        self._judged = self._watch.state(manifest) if current is not None else self._doubts.text
        reason = self._watch.verdict(manifest)
        if current is None or reason is None or current != self.store.current_id():
            return
        if self._doubts.roll_back(current, reason, lambda: self._last_id(log)):
            self._watch.rolled_back(current)

    def _last_id(self, log: Log) -> int:
        """The newest answer; of an earlier look if the log cannot be read now, on which a rollback must not depend."""
        with contextlib.suppress(AdaptiveError):
            self._newest = log.last_id()
        return self._newest

    def _note_promotion(self, log: Log) -> None:
        """Record the expected and later the measured effect of a promotion (``Gains``)."""
        with contextlib.suppress(AdaptiveError):  # damaged or deleted meanwhile: reported elsewhere
            self._gains.look(log, self.store.current(), self.costs)

    def _warn(self, problem: str) -> None:
        """Log each problem once, because problems are detected again at every check."""
        if problem not in self._warned:
            self._warned.add(problem)
            logger.warning("%s", problem)

    def _end_worker(self) -> None:
        process = self._process
        if process is None:
            return
        with self._lock:
            self._say(STOP)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _say(self, line: str) -> None:
        """Send a line to the worker, with the lock held. A worker that has died is handled elsewhere."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(line + "\n")
            process.stdin.flush()
        if line != BUSY:
            self._wake()

    def _wake(self) -> None:
        """Continue a worker that has stopped itself (SIGSTOP) after ``busy``."""
        if self._process is not None and self._process.returncode is None and hasattr(signal, "SIGCONT"):
            self._process.send_signal(signal.SIGCONT)


def _trained_bytes(settings: Settings) -> int:
    """Bytes of the weights that a training run loads, in float32; 0 if there is nothing to train. Raises AdaptiveError
    with the reason why there is no head on this target."""
    draft, grown = trained_draft(settings), grows_on(settings)
    if grown is None and (draft is None or not draft.head):
        return float32_bytes(draft.folder) if draft else 0
    if grown is not None and (reason := no_head_on(grown, settings)) is not None:
        raise AdaptiveError(reason)
    own = float32_bytes(draft.folder) if draft is not None and draft.head is HeadKind.EAGLE3 else 0
    return own + parts_bytes(sources(settings)[0].folder, settings.trust_remote_code)


@contextlib.contextmanager
def background(settings: Settings, state: PairState) -> Iterator[Trainer]:
    """A running trainer for the pair of ``settings``. It trains only after the first ``idle``, unless ``always``."""
    try:
        trainer = Trainer(settings, state, _trained_bytes(settings))
    except AdaptiveError as reason:
        trainer = Trainer(settings, state, 0, str(reason))
    trainer.start()
    try:
        yield trainer
    finally:
        trainer.close()
