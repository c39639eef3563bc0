"""Conversations over one set of weights, and their caches. Caches of the least recently used are freed first.

In: a request's tokens, its messages and its client. Out: the conversation that the request continues. Its caches hold
the longest beginning of the request that any cache holds.
"""

from __future__ import annotations

import functools
import uuid
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from adaptive.engines.protocol import Engine, Memory, Rests, draft_sequence, sequences
from adaptive.engines.protocol import Sequence as EngineSequence
from adaptive.errors import AdaptiveError, NoMemoryError, first_line
from adaptive.kept_caches import LEAST, KeptCache, KeptCaches, Tensors
from adaptive.tokens import common_prefix
from adaptive.types import Message

# Tokens that another conversation's cache must hold in addition for a copy. Fewer tokens are computed as quickly as
# they are copied.
WORTH_COPYING = 16
# Conversations that are remembered without their caches. Too low: an older conversation does not find its session
# again. Too high: each one is compared with every request.
REMEMBERED = 256
# Tokens for which caches are reserved to measure the bytes of one token, because caches grow in steps.
SAMPLE = 1024


class CachedSequence:
    """An engine's sequence, and the tokens that its cache holds."""

    def __init__(self, sequence: EngineSequence) -> None:
        self.sequence = sequence
        self.tokens: list[int] = []

    def common(self, prompt: Sequence[int]) -> int:
        """The number of tokens at the beginning of ``prompt`` that the cache holds."""
        return common_prefix(self.tokens[: self.sequence.length], prompt)

    def keep_prefix_of(self, prompt: Sequence[int]) -> None:
        """Forget everything after the common beginning with ``prompt``; its last token is always fed again."""
        self.sequence.rollback(min(self.common(prompt), len(prompt) - 1))

    def copy_prefix(self, other: CachedSequence, prompt: Sequence[int]) -> None:
        """Copy the beginning of ``prompt`` that ``other`` holds."""
        length = other.common(prompt)
        if length:  # a draft that was never used has no buffer
            self.sequence.copy_prefix(other.sequence, length)
        self.tokens = list(prompt[:length])


@dataclass(frozen=True)
class Opening:
    """The first request of a conversation, of ``length`` tokens. Later requests of the conversation repeat all of it.

    ``text`` has the tokens of a raw text. Those of a chat, which its messages identify, are not kept: an agent's prompt
    has tens of thousands."""

    client: str
    messages: tuple[Message, ...]
    length: int
    text: array[int]

    @classmethod
    def of(cls, client: str, messages: tuple[Message, ...], prompt: Sequence[int]) -> Opening:
        """The opening of a conversation that begins with this request."""
        return cls(client, messages, len(prompt), array("i", () if messages else prompt))

    def begins(self, later: Opening) -> bool:
        """Whether ``later`` continues this conversation; a common system message alone is not enough."""
        if self.client != later.client:
            return False
        if not self.messages or not later.messages:  # raw text
            return self.messages == later.messages and self.text == later.text[: self.length]
        if self.messages == later.messages:
            return True
        asked = any(message.role == "user" for message in self.messages)
        return asked and self.messages == later.messages[: len(self.messages)]


class Conversation:
    """The target's and the draft's cache of one text. ``name`` is the session if the client gives none.

    ``opening`` is None for a conversation that its client named: only requests with that name continue it.
    """

    def __init__(self, target: Engine, draft: Engine | None, name: str | None, opening: Opening) -> None:
        self.name = name or uuid.uuid4().hex[:12]
        self.opening = None if name else opening
        self.under_way = False  # an answer is being decoded in it, and uses its caches
        self.resting = True  # no pass was made since ``rest``
        self.private = False  # an answer in it must not be recorded: nothing of it is written to disk
        self._file: Path | None = None  # the file of its cache, written at ``_written`` tokens
        self._engines = target, draft
        self.forget()

    def forget(self) -> None:
        """Free the caches."""
        self._written = 0
        target, draft = sequences(*self._engines)
        self.target = CachedSequence(target)
        self.draft = CachedSequence(draft) if draft else None

    def rest(self) -> None:
        """Free what only passes need: it is no part of ``memory``, which is limited."""
        if not self.resting:
            self.resting = True
            for cache in (self.target, self.draft):
                if cache is not None and isinstance(cache.sequence, Rests):
                    cache.sequence.rest()

    def forget_draft(self) -> None:
        """Empty the draft's cache, because other weights have computed it."""
        draft = self._engines[1]
        self.draft = CachedSequence(draft_sequence(draft, self.target.sequence)) if draft else None

    def copy_prefix(self, other: Conversation, prompt: Sequence[int]) -> None:
        """Start anew with the beginning of ``prompt`` that ``other`` holds, so that it is not computed again."""
        self.forget()
        self.target.copy_prefix(other.target, prompt)
        if self.draft is not None and other.draft is not None:
            self.draft.copy_prefix(other.draft, prompt)

    def loses(self, prompt: Sequence[int]) -> bool:
        """Whether going on with ``prompt`` would drop more than half of what the target's cache holds. Agents ask for a
        title or a summary under the name of the session whose long text they go on with afterwards."""
        held = self.target.sequence.length
        return held > 2 * (self.target.common(prompt) + WORTH_COPYING)

    def take_over(self, other: Conversation, prompt: Sequence[int]) -> None:
        """Take the caches of ``other``, which starts anew, and keep only the beginning of ``prompt``."""
        self.target, self.draft = other.target, other.draft
        other.forget()
        for cache in (self.target, self.draft):
            if cache is not None:
                cache.keep_prefix_of(prompt)

    @property
    def unwritten(self) -> bool:
        """Whether the target's cache should be on disk, and is not."""
        held = self.target.sequence.length
        return held >= LEAST and self._written != held and not self.private and not self.under_way

    def keep(self, kept: KeptCaches, wanted: Callable[[], bool]) -> bool:
        """Write the target's cache to disk, if it is ``unwritten``, unless ``wanted`` returns True meanwhile. Returns
        whether it had to be written."""
        if not self.unwritten:
            return False
        held = self.target.sequence.length
        writing = kept.keep(self.target.sequence, self.target.tokens, self._file)
        try:
            while not wanted():
                next(writing)
            writing.close()
        except StopIteration as end:
            self._file, self._written = end.value, held
        return True

    def read(self, file: KeptCache, kept: KeptCaches, prompt: Sequence[int]) -> None:
        """Start anew with the beginning of ``prompt`` that a file holds."""
        self.forget()
        length = file.common(prompt)
        if kept.read(file, self.target.sequence, length):
            self.target.tokens = list(prompt[:length])
            if length > len(file.tokens) - LEAST:  # this conversation continues the file's, and overwrites the file
                self._file = file.path

    @property
    def memory(self) -> Memory:
        """The memory of both caches."""
        return self.target.sequence.memory + (self.draft.sequence.memory if self.draft else Memory())

    @property
    def nbytes(self) -> int:
        """Bytes of both caches."""
        return self.target.sequence.memory.total + (self.draft.sequence.memory.total if self.draft else 0)


class Conversations:
    """The conversations, within ``limit`` bytes of caches; those with an answer in progress always stay.

    ``limit`` 0 keeps one conversation, which every prompt continues as far as it can.
    """

    def __init__(self, target: Engine, draft: Engine | None, limit: int = 0, kept: KeptCaches | None = None) -> None:
        self.limit = limit
        self._files = kept
        self._target, self._draft = target, draft
        self._kept: list[Conversation] = []  # the most recently used last

    def __len__(self) -> int:
        """The number of conversations that have a cache."""
        return sum(conversation.nbytes > 0 for conversation in self._kept)

    @property
    def memory(self) -> Memory:
        """The memory of all caches."""
        return sum((conversation.memory for conversation in self._kept), Memory())

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(conversation.nbytes for conversation in self._kept)

    def take(
        self, prompt: Sequence[int], messages: tuple[Message, ...] = (), client: str = "", name: str | None = None
    ) -> Conversation:
        """The conversation that a request continues, or a new one; it becomes the most recently used.

        ``name`` is the client's name for it, if it gave one. Otherwise ``client`` and the request's ``messages`` (or
        its tokens, if it has no messages) identify the conversation. With neither a client nor memory for other caches
        (``limit`` 0), there is one conversation.
        """
        if not self.limit and not client:
            if not self._kept or self._kept[0].under_way:
                self._kept = [Conversation(self._target, self._draft, None, Opening.of("", (), ()))]
            return self._kept[0]
        opening = Opening.of(client, messages, prompt)
        found = self._find(opening, name, prompt)
        if found is None or found.under_way or (name is not None and found.loses(prompt)):
            # A second request at the same time gets caches of its own, and so does another text of the same name.
            session, found = found, Conversation(self._target, self._draft, name, opening)
            found.name = found.name if session is None else session.name
        self._kept = [*(c for c in self._kept[-REMEMBERED:] if c is not found), found]
        for other in self._kept:
            if other is not found and not other.under_way:
                other.rest()
        found.resting = False
        source = max(self._kept, key=lambda c: c.target.common(prompt))
        shared = source.target.common(prompt)
        file = None if self._files is None else self._files.best(prompt, max(shared, found.target.common(prompt)))
        if file is not None and self._files is not None:
            if self._free_bytes(found, file.common(prompt) * self.token_bytes):
                found.read(file, self._files, prompt)
        elif source is found or shared < found.target.common(prompt) + WORTH_COPYING:
            self._free_bytes(found, 0)
        elif self._free_bytes(found, source.nbytes * shared // source.target.sequence.length, source):
            try:
                found.copy_prefix(source, prompt)
            except AdaptiveError:  # no memory for a copy: decoding computes the prompt, or reports the error
                found.forget()
        elif source.under_way:
            found.forget()
        else:
            found.take_over(source, prompt)
        return found

    def fetch(self, prompt: Sequence[int]) -> Future[Tensors] | None:
        """Begin to read the file that ``take`` would read for this prompt, on another thread; None if there is none."""
        held = max((conversation.target.common(prompt) for conversation in self._kept), default=0)
        file = None if self._files is None else self._files.best(prompt, held)
        return None if file is None or self._files is None else self._files.fetch(file)

    def release(self) -> None:
        """Free what was fetched and has not been read."""
        if self._files is not None:
            self._files.release()

    def forget(self) -> None:
        """Free all caches, on disk too, and forget all conversations."""
        for conversation in self._kept:
            conversation.private = True  # an answer in progress is not kept at its end
        self._kept = []
        if self._files is not None:
            self._files.forget()

    def free_idle(self) -> None:
        """Free the caches of all conversations that are not under way, after memory has run out."""
        for conversation in self._kept:
            if not conversation.under_way:
                conversation.forget()

    def keep(self, wanted: Callable[[], bool] = lambda: False, every: bool = False) -> bool:
        """Write to disk the first conversation found whose cache is not there yet, or ``every`` such one. Returns
        whether there was any. Ends soon after ``wanted`` returns True, without the file that it was writing. If the
        folder was erased from outside, no conversation in memory is written."""
        if self._files is None:
            return False
        if self._files.erased:
            for conversation in self._kept:
                conversation.private = True
            self._files.forget()
        found = (conversation.keep(self._files, wanted) for conversation in reversed(self._kept))
        return any(list(found) if every else found)

    @property
    def unwritten(self) -> int:
        """The number of conversations whose cache should be on disk, and is not."""
        return 0 if self._files is None else sum(conversation.unwritten for conversation in self._kept)

    def has_room(self, tokens: int, under_way: Iterable[Conversation]) -> bool:
        """Whether an answer of ``tokens`` tokens, including its prompt, may begin: its caches and those of the answers
        ``under_way`` must be within the limit. A single answer always may."""
        held = sum(conversation.nbytes for conversation in under_way)
        return not held or held + tokens * self.token_bytes <= self.limit

    @functools.cached_property
    def token_bytes(self) -> int:
        """Bytes of a token in both caches."""
        found = Conversation(self._target, self._draft, None, Opening.of("", (), ()))
        length = min(SAMPLE, self._target.context_length)
        texts = [text.sequence for text in (found.target, found.draft) if text is not None]
        for sequence in texts:
            sequence.reserve(length)
        try:
            for number, sequence in enumerate(texts):
                if not sequence.memory.total:  # allocated by the first pass; a head reads states of the target's
                    sequence.extend([0, 0][number:], 1)
        except RuntimeError as error:
            raise NoMemoryError(f"there is no memory for the caches of an answer ({first_line(error)})") from error
        return max(1, -(-found.nbytes // length))

    def forget_drafts(self) -> None:
        """Empty all caches of the draft, because the draft has changed."""
        for conversation in self._kept:
            conversation.forget_draft()

    def _find(self, opening: Opening, name: str | None, prompt: Sequence[int]) -> Conversation | None:
        """The conversation of that name, or without a name the one with the longest opening that the request repeats.
        Of several with this name, which began as requests at the same time, a free one that holds most of the
        prompt."""
        if name is not None:
            found = [c for c in self._kept if c.opening is None and c.name == name]
        else:
            found = [c for c in self._kept if c.opening is not None and c.opening.begins(opening)]
            longest = max(found, key=lambda c: c.opening.length if c.opening else 0, default=None)
            found = [c for c in found if longest is not None and c.name == longest.name]
        return max(found, key=lambda c: (not c.under_way, c.target.common(prompt)), default=None)

    def _free_bytes(self, kept: Conversation, needed: int, source: Conversation | None = None) -> bool:
        """Free the caches of the least recently used conversations, but not of ``kept``, until ``needed`` bytes are
        free. Returns False, leaving ``source`` as it is, if ``source`` would have to be freed."""
        held = self.nbytes  # counted once: most remembered conversations hold nothing
        for conversation in self._kept:
            if held + needed <= self.limit or conversation is kept:
                return True
            if conversation.under_way:
                continue
            if conversation is source:
                return False
            if nbytes := conversation.nbytes:
                conversation.forget()
                held -= nbytes
        return True
