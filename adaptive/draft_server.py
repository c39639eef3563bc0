"""``adaptive draft-server``: serves a draft model over HTTP to programs whose target runs elsewhere.

In: requests (``wire.py``), one after the other, each with the new tokens of a conversation. Out: proposals from the
same drafters that draft beside a target. A few conversations keep their caches; nothing is written to disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adaptive.drafting.ahead import DraftsAhead, Worker, drafts_ahead
from adaptive.drafting.model import PREPARED, PreparesProposals
from adaptive.drafting.proposal import Proposal
from adaptive.engines.load import check_readable, load_engine
from adaptive.engines.protocol import Engine, Sequence
from adaptive.errors import AdaptiveError, first_line
from adaptive.pair import base_of, draft_alone, pair_identity
from adaptive.sampling import LogitsProcessor
from adaptive.service.guard import JSON, Guard
from adaptive.service.server import GRACE_S, address, listen, server_config, until_signalled, with_key
from adaptive.settings import Settings
from adaptive.state import open_state
from adaptive.swapper import EXHAUSTED
from adaptive.tokens import as_list, common_prefix
from adaptive.types import SamplingParams
from adaptive.vocabulary import Vocabulary, vocabulary_of
from adaptive.wire import (
    CONTENT_TYPE,
    HELLO,
    MOST_BODY,
    PROPOSE,
    TOP,
    VOCABULARY,
    Array,
    Asked,
    Hello,
    Origin,
    Refused,
    drafted_bytes,
)
from checkpoints.store import AdapterStore

logger = logging.getLogger("adaptive.drafting")

# Conversations that keep a cache, and seconds after which an unused one is dropped. Too high: memory. Too low: the text
# of a conversation that continues is read again.
MOST, IDLE_S = 16, 3600.0
# Seconds between two checks for a newly promoted adapter.
LOOK_S = 1.0
# Seconds until the next check after one in which the store or the adapter could not be read. Too low: requests wait for
# reading a large adapter in vain. Too high: it comes into use late.
AGAIN_S = 30.0
# Seconds for which an idle connection stays open: a user reads and thinks.
KEEP_ALIVE_S = 3600


class UnknownError(Exception):
    """The server has a shorter text of this conversation than the request assumes."""


@dataclass(eq=False)
class Held:
    """A conversation: its cache, its text, which grows in place, and the chain that was last ``proposed`` after it."""

    sequence: Sequence
    text: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    used: float = 0.0
    drafter: DraftsAhead | None = None
    drafter_of: tuple[SamplingParams, int, bool] | None = None

    @property
    def memory(self) -> int:
        """Bytes of the cache and of what was drafted ahead."""
        return self.sequence.memory.total + (0 if self.drafter is None else self.drafter.memory)


class Drafts:
    """Proposes with one model for several conversations. Not thread-safe."""

    def __init__(self, engine: Engine, cache_bytes: int) -> None:
        self.engine = engine
        self.adapter: str | None = None
        self.latest: DraftsAhead | None = None  # the drafter of the last proposal
        self._cache_bytes = cache_bytes
        self._held: OrderedDict[str, Held] = OrderedDict()  # the most recently used last
        self._chance = random.SystemRandom()

    def use_adapter(self, name: str | None, folder: Path | None) -> None:
        """Draft with another adapter, and drop all caches, which other weights computed. Raises AdaptiveError: the
        adapter before stays in use, or none if the new one could not be merged."""
        steps = self.engine.swap_adapter(folder)
        next(steps, None)  # reads and checks it; nothing has changed if this raises
        self.adapter = self.latest = None
        self._held.clear()
        for _ in steps:
            pass
        self.adapter = name

    def answer(self, asked: Asked, origin: Origin | None = None) -> bytes:
        """The requested proposal as a response body, which names its ``origin``. Raises UnknownError if the server
        lacks the beginning of the text, Refused for an invalid request."""
        proposal = self.propose(asked)
        if proposal is None:
            return drafted_bytes([], None, None, origin)
        probs = None if proposal.probs is None else [_row(row) for row in proposal.probs]
        return drafted_bytes(as_list(proposal.tokens), proposal.parents, probs, origin)

    def propose(self, asked: Asked) -> Proposal | None:
        """The requested proposal."""
        held = self._conversation(asked)
        if not asked.common and not asked.tokens:
            raise Refused("there is no text to draft behind")
        drafter, text = self._drafter(held, asked), held.text
        # Ids that only the target has are replaced by another token; that can only lower acceptance.
        new = [min(token, self.engine.vocab_size - 1) for token in asked.tokens]
        stands = asked.common
        if stands == len(text):
            stands += common_prefix(held.proposed, new)
        text[asked.common :], held.proposed = new, []
        drafter.rollback(min(stands, len(text) - 1))
        length = min(asked.length, drafter.limit(len(text)))
        if not length:
            if len(text) <= self.engine.context_length and drafter.unseen(len(text)) > 0:
                drafter.feed(text, len(text))
            return None
        proposal = drafter.propose(text, length)
        proposal = None if proposal is None else proposal.closed()
        if proposal is not None and proposal.parents is None:
            held.proposed = as_list(proposal.tokens)
        self.latest = drafter
        return proposal

    def step(self) -> bool:
        """Draft ahead after the last proposal. Returns whether more can be drafted."""
        return self.latest is not None and self.latest.step()

    def _conversation(self, asked: Asked) -> Held:
        self._forget_idle(asked.conversation not in self._held)
        held = self._held.pop(asked.conversation, None)
        if held is None:
            held = Held(self.engine.sequence())
        self._held[asked.conversation] = held
        held.used, self.latest = time.monotonic(), None
        if len(held.text) < asked.common:
            raise UnknownError
        return held

    def _forget_idle(self, one_more: bool) -> None:
        """Forget conversations that were unused for long, or without room, perhaps beside ``one_more``."""
        now = time.monotonic()
        while self._held:
            oldest = next(iter(self._held.values()))
            total = sum(held.memory for held in self._held.values())
            many = len(self._held) > 1 and (len(self._held) + one_more > MOST or total > self._cache_bytes)
            if now - oldest.used < IDLE_S and not many:
                return
            self._held.popitem(last=False)

    def _drafter(self, held: Held, asked: Asked) -> DraftsAhead:
        """The drafter for these parameters. Draws are limited to the TOP likeliest tokens, so that their probabilities
        fit into a message."""
        tree = asked.tree and self.engine.trees
        wanted = asked.sampling, asked.vocab, tree
        if held.drafter is None or held.drafter_of != wanted:
            params, device = asked.sampling, self.engine.device
            if not (params.greedy or params.seeded):
                params = replace(params, top_k=min(params.top_k or TOP, TOP))
            generator = torch.Generator(device).manual_seed(self._chance.getrandbits(63))
            processor = LogitsProcessor(params, asked.vocab, device)
            held.drafter = drafts_ahead(self.engine, tree)(
                held.sequence, self.engine, asked.vocab, params, processor, generator
            )
            held.drafter_of = wanted
            if isinstance(held.drafter, PreparesProposals):
                length = asked.common + len(asked.tokens) + PREPARED
                held.drafter.prepare(min(length, self.engine.context_length), None)
        return held.drafter


def _row(row: torch.Tensor | Array) -> Array:
    return row.float().cpu().numpy() if isinstance(row, torch.Tensor) else np.asarray(row)


class Desk:
    """Passes requests to the model's thread, and its answers back."""

    def __init__(self, drafts: Drafts, hello: Callable[[], Hello], vocabulary: Vocabulary, ahead: bool = True) -> None:
        self.drafts, self.hello, self.vocabulary = drafts, hello, vocabulary
        self.worker = Worker() if ahead else None  # drafts ahead until the next request
        self.before: Callable[[], None] = lambda: None  # called before every request, on the model's thread
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="draft")

    async def greet(self, request: Request) -> Response:
        """Describe the draft (``Hello``)."""
        return JSONResponse(self.hello().model_dump())

    async def say_vocabulary(self, request: Request) -> Response:
        """Send the draft's vocabulary."""
        return JSONResponse(self.vocabulary.model_dump())

    async def propose(self, request: Request) -> Response:
        """Propose the next tokens of a text."""
        try:
            asked = Asked.from_bytes(await request.body())
            answer = await asyncio.get_running_loop().run_in_executor(self.thread, self._answer, asked)
        except Refused as error:
            return JSONResponse({"error": str(error)}, 400)
        except UnknownError:
            return JSONResponse({"error": "this conversation is not known here; send all of its text"}, 409)
        except AdaptiveError as error:  # no memory
            logger.warning("%s", error)
            return JSONResponse({"error": str(error)}, 503)
        return Response(answer, media_type=CONTENT_TYPE)

    def _answer(self, asked: Asked) -> bytes:
        if self.worker is not None:
            self.worker.stop()
        self.before()
        hello = self.hello()
        with torch.inference_mode():
            answer = self.drafts.answer(asked, Origin(hello.weights, hello.adapter))
        if self.worker is not None:
            self.worker.go_on(self.drafts.step)
        return answer


class Promoted:
    """Follows the promoted adapter in the pair's store."""

    def __init__(self, drafts: Drafts, store: AdapterStore) -> None:
        self._drafts, self._store = drafts, store
        self._next, self._seen = float("-inf"), object()
        self._unread: set[str] = set()  # reported reasons why something could not be read

    def __call__(self) -> None:
        """Check for another promoted adapter, at most every LOOK_S seconds, and use it."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_S
        try:
            self._look()
        except (AdaptiveError, *EXHAUSTED) as error:  # also if memory or files run out
            self._next = time.monotonic() + AGAIN_S
            problem, adapter = first_line(error), self._drafts.adapter or "none"
            if problem not in self._unread:
                self._unread.add(problem)
                logger.warning("adapter: %s; adapter %s stays in use", problem, adapter)

    def _look(self) -> None:
        """Raises what reading the store and the adapter raises. The next look then begins anew."""
        current = self._store.current_id()
        if current == self._seen:
            return
        manifest, problems = self._store.usable(None)
        unreadable = bool(problems) and self._store.unreadable(manifest) is not None  # it is looked at again later
        for problem in problems:
            if not unreadable or problem not in self._unread:
                logger.warning("adapter: %s", problem)
            self._unread.add(problem)
        name = manifest.id if manifest is not None else None
        if name != self._drafts.adapter:
            folder = None if name is None else self._store.path(name)
            try:
                self._drafts.use_adapter(name, folder)
                logger.info("now drafting with adapter %s", name or "none")
            except AdaptiveError as error:
                if isinstance(error.__cause__, EXHAUSTED):  # the store has just read it all, so this passes
                    raise
                logger.warning("adapter: %s; adapter %s is used", error, self._drafts.adapter or "none")
        if unreadable:
            self._next = time.monotonic() + AGAIN_S
        else:
            self._seen = current


def serve(settings: Settings, adapter: Path | None, ahead: bool) -> None:
    """Serve the draft until SIGTERM or ctrl-C, with ``adapter``, or else, if the settings name a target, with the
    adapter that is promoted for the pair. ``ahead``: draft ahead while the target verifies. Raises AdaptiveError if the
    draft cannot be served."""
    settings = with_key(settings)
    draft, tokenizer = draft_alone(settings)
    device = settings.draft_device or settings.device
    check_readable(draft, settings, device, draft=True)
    base, vocabulary = base_of(draft), vocabulary_of(tokenizer)
    store = None
    if settings.target is not None and adapter is None:
        store = AdapterStore(open_state(settings.state_dir, pair_identity(settings).id).adapters)
    with contextlib.closing(listen(settings.host, settings.port)) as listening:
        engine = load_engine(draft, settings, device, lambda share: None, draft=True)
        if engine.undraftable is not None:
            raise AdaptiveError(f"{draft.id} cannot draft: it {engine.undraftable}; name another draft")
        drafts, name = Drafts(engine, settings.cache_mb * 10**6), Path(base.id).name
        if adapter is not None:
            drafts.use_adapter(adapter.name, adapter)

        def hello() -> Hello:
            return Hello(
                id=name, weights=base.weights, vocab_size=engine.vocab_size, context_length=engine.context_length,
                trees=engine.trees, vocabulary=vocabulary.digest, adapter=drafts.adapter,
            )  # fmt: skip

        desk = Desk(drafts, hello, vocabulary, ahead)
        if store is not None:
            desk.before = Promoted(drafts, store)
            desk.before()
        logger.info("drafting with %s, adapter %s", draft.id, drafts.adapter or "none")
        logger.info("listening on %s", address(settings.host, listening.getsockname()[1]))
        config = server_config(
            guarded(desk, settings), timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=int(GRACE_S)
        )
        try:
            until_signalled(uvicorn.Server(config), listening)
        finally:
            desk.thread.shutdown()
            if desk.worker is not None:
                desk.worker.stop()


def guarded(desk: Desk, settings: Settings) -> Guard:
    """The application, behind the check of the key, the origin and the size of each request."""
    routes = [
        Route(HELLO, desk.greet),
        Route(VOCABULARY, desk.say_vocabulary),
        Route(PROPOSE, desk.propose, methods=["POST"]),
    ]
    key = settings.api_key.get_secret_value() if settings.api_key else None
    return Guard(Starlette(routes=routes), key, MOST_BODY, types=JSON | {CONTENT_TYPE.encode()})
