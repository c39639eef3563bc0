"""Decodes several answers at once: one pass of the target verifies their proposals, of different lengths and drafters.

In: the ``Decoding`` of each answer, which joins and leaves between two rounds. Out: the tokens that each of them has
decoded; the caller shows them. A single answer is decoded as without a batch, by the calls that compute a whole round
at once. Prompts are computed in slices beside the rounds of the other answers, which therefore never stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

import torch

from adaptive.decoding.loop import BURST_S, PART, Decoding, Turn, clock_ratio
from adaptive.drafting.protocol import Wanted
from adaptive.engines.load import Forward, forward_of
from adaptive.engines.protocol import Engine, ExtendCall, Proposed, Sequence
from adaptive.errors import AdaptiveError

# PASS: tokens up to which prompts fill a pass over several answers. LEAST: tokens of prompts that a pass takes at
# least. Too high: rounds of the other answers take longer. Too low: the weights are read more often. Above 128 tokens
# our kernels split a pass.
PASS, LEAST = 128, 32
# A pass in which a prompt ends takes further prompts only up to this many tokens in all, because the first token of the
# finished prompt waits for the whole pass. Below this size, adding a prompt's tokens costs less than a pass of their
# own, but only while reading the weights dominates: up to some tens of tokens on processors. Too high: first tokens
# come late. Too low: the weights are read more often.
FULL = 64
# Multiple of these three numbers for a target whose layers are read from disk: a pass takes as long as the reading, for
# up to some hundred tokens.
STREAMED = 4
# While at most this many tokens of prompts are unread, the draft does not read the prompts of other answers that have
# just joined. Too high: these answers decode without the draft for longer. Too low: the draft's passes delay the first
# tokens of the answers whose prompts are unread.
SOON = 1024

Failed = tuple[Decoding, Exception]
T = TypeVar("T")


class Batch:
    """The answers in progress on one target, in the order in which they joined. Not thread-safe."""

    def __init__(self, target: Engine, between: Callable[[], bool]) -> None:
        """``between``: as in ``Decoding``, called once before every burst of rounds."""
        self.under_way: list[Decoding] = []
        self.clock = time.perf_counter
        self._target = target
        self._times = STREAMED if forward_of(target) is Forward.STREAMED else 1
        self._between = between
        self._lone: Decoding | None = None  # the answer for which the policy has begun, while it is alone
        self._read = 0  # tokens of prompts in shared passes so far
        self._joined: dict[Decoding, int] = {}  # ``_read`` when each answer joined

    def join(self, decoding: Decoding) -> None:
        """Add an answer that has begun."""
        self.under_way.append(decoding)
        self._joined[decoding] = self._read
        self._lone = decoding if len(self.under_way) == 1 else None

    def could_not_join(self) -> None:
        """Note that an answer has failed to begin. The policy may have begun for it, so it begins anew for a lone
        one."""
        self._lone = None

    def leave(self, decoding: Decoding) -> None:
        """Remove an answer, finished or not. The caller then ends it."""
        self.under_way.remove(decoding)
        del self._joined[decoding]

    def step(self) -> list[Failed]:
        """Run a burst of rounds, to be followed by ``show`` of every answer. Returns the failed answers and why."""
        speculate = self._between()
        if len(self.under_way) == 1:
            return self._alone(self.under_way[0], speculate)
        self._lone = None
        until = self.clock() + BURST_S
        while True:
            failed = self._round(speculate)
            if failed or self.clock() >= until or any(decoding.ended for decoding in self.under_way):
                return failed

    def _alone(self, decoding: Decoding, speculate: bool) -> list[Failed]:
        if self._lone is not decoding:  # the other answers have left
            decoding.policy.begin(decoding.scope, len(decoding.output))
            self._lone = decoding
        try:
            decoding.alone(speculate, PART)
        except Exception as error:
            return [(decoding, error)]
        return []

    @torch.inference_mode()
    def _round(self, speculate: bool) -> list[Failed]:
        """A round of every answer whose prompt has been read, and slices of the other prompts, in one pass."""
        going = [decoding for decoding in self.under_way if not decoding.unread]
        own_clock = self.under_way[0].policy.clock
        round_began, own_round_began = self.clock(), own_clock()
        turns, failed = self._turns(going, speculate, own_clock)
        rows, rounds = sum(len(turn.call.tokens) for _, turn in turns), len(turns)
        turns += [(d, d.prompt_turn(count)) for d, count in self._slices(rows)]
        began = own_clock()
        found = self._pass([turn.call for _, turn in turns])
        _finish(found)
        seconds = own_clock() - began
        ratio = clock_ratio(self.clock() - round_began, own_clock() - own_round_began)
        if rounds and rounds == len(turns) and not failed:
            going[0].policy.shared(rows, seconds)
        # An answer's share of the pass. Time is attributed to prompts in proportion to their tokens, and left out.
        share = seconds * rows / max(1, sum(len(turn.call.tokens) for _, turn in turns)) / max(1, rounds)
        for (decoding, turn), logits in zip(turns, found, strict=True):
            try:
                if isinstance(logits, Exception):
                    raise logits
                decoding.judge(turn, logits, share, ratio, len(turns) - 1)
            except Exception as error:
                failed.append((decoding, error))
        return failed

    def _turns(
        self, going: list[Decoding], speculate: bool, clock: Callable[[], float]
    ) -> tuple[list[tuple[Decoding, Turn]], list[Failed]]:
        """The turn of each answer, and the answers that failed to make one, with their errors. Proposals of the draft
        are computed together. An answer's drafting seconds, by ``clock``, are its own part and an equal share of
        that."""
        turns: list[tuple[Decoding, Turn]] = []
        failed: list[Failed] = []
        seconds = dict.fromkeys(going, 0.0)
        hurried = 0 < sum(decoding.unread for decoding in self.under_way) <= SOON
        waiting: list[tuple[Decoding, Generator[Wanted, Proposed, Turn], Any]] = [
            (decoding, decoding.turn(len(going), speculate, hurried), None) for decoding in going
        ]
        while waiting:
            asked: list[tuple[Decoding, Generator[Wanted, Proposed, Turn], Wanted]] = []
            for decoding, turn, given in waiting:
                began = clock()
                try:
                    wanted = turn.throw(given) if isinstance(given, Exception) else turn.send(given)
                    asked.append((decoding, turn, wanted))
                except StopIteration as end:
                    turns.append((decoding, end.value))
                except Exception as error:
                    failed.append((decoding, error))
                seconds[decoding] += clock() - began
            began = clock()
            found = _proposed([wanted for *_, wanted in asked])
            share = (clock() - began) / max(1, len(asked))
            for decoding, *_ in asked:
                seconds[decoding] += share
            waiting = [(decoding, turn, given) for (decoding, turn, _), given in zip(asked, found, strict=True)]
        turns.sort(key=lambda one: going.index(one[0]))
        for decoding, said in turns:
            said.draft_s = seconds[decoding]
        drafts = [said for _, said in turns if said.steps]
        if drafts and not failed:
            tokens, drafting_s = sum(said.steps for said in drafts), sum(said.draft_s for said in drafts)
            going[0].policy.drafted(len(drafts), tokens, drafting_s)
        return turns, failed

    def _slices(self, rows: int) -> Iterator[tuple[Decoding, int]]:
        """The unread prompts to continue in a pass that has ``rows`` tokens without them, with the tokens to take of
        each. The shortest prompt comes first, which gives the earliest first tokens on average. The tokens read before
        an answer joined are added to its length, so that a long prompt is not postponed for ever."""
        room, ends = max(LEAST * self._times, PASS * self._times - rows), False
        waiting = [decoding for decoding in self.under_way if decoding.unread]
        for decoding in sorted(waiting, key=lambda one: self._joined[one] + one.unread):
            if ends:
                room = min(room, FULL * self._times - rows)
            if room <= 0:
                return
            count = min(decoding.unread, room)
            yield decoding, count
            ends = ends or count == decoding.unread
            rows, room, self._read = rows + count, room - count, self._read + count

    def _pass(self, calls: list[ExtendCall]) -> list[torch.Tensor | Exception]:
        """The logits of each call."""

        def alone(number: int) -> torch.Tensor:
            call = calls[number]
            # Copied, because a recorded pass of the next call may overwrite them.
            return call.sequence.extend(call.tokens, call.rows, call.parents).clone()

        return _jointly([call.sequence for call in calls], lambda: self._target.extend_together(calls), alone, "pass")


def _finish(found: list[torch.Tensor | Exception]) -> None:
    """Wait until a CUDA device has computed these logits, which are needed next anyway, so that their time is known."""
    if (logits := next((one for one in found if isinstance(one, torch.Tensor)), None)) is not None and logits.is_cuda:
        torch.cuda.current_stream(logits.device).synchronize()


def _proposed(wanted: list[Wanted]) -> list[Proposed | Exception]:
    """The draft's proposal for each of several texts."""
    if not wanted:
        return []
    pairs = [(one.sequence, one.call) for one in wanted]
    return _jointly(
        [one.sequence for one in wanted],
        lambda: wanted[0].engine.propose_together(pairs),
        lambda number: wanted[number].fused.propose(wanted[number].call),
        "draft",
    )


def _jointly(
    texts: list[Sequence], joint: Callable[[], Iterable[T]], alone: Callable[[int], T], what: str
) -> list[T | Exception]:
    """The results of a ``joint`` call for several texts. If it fails, perhaps because of one text, each text gets a
    call of its own (``alone``, by its number). ``what`` names the call in messages."""
    held = [text.length for text in texts]
    try:
        return list(joint())
    except Exception:
        for text, length in zip(texts, held, strict=True):
            text.rollback(length)
    found: list[T | Exception] = []
    for number, (text, length) in enumerate(zip(texts, held, strict=True)):
        try:
            if text.length != length:  # recurrent states could not be rolled back so far
                raise AdaptiveError(f"a {what} failed, and the text cannot be gone on with; ask again")
            found.append(alone(number))
        except Exception as error:
            found.append(error)
    return found
