"""A model behind a draft server as the drafter: it proposes on another machine, or in another process of this one.

In: the committed text, of which only what is new is sent. Out: the server's proposal, if it is one, and comes before a
pass of the target would have been over anyway. With a chain that was drawn come the distributions that its tokens were
drawn from. The likeliest tokens, those under a seed (whose noise both sides compute from the place in the text) and
trees are verified without: whatever the server says, the text is then the target's own. A distribution is checked for
being one; that a token was really drawn from it cannot be seen from here.
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
from adaptive.sampling import LogitsProcessor
from adaptive.types import REMOTE, REMOTE_TREE, SamplingParams
from adaptive.wire import Asked, Drafted, Refused, read_drafted

# Seconds that a proposal is waited for at most: so many times what the target's last passes took, and a little for the
# line. While nothing is known of them, so many.
TIMES, LINE_S, UNKNOWN_S = 1.5, 0.01, 0.25
# Passes of the target that are looked at.
PASSES = 9


class RemoteDrafter:
    """Asks ``remote`` for the proposals of one answer, in the conversation of ``holder``."""

    name = REMOTE

    def __init__(
        self,
        remote: Remote,
        holder: object,
        target_vocab: int,
        params: SamplingParams,
        processor: LogitsProcessor,
        tree: bool = False,
    ) -> None:
        """``tree``: trees are asked for, where what is proposed does not change the target's logits."""
        self.remote = remote
        self.params = params
        self.tree = tree and not processor.active
        self._text = remote.text_of(holder)
        self._vocab = min(remote.hello.vocab_size, target_vocab)
        self._passes: deque[float] = deque(maxlen=PASSES)
        self._proposed: float | None = None  # when the last proposal was made

    def begin(self, prompt: list[int]) -> None:
        """Have the server read the prompt, while the target does."""
        self._ask(prompt, 0)

    def limit(self, committed: int) -> int:
        """None while there is nobody to ask, or an earlier question is still open."""
        return max(0, self.remote.hello.context_length - committed + 1) if self.remote.ready else 0

    def catch_up(self, committed: int) -> int:
        """What the server is still to read costs the target nothing, and is not waited for."""
        return 0

    def feed(self, committed: list[int], most: int) -> None:
        """Nothing is fed here."""

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """What the server proposes in time. ``advise`` is not asked: only this side knows what it would say."""
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
        if call.answer is None:  # the connection is gone
            return None
        self.remote.in_time(waited)
        self._proposed = time.perf_counter()
        if drafted is None:
            return None
        probs = None if drafted.probs is None else torch.from_numpy(drafted.probs)
        name = self.name if drafted.parents is None else REMOTE_TREE
        return Proposal(name, drafted.tokens, probs, drafted.parents)

    def _ask(self, committed: list[int], length: int) -> tuple[Asked, Call] | None:
        """Begin to ask for a proposal behind this text; None where that cannot be asked now."""
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
        """Seconds to wait for a proposal."""
        return LINE_S + TIMES * statistics.median(self._passes) if self._passes else UNKNOWN_S

    def reserve(self, length: int) -> None:
        """The server sees to its own memory."""

    def rollback(self, length: int) -> None:
        """The verdict is there: it took as long as a pass of the target takes. What did not stand is not sent."""
        if self._proposed is not None:
            self._passes.append(time.perf_counter() - self._proposed)
            self._proposed = None
