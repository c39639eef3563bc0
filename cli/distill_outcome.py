"""What ``adaptive distill`` says of a training run: figures, the gate's verdict, and the next command."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from adaptive.printable import counted, per_second
from cli.options import HELD, PAIR, as_typed, changed

if TYPE_CHECKING:
    from rich.console import Console

    from adaptive.settings import Settings
    from checkpoints.manifest import HeldOut, Interval
    from trainers.run import DistillOutcome

# Tokens of an answer in the break-even estimate: typical of an assistant.
ANSWER_TOKENS = 200


def show(outcome: DistillOutcome, settings: Settings, console: Console) -> None:
    """Print figures before and after, the verdict in one sentence, and the next command."""
    from rich.markup import escape
    from rich.table import Table

    for note in outcome.notes:
        console.print(f"[yellow]note:[/] {escape(note)}")
    if len(outcome.attempts) > 1:
        console.print(_attempts_table(outcome))
    if outcome.verdict is not None:
        table = Table(title="Held-out records, 95% intervals", title_justify="left")
        for column in ("", "draft in use", "this adapter", "gain"):
            table.add_column(column, justify="left" if not column else "right")
        for name, figures in (("recent", outcome.verdict.recent), ("older", outcome.verdict.older)):
            if figures is not None:
                _add_rows(table, name, figures)
        console.print(table)
    console.print(outcome.message, style="green" if outcome.promoted else None, markup=False)
    paid = break_even(outcome, settings)
    if paid is not None:
        console.print(paid)
    console.print(
        f"[dim]{counted(outcome.train_generations, 'answer')} trained on, {outcome.steps} steps "
        f"(best: {outcome.best_step}), {outcome.train_seconds:.0f} s of training, {outcome.seconds:.0f} s in all.[/]"
    )
    console.print(f"Next: {_next_command(outcome, settings)}", soft_wrap=True, markup=False)


def _attempts_table(outcome: DistillOutcome) -> Any:
    """The recipes of ``--compare`` side by side, on the validation prompts that chose between them."""
    from rich.table import Table

    table = Table(title=f"Recipes on {outcome.validation_generations} validation answers", title_justify="left")
    for column in ("recipe", "acceptance", "steps", "seconds"):
        table.add_column(column, justify="left" if column == "recipe" else "right")
    first = outcome.attempts[0].recipe
    for attempt in outcome.attempts:
        fit = attempt.fit
        table.add_row(
            attempt.recipe.difference(first) or "as asked",
            f"{fit.acceptance:.3f}" if fit.best is not None else "nothing better",
            str(fit.steps),
            f"{fit.seconds:.0f}",
        )
    return table


def break_even(outcome: DistillOutcome, settings: Settings) -> str | None:
    """A sentence on when answers have saved the training time, at the last session's costs; None if these are unknown.

    Both drafts use their best draft length there, or plain decoding if that is faster.
    """
    from adaptive.control.memory import last_costs
    from adaptive.pair import pair_identity
    from adaptive.promotions import expected_speed, seconds_a_token
    from adaptive.state import PairState

    costs = last_costs(PairState(settings.state_dir / pair_identity(settings).id).controller)
    if costs is None or outcome.verdict is None:
        return None
    faster, over_plain = expected_speed(outcome.verdict.recent, costs)
    after = seconds_a_token((), costs) / over_plain
    before = after * faster
    if after >= before:
        return "At the costs of the last session, that makes answers no faster."
    answers = outcome.train_seconds / (ANSWER_TOKENS * (before - after))
    now, then = per_second(1 / before), per_second(1 / after)
    return (
        f"At the costs of the last session: {faster:.2f} times as fast as now, by replay ({now} tokens/s "
        f"become {then}, {over_plain:.2f} times plain decoding), and the "
        f"{outcome.train_seconds:.0f} s of training are saved again after {answers:.0f} answers of "
        f"{ANSWER_TOKENS} tokens."
    )


def _add_rows(table: Any, name: str, figures: HeldOut) -> None:
    """Acceptance and tokens a round of one held-out set."""
    lengths = figures.mean_acceptance_length_before, figures.mean_acceptance_length_after
    table.add_row(
        f"{name}: acceptance (answers to {counted(figures.generations, 'prompt')})",
        _interval(figures.acceptance_before, 3),
        _interval(figures.acceptance_after, 3),
        _interval(figures.gain, 3, signed=True),
    )
    table.add_row(
        f"{name}: tokens a round at draft length {figures.draft_length}",
        _interval(lengths[0], 2),
        _interval(lengths[1], 2),
        f"{lengths[1].mean / lengths[0].mean:.2f}x",
    )


def _interval(interval: Interval, digits: int, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return f"{interval.mean:{sign}.{digits}f} ({interval.low:{sign}.{digits}f} to {interval.high:{sign}.{digits}f})"


def _next_command(outcome: DistillOutcome, settings: Settings) -> str:
    """The command that the user most likely needs next."""
    pair = f" {typed}" if (typed := as_typed(settings, *PAIR, "home", *changed(settings, *HELD))) else ""
    if outcome.promoted:
        return f"adaptive chat{pair}"
    if outcome.manifest is not None and outcome.manifest.status == "candidate":
        return f"adaptive adapters promote {outcome.manifest.id}{pair}, or adaptive distill{pair} again"
    return f"adaptive chat{pair}, and adaptive distill{pair} again when more has been said"


def as_object(outcome: DistillOutcome) -> dict[str, Any]:
    """The JSON object that ``--json`` prints."""
    verdict = outcome.verdict
    return {
        "adapter": outcome.manifest.id if outcome.manifest else None,
        "status": outcome.manifest.status if outcome.manifest else None,
        "message": outcome.message,
        "stopped": outcome.stopped,
        "verdict": None if verdict is None else {"promote": verdict.promote, "reason": verdict.reason},
        "recent": None if verdict is None else asdict(verdict.recent),
        "older": None if verdict is None or verdict.older is None else asdict(verdict.older),
        "train_generations": outcome.train_generations,
        "validation_generations": outcome.validation_generations,
        "gate_generations": outcome.gate_generations,
        "steps": outcome.steps,
        "best_step": outcome.best_step,
        "train_seconds": outcome.train_seconds,
        "seconds": outcome.seconds,
        "notes": list(outcome.notes),
        "attempts": [
            {
                "recipe": a.recipe.to_json(),
                "validation_acceptance": a.fit.acceptance if a.fit.acceptance >= 0 else None,  # stopped before any
                "steps": a.fit.steps,
            }
            for a in outcome.attempts
        ],
    }
