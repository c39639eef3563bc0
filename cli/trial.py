"""A draft on trial in another server: restarted with it, measured, at another draft length where that promises more,
and without it again where the server got worse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adaptive.errors import AdaptiveError
from adaptive.upstream import publishing
from adaptive.upstream.kinds import Kind
from adaptive.upstream.lengths import advise, round_costs
from adaptive.upstream.measure import Measured, each_accepted, measure

# A fall of the chance to be accepted, and of the speed where only that is known, that takes the draft out again. Two
# measurements of one server differ by less: they are of the same prompts, decoded greedily.
FELL, SLOWER = 0.005, 0.03
# Draft lengths that are tried at most, and how much faster the next must promise to be: a restart costs people seconds.
TRIES, FASTER = 3, 0.05


@dataclass(frozen=True)
class Put:
    """What a server uses: a draft, of an adapter, at a draft length."""

    adapter: str | None
    draft: str
    draft_length: int


@dataclass(frozen=True)
class Tried:
    """The server at one draft length; ``worse`` says in words why it is worse than before, None where it is not."""

    length: int
    measured: Measured | None
    worse: str | None


@dataclass(frozen=True)
class Server:
    """The server that is restarted, by the user's ``command``, and the ``file`` with its start command, if it has one.
    ``asked`` are the prompts it is measured by, with answers of ``max_tokens``."""

    url: str
    key: str | None
    kind: Kind
    command: str
    file: publishing.StartFile | None
    wait_s: float
    asked: Sequence[Sequence[int]]
    max_tokens: int

    def measure(self) -> Measured:
        """Its answers now. Raises AdaptiveError."""
        return measure(self.url, self.key, self.asked, self.max_tokens)

    def use(self, draft: Path, length: int) -> None:
        """Restart it with ``draft``. Raises AdaptiveError."""
        if self.file is not None:
            wanted = publishing.options(self.kind, draft, length)
            self.file.write(publishing.edited(self.file.before, self.kind, wanted))
        publishing.restart(self.command, self.url, self.key, draft, length, self.wait_s)

    def give_back(self, earlier: Put | None) -> None:
        """Restart it as it was, with what was published ``earlier``. Raises AdaptiveError."""
        if self.file is not None:
            self.file.write(self.file.before)
        draft, length = (None, 0) if earlier is None else (Path(earlier.draft), earlier.draft_length)
        publishing.restart(self.command, self.url, self.key, draft, length, self.wait_s)


def settle(
    server: Server,
    before: Measured,
    draft: Path,
    length: int,
    tokens_a_round: Sequence[float] | None,
    earlier: Put | None,
) -> Tried:
    """Put ``draft`` into the server at ``length``, or at the length that its own times then favour, and leave there
    what is fastest, which is returned; what was there ``earlier`` where that is worse than ``before``.

    ``tokens_a_round`` are those at lengths 0, 1, ... by replay; None tries ``length`` alone. Raises AdaptiveError where
    the server does not come back with what it had.
    """
    tried = [_try(server, before, draft, length)]
    while tokens_a_round is not None and tried[-1].measured is not None and len(tried) < TRIES:
        better = _better(before, tried, tokens_a_round)
        if better is None:
            break
        tried.append(_try(server, before, draft, better))
    good = [one for one in tried if one.worse is None]
    if not good:
        server.give_back(earlier)
        return tried[-1]
    best = max(good, key=_speed)
    if best is not tried[-1]:
        server.use(draft, best.length)
    return best


def _try(server: Server, before: Measured, draft: Path, length: int) -> Tried:
    try:
        server.use(draft, length)
        after = server.measure()
    except AdaptiveError as error:
        return Tried(length, None, str(error))
    return Tried(length, after, worse_than(before, after))


def _speed(tried: Tried) -> float:
    return 0.0 if tried.measured is None else tried.measured.tokens_per_second


def _better(before: Measured, tried: Sequence[Tried], tokens_a_round: Sequence[float]) -> int | None:
    """A draft length that promises more than those that were ``tried``, by what rounds took at these; None where none
    does. Rounds with and without a draft, or of two lengths, tell what a drafted token takes."""
    measured = [before, *(one.measured for one in tried if one.measured is not None)]
    costs = round_costs([answer for one in measured for answer in one.answers])
    if costs is None or costs.assumed:
        return None
    advice = advise(tokens_a_round, costs)
    known = {one.length: _speed(one) for one in tried}
    faster = advice.tokens_per_second > (1 + FASTER) * max(known.values())
    return advice.length if faster and advice.length not in (0, *known) else None


def worse_than(before: Measured, after: Measured) -> str | None:
    """Why the server is worse than before, in words; None where it is not.

    By the chance that a drafted token is accepted, where both say it; by tokens a round, where a server only says
    that; by its speed, where before nothing was drafted.
    """
    one, other = each_accepted(before), each_accepted(after)
    if one is not None and other is not None:
        return f"acceptance fell from {one:.3f} to {other:.3f} a token" if other < one - FELL else None
    if one is not None and after.drafted == 0:
        return "it drafts nothing any more"
    if before.length and after.length:
        fell = after.length < before.length - FELL
        return f"tokens a round fell from {before.length:.2f} to {after.length:.2f}" if fell else None
    if after.tokens_per_second < (1 - SLOWER) * before.tokens_per_second:
        return f"{before.tokens_per_second:.1f} tokens/s became {after.tokens_per_second:.1f}"
    return None
