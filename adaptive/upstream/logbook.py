"""Logs the answers that passed through, on a thread of its own, so that it neither delays nor fails a request."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from adaptive.drafting.archive import owner_name
from adaptive.errors import AdaptiveError
from adaptive.records.writer import LogWriter
from adaptive.service.jobs import Prompt
from adaptive.tls import trusted
from adaptive.types import Generation, SamplingParams, Timings
from adaptive.upstream.asking import Asked
from adaptive.upstream.distributions import supervision
from adaptive.upstream.kinds import Kind
from adaptive.upstream.models import model_of
from adaptive.upstream.prompts import Ask, Prompts
from adaptive.upstream.reports import MOST_TOKENS, Choice, Collected
from adaptive.upstream.sampling import defaults_of, sampling_of
from adaptive.upstream.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("adaptive.upstream")

# Tokens of answers that wait to be logged, some 3 kB each with their alternatives. Answers beyond it are counted and
# not logged. Too low: records are lost when many answers end at once. Too high: memory is short for the server.
MOST_WAITING = 50_000
# Timeout in seconds of a request about tokens to the server. It is sent after the answer, so no client waits for it.
ASK_S = 10.0
# An answer is logged when no request has been open for REST_S seconds, and at the latest PATIENCE_S seconds after its
# end. Too low: logging, and its own requests to the server, delay the next answer. Too high: more answers wait.
REST_S, PATIENCE_S = 0.05, 2.0
# Seconds between two requests for the server's defaults: while it does not say them, and after that. Too high: a server
# that was started again with others is taken to draw as before.
AGAIN_S, ANEW_S = 60.0, 600.0
# Reasons for misses that are kept, without their numbers, and characters of one. Clients' words may be in them, so that
# there may be any number.
MOST_REASONS, LONGEST_REASON = 100, 400


@dataclass(frozen=True)
class Exchange:
    """A request and its answer. ``whole``: the answer is complete. ``first_s`` and ``all_s`` are wall-clock seconds to
    the answer's first and last byte."""

    asked: Asked
    collected: Collected
    kind: Kind
    created: float
    first_s: float
    all_s: float
    whole: bool
    session: str
    key: str | None


class Logbook:
    """Logs exchanges. ``counts``: answers logged, logged with supervision, missed. ``problems``: the reasons for
    misses."""

    def __init__(self, writer: LogWriter, tokenizer: PreTrainedTokenizerBase, folder: Path, url: str) -> None:
        """``folder`` is the target's checkpoint, ``url`` the server's."""
        self.writer = writer
        self.counts: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()  # by reason in words, without its numbers: answers not logged
        self._vocabulary = Vocabulary(tokenizer)
        self._folder = folder
        self._client = httpx.Client(base_url=url, timeout=ASK_S, trust_env=False, verify=trusted())
        self._warned: str | None = None  # the writer's problem, without its numbers
        self._prompts: Prompts | None = None
        self._defaults: dict[str, Any] = {}
        self._asked = -math.inf  # when the server was asked for them
        self.waiting = 0  # answers that are not logged yet
        self._waiting = 0  # their tokens
        self._lock = threading.Lock()
        self._queue: queue.Queue[tuple[Exchange, float] | None] = queue.Queue()  # with the time of the answer's end
        self._open = 0  # requests of clients
        self._quiet = threading.Event()  # set while there is none
        self._quiet.set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logbook", daemon=True)
        self._thread.start()

    def begins(self) -> None:
        """A client's request has come."""
        self._open += 1
        self._quiet.clear()

    def ends(self) -> None:
        """A client's request has ended. ``begins`` and ``ends`` are called from one thread only."""
        self._open -= 1
        if not self._open:
            self._quiet.set()

    def put(self, exchange: Exchange) -> None:
        """Queue an exchange for the log; returns at once."""
        with self._lock:
            full = self._waiting > MOST_WAITING
            self._waiting += 0 if full else exchange.collected.tokens
            self.waiting += not full
        if full:
            self.leave_out("more answers came than could be logged")
        else:
            self._queue.put((exchange, time.monotonic()))

    def status(self) -> dict[str, Any]:
        """The figures, and what is wrong with the log, for people."""
        state = self.writer.state
        kept = {"problem": self.writer.problem, "lost": state.lost, "stripped": state.stripped}
        return {**self.counts, "waiting": self.waiting, "why_not": dict(self.problems), **kept}

    def close(self) -> None:
        """Log the queued exchanges, and end the thread."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while (waiting := self._queue.get()) is not None:
            exchange, ended = waiting
            self._rest(ended + PATIENCE_S)
            with self._missing():
                self._log(exchange)
            self._warn()
            with self._lock:
                self._waiting -= exchange.collected.tokens
                self.waiting -= 1

    def _warn(self) -> None:
        """Say what is wrong with the log, once until it is something else."""
        problem = self.writer.problem
        kind = None if problem is None else without_numbers(problem)
        if problem is not None and kind != self._warned:
            logger.warning("%s", problem)
        self._warned = kind

    def _rest(self, until: float) -> None:
        """Wait until no request has been open for REST_S seconds, the time ``until`` has come, or the end."""
        while not self._closing.is_set() and (left := until - time.monotonic()) > 0:
            if self._quiet.wait(min(left, REST_S)) and not self._closing.wait(REST_S) and self._quiet.is_set():
                return

    @contextlib.contextmanager
    def _missing(self) -> Iterator[None]:
        """Count an answer as missed, with the reason, if it cannot be logged; logging continues."""
        try:
            yield
        except AdaptiveError as error:
            self.leave_out(str(error))
        except Exception as error:  # of any kind, by an unexpected answer
            self.leave_out(f"{type(error).__name__}: {error}")

    def leave_out(self, reason: str) -> None:
        """Count an answer that is not logged. ``reason`` in words may contain numbers and a client's words."""
        known = without_numbers(reason[:LONGEST_REASON])
        if known not in self.problems and len(self.problems) >= MOST_REASONS:
            known = "other reasons"
        self.counts["missed"] += 1
        self.problems[known] += 1
        if self.problems[known] == 1:
            logger.warning("an answer is not logged: %s", reason[:LONGEST_REASON])

    def _log(self, exchange: Exchange) -> None:
        """Log the answers of an exchange. Raises AdaptiveError if none of them can be logged."""
        asked, collected = exchange.asked, exchange.collected
        if collected.long:
            raise AdaptiveError("it is too long to be held in memory")
        if collected.failed or not collected.choices:
            return  # there is no answer
        if collected.tokens > MOST_TOKENS:
            raise AdaptiveError(f"it has more than {MOST_TOKENS} tokens")
        if self._prompts is None or self._prompts.kind is not exchange.kind:
            self._prompts = Prompts(self._vocabulary.tokenizer, exchange.kind)
            self._defaults, self._asked = {}, -math.inf
        if time.monotonic() - self._asked >= (ANEW_S if self._defaults else AGAIN_S):
            self._asked = time.monotonic()
            said = defaults_of(exchange.kind, model_of(asked.said), self._asker(exchange), self._folder)
            self._defaults = said or self._defaults
        sampling = sampling_of(asked.said, self._defaults)
        counted = _counted(collected)
        prompts = self._prompts.of(asked.said, asked.chat, counted, self._asker(exchange))
        for index, choice in sorted(collected.choices.items()):
            place = index // max(1, int(asked.said.get("n") or 1))
            with self._missing():
                generation = self._generation(exchange, prompts[min(place, len(prompts) - 1)], choice, sampling)
                self.writer.write(generation)
                self.counts["logged"] += 1
                self.counts["supervised"] += generation.supervision is not None

    def _generation(self, exchange: Exchange, prompt: Prompt, choice: Choice, sampling: SamplingParams) -> Generation:
        """One answer. Raises AdaptiveError if its tokens are not certain."""
        collected, vocabulary = exchange.collected, self._vocabulary
        counted = _answered(collected) if len(collected.choices) == 1 else None
        output = vocabulary.output(choice, counted)
        if output is None or not output.ids:
            raise AdaptiveError("the server does not say which tokens its answer has")
        cached = (collected.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        made = supervision(choice.reports, vocabulary, sampling, exchange.kind) if output.reported else None
        return Generation(
            session=exchange.session,
            created=exchange.created,
            messages=prompt.messages,
            prompt_text=prompt.text if not prompt.messages else "",
            text=choice.text,
            prompt=np.array(prompt.ids, np.int32),
            output=np.array(output.ids, np.int32),
            sampling=sampling,
            adapter=None,
            engine=exchange.kind.engine,
            domain=None,
            finish_reason=_ended(exchange, choice),
            rounds=(),
            timings=_timings(exchange, len(prompt.ids), min(cached, len(prompt.ids)), len(output.ids)),
            supervision=made,
            owner=owner_name(str(exchange.asked.said.get("user") or "")),
        )

    def _asker(self, exchange: Exchange) -> Ask:
        def ask(path: str, body: Mapping[str, Any] | None) -> Any:
            headers = {} if exchange.key is None else {"Authorization": exchange.key}
            try:
                answer = (
                    self._client.get(path, headers=headers)
                    if body is None
                    else self._client.post(path, json=dict(body), headers=headers)
                )
                return answer.json() if answer.status_code == 200 else None
            except (httpx.HTTPError, ValueError):
                return None

        return ask


def without_numbers(text: str) -> str:
    """``text`` with N for each number."""
    return re.sub(r"\d+", "N", text)


def _counted(collected: Collected) -> int | None:
    """The server's count of prompt tokens; None if unknown."""
    counted = collected.usage.get("prompt_tokens")
    if isinstance(counted, int):
        return counted
    parts = collected.timings.get("prompt_n"), collected.timings.get("cache_n")  # llama.cpp's server, in a stream
    return sum(parts) if all(isinstance(part, int) for part in parts) else None  # type: ignore[arg-type]


def _answered(collected: Collected) -> int | None:
    """The server's count of the answer's tokens; None if unknown."""
    for said, name in ((collected.usage, "completion_tokens"), (collected.timings, "predicted_n")):
        if isinstance(said.get(name), int):
            return int(said[name])
    return None


def _ended(exchange: Exchange, choice: Choice) -> str:
    """The finish reason for the log; ``cancelled`` if either side broke the connection."""
    if choice.finish_reason is None or not exchange.whole:
        return "cancelled"
    return "length" if choice.finish_reason == "length" else "stop"


def _timings(exchange: Exchange, prompt: int, cached: int, predicted: int) -> Timings:
    """The server's own timings if it reports them, else ours; 0 if the answer is not streamed, since the prompt's time
    is then not known."""
    said = exchange.collected.timings
    seconds = (exchange.first_s, exchange.all_s - exchange.first_s) if exchange.asked.streamed else (0.0, 0.0)
    if all(isinstance(said.get(name), (int, float)) for name in ("prompt_ms", "predicted_ms")):
        seconds = said["prompt_ms"] / 1000, said["predicted_ms"] / 1000
    return Timings(prompt - cached, cached, max(0.0, seconds[0]), predicted, max(0.0, seconds[1]))
