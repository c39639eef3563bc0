"""``adaptive adapters``: list the trained adapters, choose the one in use, and export them."""

from __future__ import annotations

import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from adaptive.errors import AdaptiveError
from adaptive.printable import printable_line
from cli.adapters_export import base_of, drafts_by_eagle, export_gguf, write_merged
from cli.cells import print_table
from cli.groups import group
from cli.options import PAIR, shared_options
from cli.output import print_json
from cli.state import find_state, working

if TYPE_CHECKING:
    from adaptive.settings import Settings
    from checkpoints.manifest import HeldOut, Manifest
    from checkpoints.store import AdapterStore

app = group("List, show, promote, roll back, prune and export the draft's adapters.\n\nExample: adaptive adapters list")

Name = Annotated[str, typer.Argument(metavar="ID", help="Id of an adapter, as 7 or 0007; current is the one in use.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
@shared_options(*PAIR)
def list_(settings: Settings, as_json: AsJson = False) -> None:
    """Every adapter: its status, and acceptance on held-out records before and after.

    Example: adaptive adapters list

    Example: adaptive adapters list --json
    """
    store = open_store(settings)
    current, manifests, damaged = store.current_id(), store.list(), store.damaged()
    if as_json:
        objects = [{**as_object(manifest, current), "damaged": False} for manifest in manifests]
        objects += [{"id": name, "current": name == current, "damaged": True} for name in damaged]
        print_json(objects, indent=2)
        return
    from rich.console import Console

    console = Console()
    if manifests:
        print_table(console, _table(manifests, current), "age", "older records", "answers")
    else:
        console.print("no adapter yet; `adaptive distill` trains one from the log")
    prunable = store.prunable(settings.keep_adapters) if damaged else ()
    for name in damaged:
        deleted = "; `adaptive adapters prune` deletes it" if name in prunable else ""
        console.print(f"{name} is damaged and not used{deleted}", highlight=False)


@app.command()
@shared_options(*PAIR)
def show(settings: Settings, name: Name = "current", as_json: AsJson = False) -> None:
    """Everything known about one adapter, and whether its files are undamaged.

    Example: adaptive adapters show 7
    """
    store = open_store(settings)
    manifest = store.show(_resolve(store, name))
    damage = None
    try:
        store.verify(manifest.id)
    except AdaptiveError as error:
        damage = str(error)
    if as_json:
        known = {**as_object(manifest, store.current_id()), "files_whole": damage is None, "damage": damage}
        print_json(known, indent=2)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    in_use = ", in use" if manifest.id == store.current_id() else ""
    trained = manifest.trained_on
    rows = {
        "adapter": f"{manifest.id} ({manifest.status}{in_use})",
        "reason": manifest.reason,
        "created": f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(manifest.created))} ({_age(manifest)} ago)",
        "parent": manifest.parent or "none: trained from the draft without an adapter",
        "draft": f"{manifest.base.id} ({manifest.base.weights})",
        "trained on": _trained_on(manifest),
        "records": "none" if trained.first_id is None else f"{trained.first_id} to {trained.last_id}",
        "domains": ", ".join(f"{count} {name}" for name, count in sorted(trained.domains.items())) or "not labelled",
        "training": f"{manifest.train_seconds:.0f} s on {manifest.device}",
        "recipe": ", ".join(f"{key} {value}" for key, value in _recipe(manifest)) or "not noted",
        **({} if manifest.vocabulary is None else {"vocabulary": manifest.vocabulary}),
        "recent held-out": _held_out(manifest.recent),
        "older held-out": _held_out(manifest.older),
        "files": damage or f"{len(manifest.files)}, whole",
        "folder": str(store.path(manifest.id)),
    }
    for key, value in rows.items():
        table.add_row(f"[bold]{key}[/]", Text(printable_line(value)))
    Console(highlight=False).print(table)


@app.command()
@shared_options(*PAIR)
def promote(
    settings: Settings,
    name: Annotated[str, typer.Argument(metavar="ID", help="Id of an adapter, as 7 or 0007.")],
    reason: Annotated[str, typer.Option(help="Why, for the manifest.")] = "promoted by hand",
) -> None:
    """Put an adapter into use, whatever the gate's result. Running chats and servers change to it.

    Example: adaptive adapters promote 7 --reason "better on my own code"
    """
    manifest = open_store(settings).promote(name, reason)
    typer.echo(f"adapter {manifest.id} is in use")


@app.command()
@shared_options(*PAIR)
def rollback(
    settings: Settings,
    reason: Annotated[str, typer.Option(help="Why, for the manifest.")] = "rolled back by hand",
) -> None:
    """Take the adapter in use out of use; the one before it comes back, or the draft without an adapter.

    Example: adaptive adapters rollback --reason "slower on my own code"
    """
    manifest = open_store(settings).rollback(reason)
    typer.echo(f"{f'adapter {manifest.id}' if manifest else 'the draft without an adapter'} is in use again")


@app.command()
@shared_options(*PAIR)
def prune(
    settings: Settings,
    keep: Annotated[
        Optional[int], typer.Option(help="How many of the newest stay; by default as many as keep_adapters says.")
    ] = None,
) -> None:
    """Delete old adapters, never the one in use nor the one a rollback returns to. Training runs do that by themselves
    (setting keep_adapters).

    Example: adaptive adapters prune --keep 3
    """
    deleted = open_store(settings).prune(settings.keep_adapters if keep is None else keep)
    typer.echo(f"deleted {', '.join(deleted)}" if deleted else "nothing to delete")


@app.command()
@shared_options(*PAIR, "trust_remote_code")
def export(
    settings: Settings,
    name: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="Id of an adapter, as 7 or 0007; current: the one in use; draft: the EAGLE-3 head of --draft without "
            "one, with --format speculators or gguf.",
        ),
    ],
    folder: Annotated[Optional[Path], typer.Argument(help="Where the PEFT folder, or the GGUF file, goes.")] = None,
    merged: Annotated[
        Optional[Path],
        typer.Option(metavar="PATH", help="Write the draft with the adapter merged in, as a checkpoint."),
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", help="peft; gguf for llama.cpp; speculators for vLLM, of an EAGLE-3 head.")
    ] = "peft",
    encoding: Annotated[
        Optional[str],
        typer.Option(help="Weights of a merged draft or a head as GGUF: f32, f16, bf16 (the default) or q8_0."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
) -> None:
    """Copy an adapter as a PEFT folder, or write the merged draft as a checkpoint of its own; or both for llama.cpp.

    Example: adaptive adapters export current my-adapter

    Example: adaptive adapters export 7 --merged my-draft

    Example: adaptive adapters export current my-adapter.gguf --format gguf

    Example: adaptive adapters export draft my-head --format speculators --target ./my-target --draft ./eagle3-head

    Example: adaptive adapters export draft my-head.gguf --format gguf --target ./my-target --draft ./eagle3-head
    """
    if (folder is None) == (merged is None):
        raise AdaptiveError("name one folder or file to export to: `export ID PATH`, or `export ID --merged PATH`")
    if format_ not in ("peft", "gguf", "speculators"):
        raise AdaptiveError(f"--format is {format_!r}; it must be peft, gguf or speculators")
    if name == "draft" and format_ == "peft":
        raise AdaptiveError("draft, a head without an adapter, needs --format speculators or --format gguf")
    from cli.export import ENCODING

    eagle = format_ == "gguf" and (name == "draft" or drafts_by_eagle(settings))
    if encoding is not None and not (eagle or (format_ == "gguf" and merged is not None)):
        raise AdaptiveError("--encoding is only for a merged draft (--merged) or an EAGLE-3 head with --format gguf")
    encoding = encoding or ENCODING
    if format_ == "speculators" or eagle:
        from cli.export import export_eagle_gguf, export_speculators

        lora = None if name == "draft" else _lora(settings, name)
        destination = folder or merged  # both formats hold the head with the adapter merged
        assert destination is not None
        if format_ == "gguf":
            export_eagle_gguf(settings, lora, destination, encoding, force)
        else:
            export_speculators(settings, lora, destination, force)
        return
    store = open_store(settings)
    manifest = store.verify(_resolve(store, name))
    if manifest.kind == "head" and (format_ == "gguf" or merged is not None):
        raise AdaptiveError(
            f"adapter {manifest.id} is a head on the target's hidden states, which is no model by itself; export it as "
            f"a folder (`adapters export {name} FOLDER`), which --draft takes"
        )
    if format_ == "gguf":
        export_gguf(settings, store.path(manifest.id), manifest, folder, merged, encoding, force)
    elif folder is not None:
        store.export(manifest.id, folder, force)
        reader = _used_as_draft(folder) if manifest.kind == "head" else "for PEFT and anything that reads it"
        typer.echo(f"adapter {manifest.id} is in {folder}, {reader}")
    elif merged is not None:
        with working("writing the draft"):
            write_merged(settings, store.path(manifest.id), manifest, merged, force)
        typer.echo(f"the draft with adapter {manifest.id} is in {merged}; {_used_as_draft(merged)}")


def _used_as_draft(folder: Path) -> str:
    return f"use it with --draft {shlex.quote(str(folder))}"


def _lora(settings: Settings, name: str) -> Path:
    """The folder of an undamaged LoRA adapter for the draft that the settings name. Raises AdaptiveError."""
    store = open_store(settings)
    manifest = store.verify(_resolve(store, name))
    if manifest.kind == "head":
        raise AdaptiveError(
            f"adapter {manifest.id} is a head grown here, which only this program runs: its layer reads one fused "
            "input; `adaptive head FOLDER` grows one for other servers on the same log"
        )
    base_of(settings, manifest)
    return store.path(manifest.id)


def open_store(settings: Settings) -> AdapterStore:
    """The store of the pair that the settings name, else of the last used pair."""
    from checkpoints.store import AdapterStore

    return AdapterStore(find_state(settings).adapters)


def as_object(manifest: Manifest, current: str | None) -> dict[str, Any]:
    """The manifest as JSON values, with ``current`` for the one in use."""
    return {**asdict(manifest), "current": manifest.id == current}


def _resolve(store: AdapterStore, name: str) -> str:
    if name != "current":
        return name
    current = store.current_id()
    if current is None:
        raise AdaptiveError("no adapter is in use; name one, as `adaptive adapters list` shows them")
    return current


def _table(manifests: tuple[Manifest, ...], current: str | None) -> Any:
    """Three lines for each adapter; narrow enough for 80 columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    caption = "Held-out acceptance, 95% interval of its gain, tokens a round. Answers: those it was trained on."
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, caption=caption, caption_justify="left")
    for heading in ("adapter", "status", "recent records", "older records"):
        table.add_column(heading, no_wrap=True)
    for heading in ("answers", "age"):
        table.add_column(heading, justify="right", no_wrap=True)
    for manifest in manifests:
        in_use = manifest.id == current
        table.add_row(
            manifest.id,
            "[bold green]in use[/]" if in_use else manifest.status.replace("_", " "),
            _short(manifest.recent),
            _short(manifest.older),
            f"{manifest.trained_on.generations:,}",
            _age(manifest),
        )
    return table


def _short(held: HeldOut | None) -> str:
    if held is None:
        return "not measured"
    length_before, length_after = held.mean_acceptance_length_before, held.mean_acceptance_length_after
    return (
        f"{held.acceptance_before.mean:.3f} → {held.acceptance_after.mean:.3f}\n"
        f"{held.gain.low:+.3f} to {held.gain.high:+.3f}\n"
        f"{length_before.mean:.2f} → {length_after.mean:.2f}"
    )


def _recipe(manifest: Manifest) -> list[tuple[str, Any]]:
    """The adapter's hyper-parameters, without those that ``Manifest.vocabulary`` describes in words."""
    told = manifest.vocabulary is not None
    return [(key, value) for key, value in manifest.hyperparameters.items() if not (told and "vocabulary" in key)]


def _held_out(held: HeldOut | None) -> str:
    if held is None:
        return "not measured"
    before, after = held.acceptance_before, held.acceptance_after
    return (
        f"{before.mean:.3f} → {after.mean:.3f} ({after.low:.3f} to {after.high:.3f})\n"
        f"gain {held.gain.mean:+.3f} ({held.gain.low:+.3f} to {held.gain.high:+.3f})\n"
        f"tokens a round {held.mean_acceptance_length_before.mean:.2f} → "
        f"{held.mean_acceptance_length_after.mean:.2f} at draft length {held.draft_length}"
    )


def _trained_on(manifest: Manifest) -> str:
    return f"{manifest.trained_on.generations:,} answers\n{manifest.trained_on.tokens:,} tokens"


def _age(manifest: Manifest) -> str:
    seconds = max(0.0, time.time() - manifest.created)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
