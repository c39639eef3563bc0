"""A proposal on a device that works through a queue, as CUDA does: it is chosen there, and ends there.

A program that reads each token's confidence before it asks for the next one leaves the device with nothing to do in
between. So whoever proposes (``model.py``) hands the device step after step; each chooses its token, and finds by the
thresholds of the round whether the proposal goes on behind it (``Choice``). What it found is copied out as it goes, and
looked at one step late, when the next step is queued already: the device never waits for the program, and goes at most
one step further than a program would have gone that read each step before the next (``ON``).

How many tokens count is then known to the device, and the program learns it with the round's verdict (``Queued``).
Whether a token is proposed is decided from the distribution it is drawn from, before it is drawn, as ``protocol.py``
demands. The same operations run on the processor, where tests hold them to the loop that reads every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from adaptive.engines.protocol import Engine, Thresholds
from adaptive.noise import keys_of, winner
from adaptive.sampling import Uniform, draw_at, transform_logits
from adaptive.tokens import uploaded
from adaptive.types import SamplingParams

# Steps that are queued behind the one whose finding the program waits for. With none the device has nothing to do while
# the program reads; more are computed in vain wherever a proposal ends early.
ON = 1
# Tokens of a proposal for which a choice has room at least, and then by doubling.
LEAST_ROOM = 32
# Kinds of choices that are kept for an engine: sampling parameters that answers alternate between. Fewer are made, and
# recorded, anew more often; each holds ``room`` distributions, some 20 MB at 150,000 tokens.
KINDS = 4
# What a step has found: nothing, where the proposal had ended before; else the bin of its confidence and the advice,
# in one number.
NOT_ASKED, ADVICES = -1, 3
DROP, LAST, MORE = range(ADVICES)


class Kind(NamedTuple):
    """What the operations of a choice depend on, beside numbers that its tensors hold. ``vocab``: the draft's ids that
    may be chosen; ``room``: the most tokens; ``edges``: of the bins of confidence, 0 where none is asked for."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seeded: bool
    vocab: int
    room: int
    edges: int

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn by chance, and what from is kept."""
        return not self.greedy and not self.seeded


def kind_of(params: SamplingParams, vocab: int, length: int, thresholds: Thresholds | None) -> Kind:
    """The kind of choice for proposals of at most ``length`` tokens."""
    room = LEAST_ROOM
    while room < length:
        room *= 2
    edges = 0 if thresholds is None else len(thresholds.edges)
    if params.greedy:
        return Kind(0.0, 0, 1.0, 0.0, False, vocab, room, edges)
    return Kind(params.temperature, params.top_k, params.top_p, params.min_p, params.seeded, vocab, room, edges)


class Choice:
    """Chooses the tokens of a proposal, one a call, from logits (1, at least vocab), and says which of them count.

    All that it reads and writes lies in tensors of fixed places, and nothing waits for the device, so that a call can
    be recorded with the pass before it (``engines/hf/graphs.py``). ``token`` (1,) is the last one.
    """

    def __init__(self, kind: Kind, params: SamplingParams, device: torch.device) -> None:
        self.kind, self._params = kind, params
        self.token = torch.zeros(1, dtype=torch.long, device=device)
        self.tokens = torch.zeros(kind.room, dtype=torch.long, device=device)
        self.found = torch.zeros(kind.room, dtype=torch.long, device=device)
        # The step under way (from 0), the tokens that count, and whether the proposal goes on.
        self._state = torch.zeros(3, dtype=torch.long, device=device)
        self._at, self.count, self._open = (self._state[i : i + 1] for i in range(3))
        self._begin = uploaded([0, 0, 1], torch.long, device)
        self._reach = torch.ones(1, dtype=torch.float64, device=device)  # the probability that all so far are accepted
        self.probs = torch.zeros(kind.room if kind.draws else 0, kind.vocab, device=device)
        self._numbers = torch.zeros(kind.room if kind.draws else 0, 1, dtype=torch.float64, device=device)
        self._keys = torch.zeros(kind.room if kind.seeded else 0, 2, dtype=torch.long, device=device)
        self._thresholds: torch.Tensor | None = None
        self._known: tuple[bytes, ...] = ()

    def begin(
        self,
        thresholds: Thresholds | None,
        numbers: torch.Tensor | None = None,
        seed: int | None = None,
        places: range = range(0),
    ) -> None:
        """A proposal of tokens at ``places`` of the text begins. ``numbers`` (n, 1) are random ones below 1, one a
        token, where tokens are drawn by chance; under a ``seed`` the noise is that of the places."""
        self.reset()
        if numbers is not None:
            self._numbers[: len(numbers)].copy_(numbers)
        if seed is not None:
            keys = [keys_of(seed, place) for place in places]
            self._keys[: len(keys)].copy_(uploaded(keys, torch.long, self._keys.device))
        if thresholds is not None:
            self._take(thresholds)

    def reset(self) -> None:
        """Nothing is chosen yet."""
        self._state.copy_(self._begin)
        self._reach.fill_(1.0)
        self.found.fill_(NOT_ASKED)

    def _take(self, given: Thresholds) -> None:
        """Have the thresholds of this round; they are the same for several."""
        parts = given.edges, given.accepted, given.follow, given.drop_below, given.last_below
        known = tuple(part.tobytes() for part in parts)
        if known == self._known:
            return
        packed = uploaded([x for part in parts for x in part], torch.float64, self.token.device)
        if self._thresholds is None:
            self._thresholds = packed
            self._edges, self._accepted, self._follow, self._drop_below, self._last_below = packed.split(
                [len(part) for part in parts]
            )
        else:
            self._thresholds.copy_(packed)
        self._known = known

    def __call__(self, logits: torch.Tensor) -> None:
        """Choose the next token."""
        logits, asks = logits[:, : self.kind.vocab], self._thresholds is not None
        if self.kind.greedy:
            if asks:
                sure, token = logits.float().softmax(-1).max(-1)
                self._ask(sure)
            else:
                token = logits.argmax(-1)
        else:
            q = transform_logits(logits.float(), self._params).softmax(-1)
            if asks:
                self._ask(q.amax(-1))
            token = self._drawn(q)
        if not asks:
            self.count.add_(1)
        self.token.copy_(token)
        self.tokens.index_copy_(0, self._at, token)
        self._at.add_(1)

    def _drawn(self, q: torch.Tensor) -> torch.Tensor:
        """A token (1,) of q (1, vocab)."""
        if self.kind.seeded:
            return winner(q, self._keys.index_select(0, self._at))
        self.probs.index_copy_(0, self._at, q)
        return draw_at(q, self._numbers.index_select(0, self._at))

    def _ask(self, sure: torch.Tensor) -> None:
        """Whether a token is proposed here, and whether it is the last one, by the largest probability (1,): as
        ``control/stopping.py``."""
        at, going = self._at, self._open == 1
        place = torch.bucketize(sure.double(), self._edges, right=True)
        reach = self._reach * self._accepted.index_select(0, place)
        dropped = reach < self._drop_below.index_select(0, at.clamp(max=len(self._drop_below) - 1))
        last = reach * self._follow.index_select(0, place) <= self._last_below.index_select(
            0, at.clamp(max=len(self._last_below) - 1)
        )
        last |= at + 1 >= len(self._drop_below)
        # ``torch.where`` of a number has the program wait while that is copied to the device.
        advice = (~dropped).long() * (MORE - last.long())
        self.found.index_copy_(0, at, (place * ADVICES + advice).masked_fill(~going, NOT_ASKED))
        self.count.add_((going & ~dropped).long())
        self._open.copy_((going & (advice == MORE)).long())
        self._reach.copy_(torch.where(going, reach, self._reach))

    def outcome(self) -> tuple[torch.Tensor, ...]:
        """What the calls so far have left, by which two ways of making them are compared."""
        return tuple(t.clone() for t in (self.tokens, self.found, self._state, self._reach, self.probs))


_CHOICES: weakref.WeakKeyDictionary[Engine, dict[Kind, Choice]] = weakref.WeakKeyDictionary()


def choice_of(engine: Engine, kind: Kind, params: SamplingParams) -> Choice:
    """The choice of this kind over an engine's logits; the same one each time, so that recordings stay in use. One
    proposal at a time is made with it, and copied out of it before the next."""
    known = _CHOICES.setdefault(engine, {})
    choice = known.pop(kind, None) or Choice(kind, params, engine.device)
    while len(known) >= KINDS:  # the one that was not used for longest
        del known[next(iter(known))]
    known[kind] = choice
    return choice


class Queued:
    """A proposal that a device is still to compute: what ``choice`` finds is copied out after every step.

    ``drafted`` is how many of its tokens count, and waits for the device where that has not been copied yet; behind a
    verdict nothing is waited for. ``thresholds`` are told then what was asked, and of the random numbers (``uniform``)
    as many are taken.
    """

    def __init__(self, choice: Choice, thresholds: Thresholds | None, uniform: Uniform) -> None:
        self._choice, self._thresholds, self._uniform = choice, thresholds, uniform
        self.count: torch.Tensor | None = None  # () int64, on the device; None as long as steps are queued
        self._steps = 0
        self._drafted: int | None = None
        device = choice.token.device
        self._found = torch.empty(choice.kind.room, dtype=torch.long, pin_memory=device.type == "cuda")
        self._events = [_event(device)] if device.type == "cuda" else []

    def stepped(self) -> None:
        """A step has been queued."""
        at = self._steps
        self._steps += 1
        if self._thresholds is not None:
            self._found[at : at + 1].copy_(self._choice.found[at : at + 1], non_blocking=True)
        if self._events:
            self._events.append(_event(self._choice.token.device))

    def goes_on(self) -> bool:
        """Whether to queue another step: what the last step but ``ON`` has found, which is waited for."""
        at = self._steps - ON - 1
        if self._thresholds is None or at < 0:
            return True
        if self._events:
            self._events[1 + at].synchronize()
        return int(self._found[at]) % ADVICES == MORE and int(self._found[at]) != NOT_ASKED

    def close(self) -> int:
        """All steps are queued: how many tokens there are at most."""
        self.count = self._choice.count[0].clone()
        if self._thresholds is None:
            return self._finished([LAST] * self._steps)
        return self._steps if self.goes_on() else self._finished(self._found[: self._steps - ON].tolist())

    def _finished(self, found: Sequence[int]) -> int:
        """Take in what all steps found that asked."""
        asked = [one for one in found if one != NOT_ASKED]
        self._drafted = len(asked) - (bool(asked) and asked[-1] % ADVICES == DROP)
        if self._thresholds is not None:
            self._thresholds.told([one // ADVICES for one in asked])
        if self._choice.kind.draws:
            self._uniform.skip_column(self._drafted)
        return self._drafted

    @property
    def drafted(self) -> int:
        """See above."""
        if self._drafted is None:
            if self._events:
                self._events[-1].synchronize()
            self._finished(self._found[: self._steps].tolist())
        assert self._drafted is not None
        return self._drafted

    def split(self, draft_s: float, verify_s: float) -> tuple[float, float]:
        """What a round took by the program's clock, in seconds of drafting and of the rest as the device spent them.
        Behind a verdict."""
        if not self._events:
            return draft_s, verify_s
        drafting = min(self._events[0].elapsed_time(self._events[-1]) / 1000, draft_s + verify_s)
        return drafting, draft_s + verify_s - drafting


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
