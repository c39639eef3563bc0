"""``adaptive demo``: the whole idea in a few minutes, on the bundled pair and prompts it has not seen."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from adaptive.errors import AdaptiveError
from cli.bars import counting_bar
from cli.demo_figures import Tally, figures_table
from cli.demo_ways import Way
from cli.options import as_typed, shared_options
from cli.output import print_json

if TYPE_CHECKING:
    from rich.console import Console

    from adaptive.decoding.loop import Decoding
    from adaptive.opened import OpenedPair
    from adaptive.records.writer import LogWriter
    from adaptive.settings import Settings
    from cli.prompts import PromptLine
    from trainers.run import DistillOutcome

# The kind of text that the bundled draft has never seen (the target has); see checkpoints/bundled/README.md.
KIND = "tools"
# JUDGED: prompts that are measured; too few give noisy figures. LEARNED: other prompts, whose answers are used for
# training; too many take longer than a demo should.
JUDGED, LEARNED = 40, 280
TOKENS = 120
DRAFT_LENGTH = 4
TEMPERATURE = 0.7
# Judged prompts that are also answered greedily, to compare the answers token for token.
COMPARED = 10
# Seconds that a head may train. Too high: the demo exceeds its four minutes on a slow machine.
HEAD_SECONDS = 60.0
# Label of the draft without an adapter.
UNTRAINED = "draft, no adapter"
# The gain of a head of the bundled target from more answers (docs/notes/2026-11-heads.md).
MORE = "on grade-school maths it came to 2.17 tokens a round after 100 answers and to 2.52 after 300"


@shared_options("target", "draft", "device", "dtype", "quantize", "draft_quantize", "seed", without=("home",))
def demo(
    settings: Settings,
    keep: Annotated[
        Optional[Path], typer.Option(help="Keep the logs, the adapter and the head in this folder.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as one JSON object; all else goes to standard error.")
    ] = False,
) -> None:
    """A guided run: plain decoding, drafting, training the draft, growing a head, and drafting again.

    Example: adaptive demo

    Example: adaptive demo --json

    Example: adaptive demo --target ./my-14b --draft ./my-0.5b --quantize nf4
    """
    from rich.console import Console

    console = Console(highlight=False, stderr=as_json)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="adaptive-demo-") as temporary:
        home = keep or Path(temporary)
        # History is off, so that the figures show the gain of training and not repetitions of the demo's own prompts.
        fixed = {"home": home, "draft_length": "auto", "history": "off", "record": True}
        tour = Tour(settings.model_copy(update=fixed), console)
        tour.run()
    seconds = time.monotonic() - began
    console.print(f"The demo took {seconds / 60:.1f} minutes.", style="dim")
    if keep:
        command = shlex.join(["adaptive", "history", "--state-dir", str(keep)])
        console.print(f"What it made is kept: {command}", style="dim", markup=False, soft_wrap=True)
    if as_json:
        print_json({**tour.as_object(), "seconds": seconds})


class Tour:
    """The steps of the demo, in order."""

    def __init__(self, settings: Settings, console: Console) -> None:
        from rich.console import Console

        from adaptive.pair import BUNDLED
        from cli.prompts import read_prompts

        self.settings = settings
        self.console = console
        self.progress = Console(stderr=True, highlight=False)
        prompts = read_prompts(BUNDLED / "prompts" / f"{KIND}.jsonl")
        self.judged, self.learned = prompts[:JUDGED], prompts[JUDGED : JUDGED + LEARNED]
        # Only for the bundled target: with a large pair in memory, a head's training may not fit.
        self.grows = settings.target is None and settings.draft is None
        self.ways: dict[str, Way] = {}  # by drafter
        self.pair = ""
        self.logged_before = 0  # the last record from before this demo
        self.before: list[Tally] = []
        self.after: list[Tally] = []  # empty if nothing better than the draft without an adapter was trained
        self.training: DistillOutcome | None = None
        self.growing: DistillOutcome | None = None
        self.same: int | None = None  # greedy answers that were equal in all ways

    def as_object(self) -> dict[str, Any]:
        """The results as JSON values. ``adapter`` and ``head`` are null if none was promoted, and ``after`` is
        empty if neither was."""
        return {
            "pair": self.pair,
            "kind": KIND,
            "temperature": TEMPERATURE,
            "draft_length": DRAFT_LENGTH,
            "prompts": {"judged": len(self.judged), "learned": len(self.learned)},
            "before": [tally.as_object(self.before[0]) for tally in self.before],
            "training": trained(self.training),
            "adapter": promoted(self.training),
            "head_training": trained(self.growing),
            "head": promoted(self.growing),
            "after": [tally.as_object(self.after[0]) for tally in self.after],
            "greedy": None if self.same is None else {"answers": len(self.judged[:COMPARED]), "same": self.same},
        }

    def run(self) -> None:
        """Run all steps."""
        from cli.opened import open_pair

        with open_pair(self.settings, self.progress) as session, contextlib.ExitStack() as more:
            if session.pair.draft is None:
                raise AdaptiveError("the demo needs a draft that runs and is trained here; name a model with --draft")
            self.pair = session.pair.identity.id
            self.ways["draft"] = Way.of(session, KIND)
            self._say(
                f"[bold]1. Before.[/] {len(self.judged)} questions about tools, a kind of text that the draft was not "
                "trained on, are answered in turn by the target alone (plain) and with the draft. It guesses "
                f"{DRAFT_LENGTH} tokens a round; the target accepts those before the first wrong one and adds its own."
            )
            self.before = [Tally("plain", 0), Tally(UNTRAINED, DRAFT_LENGTH)]
            self._compare(self.before)
            self._say(
                f"[bold]2. Use it.[/] {len(self.learned)} other questions are answered, as in a session. The log keeps "
                "each answer and the probabilities that the target gave its tokens."
            )
            self._answer_and_log(session)
            self._say("[bold]3. Distil.[/] A LoRA adapter of the draft learns from that log.")
            adapter = self._distil(session)
            head = self._grow(session, more) if self.grows else None
            if adapter is None and head is None:
                self._next()
                return
            self._say(
                f"[bold]{5 if self.grows else 4}. After.[/] The first questions again, which nothing was trained on. "
                "Length auto: the controller chooses how many tokens are guessed, as it does by default."
            )
            self.after = list(self._ways_after(adapter, head))
            self._compare(self.after)
            self._plot(session, adapter)
            self._conclude()
            self._check()
            self._next()

    def _ways_after(self, adapter: str | None, head: str | None) -> Iterator[Tally]:
        yield from (Tally("plain", 0), Tally(UNTRAINED, DRAFT_LENGTH))
        for length in (DRAFT_LENGTH, None) if adapter else ():
            yield Tally("draft distilled", length, adapter=adapter)
        made = None if self.growing is None else self.growing.manifest
        began = "grown on" if made is not None and made.parent else "from nothing"  # a parent is in a kept folder
        for length in (DRAFT_LENGTH, None) if head else ():
            yield Tally(f"head {began}, {len(self.learned)} answers", length, "head", head)

    def _say(self, text: str) -> None:
        self.console.print()
        self.console.print(text)

    def _compare(self, tallies: list[Tally]) -> None:
        """Answer every judged prompt in every way, in turn, with one live table. Nothing is logged."""
        from rich.live import Live

        # Without an interactive console, only the final table is printed.
        shown = Live(console=self.console, refresh_per_second=4) if self.console.is_interactive else None
        with shown or contextlib.nullcontext():
            for number, prompt in enumerate(self.judged, 1):
                for tally in tallies:
                    self.ways[tally.drafter].use(tally.adapter)
                    tally.add(self._answer(tally.drafter, prompt, tally.draft_length))
                    if shown is not None:
                        last = number == len(self.judged) and tally is tallies[-1]
                        title = "" if last else f"question {number} of {len(self.judged)}"
                        shown.update(figures_table(tallies, title))
        if shown is None:
            self.console.print(figures_table(tallies, ""))

    def _answer(self, drafter: str, prompt: PromptLine, draft_length: int | None, record: bool = False) -> Decoding:
        from adaptive.types import SamplingParams, StopParams

        sampling = SamplingParams(temperature=TEMPERATURE, seed=self.settings.seed)
        return self.ways[drafter].answer(prompt, draft_length, sampling, StopParams(TOKENS), record)

    def _answer_and_log(self, session: OpenedPair) -> None:
        from adaptive.records.log import Log

        with Log(session.state.records) as log:
            self.logged_before = log.last_id()
        tally = Tally("", DRAFT_LENGTH)
        with counting_bar(self.progress, "answering") as progress:
            for prompt in progress.track(self.learned):
                tally.add(self._answer("draft", prompt, DRAFT_LENGTH, record=True))
        assert session.assistant.log is not None
        session.assistant.log.flush()
        self.console.print(
            f"{len(self.learned)} answers, {tally.tokens} tokens, "
            f"{session.state.records.stat().st_size / 1e6:.1f} MB of log"
        )

    def _distil(self, session: OpenedPair) -> str | None:
        """The id of the adapter that the gate promoted, or None."""
        from adaptive.pair import load_draft_for_training
        from adaptive.records.features import spool_of
        from cli.distill import progress_bar
        from trainers.recipe import Recipe
        from trainers.run import distill

        draft = load_draft_for_training(self.settings)
        with progress_bar(self.progress) as report:
            self.training = distill(
                session.state.records,
                session.store,
                session.pair.identity.base,
                draft,
                Recipe(draft_length=DRAFT_LENGTH),
                on_progress=report,
                spool=spool_of(session.state, self.settings.feature_gb),
            )
        self._verdict(self.training)
        return promoted(self.training)

    def _grow(self, session: OpenedPair, stay: contextlib.ExitStack) -> str | None:
        """The id of the head that the gate promoted, or None. The head stays open until ``stay`` ends."""
        from rich.markup import escape

        from cli.demo_head import HeadStep
        from trainers.recipe import Recipe

        self._say(
            "[bold]4. Or grow a draft.[/] As if there were none: a head, one layer that reads the target's own hidden "
            "states, begins from nothing and learns from the same answers."
        )
        try:
            step = HeadStep(self.settings, session)
            with counting_bar(self.progress, "reading hidden states") as progress:
                task = progress.add_task("", total=len(self.learned))
                step.learn_from(self.logged_before, lambda done: progress.update(task, completed=done))
            self.growing = step.grow(Recipe(draft_length=DRAFT_LENGTH, max_seconds=HEAD_SECONDS), self.progress)
        except AdaptiveError as error:
            self.console.print(f"[yellow]No head is grown here:[/] {escape(str(error))}")
            return None
        self._verdict(self.growing)
        head = promoted(self.growing)
        if head is not None:
            measuring = self.progress.status("measuring what a round costs with it")
            self.ways["head"] = Way.of(stay.enter_context(step.opened(measuring)), KIND)
        return head

    def _verdict(self, outcome: DistillOutcome) -> None:
        """Print the gate's verdict."""
        from rich.markup import escape

        made, took = outcome.manifest, f"[dim]({outcome.seconds:.0f} s)[/]"
        if made is None or made.recent is None or outcome.promoted is None:
            self.console.print(f"{escape(outcome.message)} More answers teach it more. {took}")
            return
        was, now = made.recent.acceptance_before.mean, made.recent.acceptance_after.mean
        self.console.print(
            f"It comes into use: in answers to {made.recent.generations} prompts kept out of training it guesses "
            f"{now:.0%} of the next tokens, {f'{was:.0%} before' if was else 'and before it nothing did'}. {took}"
        )

    def _plot(self, session: OpenedPair, adapter: str | None) -> None:
        """Log answers to the judged prompts once more, so that the plot shows the swap; then print the plot."""
        from adaptive.records.history import history
        from adaptive.records.log import Log
        from cli.plots import has_colour, plot_history

        if adapter is None:
            return
        self.ways["draft"].use(adapter)
        with _copy_of_the_log(session) as copy:
            for prompt in self.judged:
                self._answer("draft", prompt, DRAFT_LENGTH, record=True)
            copy.flush()
            with Log(copy.path) as log:
                found = history(log.figures(), by="adapter", points=24)
        self._say(f"The draft's answers in the log, before and after its adapter {adapter}:")
        # Written directly: rich would wrap and restyle the text that plotext has laid out.
        plot = plot_history(found.series, found.swaps, self.console.width, colour=has_colour(self.console))
        self.console.file.write(plot + "\n")

    def _conclude(self) -> None:
        """Print the last table's results in words."""
        plain, before, *made = self.after
        words = {"draft": "the draft distilled", "head": "the head"}
        yields, faster = [f"{before.tokens_per_round:.2f} with the draft without an adapter"], []
        for tally in made:
            if tally.draft_length is not None:
                yields.append(f"{tally.tokens_per_round:.2f} with {words[tally.drafter]}")
            elif over := tally.over(plain):
                style = "bold green" if over > 1 else "bold"
                faster.append(f"[{style}]{over:.2f}x[/] with {words[tally.drafter]}")
        self._say(f"A pass of the target yields 1 token alone, {listed(yields)}.")
        if faster:
            self.console.print(f"Speed against plain, at length auto: {listed(faster)}.")
        if made[-1].drafter == "head":
            self.console.print(f"More answers teach a head more: {MORE} (docs/notes/2026-11-heads.md).")

    def _check(self) -> None:
        """Compare some greedy answers of all ways token for token, and print the result."""
        from adaptive.types import SamplingParams, StopParams

        greedy, asked = SamplingParams(temperature=0.0), self.judged[:COMPARED]
        ways = [tally for tally in self.after if tally.draft_length is not None]
        self.same = 0
        for prompt in asked:
            answers = []
            for tally in ways:
                way = self.ways[tally.drafter]
                way.use(tally.adapter)
                answers.append(way.answer(prompt, tally.draft_length, greedy, StopParams(TOKENS)).output)
            self.same += all(answer == answers[0] for answer in answers)
        self._say(
            f"What is said stays the target's own: at temperature 0, {self.same} of {len(asked)} answers were the same "
            f"token for token, plain and with each draft; at {TEMPERATURE}, as above, each token is drawn from the "
            "target's own distribution."
        )

    def _next(self) -> None:
        """Print the next commands, for this pair or, after the bundled one, for the user's own."""
        pair = as_typed(self.settings, "target", "draft")
        quantized = "" if self.settings.quantize == "none" else " " + as_typed(self.settings, "quantize")
        chat = pair + quantized
        if not pair:
            pair = "--target ... --draft ..."
            chat = "--target Qwen/Qwen2.5-14B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct --quantize nf4"
        own = self.settings.target is not None
        self._say("To go on with this pair:" if own else "The bundled pair is a toy. With your own models:")
        alone = "" if own else "  adaptive chat --target Qwen/Qwen3-14B     no draft named: a head is grown\n"
        self.console.print(
            f"\n  adaptive chat {chat}\n{alone}"
            f"  adaptive distill {pair}     now and then, or overnight\n"
            f"  adaptive history {pair}     what it brought\n",
            soft_wrap=True,
            markup=False,
        )


@contextlib.contextmanager
def _copy_of_the_log(session: OpenedPair) -> Iterator[LogWriter]:
    """Log into a copy of the session's log, which is deleted at the end. In the log itself of a folder that is kept,
    answers to the judged prompts would be learned from by the next demo."""
    import sqlite3

    from adaptive.records.writer import LogWriter

    own = session.assistant.log
    assert own is not None
    own.flush()
    with tempfile.TemporaryDirectory(prefix="adaptive-demo-") as folder:
        path = Path(folder) / "records.db"
        with contextlib.closing(sqlite3.connect(own.path)) as log, contextlib.closing(sqlite3.connect(path)) as copy:
            log.backup(copy)
        with LogWriter(path) as writer:
            session.assistant.log = writer
            try:
                yield writer
            finally:
                session.assistant.log = own


def listed(parts: list[str]) -> str:
    """The parts joined in words: a, b and c."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def promoted(outcome: DistillOutcome | None) -> str | None:
    """The id of the adapter or head that a training run put into use; None if it did not, or if there was no run."""
    return None if outcome is None else outcome.promoted


def trained(outcome: DistillOutcome | None) -> dict[str, Any] | None:
    """A training run as JSON values."""
    if outcome is None:
        return None
    made = outcome.manifest
    return {
        "message": outcome.message,
        "seconds": outcome.seconds,
        "promoted": outcome.promoted is not None,
        "held_out": None if made is None or made.recent is None else asdict(made.recent),
    }
