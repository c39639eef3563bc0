"""The connection to a draft server: one, kept open, with a thread of its own that asks and waits.

In: what is asked (``wire.py``). Out: the bytes that were answered, or nothing. Whoever decodes waits for at most as
long as a proposal may take and goes on without one; what comes later is dropped. Where the server has gone the thread
looks for it, less and less often, and whoever asks meanwhile is told at once that there is nobody.
"""

from __future__ import annotations

import functools
import json
import logging
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from adaptive.errors import AdaptiveError, first_line
from adaptive.settings import Settings
from adaptive.vocabulary import Vocabulary
from adaptive.wire import CONTENT_TYPE, HELLO, MOST_BODY, PROPOSE, VOCABULARY, Hello, Refused

logger = logging.getLogger("adaptive.drafting")
Model = TypeVar("Model", bound=BaseModel)

# Seconds for a connection, and for an answer that nobody waits for any more: reading a long text takes a small machine
# that long. A server that takes longer is taken to be gone.
CONNECT_S, ANSWER_S = 3.0, 60.0
# Seconds to the first try to reach a server that has gone; each further one waits twice as long, up to the last.
AGAIN_S, LONGEST_S = 0.1, 10.0
# Bytes of a vocabulary at most: half a million tokens.
MOST_VOCABULARY = 1 << 26
# A server that was late or talked nonsense is left alone for so many times the seconds that were lost, twice as long
# each further time in a row. Less loses more to a useless server, more is late to see that it has become better.
REST = 4.0


@dataclass
class Figures:
    """What has come of asking: proposals that came in time, ``late`` ones, those that were ``refused``, how often the
    connection was ``lost``, and seconds that proposals were waited for."""

    proposals: int = 0
    late: int = 0
    refused: int = 0
    lost: int = 0
    waited_s: float = 0.0


@dataclass(eq=False)
class Text:
    """A conversation as the server knows it: its name there, and the first ``known`` of these ``tokens``, which it was
    told in the connection of that ``turn``. What follows them may grow."""

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    tokens: list[int] = field(default_factory=list)
    known: int = 0
    turn: int = -1

    def common(self, text: list[int], turn: int) -> int:
        """Tokens at the beginning of ``text`` that the server knows in this connection."""
        if turn != self.turn:
            return 0
        if text is self.tokens:
            return min(self.known, len(text))
        pairs = enumerate(zip(self.tokens[: self.known], text, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(self.known, len(text)))


@dataclass(eq=False)
class Call:
    """A question under way. ``body`` makes it, with all of the text where the server does not know its beginning."""

    body: Callable[[bool], bytes]
    done: threading.Event = field(default_factory=threading.Event)
    answer: bytes | None = None
    refused: str | None = None


class Remote:
    """A draft server as a program sees it. ``hello`` is who it is; ``say`` is told what people should know of it.

    Raises AdaptiveError where there is none at ``url``, or it is not one that this program can talk to.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self.url, self.figures = url, Figures()
        self.say: Callable[[str], None] = lambda said: logger.warning("%s", said)
        self.turn = 0  # counts connections
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False)
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._up, self._busy, self._pause = True, False, AGAIN_S
        self._said_refused = self._said_lost = False
        self._rests_until, self._failures = 0.0, 0
        self._texts: weakref.WeakKeyDictionary[object, Text] = weakref.WeakKeyDictionary()
        try:
            self.hello = self._greeted()
        except (httpx.HTTPError, Refused) as error:
            raise AdaptiveError(
                f"no draft server can be used at {url}: {reason(error)}; start one there with adaptive draft-server, "
                "or name another draft"
            ) from error

    @property
    def ready(self) -> bool:
        """Whether a proposal can be asked for now."""
        return self._up and not self._busy and time.monotonic() >= self._rests_until

    @property
    def connected(self) -> bool:
        """Whether the server was there when it was last asked."""
        return self._up

    def as_object(self) -> dict[str, Any]:
        """As the server's JSON has it."""
        named = {"url": self.url, "draft": self.hello.id, "adapter": self.hello.adapter, "connected": self._up}
        return named | asdict(self.figures)

    @property
    def sentence(self) -> str:
        """The same in words."""
        figures = self.figures
        parts = [f"{figures.proposals} proposals"]
        if figures.proposals:
            parts.append(f"{1000 * figures.waited_s / figures.proposals:.1f} ms each")
        named = {"late": figures.late, "refused": figures.refused, "connections lost": figures.lost}
        parts += [f"{count} {name}" for name, count in named.items() if count]
        there = "" if self._up else ", which does not answer"
        return f"draft server {self.url} ({self.hello.id}){there}: {', '.join(parts)}"

    def text_of(self, holder: object) -> Text:
        """What the server knows of the conversation of this object."""
        return self._texts.setdefault(holder, Text())

    def forget(self) -> None:
        """Go on in no conversation that the server knows. It forgets those that nobody goes on in by itself."""
        self._texts.clear()

    def vocabulary(self) -> Vocabulary:
        """The draft's. Raises AdaptiveError."""
        try:
            return _read(Vocabulary, self._got(VOCABULARY, MOST_VOCABULARY))
        except (httpx.HTTPError, Refused) as error:
            raise AdaptiveError(f"the draft server at {self.url} says no vocabulary: {reason(error)}") from error

    def ask(self, body: Callable[[bool], bytes]) -> Call | None:
        """Begin to ask; None where nobody can be asked now. ``body`` is called with whether all of the text is wanted,
        on another thread too."""
        with self._lock:
            if not self.ready:
                return None
            self._busy = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="draft server", daemon=True)
                self._thread.start()
        call = Call(body)
        self._calls.put(call)
        return call

    def in_time(self, waited: float) -> None:
        """A proposal came after so many seconds."""
        self.figures.proposals += 1
        self.figures.waited_s += waited
        self._failures = 0

    def late(self, waited: float) -> None:
        """None came in so many seconds."""
        self.figures.late += 1
        self._rest(waited)

    def refuse(self, why: str, waited: float) -> None:
        """What came after so many seconds was no proposal."""
        self.figures.refused += 1
        self._rest(waited)
        if not self._said_refused:
            self._said_refused = True
            self.say(f"draft server {self.url}: a proposal was refused ({why}); what it says so is not used")

    def _rest(self, waited: float) -> None:
        self._failures += 1
        pause = min(LONGEST_S, REST * waited * 2.0 ** min(self._failures - 1, 10))
        self._rests_until = time.monotonic() + pause

    def _run(self) -> None:
        """Ask what is to be asked; look for a server that has gone."""
        while True:
            if self._up:
                self._answer(self._calls.get())
            else:
                time.sleep(self._pause)
                self._pause = min(2 * self._pause, LONGEST_S)
                self._look()

    def _answer(self, call: Call) -> None:
        try:
            call.answer = self._asked(call)
            self._pause, self._said_lost = AGAIN_S, False
        except Refused as error:
            call.refused = str(error)
        except Exception as error:  # whatever a connection can do: nobody drafts
            self._lost(error)
        finally:
            self._busy = False
            call.done.set()

    def _asked(self, call: Call) -> bytes:
        """Its answer; the whole text is told where the server does not know what it should. Raises Refused."""
        status, answer = self._post(call.body(False))
        if status == httpx.codes.CONFLICT:
            status, answer = self._post(call.body(True))
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise PermissionError("the key is refused")
        if status != httpx.codes.OK:
            raise Refused(f"status {status}")
        return answer

    def _post(self, body: bytes) -> tuple[int, bytes]:
        headers = {"Content-Type": CONTENT_TYPE}
        with self._client.stream("POST", PROPOSE, content=body, headers=headers) as response:
            return response.status_code, _all_of(response, MOST_BODY)

    def _got(self, path: str, most: int) -> bytes:
        with self._client.stream("GET", path) as response:
            if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                raise Refused("it refuses the key; give the right one with --draft-key-file FILE")
            if response.status_code != httpx.codes.OK:
                raise Refused(f"status {response.status_code} for {path}")
            return _all_of(response, most)

    def _greeted(self) -> Hello:
        return _read(Hello, self._got(HELLO, MOST_BODY))

    def _lost(self, error: Exception) -> None:
        self.figures.lost += 1
        self._up, self.turn = False, self.turn + 1
        if not self._said_lost:
            self._said_lost = True
            self.say(f"draft server {self.url} has gone ({reason(error)}); decoding goes on plainly until it is back")

    def _look(self) -> None:
        """Whether the server is back, with the same draft."""
        try:
            found = self._greeted()
        except Exception as error:
            logger.debug("draft server %s: %s", self.url, error)
            return
        if found.vocabulary != self.hello.vocabulary or found.context_length != self.hello.context_length:
            if not self._said_refused:
                self._said_refused = True
                self.say(f"draft server {self.url} is back with another draft, {found.id}; start anew to use that")
            return
        self.hello, self._up = found, True
        logger.info("draft server %s is back", self.url)


def _all_of(response: httpx.Response, most: int) -> bytes:
    """The body of a response, as long as it is not too long and comes soon enough. Raises Refused."""
    parts, size, until = [], 0, time.monotonic() + ANSWER_S
    for part in response.iter_raw():
        size += len(part)
        if size > most:
            raise Refused(f"it says more than {most} bytes")
        if time.monotonic() > until:
            raise httpx.ReadTimeout("the answer does not end")
        parts.append(part)
    return b"".join(parts)


def _read(kind: type[Model], body: bytes) -> Model:
    try:
        return kind.model_validate(json.loads(body))
    except (ValueError, RecursionError) as error:
        said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else first_line(error)
        raise Refused(f"it does not speak as a draft server does ({said})") from error


def reason(error: Exception) -> str:
    """Why a server could not be asked, for people."""
    if isinstance(error, httpx.ConnectError):
        return "nothing answers there"
    if isinstance(error, httpx.TimeoutException):
        return "it does not answer in time"
    return first_line(error) or "the connection ended"


def is_address(name: str | None) -> bool:
    """Whether a draft is named by the address of a server."""
    return name is not None and name.lower().startswith(("http://", "https://"))


def untrained(settings: Settings) -> str | None:
    """Why the draft is not trained, where a draft server has it; else None."""
    if not is_address(settings.draft):
        return None
    return (
        f"the draft at {settings.draft} is not trained from here; what is said is logged, and adaptive distill with a "
        "copy of that draft (--draft FOLDER) learns from it"
    )


def remote_of(settings: Settings) -> Remote | None:
    """The draft server that the settings name, which is asked once for who it is; None where the draft is none.
    Raises AdaptiveError for an address that is none, and where no server answers there."""
    if settings.draft is None or not is_address(settings.draft):
        return None
    try:
        parts = urlsplit(settings.draft)
        wrong = not parts.hostname or parts.port == 0 or parts.username or parts.query or parts.fragment
    except ValueError:  # a port that is none
        wrong = True
    if wrong:
        raise AdaptiveError(f"--draft is {settings.draft!r}; it must be an address such as http://127.0.0.1:8095")
    return _remote(settings.draft.rstrip("/"), _key(settings))


@functools.cache
def _remote(url: str, key: str | None) -> Remote:
    return Remote(url, key)


def _key(settings: Settings) -> str | None:
    key = None if settings.draft_key is None else settings.draft_key.get_secret_value()
    if settings.draft_key_file is not None:
        try:
            key = settings.draft_key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise AdaptiveError(f"key file {settings.draft_key_file} cannot be read: {error}") from error
    if key is not None and not (key.isascii() and key.isprintable()):
        raise AdaptiveError("the draft server's key has other characters than ASCII's printable ones")
    return key
