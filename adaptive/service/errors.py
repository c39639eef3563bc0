"""What is wrong with a request, in the shape of the dialect that it came in, which its path tells."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

# By status; what is not named is a mistake in the request below 500 and the server's own from there on.
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
    """What is wrong, in words; ``param`` is the field that is, where it is one."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """The body of every error."""

    error: Problem


class AnthropicProblem(BaseModel):
    """What is wrong, in words."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """The body of an error of Anthropic's paths."""

    type: str
    error: AnthropicProblem


# What any path may answer, for the description at /openapi.json.
REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be served as it is; the message says why"},
    "503": {"model": ErrorBody, "description": "The models are being loaded, or the server is going down"},
}
ANTHROPIC_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {**refusal, "model": AnthropicError} for status, refusal in REFUSALS.items()
}


def error_object(status: int, message: str, param: str | None = None, path: str = "") -> dict[str, Any]:
    """The body of an error."""
    # A message may quote half a character that a client sent.
    said = message.encode("utf-8", errors="replace").decode("utf-8")
    if path.startswith(ANTHROPIC_PATHS):
        kind = ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": said}}
    kind = OPENAI.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": said, "type": kind, "param": param, "code": status}}


def error_response(
    path: str, status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """The response to a request of ``path`` that is refused."""
    return JSONResponse(error_object(status, message, param, path), status, headers)
