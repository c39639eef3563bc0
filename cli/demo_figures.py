"""What the ways of decoding of ``adaptive demo`` came to: counted, as a table, and for machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table

    from adaptive.decoding.loop import Decoding
    from adaptive.types import Round

# Tokens in a row that count as repeated where the same answer had them before.
GRAM = 8


@dataclass
class Tally:
    """One way of decoding, and what it came to over all its answers so far.

    ``drafter`` is the pair's draft or the grown head, and ``adapter`` which training of it, None as it came.
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
        """Count one finished answer. Its first token belongs to the prompt's pass."""
        self.tokens += max(0, len(done.output) - 1)
        self.seconds += done.timings.predicted_s
        self.rounds += done.rounds
        grams = [tuple(done.output[i : i + GRAM]) for i in range(len(done.output) - GRAM + 1)]
        self.grams += len(grams)
        self.repeated += len(grams) - len(set(grams))

    @property
    def speculative(self) -> bool:
        """Whether there is something to say of drafts."""
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
        """Share of drafted tokens that stood."""
        from adaptive.records.stats import speculative_stats

        return speculative_stats(self.rounds).draft_acceptance_rate

    def over(self, plain: Tally) -> float | None:
        """How many times as fast as ``plain``; None where either was not timed yet."""
        return self.per_second / plain.per_second if plain.per_second and self.seconds else None

    def as_object(self, plain: Tally) -> dict[str, Any]:
        """Its figures for machines, ``against_plain`` those of ``plain``; null where nothing was drafted or timed.
        ``draft_length`` is null where the controller chose it, ``drafter`` where nothing drafts."""
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
    """One row for every way of decoding, the first of which is plain. A way under the controller stands below the same
    one at a fixed length."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("decoding", min_width=14)
    # The breaks leave the first column room for its longest label at 80 columns.
    for name in ("tokens/s", "against\nplain", "drafted\naccepted", "tokens\na round"):
        table.add_column(name, justify="right", no_wrap=True)
    for tally in tallies:
        faster = tally.over(tallies[0])
        table.add_row(
            tally.label if tally.draft_length is not None else "  length auto",
            f"{tally.per_second:.0f}" if tally.seconds else "…",
            f"{faster:.2f}x" if faster else "",
            f"{tally.acceptance:.0%}" if tally.speculative else "",
            f"{tally.tokens_per_round:.2f}" if tally.speculative else "",
        )
    return table
