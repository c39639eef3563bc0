"""OpenAI's ``/v1/responses``, without the features that need responses to be stored on the server."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from adaptive.errors import AdaptiveError
from adaptive.service.api import Api
from adaptive.service.dialects.response_request import ResponsesRequest
from adaptive.service.dialects.response_writer import ResponseWriter
from adaptive.service.streams import COMPLETION, Served


def add_responses(app: FastAPI, api: Api) -> None:
    """Add ``/v1/responses`` to ``app``, and the paths of single responses, which are refused with a reason."""

    @app.post("/v1/responses", responses=COMPLETION, response_class=Response)
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        def write(served: Served) -> ResponseWriter:
            return ResponseWriter(served, body, None if body.store is False else api.items)

        return await api.chat(body.translated(api.items), request, write)

    async def kept(name: str) -> Response:
        raise AdaptiveError("no response is kept by this server, so that none can be fetched, deleted or cancelled")

    app.get("/v1/responses/{name}", include_in_schema=False)(kept)
    app.delete("/v1/responses/{name}", include_in_schema=False)(kept)
