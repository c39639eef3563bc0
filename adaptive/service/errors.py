"""Error responses in the form of the request's dialect, which its path determines."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

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


class Problem(BaseModel):
    """The reason in words. ``param`` is the field at fault, if it is a single one."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """The body of every error."""

    error: Problem


class AnthropicProblem(BaseModel):
    """The reason in words."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """The body of every error on Anthropic's paths."""

    type: str
    error: AnthropicProblem


# Error responses that any path may give, for the OpenAPI description.
REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be served as it is; the message says why"},
    "503": {"model": ErrorBody, "description": "The models are being loaded, or the server is going down"},
}
ANTHROPIC_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {**refusal, "model": AnthropicError} for status, refusal in REFUSALS.items()
}


def error_object(status: int, message: str, param: str | None = None, path: str = "") -> dict[str, Any]:
    """The body of an error on this path."""
    # A message may quote half of a surrogate pair that a client sent.
    said = message.encode("utf-8", errors="replace").decode("utf-8")
    if path.startswith(ANTHROPIC_PATHS):
        kind = ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": said}}
    kind = OPENAI.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": said, "type": kind, "param": param, "code": status}}


def error_response(
    path: str, status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """The response to a refused request of ``path``."""
    return JSONResponse(error_object(status, message, param, path), status, headers)
