"""Answers in OpenAI's shapes, with the ``timings`` and ``speculative_decoding`` blocks of ``generate --json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastapi.responses import JSONResponse
from transformers import PreTrainedTokenizerBase

from adaptive.records.stats import speculative_stats
from adaptive.service.jobs import Answer

# What OpenAI reports for a token outside of the distribution that is kept.
UNLIKELY = -9999.0

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


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

    def whole(self, answers: Sequence[Answer], tokenizer: PreTrainedTokenizerBase, top: int | None) -> dict[str, Any]:
        """The response to a request without stream; ``top`` alternatives a token where logprobs are wanted."""
        choices = []
        for answer in sorted(answers, key=lambda a: a.index):
            said: dict[str, Any] = (
                {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
                if self.chat
                else {"text": answer.text}
            )
            logprobs = None if top is None else _logprobs(answer, tokenizer, top, self.chat)
            choices.append({"index": answer.index, **said, "logprobs": logprobs, "finish_reason": answer.finish_reason})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage(answers), **figures(answers)}

    def piece(self, index: int, text: str, finish_reason: str | None = None, first: bool = False) -> dict[str, Any]:
        """One chunk of a stream."""
        if not self.chat:
            choice: dict[str, Any] = {"text": text}
        else:
            content = {"content": text} if text or first else {}
            choice = {"delta": {"role": "assistant", **content} if first else content}
        choice = {"index": index, **choice, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head("chat.completion.chunk" if self.chat else "text_completion"), "choices": [choice]}

    def usage_chunk(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The last chunk of a stream whose usage was asked for."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": usage(answers), **figures(answers)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


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
        "adapter": answers[-1].adapter if answers else None,
    }


def _logprobs(answer: Answer, tokenizer: PreTrainedTokenizerBase, top: int, chat: bool) -> dict[str, Any]:
    """Log-probabilities of the target at temperature 1, as the log keeps them (the likeliest 32, in float16)."""
    rows = answer.supervision
    assert rows is not None
    content = []
    for place, token in enumerate(answer.tokens):
        known = {int(i): float(p) for i, p in zip(rows.ids[place], rows.logprobs[place], strict=True)}
        likeliest = [_token(tokenizer, i, p) for i, p in list(known.items())[:top]]
        content.append({**_token(tokenizer, token, known.get(token, UNLIKELY)), "top_logprobs": likeliest})
    if chat:
        return {"content": content, "refusal": None}
    offsets = [0]
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
