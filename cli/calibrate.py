"""``adaptive calibrate``: measures the costs of a draft on this machine and predicts its gain before use."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from adaptive.errors import AdaptiveError
from adaptive.printable import counted
from cli.cells import print_table
from cli.forecast import Forecast, predict
from cli.options import shared_options
from cli.other_pair import OtherDraft, OtherTarget
from cli.repeats import Repeats, measure_repeatedly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from adaptive.assistant import Assistant
    from adaptive.control.costs import CostTable
    from adaptive.opened import OpenedPair
    from adaptive.pair import Pair
    from adaptive.settings import Settings
    from adaptive.types import SamplingParams
    from cli.prompts import PromptLine
    from trainers.dataset import Example

# Generations of the log from which acceptance is computed, the newest: enough for a precision of 1 to 2%.
NEWEST = 100
# Times as many are read if the draft was trained on the log, since most answers are then no evidence.
TRAINED = 3
# Answers given now, where the log has none, and their length in tokens: half a minute on a small machine.
ANSWERS, ANSWER_TOKENS = 8, 64
# Default prompts of these answers: short ones of several kinds.
PROMPTS = (
    "Write a Python function that returns the largest number of a list.",
    "Tell me a short story about a fox and a river.",
    "A train covers 60 miles in an hour. How far does it go in 3 hours and a half?",
    "Explain how a rainbow comes about.",
    "Write an email to a colleague who helped you with a project.",
    "What should I pack for a week in the mountains?",
    "Give three reasons to learn another language.",
    "Write a SQL query that counts the orders of every customer.",
)


@shared_options(without=("draft_length", "history", "max_new_tokens", "record", "keep_days", "keep_gb", "feature_gb"))
def calibrate(
    settings: Settings,
    prompts: Annotated[
        Optional[Path], typer.Option(help="Prompts to answer now: JSON lines; then the log is not used.")
    ] = None,
    answers: Annotated[
        int,
        typer.Option(help=f"Answers to give if the log is not used, at most {len(PROMPTS)} without --prompts.", min=1),
    ] = ANSWERS,
    other_target: OtherTarget = None,
    other_draft: OtherDraft = None,
    busy: Annotated[
        bool, typer.Option("--busy", help="Measure beside other programs, too; figures are then rough, and not kept.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what drafting and verifying cost here, predict the speed-up, and recommend a draft length.

    Acceptance comes from the log, if there is one, else from a few answers given now. The measured costs are kept
    for `--draft-length auto`. If other programs keep the machine busy, nothing is predicted or kept, and the exit
    status is 1.

    Example: adaptive calibrate

    Example: adaptive calibrate --target ./my-target --draft ./my-draft --prompts mine.jsonl --json

    Example: adaptive calibrate --other-target T.gguf --other-draft D.gguf
    """
    from rich.console import Console

    from cli.prompts import bare_prompt, read_prompts, require_answerable

    asked = read_prompts(prompts) if prompts is not None else [bare_prompt(text) for text in PROMPTS]
    from cli.opened import open_pair
    from cli.other_pair import advice, engines, load_other, other_settings

    console = Console(stderr=True, highlight=False)
    elsewhere = other_settings(settings, other_target, other_draft)
    if elsewhere is not None and other_draft is None:
        raise AdaptiveError("--other-target is given without --other-draft; name both")
    verdict = None
    unrecorded = settings.model_copy(update={"record": False, "draft_length": "0"})
    with open_pair(unrecorded, console) as session:
        from adaptive.assistant import sampling_params

        _require_draft(session.pair)
        if prompts is not None:
            with console.status("checking the prompts"):
                require_answerable(asked[:answers], session.pair, raw=not session.pair.tokenizer.chat_template)
        other = None if elsewhere is None else load_other(elsewhere, session, console)
        if other is not None and other.draft is None:
            raise AdaptiveError("the other pair has no draft that can be used; name another one with --other-draft")
        sampling = sampling_params(settings, session.pair)
        repeats = measure_repeatedly(session.pair, sampling, console, busy)
        sample, source = _answers(session, sampling, asked[:answers], prompts is None, console)
        with console.status("replaying the draft"):
            forecast = predict(repeats.costs, sample, session.pair)
        if not repeats.busy:
            _keep(session, forecast.costs)
        if elsewhere is not None and other is not None:
            elsewhere_repeats = measure_repeatedly(other, sampling, console, busy)
            there = predict(elsewhere_repeats.costs, sample, other)
            here = max(forecast.tokens_per_second), settings
            verdict = advice(session.pair, here, other, (max(there.tokens_per_second), elsewhere))
    report = _report(session, forecast, source, repeats)
    if verdict is not None and other is not None:
        report["other"] = {
            "busy": elsewhere_repeats.busy,
            "engine": engines(other),
            "costs": asdict(there.costs),
            "tokens_per_second": there.tokens_per_second,
            "recommended_draft_length": there.draft_length,
            "advice": verdict,
        }
    if as_json:
        print(json.dumps(report, indent=2))
        return
    _show(Console(highlight=False), forecast, report)
    _say_busy(repeats)
    if verdict is not None and other is not None:
        _show(Console(highlight=False), there, {**report, "pair": f"{other.identity.id} ({engines(other)})"})
        _say_busy(elsewhere_repeats)
        Console(highlight=False).print(verdict, soft_wrap=True, markup=False)


def _require_draft(pair: Pair) -> None:
    """Raise AdaptiveError if the pair has no draft that can be calibrated."""
    from adaptive.engines.protocol import ReadsFeatures
    from adaptive.speculation import growing

    if pair.remote is not None:
        raise AdaptiveError(
            "what a draft server's proposals cost is learned while it drafts, and is not measured before; compare with "
            "adaptive bench"
        )
    if pair.draft is None:
        raise AdaptiveError("there is no draft to calibrate; name one with --draft")
    if growing(pair):
        raise AdaptiveError(
            "there is no draft to calibrate yet: the head has not been trained; use `adaptive chat` or `adaptive "
            "serve` for a while, then `adaptive distill`, or name a draft with --draft"
        )
    if isinstance(pair.draft, ReadsFeatures):
        raise AdaptiveError(
            "what a head would have drafted cannot be computed without the target's states; compare with adaptive bench"
        )


def _answers(
    session: OpenedPair, sampling: SamplingParams, prompts: Sequence[PromptLine], from_log: bool, console: Console
) -> tuple[list[Example], str]:
    """Answers from which acceptance is computed, and where they come from: the log, if they may be taken ``from_log``
    and it has any, else answers to ``prompts``, given now. Raises AdaptiveError if these are too short."""
    log, trained = session.state.records, session.assistant.adapter is not None
    if from_log and log.exists() and (sample := read_sample(session.pair, log, trained)):
        return sample, "those answers of the log on which no adapter is trained" if trained else "the log"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "records.db"
        with console.status(f"answering {counted(len(prompts), 'prompt')}"):
            answer_plainly(session.assistant, sampling, prompts, log)
        sample = read_sample(session.pair, log)
    if not sample:
        raise AdaptiveError("these answers are too short to learn acceptance from; give others with --prompts")
    return sample, "answers given now"


def answer_plainly(
    assistant: Assistant,
    sampling: SamplingParams,
    prompts: Sequence[PromptLine],
    log: Path,
    tokens: int = ANSWER_TOKENS,
) -> None:
    """Log the answers to ``prompts`` in ``log``, at most ``tokens`` each; the assistant should decode plainly."""
    from adaptive.records.writer import LogWriter
    from adaptive.types import StopParams

    stop = StopParams(tokens)
    with LogWriter(log) as writer:
        assistant.log = writer
        for prompt in prompts:
            if assistant.pair.tokenizer.chat_template:
                steps = assistant.chat(prompt.messages, sampling, stop)
            else:
                steps = assistant.complete(prompt.messages[-1].content, sampling, stop)
            for _ in steps:
                pass
    assistant.log = None


def _say_busy(repeats: Repeats) -> None:
    """Say that other programs ran during the measurements, if so."""
    from rich.console import Console

    if repeats.busy:
        said = f"[yellow]Measured beside other programs ({repeats.load}): figures may be off, and are not kept.[/]"
        Console(highlight=False).print(said, soft_wrap=True)


def read_sample(pair: Pair, log: Path, trained: bool = False) -> list[Example]:
    """The newest generations of the log that can be replayed. With a draft that was ``trained`` on the log, only those
    on which no adapter is trained."""
    from trainers.dataset import examples, join, read_log, split

    assert pair.draft is not None
    dataset = read_log(log, TRAINED * NEWEST if trained else NEWEST)
    if trained:
        parts = split(dataset)
        held = join(parts.gate, parts.validation)
        if not len(held):
            return []
        dataset = held
    found = examples(dataset, pair.draft.context_length)
    return [example for example in found if example.replayable][-NEWEST:]


def _keep(session: OpenedPair, costs: CostTable) -> None:
    """Write the measured costs to the pair's state; the learned acceptance there is kept."""
    from adaptive.control.memory import load, save
    from adaptive.machine import identity
    from adaptive.measure import where_it_runs

    memory = load(session.state.controller, where_it_runs(session.pair))
    known = dataclasses.replace(memory, costs=costs, machine=identity(), measured=time.time())
    try:
        save(session.state.controller, known)
    except OSError as error:
        raise AdaptiveError(f"{session.state.controller} cannot be written ({error.strerror})") from error


def _report(session: OpenedPair, forecast: Forecast, source: str, repeats: Repeats) -> dict[str, Any]:
    """The JSON object that docs/controller.md describes."""
    costs = forecast.costs
    return {
        "pair": session.pair.identity.id,
        "adapter": session.assistant.adapter,
        "busy": repeats.busy,
        "other_programs_cores": None if repeats.load is None else repeats.load.others,
        "measurements": len(repeats.costs),
        "costs": asdict(costs),
        "acceptance_from": source,
        "generations": forecast.generations,
        "acceptance": forecast.acceptance,
        "tokens_per_round": forecast.tokens_per_round,
        "tokens_per_second": forecast.tokens_per_second,
        "recommended_draft_length": forecast.draft_length,
        "predicted_speed_up": forecast.speed_up,
        "predicted_speed_up_interval": forecast.speed_up_interval,
        "break_even_acceptance": forecast.break_even,
        "by_acceptance": [
            {"acceptance": a, "draft_length": k, "speed_up": gain} for a, k, gain in forecast.by_acceptance
        ],
    }


def _show(console: Console, forecast: Forecast, report: dict[str, Any]) -> None:
    """Print a table by draft length, with a bar for the rate, and the advice."""
    from rich.table import Table

    costs, rates = forecast.costs, forecast.tokens_per_second
    table = Table(title=report["pair"], title_justify="left")
    for name in ("drafted", "draft ms", "verify ms", "tokens\na round", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for k, rate in enumerate(rates):
        if k > forecast.draft_length + 6 and k != len(rates) - 1:
            continue
        bar = "█" * round(14 * rate / max(rates))
        style = "bold green" if k == forecast.draft_length else None
        table.add_row(
            f"{k}" if k else "plain",
            f"{(costs.start_s + costs.draft_s * k if k else 0.0) * 1e3:.2f}",
            f"{(costs.verify_s[k] if k else costs.plain_step_s) * 1e3:.2f}",
            f"{forecast.tokens_per_round[k]:.2f}",
            f"{rate:.1f}",
            bar,
            style=style,
        )
    print_table(console, table, "", "draft ms", "verify ms")
    console.print(
        f"A drafted token would be accepted with a probability of {forecast.acceptance:.0%}, if all before it were "
        f"({report['acceptance_from']}, {counted(forecast.generations, 'answer')})."
    )
    low, high = forecast.speed_up_interval
    if forecast.draft_length == 0:
        console.print(
            "[bold yellow]Do not speculate with this pair here:[/] no draft length beats plain decoding. It would pay "
            f"from an acceptance of {forecast.break_even:.1%}; `adaptive distill` raises it."
        )
    else:
        console.print(
            f"[bold]Expected: {forecast.speed_up:.2f}x plain decoding at draft length {forecast.draft_length}[/] "
            f"({low:.2f} to {high:.2f}, by what so many answers and measurements can tell; `--draft-length auto` "
            "chooses by itself). "
            f"Below {forecast.break_even:.1%} acceptance speculation does not pay."
        )
    gains = "   ".join(f"{a:.0%}: {gain:.2f}x ({k})" for a, k, gain in forecast.by_acceptance)
    console.print(f"[dim]speed-up (best length) by acceptance   {gains}[/]")
