"""The metrics at ``/metrics`` for Prometheus: common names with the prefix ``adaptive:``, one registry per server."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from adaptive.records.writer import WriterState
from adaptive.types import Round, Timings

# Histogram bounds in seconds. A token takes a millisecond with a small model, a second with a large one on a CPU.
TOKEN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
FIRST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Updated on the engine thread, read on any thread."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, what: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"adaptive:{name}", what, labels, registry=registry)

        def gauge(name: str, what: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"adaptive:{name}", what, labels, registry=registry)

        self._rounds = counter("decode_rounds", "Rounds of decoding, those that drafted nothing included")
        self._drafts = counter("spec_decode_num_drafts", "Rounds that drafted at least one token")
        self._drafted = counter("spec_decode_num_draft_tokens", "Drafted tokens")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted")
        self._drafted_by = counter("drafted_tokens", "Drafted tokens, by who drafted them", ["drafter"])
        self._accepted_by = counter("drafted_tokens_accepted", "Those of them that were accepted", ["drafter"])
        self._positions = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by place in the draft", ["position"]
        )
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self._cached_tokens = counter("prompt_tokens_cached", "Tokens of prompts that the caches held")
        self._generated = counter("generation_tokens", "Tokens of answers")
        self._requests = counter("request_success", "Answers, by how they ended", ["finished_reason"])
        self._refused = counter("requests_refused", "Requests that were not answered, by HTTP status", ["status"])
        self._abandoned = counter("requests_abandoned", "Requests whose client went away before their turn came")
        self._swaps = counter("adapter_swaps", "Times another adapter came into use")
        self._draft_length = gauge("draft_length", "Tokens drafted in the last round")
        self._adapter = gauge("adapter_info", "1 for the adapter in use", ["adapter"])
        self.running = gauge("num_requests_running", "Requests being answered")
        self.slots = gauge("slots", "Requests that may be answered at once")
        self.waiting = gauge("num_requests_waiting", "Requests in the queue")
        self.training = gauge("trainer_running", "1 during a training run")
        self._log_writable = gauge("log_writable", "1 while the log can be written, 0 while answers wait in memory")
        self._log_waiting = gauge("log_waiting", "Answers that wait in memory for the log")
        self._log_stripped = gauge("log_stripped", "Answers since the start that lost their supervision, for memory")
        self._log_lost = gauge("log_lost", "Answers since the start that could not be logged")
        self._first = Histogram(
            "adaptive:time_to_first_token_seconds",
            "From the start of an answer to its first token",
            buckets=FIRST_BUCKETS,
            registry=registry,
        )
        self._between = Histogram(
            "adaptive:inter_token_latency_seconds",
            "Between two tokens; those of one round come at once",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )

    def token(self, seconds: float, first: bool) -> None:
        """Count a token, ``seconds`` after the previous one, or after the answer's start if it is the ``first``."""
        (self._first if first else self._between).observe(seconds)

    def answered(self, timings: Timings, rounds: Sequence[Round], finish_reason: str) -> None:
        """Count an ended answer."""
        self._prompt_tokens.inc(timings.prompt_n + timings.cached_n)
        self._cached_tokens.inc(timings.cached_n)
        self._generated.inc(timings.predicted_n)
        self._requests.labels(finish_reason).inc()
        self._rounds.inc(len(rounds))
        for outcome in rounds:
            if outcome.drafted:
                self._drafts.inc()
                self._drafted.inc(outcome.drafted)
                self._accepted.inc(outcome.accepted)
                for part in outcome.parts:
                    self._drafted_by.labels(part.drafter).inc(part.drafted)
                    self._accepted_by.labels(part.drafter).inc(part.accepted)
                for position in range(outcome.accepted):
                    self._positions.labels(str(position)).inc()
        if rounds:
            self._draft_length.set(rounds[-1].drafted)

    def logging(self, state: WriterState) -> None:
        """Set the state of the log writer."""
        self._log_writable.set(int(state.writable))
        self._log_waiting.set(state.waiting)
        self._log_stripped.set(state.stripped)
        self._log_lost.set(state.lost)

    def refused(self, status: int) -> None:
        """Count a request that got an error."""
        self._refused.labels(str(status)).inc()

    def abandoned(self) -> None:
        """Count a request that left the queue unanswered."""
        self._abandoned.inc()

    def swapped(self, adapter: str | None) -> None:
        """Count a change of adapter."""
        self._swaps.inc()
        self.uses(adapter)

    def uses(self, adapter: str | None) -> None:
        """Set the adapter in use."""
        self._adapter.clear()
        self._adapter.labels(adapter or "none").set(1)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
