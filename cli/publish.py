"""``adaptive publish``: put the draft in use into an external server, and roll it back if the server gets worse."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from adaptive.errors import AdaptiveError, why_unread
from adaptive.printable import printable_line
from cli.options import PAIR, shared_options, typed

if TYPE_CHECKING:
    from rich.console import Console

    from adaptive.settings import Settings
    from adaptive.state import PairState
    from adaptive.upstream.kinds import Kind
    from adaptive.upstream.lengths import Advice
    from adaptive.upstream.measure import Measured
    from cli.publish_drafts import Published
    from cli.publish_trial import Tried
    from trainers.dataset import Example
    from trainers.replay import Replay

SERVER = "Server"

# Options of a measurement.
MEASURING = ("prompts", "max_tokens", "model", "wait", "api_key_file")
# Newest records searched for those held out of training, by which the draft length is chosen.
RECORDS = 1000
# Most tokens of an answer that are replayed.
LONGEST_OUTPUT = 512
# Draft length if the seconds of the server's rounds are not known.
USUAL_LENGTH = 4
# Factor on the largest possible gain up to which a measured gain is taken for right.
MEASURED = 1.1


@dataclass(frozen=True)
class Plan:
    """How a draft is published: its length, and why. By replay of held-out records it brings ``tokens`` tokens a round
    at the draft lengths 0, 1, ..., and ``expected`` ones at ``length``; ``answered`` are replays of the answers by
    which the server was measured. ``advice`` is None if the seconds of its rounds are not known."""

    length: int
    advice: Advice | None
    tokens: list[float]
    expected: float
    answered: list[Replay]


@shared_options(*PAIR, "trust_remote_code", "draft_length")
def publish(
    settings: Settings,
    context: typer.Context,
    upstream: Annotated[
        Optional[str],
        typer.Option(
            help="Address of the server, to be measured.",
            metavar="URL",
            envvar="ADAPTIVE_UPSTREAM",
            rich_help_panel=SERVER,
        ),
    ] = None,
    engine: Annotated[
        Optional[str], typer.Option(help="llama-server, vllm, sglang, lm-studio or adaptive.", rich_help_panel=SERVER)
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
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of the log that are answered for a measurement.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer of a measurement, in tokens.")] = 128,
    encoding: Annotated[str, typer.Option(help="Weights of a GGUF file: f32, f16, bf16 or q8_0.")] = "bf16",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write the draft in use, or an EAGLE-3 head, for another server; with --restart put it into use there.

    With --upstream the server is measured on prompts of the log, and the draft length is chosen by that. After a
    restart it is measured again: if acceptance fell, the previous draft returns (exit status 1). If the new times
    promise more at another draft length, that length is tried too.

    Example: adaptive publish --upstream http://127.0.0.1:8080 --target ./target --draft ./draft

    Example: adaptive publish --upstream http://127.0.0.1:8080 --target ./target --head my-head

    Example: adaptive publish --upstream http://127.0.0.1:8080 --start start.sh --restart "systemctl restart llama"
    """
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with console.status("starting"):
        from transformers.utils.logging import disable_progress_bar

        from adaptive.engines.cpu.torch_threads import set_threads
        from adaptive.pair import load_tokenizer, pair_identity
        from adaptive.upstream import publishing, server
        from adaptive.upstream.kinds import LM_STUDIO, VLLM
        from adaptive.upstream.measure import find_kind, measure
        from checkpoints.store import AdapterStore
        from cli import publish_notes, publish_trial
        from cli.export import check_encoding
        from cli.publish_drafts import AdaptedDraft, PublishedHead, target_rows
        from cli.publish_replay import answered_examples, expected_acceptance
        from cli.state import find_state

    set_threads(settings.threads)
    chosen = _chosen_length(settings)
    check_encoding(encoding)
    if restart is not None and upstream is None:
        raise AdaptiveError("--restart needs --upstream, the address at which the server is measured")
    if upstream is None and (unused := typed(context, *MEASURING)):
        raise AdaptiveError(f"{unused}: no server is measured without --upstream, its address; leave that out")
    key = _key(settings, api_key_file)
    url = None if upstream is None else server.checked_url(upstream)
    kind = server.checked_kind(engine) or (None if url is None else find_kind(url, key, wait))
    if kind is None:
        raise AdaptiveError("say which server it is for, with --upstream or --engine")
    if not publishing.takes_gguf(kind) and typed(context, "encoding"):
        raise AdaptiveError(f"--encoding is for GGUF files, and {kind.name} takes none; leave it out")
    publishing.check(kind, is_head=head is not None, by_hand=start is None and restart is None)
    state = find_state(settings)
    file = None if start is None else publishing.StartFile.read(start)
    disable_progress_bar()
    # Without --target the settings' models are the bundled pair, whatever pair is published.
    named = pair_identity(settings).id == state.root.name
    rows = target_rows(settings) if named and kind is VLLM else None
    published = PublishedHead(settings, head) if head else AdaptedDraft(settings, AdapterStore(state.adapters), rows)
    draft = published.path((to or publish_notes.folder_of(state)).absolute(), kind, encoding)
    there = draft.exists()
    if kind is LM_STUDIO:
        with console.status("writing the draft"):
            published.write(draft, kind, encoding)
        publish_notes.keep(state, publish_notes.Put(kind.name, published.id, str(draft), 0))
        said = json.dumps({**_named(published, kind, draft), "options": None}, indent=2) if as_json else None
        typer.echo(said or f"{published.words} is in {draft}; choose it in LM Studio by hand")
        return
    with console.status("reading the log"):
        sample = _held_out(state)
    before = None
    if url is not None:
        with console.status("measuring the server as it is"):
            before = measure(url, key, _prompts(sample, prompts), max_tokens, model, wait)
    with console.status("replaying the log"):
        known = before if named else None
        answers = [] if known is None else answered_examples(load_tokenizer(settings), known.prompts, known)
        plan = _plan(published, sample, answers, before, chosen)
    options = publishing.options(kind, draft, plan.length, published.is_head)
    # Raised for a file that cannot be edited, before the server is touched.
    edited = None if file is None else publishing.edited(file.before, kind, options)
    with console.status("writing the draft"):
        published.write(draft, kind, encoding)
    console.print(f"{published.words} for {kind.name}: {draft}", soft_wrap=True, markup=False)
    _say_expected(console, plan)
    tried, length = None, plan.length

    def discard() -> None:
        """Delete the draft, unless it was there before."""
        if not there:
            publish_notes.discard_own(state, draft)

    if restart is not None:
        assert url is not None
        assert before is not None
        asked, is_head = before.prompts, published.is_head
        running = publish_trial.Server(url, key, kind, restart, file, wait, asked, max_tokens, model, is_head)
        with console.status("restarting the server, and measuring it"):
            given, tokens = publish_notes.earlier(state, url, kind), None if chosen else plan.tokens
            tried = publish_trial.settle(running, before, draft, length, tokens, given, discard)
        length = tried.length
        if tried.worse is None:
            publish_notes.remember(state, url, publish_notes.Put(kind.name, published.id, str(draft), length))
        else:
            discard()
    else:
        publish_notes.keep(state, publish_notes.Put(kind.name, published.id, str(draft), length))
        if file is not None and edited is not None:
            file.write(edited)
    options = publishing.options(kind, draft, length, published.is_head)
    expected = expected_acceptance(plan.answered, length, kind, max_tokens)
    if tried is not None and before is not None:
        _say_tried(console, before, tried, expected)
    if as_json:
        outcome = _outcome(plan, length, expected, before, tried)
        typer.echo(json.dumps({**_named(published, kind, draft), "options": options, **outcome}, indent=2))
    if tried is not None and tried.worse is not None:
        raise typer.Exit(1)
    if file is not None:
        console.print(f"{file.path} is edited", soft_wrap=True, markup=False)
    elif not as_json:
        typer.echo(f"start {kind.name} with: {_typed(options)}")


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


def _plan(
    published: Published, sample: list[Example], answers: list[Example], before: Measured | None, chosen: int | None
) -> Plan:
    """Replay the held-out ``sample`` and the server's ``answers``, and choose the draft length, unless one is
    ``chosen``. Raises AdaptiveError if plain decoding is expected to be fastest."""
    from adaptive.upstream.lengths import LONGEST, advise, round_costs
    from trainers.replay import mean_acceptance_length

    replays, answered = published.replays(sample, answers)
    tokens = [1.0, *(mean_acceptance_length(replays, length) for length in range(1, LONGEST + 1))]
    costs = None if before is None else round_costs([before])
    advice = None if costs is None else advise(tokens, costs)
    length = chosen or (USUAL_LENGTH if advice is None else advice.length)
    if length == 0:
        raise AdaptiveError(
            "by replay and the server's own times it is fastest without a draft; --draft-length N publishes it "
            "all the same"
        )
    return Plan(length, advice, tokens, mean_acceptance_length(replays, length), answered)


def _say_expected(console: Console, plan: Plan) -> None:
    """Print what is expected of the draft."""
    accepted, advice = (plan.expected - 1) / plan.length, plan.advice
    said = f"draft length {plan.length}: {plan.expected:.2f} tokens a round by replay, {accepted:.3f} of the drafted "
    said += "accepted"
    if advice is not None and advice.length == plan.length:
        said += f"; {advice.tokens_per_second:.1f} tokens/s expected, {advice.plain_per_second:.1f} without a draft"
    console.print(said, soft_wrap=True)


def _say_tried(console: Console, before: Measured, tried: Tried, expected: float | None) -> None:
    """Print how the trial ended."""
    from rich.markup import escape

    if tried.worse is None:
        console.print(f"it is in use: {compared(before, tried, expected)}", soft_wrap=True)
    else:
        console.print(f"[yellow]rolled back:[/] {escape(printable_line(tried.worse))}", soft_wrap=True)


def _named(published: Published, kind: Kind, draft: Path) -> dict[str, Any]:
    """What is published, as plain JSON values."""
    return {
        "adapter": None if published.is_head else published.id,
        "head": published.id if published.is_head else None,
        "engine": kind.name,
        "draft": str(draft),
    }


def _outcome(
    plan: Plan, length: int, expected: float | None, before: Measured | None, tried: Tried | None
) -> dict[str, Any]:
    """How that went, as plain JSON values."""
    return {
        "draft_length": length,
        "expected": None if plan.advice is None else asdict(plan.advice),
        "expected_acceptance": expected,
        "before": _figures(before),
        "after": None if tried is None else _figures(tried.measured),
        "rolled_back": tried is not None and tried.worse is not None,
    }


def _figures(measured: Measured | None) -> dict[str, Any] | None:
    from adaptive.upstream.measure import each_accepted

    if measured is None:
        return None
    return {
        "acceptance": measured.acceptance,
        "each_accepted": each_accepted(measured),
        "tokens_per_round": measured.length,
        "tokens_per_second": measured.tokens_per_second,
        "answers": len(measured.answers),
    }


def compared(before: Measured, tried: Tried, expected: float | None) -> str:
    """The server before, and in the trial, in words; ``expected`` is the acceptance by replay."""
    after = tried.measured
    assert after is not None
    said = [
        f"{before.tokens_per_second:.1f} tokens/s became {after.tokens_per_second:.1f} at draft length {tried.length}"
    ]
    most = 1 + tried.length * (after.acceptance or 0.0)  # tokens of a round, which takes no less than a plain one
    if not before.drafted and after.drafted and after.tokens_per_second > MEASURED * most * before.tokens_per_second:
        said[0] += f", but such a draft cannot bring more than {most:.1f} times: the server was slow before"
    if after.acceptance is not None:
        was = "" if before.acceptance is None else f", {before.acceptance:.3f} before"
        said.append(f"{after.acceptance:.3f} of the drafted tokens are accepted{was}")
    if expected is not None:
        said.append(f"replay of these answers expects {expected:.3f}")
    return "; ".join(said)


def _typed(options: dict[str, str]) -> str:
    import shlex

    return " ".join(f"{name} {shlex.quote(value)}" for name, value in options.items())


def _key(settings: Settings, named: Path | None) -> str | None:
    """The server's key: in the file ``named`` on the command line, else that of the settings. Raises AdaptiveError."""
    file = named or settings.api_key_file
    if file is None and settings.api_key is None:
        return None
    place, said = f"API key file {file}", ""
    if file is None:
        assert settings.api_key is not None
        place, said = "the setting api_key", settings.api_key.get_secret_value()
    else:
        try:
            said = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise AdaptiveError(f"{place} cannot be read: {why_unread(error)}") from error
    key = said.strip()
    if not (key and key.isascii() and key.isprintable()):
        raise AdaptiveError(f"{place} holds no key: one line of ASCII characters is expected")
    return key
