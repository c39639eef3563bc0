"""Tries a draft in an external server: restarts it with the draft, measures it, tries another draft length if that
promises more, and restores the earlier state if the server got worse."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from adaptive.errors import AdaptiveError
from adaptive.printable import printable_line, without_login
from adaptive.upstream import publishing
from adaptive.upstream.kinds import Kind
from adaptive.upstream.lengths import advise, round_costs
from adaptive.upstream.measure import Measured, each_accepted, measure
from cli.publish_notes import Put

# Falls beyond which the draft is removed again. FELL: of the probability that a drafted token is accepted, or of the
# tokens a round; SLOWER: of the speed, as a share, where only that is known. Two measurements of one server differ by
# less, since both use the same prompts, decoded greedily.
FELL, SLOWER = 0.005, 0.03
# TRIES: most draft lengths tried. FASTER: how much faster, as a share, the next must promise to be, since a restart
# interrupts the server's users for seconds.
TRIES, FASTER = 3, 0.05


@dataclass(frozen=True)
class Tried:
    """The server at one draft length; ``worse`` says in words why it is worse than before, None if it is not."""

    length: int
    measured: Measured | None
    worse: str | None


@dataclass(frozen=True)
class Server:
    """The server, which the user's ``command`` restarts, and the ``file`` with its start command, if there is one.
    ``asked`` are the prompts of a measurement, whose answers have up to ``max_tokens`` tokens, and ``model`` the
    target's name, None for the first one that the server lists. ``is_head``: whether its draft is an EAGLE-3 head."""

    url: str
    key: str | None
    kind: Kind
    command: str
    file: publishing.StartFile | None
    wait_s: float
    asked: Sequence[Sequence[int]]
    max_tokens: int
    model: str | None = None
    is_head: bool = False

    def measure(self) -> Measured:
        """Measure its answers now. Raises AdaptiveError."""
        return measure(self.url, self.key, self.asked, self.max_tokens, self.model, self.wait_s)

    def use(self, draft: Path, length: int) -> None:
        """Restart it with ``draft``. Raises AdaptiveError."""
        if self.file is not None:
            wanted = publishing.options(self.kind, draft, length, self.is_head)
            self.file.write(publishing.edited(self.file.before, self.kind, wanted))
        publishing.restart(self.command, self.url, self.key, draft, length, self.wait_s)

    def give_back(self, earlier: Put | None) -> None:
        """Restart it in its state before the trial, with the draft published ``earlier``. Raises AdaptiveError."""
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
    when_restored: Callable[[], None] = lambda: None,
) -> Tried:
    """Put ``draft`` into the server at ``length``, try lengths that its own times then favour, and leave the fastest in
    use, which is returned. If all are worse than ``before``, the ``earlier`` draft is restored.

    ``tokens_a_round`` are those at lengths 0, 1, ... by replay; None tries ``length`` alone. Raises AdaptiveError if
    the server does not come back with the earlier draft. KeyboardInterrupt, and SystemExit by a signal to end
    (``cli/ending.py``), are raised after that draft is restored (and ``when_restored`` called), or after a line that
    says why it is not.
    """
    try:
        return _settle(server, before, draft, length, tokens_a_round, earlier)
    except (KeyboardInterrupt, SystemExit):
        if _undo(server, draft, earlier):
            when_restored()
        raise


def _undo(server: Server, draft: Path, earlier: Put | None) -> bool:
    """Restore the ``earlier`` state after an interruption. Returns False, and prints a line, if that fails."""
    _say("interrupted; the server's earlier state is being restored")
    try:
        server.give_back(earlier)
    except (AdaptiveError, KeyboardInterrupt) as error:
        why = str(error) or "interrupted again"
        file = f", and {server.file.path} is still edited" if server.file is not None and server.file.edited else ""
        place = without_login(server.url)
        _say(f"that failed ({why}); the server at {place} uses {draft}, unmeasured, or does not run{file}")
        return False
    return True


def _say(said: str) -> None:
    """Print a line, if there is still a terminal to read it."""
    with contextlib.suppress(OSError):
        typer.echo(printable_line(f"adaptive: {said}"), err=True)


def _settle(
    server: Server,
    before: Measured,
    draft: Path,
    length: int,
    tokens_a_round: Sequence[float] | None,
    earlier: Put | None,
) -> Tried:
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
        try:
            server.use(draft, best.length)
        except AdaptiveError as error:
            server.give_back(earlier)
            return Tried(best.length, None, str(error))
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
    """A draft length that promises more than those ``tried``, given the seconds of rounds at these; None if there is
    none. The cost of a drafted token follows from rounds with and without a draft, or of two lengths."""
    measured = [before, *(one.measured for one in tried if one.measured is not None)]
    costs = round_costs(measured)
    if costs is None or costs.assumed:
        return None
    advice = advise(tokens_a_round, costs)
    known = {one.length: _speed(one) for one in tried}
    faster = advice.tokens_per_second > (1 + FASTER) * max(known.values())
    return advice.length if faster and advice.length not in (0, *known) else None


def worse_than(before: Measured, after: Measured) -> str | None:
    """Why the server is worse than before, in words; None if it is not.

    Compares the probability that a drafted token is accepted if both are known, else tokens a round if both are known,
    else the speed.
    """
    if len(after.answers) < len(before.answers):
        return "it refuses prompts that it answered before"
    if after.drafted == 0:
        return "it drafts nothing"
    one, other = each_accepted(before), each_accepted(after)
    if one is not None and other is not None:
        return f"acceptance fell from {one:.3f} to {other:.3f} a token" if other < one - FELL else None
    if before.length and after.length:
        fell = after.length < before.length - FELL
        return f"tokens a round fell from {before.length:.2f} to {after.length:.2f}" if fell else None
    if after.tokens_per_second < (1 - SLOWER) * before.tokens_per_second:
        return f"{before.tokens_per_second:.1f} tokens/s became {after.tokens_per_second:.1f}"
    return None
