"""``adaptive bench``: our and transformers' own ways of decoding, side by side on the same prompts."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from adaptive.errors import AdaptiveError
from cli.cells import print_table
from cli.options import shared_options
from cli.other_pair import OtherDraft, OtherTarget

if TYPE_CHECKING:
    from adaptive.opened import OpenedPair
    from adaptive.pair import Pair
    from adaptive.settings import Settings
    from cli.contenders import Contender, Row
    from cli.prompts import PromptLine


@shared_options(without=("draft_length", "history", "max_new_tokens", "record", "keep_days", "keep_gb", "feature_gb"))
def bench(
    settings: Settings,
    prompts: Annotated[Optional[Path], typer.Option(help="JSON lines; default: those beside the bundled pair.")] = None,
    count: Annotated[int, typer.Option(help="Prompts to run.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of every answer.")] = 100,
    lengths: Annotated[str, typer.Option(help="Fixed draft lengths, with commas.")] = "2,4,8",
    only_ours: Annotated[bool, typer.Option("--only-ours", help="Leave transformers' generate out.")] = False,
    other_target: OtherTarget = None,
    other_draft: OtherDraft = None,
    peer: Annotated[
        Optional[str], typer.Option(help="URL of a llama.cpp server with the same model, to run beside.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Compare plain decoding, fixed draft lengths, the controller and transformers' own generation on the same prompts.

    Answers are greedy unless --temperature is given. The adapter in use is used.

    Example: adaptive bench --count 20 --tokens 200

    Example: adaptive bench --target DIR --draft DIR --lengths 4 --temperature 0.7 --json

    Example: adaptive bench --only-ours --other-target T.gguf --other-draft D.gguf
    """
    from rich.console import Console

    from cli.peer import check_peer
    from cli.prompts import read_prompts, require_answerable

    numbers = _lengths(lengths)
    if count < 1 or tokens < 2:
        raise AdaptiveError("--count must be at least 1 and --tokens at least 2")
    asked = of_every_kind(count) if prompts is None else read_prompts(prompts)[:count]
    console = Console(stderr=True)
    if peer is not None:
        check_peer(peer)

    from cli.opened import open_pair
    from cli.other_pair import advice, load_other, other_engines, other_settings

    settings = settings.model_copy(update={"record": False, "draft_length": "auto"})
    elsewhere = other_settings(settings, other_target, other_draft)
    with open_pair(settings, console) as session:
        if prompts is not None:
            with console.status("checking the prompts"):
                require_answerable(asked, session.pair)
        other = load_other(elsewhere, session, console) if elsewhere is not None else None
        rows = run(settings, session, asked, tokens, numbers, only_ours, peer, console, other)
        adapter = session.assistant.adapter
        verdict = None
        if other is not None and elsewhere is not None:
            there = _best(rows, other_engines(other, session.pair))
            verdict = advice(session.pair, (_best(rows, "ours"), settings), other, (there, elsewhere))
    if as_json:
        print(
            json.dumps(
                {
                    "adapter": adapter,
                    "prompts": len(asked),
                    "tokens": tokens,
                    "rows": [asdict(r) for r in rows],
                    "advice": verdict,
                }
            )
        )
    else:
        show(rows, Console())
        if verdict is not None:
            Console(highlight=False).print(verdict, soft_wrap=True, markup=False)


def _best(rows: list[Row], name: str) -> float:
    """Tokens per second of the fastest contender of this name."""
    return max(row.tokens_per_second for row in rows if row.contender.startswith(f"{name}, "))


def _lengths(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise AdaptiveError(f"--lengths is {text!r}; give numbers with commas, such as 2,4,8") from None
    if not numbers or not all(1 <= number <= 64 for number in numbers):
        raise AdaptiveError(f"--lengths is {text!r}; give numbers from 1 to 64")
    return numbers


def of_every_kind(count: int) -> list[PromptLine]:
    """``count`` of the bundled prompts, taken from all kinds in turn."""
    from adaptive.pair import BUNDLED
    from cli.prompts import read_prompts

    kinds = [read_prompts(file) for file in sorted((BUNDLED / "prompts").glob("*.jsonl"))]
    for number, kind in enumerate(kinds):
        random.Random(number).shuffle(kind)
    turns = [kind[i] for i in range(max(map(len, kinds))) for kind in kinds if i < len(kind)]
    return turns[:count]


def contenders(
    settings: Settings,
    session: OpenedPair,
    lengths: list[int],
    threads: int,
    url: str | None = None,
    other: Pair | None = None,
) -> list[Contender]:
    """The contenders of the table, which compares all with the first. ``threads`` is for transformers' own, which are
    left out for 0; ``url`` is that of a llama.cpp server, ``other`` the pair to compare with."""
    from adaptive.control.goodput import GoodputLength
    from adaptive.control.policy import FixedLength
    from adaptive.engines.protocol import ReadsFeatures
    from adaptive.measure import attentive_on, measure
    from adaptive.speculation import growing
    from adaptive.types import SamplingParams
    from cli.contenders import ours, peer, policies, theirs
    from cli.other_pair import other_engines

    pair = session.pair
    sampling = SamplingParams(
        temperature=settings.temperature or 0.0,
        top_k=settings.top_k or 0,
        top_p=settings.top_p if settings.top_p is not None else 1.0,
        min_p=settings.min_p or 0.0,
        seed=settings.seed,
    )
    field: list[Contender] = []
    heads = isinstance(pair.draft, ReadsFeatures)
    if threads:
        field.append(theirs("transformers, plain", pair, sampling, threads))
        if pair.draft is not None and not heads:
            field.append(theirs("transformers, assisted", pair, sampling, threads, assisted=True))
            field += [
                theirs(f"transformers, assisted {n}", pair, sampling, threads, assisted=True, length=n) for n in lengths
            ]
        field.append(theirs("transformers, prompt lookup", pair, sampling, threads, lookup=10))
    if url is not None:
        field.append(peer(url, pair, sampling))
    field.append(ours("ours, plain", pair, FixedLength(0), sampling))
    if (pair.draft is not None or pair.remote is not None) and not growing(pair):
        field += [ours(name, pair, policy, sampling) for name, policy in policies(lengths).items()]
        policy = session.assistant.policy
        if isinstance(policy, GoodputLength):
            field.append(ours("ours, controller", pair, policy, sampling))
    if other is not None:
        name = other_engines(other, pair)
        field.append(ours(f"{name}, plain", other, FixedLength(0), sampling))
        if other.draft is not None:
            field += [
                ours(title.replace("ours", name), other, policy, sampling)
                for title, policy in policies(lengths).items()
            ]
            costs = measure(other, sampling).costs
            controller = GoodputLength(costs, attentive=attentive_on(other), clock=other.clock)
            field.append(ours(f"{name}, controller", other, controller, sampling))
    return field


def run(
    settings: Settings,
    session: OpenedPair,
    prompts: list[PromptLine],
    tokens: int,
    lengths: list[int],
    only_ours: bool,
    peer: str | None,
    console: Any,
    other: Pair | None = None,
) -> list[Row]:
    """Run the comparison, with its progress on ``console``."""
    from rich.progress import track
    from transformers.utils import logging

    from cli.contenders import fastest_threads, race, table

    logging.set_verbosity_error()  # transformers' assisted generation warns about its own arguments at every round
    # transformers' ``generate`` needs models that transformers has loaded.
    theirs_too = not only_ours and _is_theirs(session.pair.target) and _is_theirs(session.pair.draft)
    if not only_ours and not theirs_too:
        console.print("transformers' own generation is left out: it runs no GGUF file and no head")
    with console.status("measuring before the race"):
        threads = fastest_threads(session.pair, prompts[0]) if theirs_too else 0
        field = contenders(settings, session, lengths, threads, peer, other)
    results = track(
        race(field, prompts, tokens),
        "racing",
        total=len(field) * len(prompts),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    return table(field, list(results))


def _is_theirs(engine: object | None) -> bool:
    return engine is None or hasattr(engine, "model")


def show(rows: list[Row], console: Any) -> None:
    """Print the table."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("", no_wrap=True)
    for head in ("tokens/s", "speed-up", "tokens\na round", "same", "repeated"):
        shown.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        length = "" if row.tokens_per_round is None else f"{row.tokens_per_round:.2f}"
        shown.add_row(
            row.contender,
            f"{row.tokens_per_second:.1f}",
            f"{row.against:.2f}",
            length,
            f"{row.same:.0%}",
            f"{row.loops:.0%}",
        )
    print_table(console, shown, "repeated", "same")
    console.print("[dim]speed-up and same: against the first line; repeated: 8-grams that an answer has said before[/]")
