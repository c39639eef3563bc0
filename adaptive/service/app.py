"""The HTTP application: the paths of all dialects, the paths for the server's state, error handling, the guard."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from adaptive.caches import Conversations
from adaptive.errors import AdaptiveError, ContextFullError
from adaptive.installation import version
from adaptive.service.answers import add_answers
from adaptive.service.api import Api, model_object
from adaptive.service.dashboard import add_dashboard
from adaptive.service.dialects.completions import add_completions
from adaptive.service.dialects.llama_server import add_llama_server
from adaptive.service.dialects.messages import add_messages
from adaptive.service.dialects.responses import add_responses
from adaptive.service.engine import EngineThread
from adaptive.service.errors import (
    REFUSALS,
    RETRY_AFTER,
    TOO_LONG,
    DetailedError,
    advice,
    error_object,
    error_response,
    refusal_of,
)
from adaptive.service.guard import Guard
from adaptive.service.jobs import NotReadyError, QueueFullError
from adaptive.speculation import growing, who_drafts

METRICS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {}}, "description": "In Prometheus' text format"}
}


def create_app(api: Api) -> FastAPI:
    """The application: routes, errors in the form of each dialect, and the guard as middleware."""
    app = FastAPI(title="adaptive", version=version(), docs_url=None, redoc_url=None, responses=REFUSALS)
    for add_dialect in (add_completions, add_responses, add_messages, add_llama_server):
        add_dialect(app, api)
    _state(app, api)
    add_dashboard(app, api)
    add_answers(app, api)
    _errors(app, api)
    settings = api.settings
    key = settings.api_key.get_secret_value() if settings.api_key else None
    counted = api.metrics.refused
    app.add_middleware(Guard, key=key, max_body=int(settings.max_body_mb * 1e6), origins=settings.cors, counted=counted)
    return app


def _state(app: FastAPI, api: Api) -> None:
    engine = api.engine

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        if engine.state != "ready":
            return _not_ready(engine, "/health")
        pair = api.session().pair
        drafter = {"name": who_drafts(pair), "growing": growing(pair), "adapter": engine.adapter}
        slots = {"total": engine.slots, "busy": len(engine.works), "why_not_more": engine.fewer}
        return JSONResponse({"status": "ok", "log": _log_state(api), "drafter": drafter, "slots": slots})

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        served = model_object(api)
        ends = {"has_more": False, "first_id": served["id"], "last_id": served["id"]}
        return {"object": "list", "data": [served], **ends}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        served = model_object(api)
        if name != served["id"]:
            raise HTTPException(404, f"this server has one model, {served['id']}")
        return served

    @app.get("/metrics", responses=METRICS, response_class=Response)
    async def metrics() -> Response:
        if engine.session is not None and engine.session.assistant.log is not None:
            api.metrics.logging(engine.session.assistant.log.state)
        api.metrics.running.set(len({id(work.job) for work in engine.works}))
        api.metrics.slots.set(engine.slots)
        api.metrics.waiting.set(len(engine.queue))
        api.metrics.training.set(int(api.trainer.status.activity in ("training", "paused")))
        return Response(api.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/props")
    async def props() -> dict[str, Any]:
        pair = api.session().pair
        return {
            "model": api.model,
            "pair": pair.identity.id,
            "draft": pair.identity.base.id if pair.draft or pair.remote else None,
            "drafter": who_drafts(pair),
            "draft_server": None if pair.remote is None else pair.remote.as_object(),
            "adapter": engine.adapter,
            "draft_length": api.settings.draft_length,
            "speculation": engine.speculation.as_object(),
            "n_ctx": pair.target.context_length,
            "total_slots": engine.slots,
            "chat_template": api.tokenizer.chat_template,
        }

    @app.get("/slots")
    async def slots() -> list[dict[str, Any]]:
        shared = {
            "waiting": len(engine.queue),
            "speculation": engine.speculation.as_object(),
            "conversations_cached": len(api.session().assistant.conversations),
            "memory": _memory(api.session().assistant.conversations),
        }
        return [
            {
                "id": number,
                "is_processing": slot.busy,
                "prompt_tokens": slot.prompt_tokens,
                "predicted_tokens": slot.predicted_tokens,
                "seconds": None if slot.began is None else time.perf_counter() - slot.began,
                **shared,
            }
            for number, slot in enumerate(engine.doing)
        ]


def _memory(conversations: Conversations) -> dict[str, int]:
    """Bytes in the caches of all conversations, by kind, and their limit."""
    return {f"{name}_bytes": size for name, size in asdict(conversations.memory).items()} | {
        "limit_bytes": conversations.limit
    }


def _log_state(api: Api) -> dict[str, Any] | None:
    """The log writer's state, as figures only, because /health needs no key; None if nothing is recorded."""
    log = api.session().assistant.log
    return None if log is None else asdict(log.state)


def _not_ready(engine: EngineThread, path: str) -> JSONResponse:
    said = "the models are being loaded" if engine.state == "loading" else "the server is shutting down"
    body = {"status": engine.state, **error_object(503, f"{said}; try again in a moment", path=path)}
    return JSONResponse(body, 503, RETRY_AFTER)


def _errors(app: FastAPI, api: Api) -> None:
    Handler = Callable[[Request, Any], Awaitable[Response]]  # noqa: N806 - a type

    async def mistake(request: Request, error: AdaptiveError) -> Response:
        return refuse(request, 400, str(error), details=error.details if isinstance(error, DetailedError) else None)

    async def too_long(request: Request, error: ContextFullError) -> Response:
        return refuse(request, 400, str(error), code=TOO_LONG)

    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return refuse(request, *refusal_of(error.errors(), error.body))

    async def full(request: Request, error: QueueFullError) -> Response:
        said = f"{api.engine.queue.limit} requests are waiting; try again in a moment"
        return refuse(request, 429, said, None, RETRY_AFTER)

    async def not_ready(request: Request, error: NotReadyError) -> Response:
        api.metrics.refused(503)
        return _not_ready(api.engine, request.url.path)

    async def failed(request: Request, error: Exception) -> Response:  # uvicorn logs the error afterwards
        return refuse(request, 500, "the server failed on this request; its log says why")

    async def plain(request: Request, error: HTTPException) -> Response:
        path, lost = request.url.path, error.status_code in (404, 405)
        said = f"{request.method} {path}: {error.detail}{advice(path)}" if lost else str(error.detail)
        return refuse(request, error.status_code, said, None, error.headers)

    def refuse(request: Request, status: int, message: str, *place: Any, **more: Any) -> JSONResponse:
        """Count a refusal and answer with it; ``place`` and ``more`` are further parameters of ``error_response``."""
        api.metrics.refused(status)
        return error_response(request.url.path, status, message, *place, **more)

    handlers: dict[Any, Handler] = {
        AdaptiveError: mistake,
        ContextFullError: too_long,
        RequestValidationError: invalid,
        QueueFullError: full,
        NotReadyError: not_ready,
        HTTPException: plain,
        Exception: failed,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
