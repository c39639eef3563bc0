"""``adaptive demo``: the whole idea in a few minutes, on the bundled pair and prompts it has not seen."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from cli.options import as_typed, shared_options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from adaptive.assistant import Assistant
    from adaptive.control.policy import LengthPolicy
    from adaptive.decoding.loop import Decoding
    from adaptive.opened import OpenedPair
    from adaptive.settings import Settings
    from adaptive.types import Round
    from cli.prompts import PromptLine
    from trainers.run import DistillOutcome

# The kind of text that the bundled draft has never seen (the target has); see checkpoints/bundled/README.md.
KIND = "tools"
# Prompts that are measured, and other prompts whose answers are learned from. Fewer of the first make
# the figures noisy, more of the second take longer than a tour should.
JUDGED, LEARNED = 40, 280
TOKENS = 120
DRAFT_LENGTH = 4
TEMPERATURE = 0.7


@dataclass
class Tally:
    """One way of decoding, and what it came to over all its answers so far.

    ``draft_length`` None leaves the length to the controller.
    """

    label: str
    draft_length: int | None
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
        grams = [tuple(done.output[i : i + 8]) for i in range(len(done.output) - 7)]
        self.grams += len(grams)
        self.repeated += len(grams) - len(set(grams))

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

    def as_object(self, plain: Tally) -> dict[str, Any]:
        """Its figures for machines, ``against_plain`` those of ``plain``; null where nothing was drafted or timed.
        ``draft_length`` is null where the controller chose it."""
        speculative = self.draft_length != 0 and bool(self.rounds)
        return {
            "decoding": self.label.strip(),
            "draft_length": self.draft_length,
            "adapter": self.adapter,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.per_second if self.seconds else None,
            "against_plain": self.per_second / plain.per_second if plain.per_second else None,
            "acceptance": self.acceptance if speculative else None,
            "tokens_per_round": self.tokens_per_round if speculative else None,
            "repeated_8_grams": self.repeated / self.grams if self.grams else None,
        }


def figures_table(tallies: list[Tally], title: str) -> Table:
    """One row for every way of decoding."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("decoding")
    for name in ("tokens/s", "against plain", "drafts accepted", "tokens a round", "repeated 8-grams"):
        table.add_column(name, justify="right")
    plain = tallies[0].per_second
    for tally in tallies:
        speculative = tally.draft_length != 0 and bool(tally.rounds)
        table.add_row(
            tally.label,
            f"{tally.per_second:.0f}" if tally.seconds else "…",
            f"{tally.per_second / plain:.2f}x" if plain and tally.seconds else "",
            f"{tally.acceptance:.0%}" if speculative else "",
            f"{tally.tokens_per_round:.2f}" if speculative else "",
            f"{tally.repeated / tally.grams:.1%}" if tally.grams else "",
        )
    return table


@shared_options("target", "draft", "device", "dtype", "quantize", "draft_quantize", "seed", without=("home",))
def demo(
    settings: Settings,
    keep: Annotated[Optional[Path], typer.Option(help="Keep the log and the adapter in this folder.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="What it came to as one JSON object; the tour goes to standard error.")
    ] = False,
) -> None:
    """A guided run: plain decoding, speculative, distil on what was said, speculative again.

    Example: adaptive demo

    Example: adaptive demo --json

    Example: adaptive demo --target ./my-14b --draft ./my-0.5b --quantize nf4
    """
    import json

    from rich.console import Console

    console = Console(highlight=False, stderr=as_json)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="adaptive-demo-") as temporary:
        home = keep or Path(temporary)
        # What training brings is to be seen, not that the tour asks the same things again.
        fixed = {"home": home, "draft_length": "auto", "history": "off", "record": True}
        tour = Tour(settings.model_copy(update=fixed), console)
        tour.run()
    seconds = time.monotonic() - began
    console.print(f"[dim]The tour took {seconds / 60:.1f} minutes.[/]")
    if keep:
        console.print(f"[dim]Its log and adapter are kept: adaptive history --state-dir {keep}[/]")
    if as_json:
        print(json.dumps({**tour.as_object(), "seconds": seconds}, ensure_ascii=False))


class Tour:
    """The steps of the demo, in order."""

    def __init__(self, settings: Settings, console: Console) -> None:
        from adaptive.pair import BUNDLED
        from cli.prompts import read_prompts

        self.settings = settings
        self.console = console
        self.file = BUNDLED / "prompts" / f"{KIND}.jsonl"
        prompts = read_prompts(self.file)
        self.judged, self.learned = prompts[:JUDGED], prompts[JUDGED : JUDGED + LEARNED]
        self.controller: LengthPolicy
        self.pair = ""
        self.before: list[Tally] = []
        self.after: list[Tally] = []  # empty where no adapter was good enough
        self.training: DistillOutcome | None = None

    def as_object(self) -> dict[str, Any]:
        """What it came to, for machines; ``adapter`` is null, and ``after`` empty, where the gate let none through."""
        made = None if self.training is None else self.training.manifest
        promoted = made is not None and made.status == "promoted"
        return {
            "pair": self.pair,
            "kind": KIND,
            "temperature": TEMPERATURE,
            "draft_length": DRAFT_LENGTH,
            "prompts": {"judged": len(self.judged), "learned": len(self.learned)},
            "before": [tally.as_object(self.before[0]) for tally in self.before],
            "training": None
            if self.training is None
            else {
                "message": self.training.message,
                "seconds": self.training.seconds,
                "promoted": promoted,
                "held_out": None if made is None or made.recent is None else asdict(made.recent),
            },
            "adapter": made.id if made is not None and promoted else None,
            "after": [tally.as_object(self.after[0]) for tally in self.after],
        }

    def run(self) -> None:
        """All of it."""
        from cli.opened import open_pair

        with open_pair(self.settings, self.console) as session:
            if session.pair.draft is None:
                from adaptive.errors import AdaptiveError

                raise AdaptiveError("the demo needs a draft; name one with --draft")
            self._say(
                f"[bold]1. Before.[/] {len(self.judged)} tool-use questions, a kind of text that the draft has "
                f"never seen (temperature {TEMPERATURE}; each way in turn on every prompt)."
            )
            self.controller = session.assistant.policy
            self.pair = session.pair.identity.id
            self.before = [Tally("plain", 0), Tally("speculative", DRAFT_LENGTH)]
            self._compare(session, self.before)
            self._say(
                f"[bold]2. Use it.[/] {len(self.learned)} other questions are answered, as in a session. The log keeps "
                "what the target said, with its distribution."
            )
            self._answer_and_log(session)
            self._say("[bold]3. Distil.[/] A LoRA adapter of the draft learns from that log.")
            adapter = self._distil(session)
            if adapter is None:
                self._say(
                    "So the draft in use stays as it was: an adapter comes into use only if it surely drafts better on "
                    "answers that it was not trained on. More answers teach it more."
                )
                self._next()
                return
            self._say("[bold]4. After.[/] The first prompts again. None of them was trained on; every way in turn.")
            self.after = [
                Tally("plain", 0),
                Tally("speculative", DRAFT_LENGTH),
                Tally(f"speculative, adapter {adapter}", DRAFT_LENGTH, adapter),
                Tally("  with the controller", None, adapter),
            ]
            self._compare(session, self.after)
            self._plot(session)
            self._conclude(self.after)
            self._next()

    def _say(self, text: str) -> None:
        self.console.print()
        self.console.print(text)

    def _compare(self, session: OpenedPair, tallies: list[Tally]) -> None:
        """Every way answers every judged prompt, in turn, behind one live table. Not learned from."""
        from rich.live import Live

        from adaptive.control.policy import FixedLength

        with Live(figures_table(tallies, ""), console=self.console, refresh_per_second=4) as live:
            for number, prompt in enumerate(self.judged, 1):
                for tally in tallies:
                    # The controller is not the policy of the moment: this swap is ours, not one to learn from.
                    session.assistant.policy = FixedLength(0)
                    folder = session.store.path(tally.adapter) if tally.adapter else None
                    session.assistant.use_adapter(tally.adapter, folder)
                    tally.add(self._answer(session.assistant, prompt, tally.draft_length, record=False))
                    live.update(figures_table(tallies, f"prompt {number} of {len(self.judged)}"))

    def _answer(self, assistant: Assistant, prompt: PromptLine, draft_length: int | None, record: bool) -> Decoding:
        from adaptive.control.policy import FixedLength
        from adaptive.types import SamplingParams, StopParams

        assistant.policy = self.controller if draft_length is None else FixedLength(draft_length)
        sampling = SamplingParams(temperature=TEMPERATURE, seed=self.settings.seed)
        stop = StopParams(max_new_tokens=TOKENS)
        for _ in assistant.chat(prompt.messages, sampling, stop, domain=KIND, record=record):
            pass
        assert assistant.last is not None
        return assistant.last

    def _answer_and_log(self, session: OpenedPair) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        tally = Tally("", DRAFT_LENGTH)
        with Progress(*columns, console=self.console, transient=True) as progress:
            for prompt in progress.track(self.learned):
                tally.add(self._answer(session.assistant, prompt, DRAFT_LENGTH, record=True))
        assert session.assistant.log is not None
        session.assistant.log.flush()
        self.console.print(
            f"{len(self.learned)} answers, {tally.tokens} tokens, "
            f"{session.state.records.stat().st_size / 1e6:.1f} MB of log"
        )

    def _distil(self, session: OpenedPair) -> str | None:
        """The id of the adapter that the gate let through, or None."""
        from adaptive.pair import load_draft_for_training
        from cli.distill import progress_bar
        from trainers.recipe import Recipe
        from trainers.run import distill

        draft = load_draft_for_training(self.settings)
        with progress_bar(self.console) as report:
            outcome = distill(
                session.state.records,
                session.store,
                session.pair.identity.base,
                draft,
                Recipe(draft_length=DRAFT_LENGTH),
                on_progress=report,
            )
        self.training = outcome
        self.console.print(f"{outcome.message} [dim]({outcome.seconds:.0f} s)[/]")
        promoted = outcome.manifest is not None and outcome.manifest.status == "promoted"
        return outcome.manifest.id if outcome.manifest is not None and promoted else None

    def _plot(self, session: OpenedPair) -> None:
        """Judged prompts once more into the log, so that the plot shows the swap; then the plot."""
        from adaptive.records.history import history
        from adaptive.records.log import Log
        from cli.plots import has_colour, plot_history

        for prompt in self.judged:
            self._answer(session.assistant, prompt, DRAFT_LENGTH, record=True)
        assert session.assistant.log is not None
        session.assistant.log.flush()
        log = Log(session.state.records)
        found = history(log.figures(), by="adapter", points=24)
        log.close()
        self.console.print()
        # Not through rich, which would wrap and restyle what plotext has laid out.
        plot = plot_history(found.series, found.swaps, self.console.width, colour=has_colour(self.console))
        self.console.file.write(plot + "\n")

    def _conclude(self, tallies: list[Tally]) -> None:
        plain, before, after, controlled = tallies
        longer = after.tokens_per_round / before.tokens_per_round
        self._say(
            f"One pass of the target now yields {after.tokens_per_round:.2f} tokens instead of "
            f"{before.tokens_per_round:.2f} ({longer:.2f}x) "
            f"at draft length {DRAFT_LENGTH}. With the length set by the controller, as it is by default, it decodes "
            f"[bold green]{controlled.per_second / plain.per_second:.2f}x as fast as plain decoding[/] and "
            f"{controlled.per_second / before.per_second:.2f}x as fast as the speculation it began with. What it says "
            "is still drawn from the target's own distribution."
        )

    def _next(self) -> None:
        """What to type now, for this pair or, after the bundled one, for one's own."""
        pair = as_typed(self.settings, "target", "draft")
        quantized = "" if self.settings.quantize == "none" else " " + as_typed(self.settings, "quantize")
        chat = pair + quantized
        if not pair:
            pair = "--target ... --draft ..."
            chat = "--target Qwen/Qwen2.5-14B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct --quantize nf4"
        own = self.settings.target is not None
        self._say("To go on with this pair:" if own else "The bundled pair is a toy. With your own models:")
        self.console.print(
            f"\n  adaptive chat {chat}\n"
            f"  adaptive distill {pair}     now and then, or overnight\n"
            f"  adaptive history {pair}     what it brought\n",
            soft_wrap=True,
            markup=False,
        )
