"""Computes the figures of speculative decoding from its rounds.

``generate --json``, ``history`` and the dashboard all use these functions, so that their figures agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from adaptive.printable import counted
from adaptive.types import Round

# Share of a round's verification that its drafting takes at least if the draft is asked. A plain round reads the clock
# twice, a thousandth of a pass of a millisecond. Too low: a machine that stops at that moment hides a plain round. Too
# high: rounds whose draft was asked and proposed nothing count as plain decoding, which then looks too slow.
ASKED = 0.01


def asked(outcome: Round) -> bool:
    """Whether the draft was asked in a round: it proposed tokens, or took time and proposed none (its first token was
    not worth verifying, or it came late)."""
    return outcome.drafted > 0 or outcome.draft_s > ASKED * outcome.verify_s


@dataclass(frozen=True, order=True)
class RoundCount:
    """The number of rounds that drafted and accepted exactly this many tokens; all figures derive from these counts."""

    drafted: int
    accepted: int
    rounds: int


@dataclass(frozen=True)
class SpeculativeStats:
    """The ``speculative_decoding`` object of the JSON outputs; ``dataclasses.asdict`` gives its keys.

    ``num_spec_steps`` counts rounds that drafted at least one token. ``mean_acceptance_length`` is
    1 + accepted / num_spec_steps (1.0 without such rounds), ``draft_acceptance_rate`` accepted /
    drafted tokens (0.0 without). ``acceptance_histogram[i]`` is the number of those rounds that
    accepted exactly i tokens, up to the longest draft.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance_histogram: tuple[int, ...]


@dataclass(frozen=True)
class PositionAcceptance:
    """Acceptance of the draft's ``position``-th token (from 1), given that all before it were accepted.

    ``observed`` counts rounds in which it was drafted and all tokens before it were accepted: after the
    first rejection a token is unobserved, not rejected.
    """

    position: int
    observed: int
    accepted: int

    @property
    def acceptance(self) -> float | None:
        """Conditional acceptance, 0 to 1; None if the position was never observed."""
        return self.accepted / self.observed if self.observed else None


@dataclass(frozen=True)
class JudgedTokens:
    """Drafted tokens that the target judged, and how many of them it accepted.

    A round judges its accepted tokens and the first rejected one; the tokens drafted behind that are unobserved.
    """

    accepted: int
    judged: int


def judged_tokens(counts: Iterable[RoundCount]) -> JudgedTokens:
    """The judged tokens of all these rounds; 0 of 0 if nothing was drafted."""
    drafting = [c for c in counts if c.drafted]
    return JudgedTokens(
        accepted=sum(c.accepted * c.rounds for c in drafting),
        judged=sum(min(c.drafted, c.accepted + 1) * c.rounds for c in drafting),
    )


def speculative_stats(rounds: Iterable[Round]) -> SpeculativeStats:
    """The figures of ``rounds``."""
    return stats_of_counts(count_rounds(rounds))


@dataclass(frozen=True)
class Drafted:
    """The work of one drafter: rounds in which it drafted, tokens that it drafted, and how many were accepted."""

    rounds: int
    drafted: int
    accepted: int


def by_drafter(rounds: Iterable[Round]) -> dict[str, Drafted]:
    """The work of each drafter, in the order in which they first drafted."""
    found: dict[str, Drafted] = {}
    for r in rounds:
        for part in r.parts if r.drafted else ():
            one = found.get(part.drafter, Drafted(0, 0, 0))
            found[part.drafter] = Drafted(one.rounds + 1, one.drafted + part.drafted, one.accepted + part.accepted)
    return found


def learned_rounds(rounds: Iterable[Round]) -> list[Round]:
    """``rounds`` reduced to the trained drafter's tokens, with plain rounds (``Round.learned``): the rounds by which an
    adapter may be judged."""
    return [own for r in rounds if (own := r.learned) is not None]


def count_rounds(rounds: Iterable[Round]) -> tuple[RoundCount, ...]:
    """``rounds`` counted by their numbers of drafted and accepted tokens."""
    counts = Counter((r.drafted, r.accepted) for r in rounds)
    return tuple(sorted(RoundCount(drafted, accepted, n) for (drafted, accepted), n in counts.items()))


def stats_of_counts(counts: Iterable[RoundCount]) -> SpeculativeStats:
    """The figures of counted rounds (the same pair of drafted and accepted may occur several times)."""
    speculative = [c for c in counts if c.drafted > 0]
    steps = sum(c.rounds for c in speculative)
    drafted = sum(c.drafted * c.rounds for c in speculative)
    accepted = sum(c.accepted * c.rounds for c in speculative)
    histogram = [0] * (max((c.drafted for c in speculative), default=-1) + 1)
    for c in speculative:
        histogram[c.accepted] += c.rounds
    return SpeculativeStats(
        mean_acceptance_length=1 + accepted / steps if steps else 1.0,
        draft_acceptance_rate=accepted / drafted if drafted else 0.0,
        num_spec_steps=steps,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
        acceptance_histogram=tuple(histogram),
    )


def tokens_per_round(counts: Iterable[RoundCount]) -> float | None:
    """Tokens that a pass of the target yields, over **all** rounds, plain ones included: 1 + accepted / rounds.

    The main figure everywhere (tokens a round); None without a round. ``mean_acceptance_length`` leaves out
    rounds that drafted nothing, so it shows how good a draft is and not how much it gained.
    """
    rounds = accepted = 0
    for c in counts:
        rounds += c.rounds
        accepted += c.accepted * c.rounds
    return 1 + accepted / rounds if rounds else None


def in_words(counts: Iterable[RoundCount]) -> str:
    """Tokens a round, and acceptance with its number of tokens: the sentence used everywhere for answers."""
    known = tuple(counts)
    stats, tokens = stats_of_counts(known), tokens_per_round(known)
    if tokens is None:
        return "no rounds"
    if not stats.num_draft_tokens:
        return f"{tokens:.2f} tokens a round, nothing drafted"
    return (
        f"{tokens:.2f} tokens a round, {stats.draft_acceptance_rate:.0%} of "
        f"{counted(stats.num_draft_tokens, 'drafted token')} accepted"
    )


def figures_object(rounds: Iterable[Round]) -> dict[str, Any]:
    """The figures of an answer's rounds in JSON: of all of them, of those that drafted, of each drafter."""
    known = tuple(rounds)
    counts = count_rounds(known)
    return {
        "rounds": len(known),
        "tokens_per_round": tokens_per_round(counts),
        "speculative_decoding": asdict(stats_of_counts(counts)),
        "drafters": {name: asdict(one) for name, one in by_drafter(known).items()},
    }


def acceptance_by_position(counts: Iterable[RoundCount]) -> tuple[PositionAcceptance, ...]:
    """Conditional acceptance of every draft position, up to the longest draft."""
    rounds = [c for c in counts if c.drafted > 0]
    longest = max((c.drafted for c in rounds), default=0)
    return tuple(
        PositionAcceptance(
            position=position,
            observed=sum(c.rounds for c in rounds if c.drafted >= position and c.accepted >= position - 1),
            accepted=sum(c.rounds for c in rounds if c.accepted >= position),
        )
        for position in range(1, longest + 1)
    )


def rounds_by_length(counts: Iterable[RoundCount]) -> tuple[int, ...]:
    """The number of rounds that drafted exactly 0, 1, 2, … tokens, up to the longest draft."""
    found: Counter[int] = Counter()
    for c in counts:
        found[c.drafted] += c.rounds
    return tuple(found[k] for k in range(max(found, default=-1) + 1))
