"""The connection to a draft server. A single connection stays open; a thread of its own sends requests and waits.

In: requests (``wire.py``). Out: the response's head and arrays, or nothing. Decoding waits for a proposal for a limited
time and then continues without it; late responses are dropped. While the server is unreachable, the thread tries to
connect again at growing intervals, and requests fail at once.
"""

from __future__ import annotations

import functools
import json
import logging
import queue
import ssl
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

from adaptive.errors import AdaptiveError, first_line, why_unread
from adaptive.printable import refused_address
from adaptive.settings import Settings
from adaptive.tls import trusted
from adaptive.tokens import common_prefix
from adaptive.vocabulary import Vocabulary
from adaptive.wire import CONTENT_TYPE, HELLO, MOST_BODY, PROPOSE, VOCABULARY, Body, Hello, Refused, origin_of, unpacked

logger = logging.getLogger("adaptive.drafting")
Model = TypeVar("Model", bound=BaseModel)

# Seconds for connecting, and for a response, which decoding may no longer wait for: a small machine needs that long to
# read a long text. A server that takes longer counts as lost.
CONNECT_S, ANSWER_S = 3.0, 60.0
# Seconds to the first attempt to reach a lost server; the pause doubles with each attempt, up to LONGEST_S.
AGAIN_S, LONGEST_S = 0.1, 10.0
# Most bytes of a vocabulary: half a million tokens.
MOST_VOCABULARY = 1 << 26
# After a late or invalid response the server gets no requests for REST times the seconds that it cost, and twice as
# long after each further one in a row. Too low: a useless server costs more time. Too high: an improvement is noticed
# late.
REST = 4.0


@dataclass
class Figures:
    """Counts of the results of requests: proposals in time, ``late`` ones, ``refused`` ones, how often the connection
    was ``lost``, and the seconds that decoding waited for proposals."""

    proposals: int = 0
    late: int = 0
    refused: int = 0
    lost: int = 0
    waited_s: float = 0.0


@dataclass(eq=False)
class Text:
    """The server's copy of a conversation: its name there, and the first ``known`` of these ``tokens``, sent over the
    connection number ``turn``. Further tokens may be appended."""

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    tokens: list[int] = field(default_factory=list)
    known: int = 0
    turn: int = -1

    def common(self, text: list[int], turn: int) -> int:
        """The number of tokens at the beginning of ``text`` that the server has, in this connection."""
        if turn != self.turn:
            return 0
        if text is self.tokens:
            return min(self.known, len(text))
        return common_prefix(self.tokens[: self.known], text)


@dataclass(eq=False)
class Call:
    """A request in progress. ``body`` makes its bytes, given whether to include all of the text."""

    body: Callable[[bool], bytes]
    done: threading.Event = field(default_factory=threading.Event)
    answer: Body | None = None
    refused: str | None = None


class Remote:
    """The client of a draft server. ``hello`` describes the server; ``say`` receives messages for users.

    Raises AdaptiveError if there is no server at ``url``, or it is incompatible.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self.url, self.figures = url, Figures()
        self.say: Callable[[str], None] = lambda said: logger.warning("%s", said)
        self.turn = 0  # counts connections
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
        self._client = httpx.Client(
            base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False, verify=trusted()
        )
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._up, self._busy, self._pause = True, False, AGAIN_S
        self._said_refused = self._said_lost = self._said_other = False
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
        """Whether a proposal can be requested now."""
        return self._up and not self._busy and time.monotonic() >= self._rests_until

    @property
    def connected(self) -> bool:
        """Whether the server answered when it was last contacted."""
        return self._up

    def as_object(self) -> dict[str, Any]:
        """The figures for the JSON of this program's own server."""
        named = {"url": self.url, "draft": self.hello.id, "adapter": self.hello.adapter, "connected": self._up}
        return named | asdict(self.figures)

    @property
    def sentence(self) -> str:
        """The figures in words."""
        figures = self.figures
        parts = [f"{figures.proposals} proposals"]
        if figures.proposals:
            parts.append(f"{1000 * figures.waited_s / figures.proposals:.1f} ms each")
        named = {"late": figures.late, "refused": figures.refused, "connections lost": figures.lost}
        parts += [f"{count} {name}" for name, count in named.items() if count]
        there = "" if self._up else ", which does not answer"
        return f"draft server {self.url} ({self.hello.id}){there}: {', '.join(parts)}"

    def text_of(self, holder: object) -> Text:
        """The server's copy of the conversation that belongs to ``holder``."""
        return self._texts.setdefault(holder, Text())

    def forget(self) -> None:
        """Continue none of the server's conversations. The server drops unused ones by itself."""
        self._texts.clear()

    def vocabulary(self) -> Vocabulary:
        """The draft's vocabulary. Raises AdaptiveError."""
        try:
            return _read(Vocabulary, self._got(VOCABULARY, MOST_VOCABULARY))
        except (httpx.HTTPError, Refused) as error:
            raise AdaptiveError(f"the draft server at {self.url} says no vocabulary: {reason(error)}") from error

    def ask(self, body: Callable[[bool], bytes]) -> Call | None:
        """Start a request; None if none is possible now. ``body`` is called, also on another thread, with whether to
        include all of the text."""
        with self._lock:
            if not self.ready:
                return None
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="draft server", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # there can be no more threads now
                    return None
                self._thread = thread
            self._busy = True
        call = Call(body)
        self._calls.put(call)
        return call

    def in_time(self, waited: float) -> None:
        """Count a proposal that came after ``waited`` seconds."""
        self.figures.proposals += 1
        self.figures.waited_s += waited
        self._failures = 0

    def late(self, waited: float) -> None:
        """Count a proposal that did not come within ``waited`` seconds."""
        self.figures.late += 1
        self._rest(waited)

    def refuse(self, why: str, waited: float) -> None:
        """Count an invalid response, which came after ``waited`` seconds."""
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
        """Process the requests; while the server is lost, try to reach it."""
        while True:
            if self._up:
                self._answer(self._calls.get())
            else:
                time.sleep(self._pause)
                self._pause = min(2 * self._pause, LONGEST_S)
                self._look()

    def _answer(self, call: Call) -> None:
        try:
            answer = unpacked(self._asked(call))
            if self._is_ours(answer):
                call.answer = answer
                self._pause, self._said_lost = AGAIN_S, False
            else:
                self._disconnect()  # ``_look`` reports the other draft
        except Refused as error:
            call.refused = str(error)
        except Exception as error:  # a connection may fail in any way; decoding continues without the draft
            self._lost(error)
        finally:
            self._busy = False
            call.done.set()

    def _is_ours(self, answer: Body) -> bool:
        """Whether the draft of the start made this answer; notes its adapter. A new process at the address may have
        another draft, and be reached without an error in between. Raises Refused."""
        origin = origin_of(answer)
        if origin is None:
            return True
        if origin.weights != self.hello.weights:
            return False
        if origin.adapter != self.hello.adapter:
            self.hello = self.hello.model_copy(update={"adapter": origin.adapter})
        return True

    def _asked(self, call: Call) -> bytes:
        """The response; sends all of the text if the server lacks its beginning. Raises Refused."""
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

    def _disconnect(self) -> None:
        self.figures.lost += 1
        self._up, self.turn = False, self.turn + 1

    def _lost(self, error: Exception) -> None:
        self._disconnect()
        if not self._said_lost:
            self._said_lost = True
            self.say(f"draft server {self.url} has gone ({reason(error)}); decoding goes on plainly until it is back")

    def _look(self) -> None:
        """Check whether the server is back, with the same draft."""
        try:
            found = self._greeted()
        except Exception as error:
            logger.debug("draft server %s: %s", self.url, error)
            return
        if _same(found) != _same(self.hello):
            if not self._said_other:
                self._said_other = True
                self.say(f"draft server {self.url} is back with another draft, {found.id}; start anew to use that")
            return
        self.hello, self._up, self._said_other = found, True, False
        logger.info("draft server %s is back", self.url)


def _same(hello: Hello) -> tuple[str, str, int]:
    """What must not change while a program uses the draft. The adapter may."""
    return hello.weights, hello.vocabulary, hello.context_length


def _all_of(response: httpx.Response, most: int) -> bytes:
    """The body of a response. Raises Refused if it exceeds ``most`` bytes, and ReadTimeout if it takes too long."""
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
    """The reason of a failed request, for users."""
    if isinstance(error, httpx.ConnectError):
        refused = _of_tls(error)
        return "nothing answers there" if refused is None else f"TLS failed with {first_line(refused)}"
    if isinstance(error, httpx.TimeoutException):
        return "it does not answer in time"
    return first_line(error) or "the connection ended"


def _of_tls(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS library's error that caused this one, None if there is none."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error


def is_address(name: str | None) -> bool:
    """Whether ``name`` is the address of a draft server."""
    return name is not None and name.lower().startswith(("http://", "https://"))


def untrained(settings: Settings) -> str | None:
    """The reason why the draft is not trained, if a draft server has it; else None."""
    if not is_address(settings.draft):
        return None
    return (
        "the draft of a draft server is not trained from here; answers are logged, and adaptive distill with a "
        "copy of that draft (--draft FOLDER) learns from it"
    )


def remote_of(settings: Settings) -> Remote | None:
    """The draft server that the settings name, contacted once for its description; None if they name none. Raises
    AdaptiveError for an invalid address, or if no server answers there."""
    if settings.draft is None or not is_address(settings.draft):
        return None
    try:
        parts = urlsplit(settings.draft)
        wrong = not parts.hostname or parts.port == 0 or "@" in parts.netloc or parts.query or parts.fragment
        httpx.URL(settings.draft).raw_host.decode("ascii").encode("idna")  # as a socket will encode it
    except (ValueError, httpx.InvalidURL):  # an invalid port, character or name, such as a name with an empty part
        wrong = True
    if wrong:
        raise AdaptiveError(
            f"--draft is {refused_address(settings.draft)}; it must be an address such as http://127.0.0.1:8095, "
            "without a login"
        )
    return _remote(settings.draft.rstrip("/"), _key(settings))


@functools.cache
def _remote(url: str, key: str | None) -> Remote:
    return Remote(url, key)


def _key(settings: Settings) -> str | None:
    key = None if settings.draft_key is None else settings.draft_key.get_secret_value().strip()
    if settings.draft_key_file is not None:
        try:
            key = settings.draft_key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise AdaptiveError(f"key file {settings.draft_key_file} cannot be read: {why_unread(error)}") from error
    if key is not None and not (key.isascii() and key.isprintable()):
        raise AdaptiveError("the draft server's key has other characters than ASCII's printable ones")
    return key
