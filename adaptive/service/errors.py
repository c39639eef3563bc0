"""Error responses in the form of the request's dialect, which its path determines, and the words for invalid fields."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

from adaptive.errors import AdaptiveError

# Error types by status. Other statuses below 500 mean an invalid request, from 500 on a server error.
OPENAI = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
ANTHROPIC_PATHS = "/v1/messages"
# Seconds after which a client should retry after 429 or 503: about the time of one answer.
RETRY_AFTER = {"Retry-After": "2"}
# What to do about a path that does not exist, by its beginning: most often the base URL in the client is not right.
WRONG_BASES = {
    "/v1/v1/": "the client's base URL should be the server's address without /v1",
    "/api/": "Ollama's API is not served; use OpenAI's, whose base URL is the server's address with /v1",
    **dict.fromkeys(
        ("/chat/completions", "/responses", "/completions", "/messages", "/models", "/embeddings"),
        "the client's base URL should be the server's address with /v1",
    ),
}
# OpenAI's code for a prompt that is longer than the context, by which clients know that they must shorten it.
TOO_LONG = "context_length_exceeded"
# Parts of the place of pydantic's error that name an alternative of a union, such as ``constrained-str``, and no field.
ALTERNATIVE = re.compile(r".*[\[-].*|str|int|float|bool")


class Problem(BaseModel):
    """The reason in words. ``param`` is the field at fault, if it is a single one."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorBody(BaseModel):
    """The body of every error."""

    error: Problem


class AnthropicProblem(BaseModel):
    """The reason in words, and for some errors in ``details`` for programs."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicError(BaseModel):
    """The body of every error on Anthropic's paths."""

    type: str
    error: AnthropicProblem


# Error responses that any path may give, for the OpenAPI description.
REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be served as it is; the message says why"},
    "503": {"model": ErrorBody, "description": "The models are being loaded, the server is stopping, or a pass failed"},
}
ANTHROPIC_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {**refusal, "model": AnthropicError} for status, refusal in REFUSALS.items()
}


class DetailedError(AdaptiveError):
    """A mistake in a request to Anthropic's API. From ``details`` a client knows how to send the request instead."""

    def __init__(self, message: str, details: dict[str, Any]) -> None:
        super().__init__(message)
        self.details = details


def error_object(
    status: int,
    message: str,
    param: str | None = None,
    path: str = "",
    code: str | None = None,
    details: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The body of an error on this path. ``code`` is OpenAI's name for the error; the status if it has none.
    ``details``: see ``DetailedError``."""
    # A message may quote half of a surrogate pair that a client sent.
    said = message.encode("utf-8", errors="replace").decode("utf-8")
    if path.startswith(ANTHROPIC_PATHS):
        kind = ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        more = {} if details is None else {"details": details}
        return {"type": "error", "error": {"type": kind, "message": said, **more}}
    kind = OPENAI.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": said, "type": kind, "param": param, "code": code or status}}


def error_response(
    path: str,
    status: int,
    message: str,
    param: str | None = None,
    headers: dict[str, str] | None = None,
    code: str | None = None,
    details: dict[str, Any] | None = None,
) -> JSONResponse:
    """The response to a refused request of ``path``. ``code`` and ``details`` as in ``error_object``."""
    return JSONResponse(error_object(status, message, param, path, code, details), status, headers)


def advice(path: str) -> str:
    """What to do about a ``path`` that does not exist, after a semicolon; empty if that is not known."""
    return next((f"; {said}" for beginning, said in WRONG_BASES.items() if path.startswith(beginning)), "")


def refusal_of(errors: Sequence[Any], body: Any) -> tuple[int, str, str | None]:
    """The status, the message and the field at fault for a ``body`` that does not fit, from pydantic's ``errors``. The
    body is still bytes if its Content-Type is not JSON's."""
    if errors[0]["type"] == "json_invalid":
        reason, place = errors[0]["ctx"]["error"], errors[0]["loc"][-1]
        return 400, f"the body is not JSON: {reason} at character {place + 1}", None
    if isinstance(body, bytes):
        return 415, "send it as Content-Type: application/json", None
    field, reason = problem_of(errors)
    param = field.partition(".")[2] or None  # the first part is "body"
    return 400, f"{param or 'the body'}: {reason}", param


def problem_of(errors: Sequence[Any]) -> tuple[str, str]:
    """The field at fault and the reason in words, from pydantic's ``errors``: of the first one, or if it is about an
    alternative of a union, of the alternative that the input resembles most. If it resembles none, all are named."""
    first = errors[0]["loc"]
    begins = next((place for place, part in enumerate(first) if _is_alternative(part)), None)
    same = errors[:1] if begins is None else [error for error in errors if error["loc"][:begins] == first[:begins]]
    best = max(same, key=_resemblance)
    reasons = [error["msg"].lower() for error in same if _resemblance(error) == _resemblance(best)]
    reason = reasons[0] if _fits(best) else " or ".join(dict.fromkeys(reasons))
    return ".".join(map(str, _fields(best["loc"]))), reason


def _resemblance(error: Any) -> tuple[int, int]:
    """How much the input resembles what was expected. All around a deeper error has the right type."""
    return len(_fields(error["loc"])), _fits(error)


def _fits(error: Any) -> int:
    """Whether the input has the type that was expected, but not the value: 2, for one of a few listed values 1, else
    0."""
    if error["type"] != "literal_error":
        return 0 if error["type"].endswith("_type") else 2
    return int(isinstance(error["input"], str if error["ctx"]["expected"].startswith("'") else int))


def _fields(place: Sequence[Any]) -> list[Any]:
    return [part for part in place if not _is_alternative(part)]


def _is_alternative(part: Any) -> bool:
    return isinstance(part, str) and ALTERNATIVE.fullmatch(part) is not None
