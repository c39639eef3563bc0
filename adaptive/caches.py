"""Caches of several conversations over one set of weights: the least recently used goes first.

In: the token ids of a prompt. Out: the conversation whose caches hold the longest useful beginning of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from adaptive.engines.protocol import Engine
from adaptive.engines.protocol import Sequence as EngineSequence

# Share of what a conversation holds that a prompt must repeat to go on in it. A prompt that shares only
# the system message begins another conversation; an edited or repeated last turn goes on in the same.
SAME_CONVERSATION = 0.5


class CachedSequence:
    """An engine's sequence, and the tokens that its cache holds."""

    def __init__(self, engine: Engine) -> None:
        self.sequence: EngineSequence = engine.sequence()
        self.tokens: list[int] = []

    def common(self, prompt: Sequence[int]) -> int:
        """Tokens at the beginning of ``prompt`` that the cache holds."""
        held = self.tokens[: self.sequence.length]
        pairs = enumerate(zip(held, prompt, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(held), len(prompt)))

    def keep_prefix_of(self, prompt: Sequence[int]) -> None:
        """Forget everything after the common beginning with ``prompt``, whose last token is always fed anew."""
        self.sequence.rollback(min(self.common(prompt), len(prompt) - 1))


class Conversation:
    """The target's and the draft's cache of one text. ``name`` serves as a session where none is given."""

    def __init__(self, target: Engine, draft: Engine | None) -> None:
        self.name = uuid.uuid4().hex[:12]
        self.target = CachedSequence(target)
        self.draft = CachedSequence(draft) if draft else None

    @property
    def nbytes(self) -> int:
        """Bytes that both caches take."""
        return self.target.sequence.nbytes + (self.draft.sequence.nbytes if self.draft else 0)


class Conversations:
    """The conversations kept, within ``limit`` bytes of caches; the one in use always stays.

    ``limit`` 0 keeps one conversation, which every prompt goes on in as far as it can.
    """

    def __init__(self, target: Engine, draft: Engine | None, limit: int = 0) -> None:
        self.limit = limit
        self._target, self._draft = target, draft
        self._kept: list[Conversation] = []  # the most recently used last

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches kept."""
        return sum(conversation.nbytes for conversation in self._kept)

    def take(self, prompt: Sequence[int]) -> Conversation:
        """The conversation that ``prompt`` goes on in, or a new one; it is now the most recently used."""
        best = max(self._kept, key=lambda c: c.target.common(prompt), default=None)
        if best is not None and self.limit:
            held = min(len(best.target.tokens), best.target.sequence.length)
            if best.target.common(prompt) < max(1, SAME_CONVERSATION * held):
                best = None
        if best is None:
            best = Conversation(self._target, self._draft)
        else:
            self._kept.remove(best)
        self._kept.append(best)
        while len(self._kept) > 1 and self.nbytes > self.limit:
            self._kept.pop(0)
        return best

    def forget_drafts(self) -> None:
        """The draft is another one: its caches were made by other weights and begin anew."""
        for conversation in self._kept:
            conversation.draft = CachedSequence(self._draft) if self._draft else None
