"""Several answers at once: their proposals, of different lengths and drafters, are verified in one pass of the target.

In: the ``Decoding`` of each answer, which joins and leaves between two rounds. Out: what each has decoded, to be shown
by itself. One alone is decoded as if there were no batch, by the calls that do a whole round at once. Prompts are
computed in slices beside the others' rounds, so that nobody stands still while somebody's text is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from adaptive.decoding.loop import BURST_S, PART, Decoding, Turn, stretch
from adaptive.drafting.protocol import Wanted
from adaptive.engines.protocol import Engine, ExtendCall, Proposed
from adaptive.errors import AdaptiveError
from adaptive.types import FREE

# Tokens of a pass over several answers, as far as prompts fill it up, and of those at least so many are theirs. More
# keep the others waiting, fewer read the weights more often; beyond 128 our kernels make passes of their own.
PASS, LEAST = 128, 32
# Tokens from which a pass in which a prompt ends takes in no other prompt: its first token waits for the whole pass.
# More would be read of the others for less than a pass of their own takes, but only up to where arithmetic and not
# the weights is what a pass takes, which on processors are some tens of tokens.
FULL = 64
# Tokens of prompts up to which they are waited for before an answer that has just joined has its prompt read by the
# draft too: as many as are soon read. More keep it from drafting for longer, fewer put off who waits for a first token.
SOON = 1024

Failed = tuple[Decoding, Exception]


class Batch:
    """The answers under way on one target, in the order in which they came. Not for several threads at once."""

    def __init__(self, target: Engine, between: Callable[[], bool]) -> None:
        """``between`` as of a ``Decoding``, called before every burst of rounds of all."""
        self.under_way: list[Decoding] = []
        self.clock = time.perf_counter
        self._target = target
        self._between = between
        self._lone: Decoding | None = None  # whose estimates the policy goes on with
        self._read = 0  # tokens of prompts in shared passes so far
        self._joined: dict[Decoding, int] = {}  # how many those were when an answer joined

    def join(self, decoding: Decoding) -> None:
        """Decode an answer from now on that has begun."""
        self.under_way.append(decoding)
        self._joined[decoding] = self._read
        self._lone = decoding if len(self.under_way) == 1 else None

    def leave(self, decoding: Decoding) -> None:
        """Decode it no longer, whether it has come to its end or not; it is then to be ended."""
        self.under_way.remove(decoding)
        del self._joined[decoding]

    def step(self) -> list[Failed]:
        """A burst of rounds, at the end of which every answer is to be shown; whose could not go on, and why."""
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
        if self._lone is not decoding:  # the others have gone
            decoding.policy.begin(decoding.scope)
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
        seconds = own_clock() - began
        times = stretch(self.clock() - round_began, own_clock() - own_round_began)
        if rounds and rounds == len(turns) and not failed:
            going[0].policy.shared(rows, seconds)
        # An answer's share of the pass, but for what the prompts are taken to have taken.
        share = seconds * rows / max(1, sum(len(turn.call.tokens) for _, turn in turns)) / max(1, rounds)
        for (decoding, turn), logits in zip(turns, found, strict=True):
            try:
                if isinstance(logits, Exception):
                    raise logits
                decoding.judge(turn, logits, share, times)
            except Exception as error:
                failed.append((decoding, error))
        return failed

    def _turns(
        self, going: list[Decoding], speculate: bool, clock: Callable[[], float]
    ) -> tuple[list[tuple[Decoding, Turn]], list[Failed]]:
        """What each answer asks of the pass, and whose could not say it, and why. What they want of the draft is made
        together; each drafts for as long as its own part took by the ``clock``, and an equal share of that."""
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
        drafts = [said for _, said in turns if said.proposal is not None and said.proposal.drafter not in FREE]
        if drafts and not failed:
            longest = max(len(said.proposal.tokens) for said in drafts if said.proposal is not None)
            going[0].policy.drafted(len(drafts), longest, sum(said.draft_s for said in drafts))
        return turns, failed

    def _slices(self, rows: int) -> Iterator[tuple[Decoding, int]]:
        """Tokens of each prompt that has not been read, for a pass over so many ``rows`` without them: the shortest
        first, so that the first tokens of all come soonest. Who joins when as much has been read of others' prompts as
        one still lacks comes behind it, so that a long one is not put off for ever."""
        room, ends = max(LEAST, PASS - rows), False
        waiting = [decoding for decoding in self.under_way if decoding.unread]
        for decoding in sorted(waiting, key=lambda one: self._joined[one] + one.unread):
            if ends:
                room = min(room, FULL - rows)
            if room <= 0:
                return
            count = min(decoding.unread, room)
            yield decoding, count
            ends = ends or count == decoding.unread
            rows, room, self._read = rows + count, room - count, self._read + count

    def _pass(self, calls: list[ExtendCall]) -> list[torch.Tensor | Exception]:
        """The logits of each call. Where a pass over all fails, for one of them perhaps, each has its own."""
        held = [call.sequence.length for call in calls]
        try:
            return list(self._target.extend_together(calls))
        except Exception:
            for call, length in zip(calls, held, strict=True):
                call.sequence.rollback(length)
        found: list[torch.Tensor | Exception] = []
        for call, length in zip(calls, held, strict=True):
            try:
                if call.sequence.length != length:  # states that could not be taken back so far
                    raise AdaptiveError("a pass failed, and the text cannot be gone on with; ask again")
                found.append(call.sequence.extend(call.tokens, call.rows, call.parents))
            except Exception as error:
                found.append(error)
        return found


def _proposed(wanted: list[Wanted]) -> list[Proposed | Exception]:
    """What one draft proposes for each of several texts. Where that fails for all, for one of them perhaps, each is
    asked for by itself."""
    if not wanted:
        return []
    held = [one.sequence.length for one in wanted]
    try:
        return list(wanted[0].engine.propose_together([(one.sequence, one.call) for one in wanted]))
    except Exception:
        for one, length in zip(wanted, held, strict=True):
            one.sequence.rollback(length)
    found: list[Proposed | Exception] = []
    for one, length in zip(wanted, held, strict=True):
        try:
            if one.sequence.length != length:  # as above
                raise AdaptiveError("a draft failed, and its text cannot be gone on with; ask again")
            found.append(one.fused.propose(one.call))
        except Exception as error:
            found.append(error)
    return found
