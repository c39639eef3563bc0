"""Turns requests of any dialect into jobs for the engine thread, and the events of a job into a response."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from transformers import PreTrainedTokenizerBase

from adaptive.assistant import sampling_params
from adaptive.drafting.archive import owner_name
from adaptive.encoding import encode_text
from adaptive.errors import AdaptiveError, ContextFullError
from adaptive.grammar import Grammar
from adaptive.headers import session_name
from adaptive.opened import OpenedPair
from adaptive.records.holders import Held
from adaptive.service.calls import Reading
from adaptive.service.chats import prepare
from adaptive.service.engine import EngineThread
from adaptive.service.errors import RETRY_AFTER, error_response
from adaptive.service.items import KeptItems
from adaptive.service.jobs import Answer, Ask, Done, Event, Failed, Job, NotReadyError, Prompt
from adaptive.service.metrics import Metrics
from adaptive.service.schemas import ChatRequest, Common, CompletionRequest
from adaptive.service.streams import Served, Writer, chunks, written
from adaptive.service.threads import Few
from adaptive.service.trainer import Trainer
from adaptive.service.trials import Trials
from adaptive.settings import Settings, model_name

# A context length that no text exceeds, for counting tokens: a counted text may be longer than the model's context.
UNLIMITED = 2**31

Write = Callable[[Served], Writer]


class Api:
    """Serves the requests of all dialects: gives access to the pair, and puts jobs into the engine's queue."""

    def __init__(self, engine: EngineThread, settings: Settings, metrics: Metrics, trainer: Trainer) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics
        self.trainer = trainer
        self.model = model_name(settings)
        self.leaving: Callable[[], bool] = lambda: False  # whether the server is stopping: ends endless streams
        # These are used on the event loop.
        self.jobs: weakref.WeakSet[Job] = weakref.WeakSet()  # waiting, running and just ended
        self.items = KeptItems()
        self.trials = Trials()
        self.long = Few()
        self.forgotten: list[Held] = []  # the answers deleted so far: a request that repeats one is not recorded
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def session(self) -> OpenedPair:
        """The pair and its state. Raises NotReadyError."""
        if self.engine.state != "ready" or self.engine.session is None:
            raise NotReadyError
        return self.engine.session

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """A copy of the pair's tokenizer, because the engine thread uses the original concurrently."""
        if self._tokenizer is None:
            self._tokenizer = copy.deepcopy(self.session().pair.tokenizer)
        return self._tokenizer

    async def chat(self, body: ChatRequest, request: Request, write: Write, top: int | None = None) -> Response:
        """Answer a chat. ``top``: alternatives per token if logprobs are requested, else None."""
        # Not on the event loop: a long text takes a while, and other streams must continue.
        context = self.session().pair.target.context_length
        chat = await asyncio.to_thread(prepare, body, self.tokenizer, context)
        limit = body.max_completion_tokens or body.max_tokens
        return await self._serve(
            body, (chat.prompt,), limit, request, write, top, chat.grammar, chat.reading, chat.marks
        )

    async def complete(
        self, body: CompletionRequest, request: Request, write: Write, top: int | None = None
    ) -> Response:
        """Continue one text or several. ``top`` as in ``chat``."""
        body.refuse_unbuilt()
        prompts = [await asyncio.to_thread(self._raw, text) for text in body.prompts()]
        return await self._serve(body, tuple(prompts), body.max_tokens, request, write, top, body.constrained())

    def _raw(self, given: str | list[int]) -> Prompt:
        """A prompt from text or token ids. Raises AdaptiveError for invalid or too long text, or an unknown id."""
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
        request: Request,
        write: Write,
        top: int | None,
        grammar: Grammar | None,
        reading: Reading = Reading(),  # noqa: B008 - frozen
        marks: Mapping[int, str] | None = None,
    ) -> Response:
        pair = self.session().pair
        grammars = self.session().assistant.grammars
        if grammar is not None and not grammars.holds(grammar):
            await self.trials.run(grammar)
            await asyncio.to_thread(grammars.compile, grammar)
        check_prompts(prompts, pair.target.context_length)
        ask = Ask(
            prompts=prompts,
            sampling=body.sampling(sampling_params(self.settings, pair), pair.target.vocab_size),
            stop=body.stopping(limit, self.settings.max_new_tokens),
            n=body.n or 1,
            client=body.user or (request.client.host if request.client else ""),
            owner=owner_name(body.user or ""),
            session=session_name(request.headers.get("x-session-id", "").encode("latin-1")) or None,
            record=wants_record(body, request.headers.get("x-store", "")),
            supervise=top is not None,
            stream=bool(body.stream),
            grammar=grammar,
            marks=marks or {},
        )
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        job = Job(ask, lambda event: _hand_over(loop, events, event))
        self.jobs.add(job)
        if ask.repeats(self.forgotten, ask.session):
            ask.forgotten.set()
        self.engine.submit(job)
        tokens = sum(len(prompt.ids) for prompt in prompts)
        writer = write(Served(uuid.uuid4().hex, int(time.time()), self.model, self.tokenizer, reading, tokens, ask.n))
        if ask.stream:
            stream = chunks(job, events, writer, self.metrics.refused)
            return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await self._whole(job, events, writer, request)

    async def _whole(self, job: Job, events: asyncio.Queue[Event], writer: Writer, request: Request) -> Response:
        """The response without a stream: wait for all answers, or until the client disconnects."""
        gone = asyncio.create_task(_gone(request))
        answers: list[Answer] = []
        try:
            while True:
                event = asyncio.create_task(events.get())
                await asyncio.wait({event, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not event.done():
                    event.cancel()
                    return Response(status_code=499)  # the client has disconnected
                got = event.result()
                if isinstance(got, Failed):
                    self.metrics.refused(got.status)
                    again = RETRY_AFTER if got.status == 503 else None
                    return error_response(request.url.path, got.status, got.message, headers=again)
                if isinstance(got, Answer):
                    answers.append(got)
                if isinstance(got, Done):
                    return Response(written(writer.whole(answers)), media_type="application/json")
        finally:
            gone.cancel()
            job.cancel()


def _hand_over(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Event], event: Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: there is no reader any more
        loop.call_soon_threadsafe(events.put_nowait, event)


async def _gone(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def wants_record(body: Common, header: str) -> bool:
    """Whether the answer may be logged. The header X-Store takes precedence over ``store``: agents whose requests all
    say ``store: false`` let their user set a header. Raises AdaptiveError for another value of it."""
    said = header.strip().lower()
    if said not in ("", "true", "false"):
        raise AdaptiveError("X-Store: send true or false")
    return body.store is not False if not said else said == "true"


def check_tokens(tokens: list[int], vocab_size: int) -> None:
    """Raise AdaptiveError for an id outside the vocabulary."""
    wrong = next((t for t in tokens if t >= vocab_size), None)
    if wrong is not None:
        raise AdaptiveError(f"{wrong} is no token id; ids go from 0 to {vocab_size - 1}")


def check_prompts(prompts: tuple[Prompt, ...], context: int) -> None:
    """Raise AdaptiveError, before anything is streamed, for a prompt that is empty or fills the context."""
    for prompt in prompts:
        if not prompt.ids:
            raise AdaptiveError("the prompt is empty; give at least one token")
        if len(prompt.ids) >= context:
            # Agents know these words of Anthropic's API, and shorten the conversation by themselves.
            raise ContextFullError(
                f"prompt is too long: {len(prompt.ids)} tokens > {context} maximum, the model's context; shorten it"
            )


def model_object(api: Api) -> dict[str, Any]:
    """The description of the served model, with the fields of both OpenAI's and Anthropic's API."""
    context = api.session().pair.target.context_length
    return {
        "id": api.model,
        "object": "model",
        "created": 0,
        "owned_by": "adaptive",
        "max_model_len": context,
        "type": "model",
        "display_name": api.model,
        "created_at": "1970-01-01T00:00:00Z",
        "max_input_tokens": context,
    }
