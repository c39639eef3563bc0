"""``adaptive head``: an EAGLE-3 head for the target, grown on the log, for servers that run heads of this kind."""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from adaptive.errors import AdaptiveError
from adaptive.printable import counted
from cli.options import shared_options
from cli.waiting import wait

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

    from adaptive.pair import Source
    from adaptive.settings import Settings
    from trainers.eagle import Grown
    from trainers.recipe import Recipe


# What has no part in the training of a head: how answers are decoded, drafted and logged.
NO_PART = (
    "draft_device", "draft_quantize", "cuda_graphs", "history", "max_new_tokens", "temperature", "top_k", "top_p",
    "min_p", "record", "keep_days", "keep_gb", "feature_gb",
)  # fmt: skip


@shared_options(without=NO_PART)
def head(
    settings: Settings,
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Where the head goes.")],
    data: Annotated[
        Optional[Path], typer.Option(help="Learn from chat messages too: JSON lines of messages.", metavar="FILE")
    ] = None,
    records: Annotated[Optional[int], typer.Option(help="Newest records to learn from; 2,000 by default.")] = None,
    epochs: Annotated[Optional[float], typer.Option(help="Times over the training set, at most.")] = None,
    max_seconds: Annotated[Optional[float], typer.Option(help="Seconds of training, at most.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a head that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Grow an EAGLE-3 head for the target on its logged answers, for vLLM and llama-server.

    It reads the log of the pair and computes the target's hidden states from its checkpoint. The head in FOLDER is in
    the format of the speculators library; it is also a draft here (--draft FOLDER), where it learns further. ctrl-C
    stops and keeps the best weights so far.

    Example: adaptive head my-head

    Example: adaptive head my-head --target ./my-target --draft none --max-seconds 600

    Example: adaptive head my-head --target ./my-target --data chats.jsonl
    """
    wait(spins=0)
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with console.status("starting"):
        from adaptive.engines.cpu.torch_threads import set_threads
        from adaptive.engines.head.speculators import check_other_weights
        from checkpoints.folder import check_destination, check_writable
        from cli.distill import require_trainable_length
        from trainers.dataset import Stopped
        from trainers.recipe import Recipe

    require_trainable_length(settings, context)
    set_threads(settings.threads)
    check_destination(folder, force)
    check_writable(folder)
    check_other_weights(folder)
    length = settings.draft_length
    asked: dict[str, Any] = {
        "buffer": records,
        "epochs": epochs,
        "max_seconds": max_seconds,
        "seed": settings.seed,
        "draft_length": int(length) if length.isdecimal() and int(length) > 0 else None,
    }
    recipe = Recipe(**{name: value for name, value in asked.items() if value is not None})
    try:
        target, grown = _grow(settings, folder, recipe, data, console)
    except Stopped:
        console.print("stopped before any weights were judged; nothing was written")
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(_as_object(folder, grown), indent=2))
    else:
        _show(settings, folder, grown, target, recipe, Console(highlight=False))
    if grown.fit.stopped:
        raise typer.Exit(130)


def _grow(
    settings: Settings, folder: Path, recipe: Recipe, data: Path | None, console: Console
) -> tuple[Source, Grown]:
    """Read the log and the ``data``, load the target, and grow the head, with a progress bar on ``console``. Raises
    AdaptiveError and Stopped."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # as in ``cli.distill.run``
    with console.status("starting"):
        from adaptive.engines.budget import check
        from adaptive.engines.load import load_model, read_config, weights_progress
        from adaptive.pair import pair_identity, sources
        from adaptive.state import open_state
        from cli.distill import chats_of, progress_bar, stoppable
        from cli.state import tell_of_earlier_log
        from trainers.batches import output_limit
        from trainers.eagle import grow
        from trainers.sets import gather
        from trainers.states import most_bytes

    target, _ = sources(settings)
    if target.gguf is not None:
        raise AdaptiveError(
            f"target {target.id} is a GGUF file, and a head is grown on hidden states, which its Hugging Face "
            "checkpoint gives; name that as --target"
        )
    if settings.memory is not None:
        raise AdaptiveError(
            "the hidden states that a head for other servers is grown on are computed with the whole target in memory; "
            "leave --memory out (`adaptive chat` and `adaptive serve` grow a head of another kind with it)"
        )
    check(target, None, False, settings)
    identity = pair_identity(settings)
    state = open_state(settings.state_dir, identity.id)
    tell_of_earlier_log(settings, state)
    limit = output_limit(read_config(target, settings))
    extra = None if data is None else chats_of(settings, data, console)
    sets, _ = gather(state.records, extra, None, recipe, identity.base, limit, None)

    def load() -> PreTrainedModel:
        with weights_progress(lambda share: None):
            return load_model(target, settings, settings.device)

    with stoppable() as should_stop, progress_bar(console, "growing a head") as report:
        return target, grow(load, target.id, sets, recipe, folder, most_bytes, state.root, report, should_stop)


def _as_object(folder: Path, grown: Grown) -> dict[str, Any]:
    """The result as plain JSON values."""
    return {
        "folder": str(folder),
        "stopped": grown.fit.stopped,
        "generations": grown.train_generations,
        "steps": grown.fit.steps,
        "best_step": grown.fit.best_step,
        "seconds": grown.fit.seconds,
        "vocabulary": grown.vocabulary,
        "acceptance_by_step": list(grown.by_step),
        "held_out": None if grown.figures is None else asdict(grown.figures),
    }


def _show(settings: Settings, folder: Path, grown: Grown, target: Source, recipe: Recipe, console: Console) -> None:
    """Print what the head is expected to bring, and the commands that use it."""
    from adaptive.engines.llamacpp.eagle import feeds_no_head
    from adaptive.engines.load import read_config
    from cli.export import for_vllm

    if grown.figures is None:
        why = "stopped early" if grown.fit.stopped else "no other answers are logged"
        console.print(f"{why}: the head was not compared on held-out answers")
    else:
        length, rate = grown.figures.mean_acceptance_length_after, grown.figures.acceptance_after
        console.print(
            f"On answers to {counted(grown.figures.generations, 'prompt')} that it was not trained on: acceptance "
            f"{rate.mean:.3f} ({rate.low:.3f} to {rate.high:.3f}), {length.mean:.2f} tokens a round at draft length "
            f"{recipe.draft_length} ({length.low:.2f} to {length.high:.2f}; plain decoding has 1).",
            style="green",
        )
    fit = grown.fit
    console.print(
        f"[dim]{counted(grown.train_generations, 'answer')} trained on, {fit.steps} steps (best: {fit.best_step}), "
        f"{fit.seconds:.0f} s of training.[/]"
    )
    ours = shlex.join(["adaptive", "serve", "--target", target.id, "--draft", str(folder)])
    lines = [f"  here          {ours}", f"  vLLM          {for_vllm(target.id, folder)}"]
    if not feeds_no_head(read_config(target, settings).get_text_config()):
        file, models = f"{folder.name}.gguf", ["--target", target.id, "--draft", str(folder)]
        to_gguf = shlex.join(["adaptive", "adapters", "export", "draft", file, "--format", "gguf", *models])
        lines.append(f"  llama-server  {to_gguf}")
    for text in (f"The head is in {folder}. To use it:", *lines):
        console.print(text, soft_wrap=True, markup=False)
