"""Paths of llama.cpp's server: ``/completion``, ``/apply-template``, ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request, Response
from pydantic import Field

from adaptive.encoding import encode_text
from adaptive.errors import AdaptiveError
from adaptive.service.api import UNLIMITED, Api, check_tokens
from adaptive.service.chats import rendered
from adaptive.service.errors import error_object
from adaptive.service.figures import figures
from adaptive.service.jobs import Answer, Failed, Piece
from adaptive.service.loose import Text
from adaptive.service.required import GrammarText
from adaptive.service.schemas import (
    PASSED_OVER,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    MaxTokens,
    RequestBody,
    TokenId,
    TokenizeRequest,
)
from adaptive.service.streams import COMPLETION, Served, data_line

# The bias that excludes a token. In llama.cpp's requests ``false`` means the same.
NEVER = -100.0

# OpenAI's and llama.cpp's paths for embeddings. They are refused.
EMBEDDINGS = ("/v1/embeddings", "/embeddings", "/embedding")


class LlamaCompletion(RequestBody):
    """``POST /completion``: continue one text."""

    # In addition to the fields that every dialect ignores: parameters of samplers that are off, and the sampler order.
    passed_over: ClassVar[frozenset[str]] = PASSED_OVER | {
        "samplers", "mirostat_tau", "mirostat_eta", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
        "dry_sequence_breakers", "xtc_threshold", "dynatemp_exponent", "repeat_last_n", "min_keep", "n_keep",
        "n_discard", "penalize_nl", "model",
    }  # fmt: skip

    prompt: Text | list[TokenId]
    n_predict: MaxTokens | None = None
    stream: bool | None = False
    stop: list[Text] | None = None
    temperature: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    ignore_eos: bool = False
    logit_bias: list[tuple[int | str, float | bool]] | dict[str, float | bool] | None = None
    grammar: GrammarText | None = None
    json_schema: dict[str, Any] | None = None
    return_tokens: bool = False
    store: bool | None = None  # not llama.cpp's; as in OpenAI's requests

    def translated(self) -> CompletionRequest:
        """The request as OpenAI's completion. Raises AdaptiveError for unsupported fields."""
        self.refuse_unknown()
        same = {"stream", "stop", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty"}
        same |= {"ignore_eos", "grammar", "json_schema", "prompt", "store"}
        bias = self.logit_bias.items() if isinstance(self.logit_bias, dict) else self.logit_bias
        return CompletionRequest(
            **self.model_dump(include=same),
            max_tokens=self.n_predict,
            repetition_penalty=self.repeat_penalty,
            seed=None if self.seed == -1 else self.seed,
            logit_bias=None if bias is None else {str(key): _bias(value) for key, value in bias},
        )


def _bias(value: float | bool) -> float:
    return NEVER if value is False else float(value)


def add_llama_server(app: FastAPI, api: Api) -> None:
    """Add the paths of this dialect to ``app``."""

    @app.post("/completion", responses=COMPLETION, response_class=Response)
    async def completion(body: LlamaCompletion, request: Request) -> Response:
        def write(served: Served) -> LlamaWriter:
            return LlamaWriter(served, body)

        return await api.complete(body.translated(), request, write)

    @app.post("/apply-template")
    async def apply_template(body: ChatRequest) -> dict[str, Any]:
        body.refuse_unbuilt()
        return {"prompt": await asyncio.to_thread(rendered, body, api.tokenizer)}

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        body.refuse_unknown()
        ids = await api.long.run(encode_text, api.tokenizer, body.content, UNLIMITED, body.add_special)
        return {"tokens": ids}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        body.refuse_unknown()
        check_tokens(body.tokens, api.session().pair.target.vocab_size)
        return {"content": await api.long.run(api.tokenizer.decode, body.tokens)}

    async def embeddings() -> Response:
        raise AdaptiveError(
            "embeddings are not served: this server's models only write text; run an embedding model beside it"
        )

    for path in EMBEDDINGS:
        app.post(path, include_in_schema=False)(embeddings)


class LlamaWriter:
    """Writes one answer as llama.cpp's server does."""

    def __init__(self, served: Served, body: LlamaCompletion) -> None:
        self._served = served
        self._tokens = body.return_tokens

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See ``Writer.whole``."""
        (answer,) = answers
        return self._last(answer, answer.text)

    def begin(self) -> Iterable[str]:
        """Nothing: a stream has no header."""
        return ()

    def piece(self, piece: Piece) -> Iterator[str]:
        """An event with new text."""
        yield data_line({"index": 0, "content": piece.text, "tokens": [], "stop": False, "id_slot": 0})

    def answer(self, answer: Answer) -> Iterator[str]:
        """The last event, which says how the answer ended."""
        yield data_line(self._last(answer, ""))

    def end(self, answers: Sequence[Answer]) -> Iterable[str]:
        """Nothing: the last event is marked as such (``stop``)."""
        return ()

    def failed(self, failed: Failed) -> Iterator[str]:
        """The error, as an event."""
        yield data_line(error_object(failed.status, failed.message))

    def _last(self, answer: Answer, text: str) -> dict[str, Any]:
        kind = "limit" if answer.finish_reason == "length" else "word" if answer.stopped_by else "eos"
        return {
            "index": 0,
            "content": text,
            "tokens": list(answer.tokens) if self._tokens else [],
            "id_slot": 0,
            "stop": True,
            "model": self._served.model,
            "tokens_predicted": len(answer.tokens),
            "tokens_evaluated": answer.prompt_tokens,
            "tokens_cached": answer.prompt_tokens + len(answer.tokens),
            "truncated": False,
            "stop_type": kind,
            "stopping_word": answer.stopped_by,
            **figures([answer]),
        }
