"""The model of a draft server as the drafter: it proposes on another machine, or in another process of this one.

In: the committed text, of which only the new part is sent. Out: the server's proposal, if it is valid and arrives
before a pass of the target would have ended anyway. A drawn chain comes with the distributions that its tokens were
drawn from. Likeliest tokens, tokens under a seed (whose noise both sides compute from the place in the text) and trees
come without: the text is the target's own whatever the server proposes. Distributions are checked for validity; that a
token was really drawn from one cannot be checked here.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import replace

import torch

from adaptive.control.policy import Adviser
from adaptive.drafting.proposal import Proposal
from adaptive.remote import Call, Remote
from adaptive.types import REMOTE, REMOTE_TREE, SamplingParams
from adaptive.wire import Asked, Drafted, Refused, read_drafted

# Most seconds to wait for a proposal: TIMES the median of the target's last passes plus LINE_S for the connection;
# UNKNOWN_S before any pass was timed.
TIMES, LINE_S, UNKNOWN_S = 1.5, 0.01, 0.25
# Passes of the target in that median.
PASSES = 9


class RemoteDrafter:
    """Requests the proposals of one answer from ``remote``, in the conversation of ``holder``."""

    name = REMOTE

    def __init__(
        self, remote: Remote, holder: object, target_vocab: int, params: SamplingParams, tree: bool = False
    ) -> None:
        """``tree``: request trees."""
        self.remote = remote
        self.params = params
        self.tree = tree
        self._text = remote.text_of(holder)
        self._vocab = min(remote.hello.vocab_size, target_vocab)
        self._passes: deque[float] = deque(maxlen=PASSES)
        self._proposed: float | None = None  # time of the last proposal

    def begin(self, prompt: list[int]) -> None:
        """Let the server read the prompt while the target does."""
        self._ask(prompt, 0)

    def limit(self, committed: int) -> int:
        """0 while the server cannot be asked or an earlier request is still open."""
        return max(0, self.remote.hello.context_length - committed + 1) if self.remote.ready else 0

    def unseen(self, committed: int) -> int:
        """0: the server's reading costs the target nothing and is not waited for."""
        return 0

    def feed(self, committed: list[int], most: int) -> None:
        """Does nothing."""

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """The server's proposal, if it comes in time. ``advise`` is ignored: the server cannot call it."""
        asked = self._ask(committed, length)
        if asked is None:
            return None
        question, call = asked
        began = time.perf_counter()
        there = call.done.wait(self._patience())
        waited = time.perf_counter() - began
        if not there:
            self.remote.late(waited)
            return None
        try:
            drafted = self._read(question, call)
        except Refused as error:
            self.remote.refuse(str(error), waited)
            return None
        if call.answer is None:  # the connection was lost
            return None
        self.remote.in_time(waited)
        self._proposed = time.perf_counter()
        if drafted is None:
            return None
        probs = None if drafted.probs is None else torch.from_numpy(drafted.probs)
        name = self.name if drafted.parents is None else REMOTE_TREE
        return Proposal(name, drafted.tokens, probs, drafted.parents)

    def _ask(self, committed: list[int], length: int) -> tuple[Asked, Call] | None:
        """Send the request for a proposal after this text; None if it cannot be sent now."""
        text, turn = self._text, self.remote.turn
        common = text.common(committed, turn)
        every = Asked(text.name, 0, list(committed), length, self.tree, self._vocab, self.params)
        asked = replace(every, common=common, tokens=every.tokens[common:])
        call = self.remote.ask(lambda whole: (every if whole else asked).to_bytes())
        if call is None:
            return None
        text.tokens, text.known, text.turn = committed, len(committed), turn
        return asked, call

    def _read(self, asked: Asked, call: Call) -> Drafted | None:
        if call.refused is not None:
            raise Refused(call.refused)
        if call.answer is None:
            return None
        return read_drafted(call.answer, asked, drawn=not (self.params.greedy or self.params.seeded))

    def _patience(self) -> float:
        """The most seconds to wait for a proposal."""
        return LINE_S + TIMES * statistics.median(self._passes) if self._passes else UNKNOWN_S

    def reserve(self, length: int) -> None:
        """Does nothing: the server manages its own memory."""

    def rollback(self, length: int) -> None:
        """Note the end of a verification, to time the target's passes. Rejected tokens are not sent."""
        if self._proposed is not None:
            self._passes.append(time.perf_counter() - self._proposed)
            self._proposed = None
