"""Answers in OpenAI's shapes, with the ``timings`` and ``speculative_decoding`` blocks of ``generate --json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from adaptive.records.stats import by_drafter, speculative_stats
from adaptive.service.calls import Call, CallParser, parser_for
from adaptive.service.jobs import Answer, Piece
from adaptive.types import Supervision

# What OpenAI reports for a token outside of the distribution that is kept.
UNLIKELY = -9999.0

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Problem(BaseModel):
    """What is wrong, in words; ``param`` is the field that is, where it is one."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """The body of every error."""

    error: Problem


# What any path may answer, for the description at /openapi.json.
REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be served as it is; the message says why"},
    "503": {"model": ErrorBody, "description": "The models are being loaded, or the server is going down"},
}
# A completion, whole or as server-sent events.
COMPLETION: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "The answers"}
}
METRICS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {}}, "description": "In Prometheus' text format"}
}


def error_object(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(
    status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """An error in OpenAI's shape."""
    # A message may quote half a character that a client sent.
    printable = message.encode("utf-8", errors="replace").decode("utf-8")
    return JSONResponse(error_object(status, printable, param), status, headers)


@dataclass(frozen=True)
class Shape:
    """What every object of one response shares."""

    id: str
    created: int
    model: str
    chat: bool

    def whole(
        self,
        answers: Sequence[Answer],
        tokenizer: PreTrainedTokenizerBase,
        top: int | None,
        tools: Sequence[dict[str, Any]] | None,
    ) -> dict[str, Any]:
        """The response to a request without stream; ``top`` alternatives a token where logprobs are wanted."""
        choices = []
        for answer in sorted(answers, key=lambda a: a.index):
            said: dict[str, Any] = {"text": answer.text}
            reason = answer.finish_reason
            if self.chat:
                message = _message(answer.text, parser_for(tokenizer, tools))
                said = {"message": message}
                reason = ending(reason, "tool_calls" in message)
            logprobs = None
            if top is not None and answer.supervision is not None:
                logprobs = _logprobs(answer.tokens, answer.supervision, tokenizer, top, self.chat)
            choices.append({"index": answer.index, **said, "logprobs": logprobs, "finish_reason": reason})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage(answers), **figures(answers)}

    def piece(
        self,
        index: int,
        text: str,
        finish_reason: str | None = None,
        first: bool = False,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One chunk of a stream."""
        if not self.chat:
            choice: dict[str, Any] = {"text": text}
        else:
            content = {"content": text} if text or first else {}
            choice = {"delta": {"role": "assistant", **content} if first else content}
        choice = {"index": index, **choice, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head("chat.completion.chunk" if self.chat else "text_completion"), "choices": [choice]}

    def call(self, index: int, place: int, call: Call) -> dict[str, Any]:
        """One chunk of a stream, with the ``place``-th call of tools of its answer."""
        delta = {"tool_calls": [{"index": place, **call.object()}]}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def piece_logprobs(
        self, piece: Piece, tokenizer: PreTrainedTokenizerBase, top: int | None, offset: int
    ) -> dict[str, Any] | None:
        """Those of one chunk, whose token begins ``offset`` characters into the answer; None where none are wanted."""
        if top is None or piece.token is None or piece.supervision is None:
            return None
        return _logprobs((piece.token,), piece.supervision, tokenizer, top, self.chat, offset)

    def usage_chunk(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The last chunk of a stream whose usage was asked for."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": usage(answers), **figures(answers)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def ending(reason: str, called: bool) -> str:
    """How an answer ended, in OpenAI's words: one that asks for tools has not just stopped."""
    return "tool_calls" if called and reason == "stop" else reason


def _message(text: str, parser: CallParser | None) -> dict[str, Any]:
    """The message of one answer, with the calls of tools in it."""
    said = [text] if parser is None else parser.feed(text) + parser.finish()
    calls = [part.object() for part in said if isinstance(part, Call)]
    content = "".join(part for part in said if isinstance(part, str))
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    return {**message, "content": content or None, "tool_calls": calls} if calls else message


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens; a prompt that was answered several times counts once for each answer that it was read for."""
    prompt = sum(a.prompt_tokens for a in answers)
    completion = sum(len(a.tokens) for a in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(a.timings.cached_n for a in answers)},
    }


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Timings in milliseconds and acceptance, over all answers of the request."""
    stats = speculative_stats(outcome for a in answers for outcome in a.rounds)
    seconds = sum(a.timings.predicted_s for a in answers)
    timed = sum(a.timings.predicted_n - 1 for a in answers if a.timings.predicted_s > 0)
    return {
        "timings": {
            "prompt_n": sum(a.timings.prompt_n for a in answers),
            "cache_n": sum(a.timings.cached_n for a in answers),
            "prompt_ms": 1000 * sum(a.timings.prompt_s for a in answers),
            "predicted_n": sum(a.timings.predicted_n for a in answers),
            "predicted_ms": 1000 * seconds,
            "predicted_per_second": timed / seconds if seconds > 0 else 0.0,
            "draft_n": stats.num_draft_tokens,
            "draft_n_accepted": stats.num_accepted_draft_tokens,
        },
        "speculative_decoding": asdict(stats),
        "drafters": {name: asdict(one) for name, one in by_drafter(r for a in answers for r in a.rounds).items()},
        "adapter": answers[-1].adapter if answers else None,
    }


def _logprobs(
    tokens: Sequence[int],
    rows: Supervision,
    tokenizer: PreTrainedTokenizerBase,
    top: int,
    chat: bool,
    offset: int = 0,
) -> dict[str, Any]:
    """Log-probabilities of the target at temperature 1, as the log keeps them (the likeliest 32, in float16)."""
    content = []
    for place, token in enumerate(tokens):
        known = {int(i): float(p) for i, p in zip(rows.ids[place], rows.logprobs[place], strict=True)}
        likeliest = [_token(tokenizer, i, p) for i, p in list(known.items())[:top]]
        content.append({**_token(tokenizer, token, known.get(token, UNLIKELY)), "top_logprobs": likeliest})
    if chat:
        return {"content": content, "refusal": None}
    offsets = [offset]
    for entry in content:
        offsets.append(offsets[-1] + len(entry["token"]))
    return {
        "tokens": [entry["token"] for entry in content],
        "token_logprobs": [entry["logprob"] for entry in content],
        "top_logprobs": [{t["token"]: t["logprob"] for t in entry["top_logprobs"]} for entry in content],
        "text_offset": offsets[:-1],
    }


def _token(tokenizer: PreTrainedTokenizerBase, token: int, logprob: float) -> dict[str, Any]:
    text = str(tokenizer.decode([token]))
    # -inf is no JSON; it stands for mass below what float16 can hold.
    return {"token": text, "logprob": max(logprob, UNLIKELY), "bytes": list(text.encode("utf-8"))}
