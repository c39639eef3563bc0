"""``adaptive publish``: put the draft in use into an external server, and roll it back if the server gets worse."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from adaptive.errors import AdaptiveError
from cli.options import PAIR, shared_options

if TYPE_CHECKING:
    from rich.console import Console

    from adaptive.settings import Settings
    from adaptive.state import PairState
    from adaptive.upstream.lengths import Advice
    from adaptive.upstream.measure import Measured
    from cli import trial
    from cli.trial import Tried
    from trainers.dataset import Example

SERVER = "Server"

# Newest records searched for those held out of training, by which the draft length is chosen.
RECORDS = 1000
# Most tokens of an answer that are replayed.
LONGEST_OUTPUT = 512


@shared_options(*PAIR, "trust_remote_code", "draft_length")
def publish(
    settings: Settings,
    upstream: Annotated[
        Optional[str],
        typer.Option(help="Address of the server, to be measured.", metavar="URL", rich_help_panel=SERVER),
    ] = None,
    engine: Annotated[
        Optional[str], typer.Option(help="llama-server, vllm, sglang or adaptive.", rich_help_panel=SERVER)
    ] = None,
    model: Annotated[
        Optional[str],
        typer.Option(
            help="The target's name at the server; by default the first one that it lists.",
            metavar="NAME",
            rich_help_panel=SERVER,
        ),
    ] = None,
    head: Annotated[
        Optional[Path],
        typer.Option(help="EAGLE-3 head to publish in place of the draft in use.", metavar="FOLDER"),
    ] = None,
    to: Annotated[Optional[Path], typer.Option(help="Folder of the drafts; by default the pair's own.")] = None,
    start: Annotated[
        Optional[Path],
        typer.Option(help="File with the command that starts the server, which is edited.", rich_help_panel=SERVER),
    ] = None,
    restart: Annotated[
        Optional[str],
        typer.Option(help="Command that restarts the server.", metavar="COMMAND", rich_help_panel=SERVER),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=1, help="Seconds that a restart may take.", rich_help_panel=SERVER)
    ] = 300.0,
    api_key_file: Annotated[
        Optional[Path], typer.Option(help="File with the server's key.", rich_help_panel=SERVER)
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of the log that a measurement asks.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer of a measurement, in tokens.")] = 128,
    encoding: Annotated[str, typer.Option(help="Weights of a GGUF file: f32, f16, bf16 or q8_0.")] = "bf16",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Export the draft in use, or an EAGLE-3 head, for another server, and say how to start it; with --restart put it
    to use there.

    With --upstream the server is measured on prompts of the log, which tells the draft length; after a restart once
    more, and where its acceptance fell the draft before comes back (exit status 1). Where the times after the restart
    promise more at another draft length, that is tried, too.

    Example: adaptive publish --upstream http://127.0.0.1:8080 --target ./target --draft ./draft

    Example: adaptive publish --upstream http://127.0.0.1:8080 --target ./target --head my-head

    Example: adaptive publish --upstream http://127.0.0.1:8080 --start start.sh --restart "systemctl restart llama"
    """
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from adaptive.pair import load_tokenizer, pair_identity
    from adaptive.upstream import publishing, server
    from adaptive.upstream.lengths import LONGEST
    from adaptive.upstream.measure import find_kind, measure
    from checkpoints.store import AdapterStore
    from cli import trial
    from cli.answered import answered_examples, expected_acceptance
    from cli.published import AdaptedDraft, PublishedHead
    from cli.state import find_state
    from trainers.replay import mean_acceptance_length

    chosen = _chosen_length(settings)
    if restart is not None and upstream is None:
        raise AdaptiveError("--restart needs --upstream, the address at which the server is measured")
    key = None if api_key_file is None else _key(api_key_file)
    url = None if upstream is None else server.checked_url(upstream)
    kind = server.checked_kind(engine) or (None if url is None else find_kind(url, key))
    if kind is None:
        raise AdaptiveError("say which server it is for, with --upstream or --engine")
    state = find_state(settings)
    file = None if start is None else publishing.StartFile.read(start)
    console = Console(stderr=True, highlight=False)
    disable_progress_bar()
    with console.status("reading the log"):
        sample = _held_out(state)
    asked = _prompts(sample, prompts) if url is not None else []
    before = None
    if url is not None:
        with console.status("measuring the server as it is"):
            before = measure(url, key, asked, max_tokens, model, wait)
        asked = [list(prompt) for prompt in before.prompts]
    store = AdapterStore(state.adapters)
    published = AdaptedDraft(settings, store) if head is None else PublishedHead(settings, head)
    with console.status("writing the draft"):
        draft = published.write((to or state.root / "published").absolute(), kind, encoding)
    with console.status("replaying the log"):
        # Without --target the tokenizer would be that of the bundled pair, whatever pair the log is of.
        own = before is not None and pair_identity(settings).id == state.root.name
        said = answered_examples(load_tokenizer(settings), asked, before) if own and before is not None else []
        replays, answered = published.replays(sample, said)
        tokens = [1.0, *(mean_acceptance_length(replays, length) for length in range(1, LONGEST + 1))]
    advice = _advice(tokens, before)
    length = chosen or (advice.length if advice else 4)
    if length == 0:
        raise AdaptiveError(
            "by replay and the server's own times it is fastest without a draft; --draft-length N publishes it "
            "all the same"
        )
    outcome: dict[str, Any] = {
        "adapter": None if published.is_head else published.id,
        "head": published.id if published.is_head else None,
        "engine": kind.name,
        "draft": str(draft),
        "draft_length": length,
        "options": publishing.options(kind, draft, length, published.is_head),
        "expected": None if advice is None else asdict(advice),
        "expected_acceptance": expected_acceptance(answered, length, kind, max_tokens),
        "before": _figures(before),
        "after": None,
        "rolled_back": False,
    }
    console.print(f"{published.words} for {kind.name}: {draft}", soft_wrap=True)
    _say_expected(console, advice, length, mean_acceptance_length(replays, length))
    # Raised for a file that cannot be edited, before the server is touched.
    edited = None if file is None else publishing.edited(file.before, kind, outcome["options"])
    if restart is not None:
        assert url is not None
        assert before is not None
        is_head = published.is_head
        running = trial.Server(url, key, kind, restart, file, wait, asked, max_tokens, model, is_head)
        with console.status("restarting the server, and measuring it"):
            tried = trial.settle(running, before, draft, length, None if chosen else tokens, _remembered(state))
        rolled_back, length = tried.worse is not None, tried.length
        outcome |= {"draft_length": length}
        outcome |= {"options": publishing.options(kind, draft, length, published.is_head)}
        outcome |= {"expected_acceptance": expected_acceptance(answered, length, kind, max_tokens)}
        outcome |= {"after": _figures(tried.measured), "rolled_back": rolled_back}
        if not rolled_back:
            _remember(state, trial.Put(published.id, str(draft), length))
            console.print(f"it is in use: {_compared(before, tried, outcome['expected_acceptance'])}", soft_wrap=True)
        else:
            console.print(f"[yellow]rolled back:[/] {tried.worse}", soft_wrap=True)
    elif file is not None and edited is not None:
        file.write(edited)
    if as_json:
        typer.echo(json.dumps(outcome, indent=2))
    if outcome["rolled_back"]:
        raise typer.Exit(1)
    if file is not None:
        console.print(f"{file.path} is edited", soft_wrap=True)
    elif not as_json:
        typer.echo(f"start {kind.name} with: {_typed(outcome['options'])}")


def _chosen_length(settings: Settings) -> int | None:
    """The draft length of the settings; None if it is to be chosen. Raises AdaptiveError for a tree, and for 0."""
    from adaptive.settings import fixed_draft_length

    said = fixed_draft_length(settings.draft_length)
    if said is None:
        return None
    length, tree = said
    if tree:
        raise AdaptiveError(
            f"--draft-length is {settings.draft_length}, and publish takes no tree; give a number from 1 to 64, or auto"
        )
    if length == 0:
        raise AdaptiveError("--draft-length is 0, with which no draft is used; give a number from 1 to 64, or auto")
    return length


def _held_out(state: PairState) -> list[Example]:
    """Records on which no adapter is trained, or all records if there are none such; oldest first. Raises
    AdaptiveError."""
    from trainers.dataset import examples, join, read_log, split

    dataset = read_log(state.records, RECORDS)
    parts = split(dataset)
    held = join(parts.gate, parts.validation)
    found = [one for one in examples(held if len(held) else dataset, LONGEST_OUTPUT) if one.replayable]
    if not found:
        raise AdaptiveError(
            f"the log {state.records} holds nothing to measure by; let `adaptive learn` run for a while"
        )
    return sorted(found, key=lambda example: example.id)


def _prompts(sample: list[Example], count: int) -> list[list[int]]:
    """Up to ``count`` distinct prompts, the newest of ``sample``."""
    found = {tuple(example.prompt.tolist()): None for example in reversed(sample)}
    return [list(prompt) for prompt in list(found)[:count]]


def _advice(tokens: list[float], before: Measured | None) -> Advice | None:
    from adaptive.upstream.lengths import advise, round_costs

    costs = None if before is None else round_costs(before.answers)
    return None if costs is None else advise(tokens, costs)


def _say_expected(console: Console, advice: Advice | None, length: int, tokens: float) -> None:
    """Print what is expected at draft length ``length``, with ``tokens`` tokens a round."""
    accepted = (tokens - 1) / length
    said = f"draft length {length}: {tokens:.2f} tokens a round by replay, {accepted:.3f} of the drafted accepted"
    if advice is not None and advice.length == length:
        said += f"; {advice.tokens_per_second:.1f} tokens/s expected, {advice.plain_per_second:.1f} without a draft"
    console.print(said, soft_wrap=True)


def _figures(measured: Measured | None) -> dict[str, Any] | None:
    from adaptive.upstream.measure import each_accepted

    if measured is None:
        return None
    return {
        "acceptance": measured.acceptance,
        "each_accepted": each_accepted(measured),
        "tokens_a_round": measured.length,
        "tokens_per_second": measured.tokens_per_second,
        "answers": len(measured.answers),
    }


def _compared(before: Measured, tried: Tried, expected: float | None) -> str:
    after = tried.measured
    assert after is not None
    said = [
        f"{before.tokens_per_second:.1f} tokens/s became {after.tokens_per_second:.1f} at draft length {tried.length}"
    ]
    if after.acceptance is not None:
        was = "" if before.acceptance is None else f", {before.acceptance:.3f} before"
        said.append(f"{after.acceptance:.3f} of the drafted tokens are accepted{was}")
    if expected is not None:
        said.append(f"replay of these answers expects {expected:.3f}")
    return "; ".join(said)


def _typed(options: dict[str, str]) -> str:
    import shlex

    return " ".join(f"{name} {shlex.quote(value)}" for name, value in options.items())


def _key(file: Path) -> str:
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AdaptiveError(f"API key file {file} cannot be read: {error}") from error
    if not (key and key.isascii() and key.isprintable()):
        raise AdaptiveError(f"API key file {file} holds no key: one line of ASCII characters is expected")
    return key


def _remember(state: PairState, put: trial.Put) -> None:
    from checkpoints import files

    note = state.root / "published.json"
    try:
        files.replace_text(state.root, note, json.dumps(asdict(put)))
    except OSError as error:
        raise AdaptiveError(f"it is in use, but {note} cannot be written ({error.strerror})") from error


def _remembered(state: PairState) -> trial.Put | None:
    """What was published to the server before, None if nothing was."""
    from cli import trial

    try:
        return trial.Put(**json.loads((state.root / "published.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
