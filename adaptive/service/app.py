"""The HTTP API: OpenAI's endpoints, and those that say how the server is."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase

from adaptive.assistant import sampling_params
from adaptive.drafting.archive import owner_name
from adaptive.drafting.model import drafter_name
from adaptive.encoding import encode_text, render_chat
from adaptive.errors import AdaptiveError
from adaptive.grammar import Grammar
from adaptive.installation import version
from adaptive.pair import Pair
from adaptive.service.calls import forced_call
from adaptive.service.dashboard import add_dashboard
from adaptive.service.engine import EngineThread, Opened
from adaptive.service.guard import Guard
from adaptive.service.jobs import Answer, Ask, Done, Event, Failed, Job, Prompt, QueueFullError
from adaptive.service.metrics import Metrics
from adaptive.service.responses import (
    COMPLETION,
    METRICS,
    REFUSALS,
    Shape,
    error_object,
    error_response,
)
from adaptive.service.schemas import (
    ChatRequest,
    Common,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from adaptive.service.streams import Wanted, chunks
from adaptive.service.trainer import Trainer
from adaptive.settings import Settings
from adaptive.speculation import growing

# Seconds that a client told 429 or 503 is asked to wait: about one answer.
RETRY_AFTER = {"Retry-After": "2"}


# Tokens of a context that any text fits in: whoever counts tokens may count more than the model takes.
UNLIMITED = 2**31


class NotReadyError(Exception):
    """The models are still being loaded, or the server is going down."""


class Api:
    """Turns requests into jobs and their events into responses."""

    def __init__(self, engine: EngineThread, settings: Settings, metrics: Metrics, trainer: Trainer) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics
        self.trainer = trainer
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def session(self) -> Opened:
        """The pair and its state. Raises NotReadyError."""
        if self.engine.state != "ready" or self.engine.session is None:
            raise NotReadyError
        return self.engine.session

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """A tokenizer of our own: the engine thread uses the pair's at the same time."""
        if self._tokenizer is None:
            self._tokenizer = copy.deepcopy(self.session().pair.tokenizer)
        return self._tokenizer

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a chat."""
        body.refuse_unbuilt()
        tools = None if body.tool_choice == "none" else body.tools
        chat = [message.for_template() for message in body.messages]
        # Off the event loop: a long text takes a while, and other streams go on meanwhile.
        context = self.session().pair.target.context_length
        ids = await asyncio.to_thread(render_chat, self.tokenizer, chat, context, tools)
        prompt = Prompt(ids, tuple(message.for_log() for message in body.messages), "")
        top = (body.top_logprobs or 0) if body.logprobs else None
        limit, grammar = body.max_completion_tokens or body.max_tokens, body.constrained()
        if forced := body.must_call():
            if grammar is not None:
                raise AdaptiveError("tool_choice: an answer that keeps to a format cannot be a call")
            grammar = forced_call(self.tokenizer, forced, several=body.tool_choice == "required")
        return await self._serve(body, (prompt,), limit, top, request, tools, grammar)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Continue one text or several."""
        body.refuse_unbuilt()
        prompts = [await asyncio.to_thread(self._raw, text) for text in body.prompts()]
        limit, grammar = body.max_tokens, body.constrained()
        return await self._serve(body, tuple(prompts), limit, body.logprobs, request, None, grammar)

    def _raw(self, given: str | list[int]) -> Prompt:
        """Raises AdaptiveError for what the tokenizer or the model does not know."""
        if isinstance(given, str):
            context = self.session().pair.target.context_length
            return Prompt(encode_text(self.tokenizer, given, context), (), given)
        check_tokens(given, self.session().pair.target.vocab_size)
        return Prompt(list(given), (), str(self.tokenizer.decode(given)))

    async def _serve(
        self,
        body: Common,
        prompts: tuple[Prompt, ...],
        limit: int | None,
        top: int | None,
        request: Request,
        tools: list[dict[str, Any]] | None,
        grammar: Grammar | None,
    ) -> Response:
        pair = self.session().pair
        if grammar is not None:
            await asyncio.to_thread(self.session().assistant.grammars.compile, grammar)
        check_prompts(prompts, pair.target.context_length)
        ask = Ask(
            prompts=prompts,
            sampling=body.sampling(sampling_params(self.settings, pair), pair.target.vocab_size),
            stop=body.stopping(limit, self.settings.max_new_tokens),
            n=body.n or 1,
            client=body.user or (request.client.host if request.client else ""),
            owner=owner_name(body.user or ""),
            session=request.headers.get("x-session-id"),
            record=body.store is not False,
            supervise=top is not None,
            stream=bool(body.stream),
            grammar=grammar,
        )
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        job = Job(ask, lambda event: _hand_over(loop, events, event))
        self.engine.submit(job)
        name = uuid.uuid4().hex
        shape = Shape(
            f"{'chatcmpl' if isinstance(body, ChatRequest) else 'cmpl'}-{name}",
            int(time.time()),
            pair.identity.id,
            isinstance(body, ChatRequest),
        )
        if ask.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            stream = chunks(job, events, shape, self.tokenizer, Wanted(usage, top, tools))
            return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await self._whole(job, events, shape, Wanted(True, top, tools), request)

    async def _whole(
        self, job: Job, events: asyncio.Queue[Event], shape: Shape, wanted: Wanted, request: Request
    ) -> Response:
        """Wait for every answer, or for the client to go away."""
        gone = asyncio.create_task(_gone(request))
        answers: list[Answer] = []
        try:
            while True:
                event = asyncio.create_task(events.get())
                await asyncio.wait({event, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not event.done():
                    event.cancel()
                    return Response(status_code=499)  # nobody reads it
                got = event.result()
                if isinstance(got, Failed):
                    self.metrics.refused(got.status)
                    return error_response(got.status, got.message)
                if isinstance(got, Answer):
                    answers.append(got)
                if isinstance(got, Done):
                    return JSONResponse(shape.whole(answers, self.tokenizer, wanted.top, wanted.tools))
        finally:
            gone.cancel()
            job.cancel()


def _hand_over(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Event], event: Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is left to read
        loop.call_soon_threadsafe(events.put_nowait, event)


async def _gone(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def check_tokens(tokens: list[int], vocab_size: int) -> None:
    """Raise AdaptiveError for an id that the model does not have."""
    wrong = next((t for t in tokens if t >= vocab_size), None)
    if wrong is not None:
        raise AdaptiveError(f"{wrong} is no token id; ids go from 0 to {vocab_size - 1}")


def check_prompts(prompts: tuple[Prompt, ...], context: int) -> None:
    """Raise AdaptiveError for a prompt that is empty or leaves no room, before anything is streamed."""
    for prompt in prompts:
        if not prompt.ids:
            raise AdaptiveError("the prompt is empty; give at least one token")
        if len(prompt.ids) >= context:
            raise AdaptiveError(
                f"the prompt has {len(prompt.ids)} tokens and the model's context holds {context}; shorten it"
            )


def create_app(api: Api) -> FastAPI:
    """The application: routes, errors in OpenAI's shape, the guard before all."""
    app = FastAPI(title="adaptive", version=version(), docs_url=None, redoc_url=None, responses=REFUSALS)
    _completions(app, api)
    _state(app, api)
    add_dashboard(app, api.trainer)
    _errors(app, api)
    settings = api.settings
    key = settings.api_key.get_secret_value() if settings.api_key else None
    app.add_middleware(Guard, key=key, max_body=int(settings.max_body_mb * 1e6), origins=settings.cors)
    return app


def _completions(app: FastAPI, api: Api) -> None:
    @app.post("/v1/chat/completions", responses=COMPLETION, response_class=Response)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await api.chat(body, request)

    @app.post("/v1/completions", responses=COMPLETION, response_class=Response)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        return await api.complete(body, request)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        ids = await asyncio.to_thread(encode_text, api.tokenizer, body.content, UNLIMITED, body.add_special)
        return {"tokens": ids}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        check_tokens(body.tokens, api.session().pair.target.vocab_size)
        return {"content": await asyncio.to_thread(api.tokenizer.decode, body.tokens)}


def _state(app: FastAPI, api: Api) -> None:
    engine = api.engine

    @app.get("/health")
    async def health() -> Response:
        if engine.state != "ready":
            return _not_ready(engine)
        pair = api.session().pair
        drafter = {"name": _drafter(pair), "growing": growing(pair), "adapter": engine.adapter}
        return JSONResponse({"status": "ok", "log": _log_state(api), "drafter": drafter})

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(api)]}

    @app.get("/v1/models/{name}")
    async def model(name: str) -> dict[str, Any]:
        served = _model(api)
        if name != served["id"]:
            raise HTTPException(404, f"this server has one model, {served['id']}")
        return served

    @app.get("/metrics", responses=METRICS, response_class=Response)
    async def metrics() -> Response:
        if engine.session is not None and engine.session.assistant.log is not None:
            api.metrics.logging(engine.session.assistant.log.state)
        api.metrics.running.set(int(engine.slot.busy))
        api.metrics.waiting.set(len(engine.queue))
        api.metrics.training.set(int(api.trainer.status.activity in ("training", "paused")))
        return Response(api.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/props")
    async def props() -> dict[str, Any]:
        pair = api.session().pair
        return {
            "model": pair.identity.id,
            "draft": pair.identity.base.id if pair.draft else None,
            "drafter": _drafter(pair),
            "adapter": engine.adapter,
            "draft_length": api.settings.draft_length,
            "speculation": engine.speculation.as_object(),
            "n_ctx": pair.target.context_length,
            "total_slots": 1,
            "chat_template": api.tokenizer.chat_template,
        }

    @app.get("/slots")
    async def slots() -> list[dict[str, Any]]:
        slot = engine.slot
        return [
            {
                "id": 0,
                "is_processing": slot.busy,
                "prompt_tokens": slot.prompt_tokens,
                "predicted_tokens": slot.predicted_tokens,
                "seconds": None if slot.began is None else time.perf_counter() - slot.began,
                "waiting": len(engine.queue),
                "speculation": engine.speculation.as_object(),
                "conversations_cached": len(api.session().assistant.conversations),
            }
        ]


def _drafter(pair: Pair) -> str | None:
    """Who drafts beside history and grammars."""
    return None if pair.draft is None else drafter_name(pair.draft)


def _model(api: Api) -> dict[str, Any]:
    pair = api.session().pair
    return {
        "id": pair.identity.id,
        "object": "model",
        "created": 0,
        "owned_by": "adaptive",
        "max_model_len": pair.target.context_length,
    }


def _log_state(api: Api) -> dict[str, Any] | None:
    """Whether what is said can be logged, in figures (anybody may ask); None where it is not to be."""
    log = api.session().assistant.log
    return None if log is None else asdict(log.state)


def _not_ready(engine: EngineThread) -> JSONResponse:
    said = "the models are being loaded" if engine.state == "loading" else "the server is shutting down"
    body = {"status": engine.state, **error_object(503, f"{said}; try again in a moment")}
    return JSONResponse(body, 503, RETRY_AFTER)


def _errors(app: FastAPI, api: Api) -> None:
    Handler = Callable[[Request, Any], Awaitable[Response]]  # noqa: N806 - a type

    async def mistake(request: Request, error: AdaptiveError) -> Response:
        return refuse(400, str(error))

    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        return refuse(400, f"{param or 'the body'}: {first['msg'].lower()}", param)

    async def full(request: Request, error: QueueFullError) -> Response:
        return refuse(429, f"{api.engine.queue.limit} requests are waiting; try again in a moment", None, RETRY_AFTER)

    async def not_ready(request: Request, error: NotReadyError) -> Response:
        api.metrics.refused(503)
        return _not_ready(api.engine)

    async def failed(request: Request, error: Exception) -> Response:  # which the server then writes to its log
        return refuse(500, "the server failed on this request; its log says why")

    async def plain(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}: " if error.status_code in (404, 405) else ""
        return refuse(error.status_code, f"{where}{error.detail}")

    def refuse(
        status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> JSONResponse:
        api.metrics.refused(status)
        return error_response(status, message, param, headers)

    handlers: dict[Any, Handler] = {
        AdaptiveError: mistake,
        RequestValidationError: invalid,
        QueueFullError: full,
        NotReadyError: not_ready,
        HTTPException: plain,
        Exception: failed,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
