"""The results of the ways of decoding in ``adaptive demo``: counted, as a table, and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from adaptive.printable import per_second

if TYPE_CHECKING:
    from rich.table import Table

    from adaptive.decoding.loop import Decoding
    from adaptive.types import Round

# Length of the token n-grams that count as repeated if they occurred earlier in the same answer.
GRAM = 8


@dataclass
class Tally:
    """One way of decoding, and its figures over all its answers so far.

    ``drafter`` is the pair's draft or the grown head; ``adapter`` the training it uses, None for none.
    ``draft_length`` None leaves the length to the controller.
    """

    label: str
    draft_length: int | None
    drafter: Literal["draft", "head"] = "draft"
    adapter: str | None = None
    tokens: int = 0
    seconds: float = 0.0
    repeated: int = 0
    grams: int = 0
    rounds: list[Round] = field(default_factory=list)

    def add(self, done: Decoding) -> None:
        """Count one finished answer, without its first token, which comes from the prefill."""
        self.tokens += max(0, len(done.output) - 1)
        self.seconds += done.timings.predicted_s
        self.rounds += done.rounds
        grams = [tuple(done.output[i : i + GRAM]) for i in range(len(done.output) - GRAM + 1)]
        self.grams += len(grams)
        self.repeated += len(grams) - len(set(grams))

    @property
    def speculative(self) -> bool:
        """Whether there are figures of drafting."""
        return self.draft_length != 0 and bool(self.rounds)

    @property
    def per_second(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens that one pass of the target yields, over all rounds."""
        from adaptive.records.stats import count_rounds, tokens_per_round

        return tokens_per_round(count_rounds(self.rounds)) or 1.0

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were accepted."""
        from adaptive.records.stats import speculative_stats

        return speculative_stats(self.rounds).draft_acceptance_rate

    def over(self, plain: Tally) -> float | None:
        """Speed relative to ``plain``; None if either was not timed yet."""
        return self.per_second / plain.per_second if plain.per_second and self.seconds else None

    def as_object(self, plain: Tally) -> dict[str, Any]:
        """The figures as JSON values, ``against_plain`` relative to ``plain``; null if nothing was drafted or timed.
        ``draft_length`` is null if the controller chose it, ``drafter`` if nothing drafts."""
        return {
            "decoding": self.label if self.draft_length is not None else f"{self.label}, length auto",
            "drafter": None if self.draft_length == 0 else self.drafter,
            "draft_length": self.draft_length,
            "adapter": self.adapter,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.per_second if self.seconds else None,
            "against_plain": self.over(plain),
            "acceptance": self.acceptance if self.speculative else None,
            "tokens_per_round": self.tokens_per_round if self.speculative else None,
            "repeated_8_grams": self.repeated / self.grams if self.grams else None,
        }


def figures_table(tallies: list[Tally], title: str) -> Table:
    """One row for every way of decoding; the first is plain. A way with the controller follows the same way with a
    fixed length."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("decoding", min_width=14)
    # The line breaks leave the first column room for its longest label at 80 columns.
    for name in ("tokens/s", "against\nplain", "drafted\naccepted", "tokens\na round"):
        table.add_column(name, justify="right", no_wrap=True)
    for tally in tallies:
        faster = tally.over(tallies[0])
        table.add_row(
            tally.label if tally.draft_length is not None else "  length auto",
            per_second(tally.per_second) if tally.seconds else "…",
            f"{faster:.2f}x" if faster else "",
            f"{tally.acceptance:.0%}" if tally.speculative else "",
            f"{tally.tokens_per_round:.2f}" if tally.speculative else "",
        )
    return table
