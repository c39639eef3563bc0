"""What a server says of each token of its answer, collected while the answer passes through."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from adaptive.upstream.surgery import Cut

# Tokens of an answer that are collected. Beyond them nothing of it is logged: they take memory until it has ended.
MOST_TOKENS = 32_768
# Log-probabilities below it are a server's way to write that it has none (OpenAI and we say -9999).
NONE_BELOW = -9000.0


class Named(NamedTuple):
    """A token as a server names it: its id where it says that, else the ``text`` it stands for."""

    id: int | None
    text: str
    logprob: float


class Report(NamedTuple):
    """One output token, and the alternatives to it with their log-probabilities (itself among them, mostly)."""

    token: Named
    alternatives: tuple[Named, ...]


@dataclass
class Choice:
    """One answer so far. ``finish_reason`` as the server says it, None where it has not ended; ``unread`` the reports
    as text, which are read when somebody asks for them: whoever waits for the answer does not wait for that.

    ``parsed``: reasoning or calls were separated from the text, so that the marks around them are not shown.
    ``streamed``: it came in events. ``silent``: one of them reported a token and showed nothing.
    """

    read: list[Report] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    parsed: bool = False
    streamed: bool = False
    silent: bool = False
    finish_reason: str | None = None
    unread: list[str] = field(default_factory=list)

    @property
    def reports(self) -> list[Report]:
        """Of each token so far."""
        said, self.unread = self.unread, []
        for text in said:
            self.read += _reports(json.loads(text))
        return self.read

    @property
    def text(self) -> str:
        """What was shown."""
        return "".join(self.pieces)

    @property
    def marks_missing(self) -> bool:
        """Whether the marks of reasoning and calls may be missing among the reports: in a stream they are, unless its
        server reports tokens that show nothing."""
        return self.parsed and self.streamed and not self.silent


@dataclass
class Collected:
    """The answers to one request, by index; ``usage`` and ``timings`` as the server gives them."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    failed: bool = False
    long: bool = False  # it was too long to be read

    def add(self, found: Cut) -> None:
        """One object of the answer: all of it, or what one event holds. What is not understood is passed over."""
        said, reported = found.whole, iter(found.reported)
        self.failed |= "error" in said
        for name in ("usage", "timings"):
            if isinstance(said.get(name), dict):
                setattr(self, name, said[name])
        choices = said.get("choices")
        for one in choices if isinstance(choices, list) else ():
            text = next(reported) if isinstance(one, dict) else None
            if isinstance(one, dict) and isinstance(one.get("index", 0), int):
                self._add(self.choices.setdefault(one.get("index", 0), Choice()), one, text)

    def _add(self, choice: Choice, one: dict[str, Any], reported: str | None) -> None:
        choice.streamed |= isinstance(one.get("delta"), dict)
        for said in (one.get("delta"), one.get("message")):
            if isinstance(said, dict):
                # Some versions of vLLM give the same text under both names.
                thoughts = said.get("reasoning_content") or said.get("reasoning")
                choice.pieces += [text for text in (thoughts, said.get("content")) if isinstance(text, str)]
                choice.parsed |= bool(thoughts or said.get("tool_calls"))
        if isinstance(one.get("text"), str):
            choice.pieces.append(one["text"])
        if isinstance(one.get("finish_reason"), str):
            choice.finish_reason = one["finish_reason"]
        said = one.get("logprobs")
        choice.silent |= bool(said) and one.get("delta") == {} and one.get("finish_reason") is None
        if reported is not None and isinstance(said, dict) and self.tokens <= MOST_TOKENS:
            choice.unread.append(reported)
            listed = said.get("content", said.get("tokens"))
            self.tokens += len(listed) if isinstance(listed, list) else 0


def _reports(logprobs: dict[str, Any]) -> list[Report]:
    """Of either of OpenAI's two shapes: a list of entries, or lists beside each other."""
    content = logprobs.get("content")
    if isinstance(content, list):
        return [
            Report(_entry(entry), tuple(_entry(one) for one in entry.get("top_logprobs") or () if _known(one)))
            for entry in content
            if isinstance(entry, dict)
        ]
    tokens, own = logprobs.get("tokens"), logprobs.get("token_logprobs")
    if not isinstance(tokens, list) or not isinstance(own, list):
        return []
    others = logprobs.get("top_logprobs") or [{}] * len(tokens)
    return [
        Report(
            _named(token, logprob),
            tuple(_named(name, value) for name, value in (alternatives or {}).items() if value > NONE_BELOW),
        )
        for token, logprob, alternatives in zip(tokens, own, others, strict=False)
    ]


def _known(entry: object) -> bool:
    return isinstance(entry, dict) and _logprob(entry) > NONE_BELOW


def _logprob(entry: dict[str, Any]) -> float:
    value = entry.get("logprob")
    return float(value) if isinstance(value, (int, float)) else NONE_BELOW


def _entry(entry: dict[str, Any]) -> Named:
    number = entry.get("id")
    named = _named(str(entry.get("token", "")), _logprob(entry))
    return named if not isinstance(number, int) else named._replace(id=number)


def _named(text: str, logprob: float | None) -> Named:
    """A token by its text; ``token_id:123`` names its id (vLLM)."""
    mark, _, number = text.rpartition("token_id:")
    given = int(number) if not mark and text.startswith("token_id:") and number.isascii() and number.isdigit() else None
    return Named(given, text, NONE_BELOW if logprob is None else float(logprob))
