"""Measures the speed of a server, and its acceptance by the figures that its answers or its metrics report."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from adaptive.errors import AdaptiveError, first_line
from adaptive.printable import without_login
from adaptive.tls import trusted
from adaptive.upstream.kinds import ADAPTIVE, Kind, kind_of
from adaptive.upstream.models import served

# Timeout in seconds of one answer; a large model on a small machine takes minutes.
ANSWER_S = 600.0
# Seconds between two requests to a server that loads its model.
AGAIN_S = 0.2
# Characters of a refusal that are shown.
LONGEST_REASON = 300
# Names, without the engine's prefix, of the counters of drafted and accepted tokens, and of SGLang's gauge of tokens a
# round.
DRAFTED, ACCEPTED = "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"
LENGTH = "spec_accept_length"
# Steps of a bisection: the interval becomes less than a ten-thousandth.
STEPS = 14


@dataclass(frozen=True)
class Answered:
    """One answer: its tokens; its seconds, without those of the prompt if the server reports them separately; and the
    number of tokens ``drafted`` and ``accepted``, None if the server does not report them for each answer."""

    tokens: int
    seconds: float
    drafted: int | None
    accepted: int | None
    text: str = ""
    finish_reason: str | None = None


@dataclass(frozen=True)
class Counted:
    """The present values in a server's metrics; None for missing ones."""

    drafted: float | None
    accepted: float | None
    length: float | None


@dataclass(frozen=True)
class Measured:
    """Some answers together. ``drafted`` and ``accepted`` are the totals, None if unknown. ``length`` is the server's
    own mean of tokens a round, None if it has none. ``prompts`` are those that were answered, in their order."""

    answers: tuple[Answered, ...]
    drafted: int | None
    accepted: int | None
    length: float | None
    prompts: tuple[tuple[int, ...], ...] = ()

    @property
    def acceptance(self) -> float | None:
        """The acceptance rate; None if nothing was drafted, or the counts are unknown."""
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else None

    @property
    def tokens_per_second(self) -> float:
        """Of all answers together."""
        return sum(one.tokens for one in self.answers) / max(1e-9, sum(one.seconds for one in self.answers))


class RefusedError(AdaptiveError):
    """The server refuses a prompt, such as one that is too long for its context."""


def find_kind(url: str, key: str | None, wait_s: float = 0.0) -> Kind:
    """The kind of the server at ``url``. While it answers that it is not ready (503), it is asked again, for up to
    ``wait_s`` seconds. Raises AdaptiveError if it does not answer."""
    with _client(url, key) as client:
        return kind_of(_models(client, time.monotonic() + wait_s))


def measure(
    url: str,
    key: str | None,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    model: str | None = None,
    wait_s: float = 0.0,
) -> Measured:
    """Measure the server's greedy answers to ``prompts`` (token ids), requested one after the other and not logged.
    ``model`` is the target's name there, None for the first one that the server lists.

    Each prompt is asked for one token first, so that the server's prompt cache contains it in every measurement. While
    the server answers that it is not ready (503), it is asked again, for up to ``wait_s`` seconds. Prompts that it
    refuses are left out. Raises AdaptiveError if the server does not answer, or refuses all of them.
    """
    until = time.monotonic() + wait_s
    answers: list[Answered] = []
    answered: list[tuple[int, ...]] = []
    before: Counted | None = None
    refusal: RefusedError | None = None
    with _client(url, key) as client:
        said = _models(client, until)
        body: dict[str, Any] = {"model": served(said, model).name, "temperature": 0}
        if kind_of(said) is ADAPTIVE:
            body["store"] = False
        for ids in prompts:
            body["prompt"] = list(ids)
            try:
                _answered(client, {**body, "max_tokens": 1}, until)
                before = before or counted(_metrics(client))
                answers.append(_answered(client, {**body, "max_tokens": max_tokens}, until))
                answered.append(tuple(ids))
            except RefusedError as error:
                refusal = error
        after = counted(_metrics(client))
    if refusal is not None and not answers:
        raise refusal
    return _together(tuple(answers), before or after, after, tuple(answered))


def _together(
    answers: tuple[Answered, ...], before: Counted, after: Counted, prompts: tuple[tuple[int, ...], ...]
) -> Measured:
    """``before`` and ``after`` are the server's metrics before the answers and after them."""
    if all(one.drafted is not None and one.accepted is not None for one in answers):
        drafted, accepted = (sum(getattr(one, name) for one in answers) for name in ("drafted", "accepted"))
        return Measured(answers, drafted, accepted, None, prompts)
    if None in (before.drafted, before.accepted, after.drafted, after.accepted):
        return Measured(answers, None, None, after.length, prompts)
    grown = (after.drafted or 0) - (before.drafted or 0), (after.accepted or 0) - (before.accepted or 0)
    return Measured(answers, int(grown[0]), int(grown[1]), after.length, prompts)


def counted(metrics: str) -> Counted:
    """The values in a text of Prometheus' format: counters summed over all their labels, and the mean of the tokens a
    round, which each rank of a server gives for itself (0 before it has drafted)."""

    def values(name: str) -> list[float]:
        found = re.findall(rf"^[a-z]+:{name}(?:\{{[^}}]*\}})? (\S+)", metrics, re.MULTILINE)
        return [float(one) for one in found]

    def total(name: str) -> float | None:
        found = values(name)
        return sum(found) if found else None

    drafted, accepted = total(DRAFTED), total(ACCEPTED)
    if drafted is None and "vllm:" in metrics:
        drafted = accepted = 0.0  # vLLM has these counters only if it drafts
    lengths = values(LENGTH)
    drafting = [one for one in lengths if one > 0] or lengths
    return Counted(drafted, accepted, sum(drafting) / len(drafting) if drafting else None)


def _place(client: httpx.Client) -> str:
    """The address of the server, for people."""
    return without_login(str(client.base_url))


def _why(error: Exception) -> str:
    """What is said of an error: of a response its status, because httpx's text has the address with its login."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"{error.response.status_code} {error.response.reason_phrase}".rstrip()
    return first_line(error)


def _client(url: str, key: str | None) -> httpx.Client:
    headers = {"X-Adaptive-Record": "off"}  # in case the address is that of our own proxy
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return httpx.Client(base_url=url, headers=headers, timeout=ANSWER_S, trust_env=False, verify=trusted())


def _models(client: httpx.Client, until: float) -> Any:
    try:
        answer, _ = _ready(lambda: client.get("/v1/models"), until)
        answer.raise_for_status()
        return answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise AdaptiveError(f"the server at {_place(client)} does not answer: {_why(error)}") from error


def _ready(ask: Callable[[], httpx.Response], until: float) -> tuple[httpx.Response, float]:
    """The response, asked for again until the time ``until`` while the server is not ready, and its seconds."""
    while True:
        began = time.perf_counter()
        answer = ask()
        took_s = time.perf_counter() - began
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() >= until:
            return answer, took_s
        time.sleep(AGAIN_S)


def _metrics(client: httpx.Client) -> str:
    try:
        answer = client.get("/metrics")
    except httpx.HTTPError:
        return ""
    return answer.text if answer.status_code == 200 else ""


def _answered(client: httpx.Client, body: dict[str, Any], until: float) -> Answered:
    """The answer to ``body``, requested again until the time ``until`` while the server is not ready. Raises
    RefusedError if the server does not take the prompt, else AdaptiveError."""
    try:
        answer, took_s = _ready(lambda: client.post("/v1/completions", json=body), until)
        if answer.status_code == httpx.codes.BAD_REQUEST:
            why = " ".join(answer.text.split())[:LONGEST_REASON]
            raise RefusedError(f"the server at {_place(client)} refuses every prompt of the log: {why}")
        answer.raise_for_status()
        said = answer.json()
        tokens, choice = int(said["usage"]["completion_tokens"]), said["choices"][0]
        text, finish_reason = str(choice["text"]), choice.get("finish_reason")
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise AdaptiveError(f"the server at {_place(client)} does not answer a prompt: {_why(error)}") from error
    timings = said.get("timings")
    timings = timings if isinstance(timings, dict) else {}
    took = timings.get("predicted_ms")
    seconds = took / 1000 if isinstance(took, (int, float)) and took > 0 else took_s
    drafted, accepted = timings.get("draft_n"), timings.get("draft_n_accepted")
    if timings and "predicted_ms" in timings and drafted is None:
        drafted = accepted = 0  # llama.cpp's server leaves them out if it drafted nothing
    return Answered(tokens, seconds, drafted, accepted, text, finish_reason)


def each_accepted(measured: Measured) -> float | None:
    """The probability that a drafted token is accepted given that all before it are, assumed equal at all positions.
    Unlike the acceptance rate it does not fall with the draft length. None if nothing was drafted, or unknown.
    """
    if not measured.drafted or measured.accepted is None:
        return None
    rounds = sum(one.tokens for one in measured.answers) - measured.accepted
    if rounds <= 0:
        return 1.0
    drafted, accepted = measured.drafted / rounds, measured.accepted / rounds
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        expected = middle * (1 - middle**drafted) / (1 - middle)  # of middle + middle ** 2 + ..., `drafted` of them
        low, high = (middle, high) if expected < accepted else (low, middle)
    return (low + high) / 2
