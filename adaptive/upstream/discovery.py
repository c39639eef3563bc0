"""Finds out how a server is to be asked: its kind, which of its models is the target, how many alternatives it gives.

In: the names of models that requests name, and what the server did with requests that had fields added. Out: the kind,
whether a request is for the target, and how many alternatives a token to ask for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from adaptive.upstream.asking import unlogged
from adaptive.upstream.connections import CONNECT_S, Connections, ServerCutError, UnreachableError, UnsendableError
from adaptive.upstream.kinds import MOST, UNKNOWN, Kind, kind_of
from adaptive.upstream.models import Served, model_of, served

logger = logging.getLogger("adaptive.upstream")

# What a server answers that has no list of its models.
UNLISTED = frozenset({404, 405, 501})
# Seconds after which the list of models is asked for again, before a request for a name that was not listed, or else
# beside a request; and how many such names are remembered. Too low: needless requests. Too high: answers of another
# model, with which the server was started again, are logged as the target's.
AGAIN_S, MOST_NAMES = 60.0, 100
# Fewer alternatives a token, which are asked for where a server does not give as many as its kind does.
FEWER = (5, 0)
# Refusals in a row that mean fewer. Too low: a server that fails once by chance is asked for fewer from then on. Too
# high: more requests are sent twice.
IN_A_ROW = 2
# Seconds after which as many are asked for again. Too low: a request is sent twice again and again. Too high: a server
# that failed twice by chance, or got better, gives fewer for long.
RETRIED_S = 3600.0


class Discovery:
    """What is known of the server behind ``connections``."""

    def __init__(self, connections: Connections, kind: Kind | None, model: str | None) -> None:
        """``kind`` None finds it out. ``model``: the target's name at the server; None takes the first one listed."""
        self.kind = kind
        self.served: Served | None = None  # the target among the server's models, once these are known
        self._connections = connections
        self._model = model
        self._looking: asyncio.Task[None] | None = None  # a request for the list of the server's models
        self._looked: dict[str, float] = {}  # when it was last made for an unknown name, by name
        self._last = -math.inf  # when it was last made
        self._most = MOST  # alternatives a token that the server is known or believed to give
        self._refusals = 0  # in a row, of requests with that many
        self._fewer = math.inf  # when it was asked for fewer
        self._told: set[int] = set()  # numbers that people were told of

    def close(self) -> None:
        """End a request for the list of models."""
        if self._looking is not None:
            self._looking.cancel()

    async def known(self, key: str | None, name: str) -> Kind:
        """The kind of the server; unknown while it does not answer. It is asked for its models once, again when a
        request names a model ``name`` that it did not list, because it may have got that since, and now and then, since
        it may have been started again with another one."""
        if self.served is None or self._is_new(name):
            if self._looking is None:
                self._looking = asyncio.create_task(self._look(key))
            await asyncio.shield(self._looking)
            self._looked[name] = time.monotonic()
            if len(self._looked) > MOST_NAMES:
                del self._looked[next(iter(self._looked))]
        elif self._looking is None and time.monotonic() - self._last >= AGAIN_S:
            self._looking = asyncio.create_task(self._look(key))  # beside this request, which does not wait for it
        return self.kind or UNKNOWN

    def _is_new(self, name: str) -> bool:
        """Whether the server, which listed one model, may have got this one since."""
        one = self.served
        if one is None or not (one.alone and one.name and name) or name in one.names:
            return False
        return time.monotonic() - self._looked.get(name, -math.inf) >= AGAIN_S

    async def _look(self, key: str | None) -> None:
        """Ask the server for its models, on behalf of all requests that wait for that."""
        self._last = time.monotonic()
        headers = [] if key is None else [(b"authorization", key.encode("latin-1"))]

        async def ask() -> tuple[int, bytes]:
            async with self._connections.ask("GET", b"/v1/models", headers) as answer:
                return answer.status, await answer.read()

        try:
            status, body = await asyncio.wait_for(ask(), CONNECT_S)
            said = json.loads(body) if status == 200 else None
            if said is not None or (self.kind is not None and status in UNLISTED):
                self._found(said)
        except (UnreachableError, UnsendableError, ServerCutError, TimeoutError, ValueError, RecursionError):
            pass
        finally:
            self._looking = None

    def _found(self, models: object) -> None:
        """The server has said its models."""
        before = self.served
        # The target stays the one that it was, whatever is listed first now.
        self.served = served(models, self._model, before)
        if self.kind is None:
            self.kind = kind_of(models)
            logger.info("the server at %s is %s", self._connections.url, self.kind.name)
        if self.served.gone and before is not None and not before.gone:
            logger.warning(
                "the server does not list %s any more, and nothing is logged until it does; "
                "if it only has another name now, start the proxy again",
                self.served.name,
            )
        elif self.served.others and (before is None or before.alone):
            logger.info("of its models, answers of %s are logged; --model names another", self.served.name)

    def unlogged(self, said: Mapping[str, Any]) -> str | None:
        """Why answers to the request ``said`` are not logged; None if they are."""
        if self.served is not None and not self.served.is_target(model_of(said)):
            return "it is of another model (--model names the one to log)"
        return unlogged(said)

    def alternatives(self, kind: Kind) -> int:
        """How many a token are asked for."""
        if time.monotonic() - self._fewer >= RETRIED_S:
            self._most, self._refusals, self._fewer = MOST, IN_A_ROW - 1, math.inf  # one refusal says enough now
        return min(kind.alternatives, self._most)

    def taken(self) -> None:
        """The server has taken a request with added fields."""
        self._refusals = 0

    def refused(self, asked: int) -> None:
        """The server has refused a request for so many, and taken the client's own; after IN_A_ROW such refusals fewer
        are asked for. Nothing follows from what a server does while its kind is not known."""
        if self.kind is None or asked != self.alternatives(self.kind):
            return
        self._refusals += 1
        if self._refusals == IN_A_ROW:
            self._refusals, self._most = 0, next(most for most in FEWER if most < asked)
            self._fewer = time.monotonic()
            if self._most not in self._told:
                self._told.add(self._most)
                logger.warning("the server gives no %d alternatives a token; %d are asked for", asked, self._most)
