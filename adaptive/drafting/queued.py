"""Proposals on a device that works through a queue, such as CUDA: the device chooses the tokens and ends the proposal.

A program that reads each token's confidence before it asks for the next one leaves the device idle in between. So the
drafter (``model.py``) queues step after step. Each step chooses its token, and decides by the thresholds of the round
whether the proposal continues after it (``Choice``). Its result is copied to the host and read one step late, when the
next step is queued already: the device never waits for the program, and computes at most ``ON`` steps more than a
program would that reads each step before the next.

So the device determines how many tokens count, and the program learns that with the verdict of the round (``Queued``).
Whether a token is proposed is decided from the distribution it is drawn from, before it is drawn, as ``protocol.py``
requires. The same operations run on the CPU, where tests compare them with the loop that reads every step.
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

# Steps that are queued after the one whose result the program waits for. 0: the device is idle while the program reads.
# Higher: more steps are computed in vain whenever a proposal ends early.
ON = 1
# Least room of a choice, in tokens; more in powers of 2.
LEAST_ROOM = 32
# Kinds of choices kept for an engine, for answers with alternating sampling parameters. Too low: choices are made and
# recorded again more often. Too high: memory, since each holds ``room`` distributions, some 20 MB at 150,000 tokens.
KINDS = 6
# The result of a step: NOT_ASKED if the proposal had ended before it, else the bin of its confidence times ADVICES plus
# the advice.
NOT_ASKED, ADVICES = -1, 3
DROP, LAST, MORE = range(ADVICES)


class Kind(NamedTuple):
    """Everything that the operations of a choice depend on, except numbers in its tensors. ``vocab``: ids of the draft
    that may be chosen; ``room``: most tokens; ``edges``: between the bins of confidence, 0 without thresholds."""

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
        """Whether the likeliest token is chosen."""
        return self.temperature == 0

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn by chance; their distributions are then kept."""
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
    """Chooses the tokens of a proposal, one per call, from logits (1, at least vocab), and decides which of them count.

    It reads and writes only tensors at fixed addresses and never waits for the device, so a call can be recorded with
    the pass before it (``engines/hf/graphs.py``). ``token`` (1,) is the last chosen one.
    """

    def __init__(self, kind: Kind, params: SamplingParams, device: torch.device) -> None:
        self.kind, self._params = kind, params
        self.token = torch.zeros(1, dtype=torch.long, device=device)
        self.tokens = torch.zeros(kind.room, dtype=torch.long, device=device)
        self.found = torch.zeros(kind.room, dtype=torch.long, device=device)
        # The current step (from 0), the number of tokens that count, and whether the proposal continues.
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
        """Start a proposal of tokens at ``places`` of the text. ``numbers`` (n, 1) are random numbers below 1, one per
        token, if tokens are drawn by chance. With a ``seed``, the places determine the noise."""
        self.reset()
        if numbers is not None:
            self._numbers[: len(numbers)].copy_(numbers)
        if seed is not None:
            keys = [keys_of(seed, place) for place in places]
            self._keys[: len(keys)].copy_(uploaded(keys, torch.long, self._keys.device))
        if thresholds is not None:
            self._take(thresholds)

    def reset(self) -> None:
        """Forget the chosen tokens."""
        self._state.copy_(self._begin)
        self._reach.fill_(1.0)
        self.found.fill_(NOT_ASKED)

    def _take(self, given: Thresholds) -> None:
        """Copy the thresholds of this round to the device, unless they are those of the last one."""
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
        """Decide whether a token is proposed here and whether it is the last one, by the largest probability (1,), as
        ``control/stopping.py`` does."""
        at, going = self._at, self._open == 1
        place = torch.bucketize(sure.double(), self._edges, right=True)
        reach = self._reach * self._accepted.index_select(0, place)
        dropped = reach < self._drop_below.index_select(0, at.clamp(max=len(self._drop_below) - 1))
        last = reach * self._follow.index_select(0, place) <= self._last_below.index_select(
            0, at.clamp(max=len(self._last_below) - 1)
        )
        last |= at + 1 >= len(self._drop_below)
        # ``torch.where`` with a Python number would make the program wait while that is copied to the device.
        advice = (~dropped).long() * (MORE - last.long())
        self.found.index_copy_(0, at, (place * ADVICES + advice).masked_fill(~going, NOT_ASKED))
        self.count.add_((going & ~dropped).long())
        self._open.copy_((going & (advice == MORE)).long())
        self._reach.copy_(torch.where(going, reach, self._reach))

    def outcome(self) -> tuple[torch.Tensor, ...]:
        """Copies of the results of the calls so far, to compare two ways of making them."""
        return tuple(t.clone() for t in (self.tokens, self.found, self._state, self._reach, self.probs))


_CHOICES: weakref.WeakKeyDictionary[Engine, dict[Kind, Choice]] = weakref.WeakKeyDictionary()


def choice_of(engine: Engine, kind: Kind, params: SamplingParams) -> Choice:
    """The choice of this kind for an engine's logits: the same object each time, so that recordings stay valid. It
    makes one proposal at a time, whose results are copied before the next one."""
    known = _CHOICES.setdefault(engine, {})
    choice = known.pop(kind, None) or Choice(kind, params, engine.device)
    while len(known) >= KINDS:  # drop the least recently used one
        del known[next(iter(known))]
    known[kind] = choice
    return choice


class Queued:
    """A proposal that the device has yet to compute. The result of each step of ``choice`` is copied to the host.

    ``drafted`` is the number of tokens that count. It waits for the device if that was not copied yet; after a verdict
    it never waits. It then reports the bins to ``thresholds`` and consumes as many random numbers (``uniform``).
    """

    def __init__(self, choice: Choice, thresholds: Thresholds | None, uniform: Uniform) -> None:
        self._choice, self._thresholds, self._uniform = choice, thresholds, uniform
        self.count: torch.Tensor | None = None  # () int64, on the device; None while steps are being queued
        self._steps = 0
        self._drafted: int | None = None
        device = choice.token.device
        self._found = torch.empty(choice.kind.room, dtype=torch.long, pin_memory=device.type == "cuda")
        self._events = [_event(device)] if device.type == "cuda" else []

    def stepped(self) -> None:
        """Note that a step was queued."""
        at = self._steps
        self._steps += 1
        if self._thresholds is not None:
            self._found[at : at + 1].copy_(self._choice.found[at : at + 1], non_blocking=True)
        if self._events:
            self._events.append(_event(self._choice.token.device))

    def goes_on(self) -> bool:
        """Whether to queue another step, by the result of the step ``ON`` before the last one. Waits for it."""
        at = self._steps - ON - 1
        if self._thresholds is None or at < 0:
            return True
        if self._events:
            self._events[1 + at].synchronize()
        return int(self._found[at]) % ADVICES == MORE and int(self._found[at]) != NOT_ASKED

    def close(self) -> int:
        """Note that all steps are queued. Returns the most tokens that may count."""
        self.count = self._choice.count[0].clone()
        if self._thresholds is None:
            return self._finished([LAST] * self._steps)
        return self._steps if self.goes_on() else self._finished(self._found[: self._steps - ON].tolist())

    def _finished(self, found: Sequence[int]) -> int:
        """Evaluate the results of all steps."""
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
        """Divide a round's seconds by the program's clock into seconds of drafting and of the rest, as the device spent
        them. Call it after the verdict."""
        if not self._events:
            return draft_s, verify_s
        drafting = min(self._events[0].elapsed_time(self._events[-1]) / 1000, draft_s + verify_s)
        return drafting, draft_s + verify_s - drafting


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
