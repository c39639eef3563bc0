"""``adaptive export``: the models of a pair as GGUF files, for llama.cpp."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adaptive.errors import AdaptiveError
from cli.options import shared_options
from cli.state import working

if TYPE_CHECKING:
    from collections.abc import Callable

    from adaptive.pair import Source
    from adaptive.settings import Settings

# Encoding of the weights in a GGUF file if none is named.
ENCODING = "bf16"


@shared_options("target", "draft", "revision", "draft_revision", "trust_remote_code", without=("home",))
def export(
    settings: Settings,
    folder: Annotated[Path, typer.Argument(help="Where the files go.")],
    encoding: Annotated[str, typer.Option(help="Weights as f32, f16, bf16 or q8_0.")] = ENCODING,
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write the pair's models (the bundled pair's, if none is named) as GGUF files for llama.cpp.

    Example: adaptive export gguf

    Example: adaptive export gguf --encoding q8_0 --target ./my-target --draft ./my-draft
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from adaptive.pair import sources

    pair = {role: source for role, source in zip(("target", "draft"), sources(settings), strict=True) if source}
    written: dict[str, Path] = {}
    for role, source in pair.items():
        if source.gguf is not None:
            raise AdaptiveError(f"{role} {source.id} is a GGUF file already")
        if source.head is not None:
            raise AdaptiveError(
                f"the draft is {source.head.words}, which is no model by itself; export the target alone"
            )
        written[role] = folder / f"{Path(source.id).name}-{encoding}.gguf"
    if written.get("draft") == written["target"]:
        written = {role: file.with_name(f"{role}-{file.name}") for role, file in written.items()}
    for file in written.values():
        check_free(file, force)
    console = Console(stderr=True)
    columns = (TextColumn("writing {task.description:7}"), BarColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for role, source in pair.items():
            task = progress.add_task(role, total=1.0)
            write_checkpoint(source, None, written[role], encoding, settings, _mover(progress, task))
    if as_json:
        typer.echo(json.dumps({role: str(file) for role, file in written.items()}))
        return
    for file in written.values():
        typer.echo(f"{file}  {file.stat().st_size / 1e6:.1f} MB")
    typer.echo(f"Next: {next_command(written, pair.get('draft'), settings.draft_revision)}")


def next_command(written: dict[str, Path], draft: Source | None, revision: str | None = None) -> str:
    """The command that the user most likely needs next."""
    words = ["adaptive", "chat", "--target", str(written["target"])]
    if draft is not None:
        words += ["--draft", str(written["draft"]), "--draft-checkpoint", draft.id]
        words += [] if revision is None else ["--draft-revision", revision]
    return shlex.join(words)


def check_free(file: Path, force: bool) -> None:
    """Raise AdaptiveError if the file exists and ``force`` is not set, or is a folder."""
    if file.is_dir():
        raise AdaptiveError(f"{file} is a folder; name a file")
    if file.exists() and not force:
        raise AdaptiveError(f"{file} is there already; choose another name, or --force to write over it")


def check_encoding(encoding: str) -> None:
    """Raise AdaptiveError for an unknown encoding."""
    from adaptive.engines.llamacpp.write import ENCODINGS

    if encoding not in ENCODINGS:
        raise AdaptiveError(f"--encoding is {encoding!r}; it must be one of {', '.join(ENCODINGS)}")


def write_checkpoint(
    source: Source,
    adapter: Path | None,
    file: Path,
    encoding: str,
    settings: Settings,
    on_progress: Callable[[float], None] | None = None,
) -> None:
    """Write the language model of the checkpoint ``source`` as a GGUF file, with ``adapter`` merged into it if given.

    The adapter's delta is added in float32 before the weights are encoded, so that the sum is rounded once.
    """
    import torch
    from transformers.utils import logging

    from adaptive.engines.cpu.torch_threads import set_threads
    from adaptive.engines.hf.lora import MergedAdapter
    from adaptive.engines.llamacpp.write import write_model
    from adaptive.engines.load import load_model, read_config
    from adaptive.tokenizers import read_tokenizer

    check_encoding(encoding)
    set_threads(settings.threads)
    trust = settings.trust_remote_code
    logging.disable_progress_bar()
    tokenizer = read_tokenizer(source, trust)
    dtype = torch.float32 if adapter is not None else getattr(read_config(source, settings), "dtype", None)
    model = load_model(dataclasses.replace(source, quantize="none"), settings, "cpu", dtype or torch.float32)
    if adapter is not None:
        MergedAdapter(model).apply(adapter)
    write_model(model, tokenizer, file, encoding, Path(source.id).name, on_progress)  # type: ignore[arg-type]


def _mover(progress: object, task: object) -> Callable[[float], None]:
    return lambda share: progress.update(task, completed=share)  # type: ignore[attr-defined, no-any-return]


def eagle_of(settings: Settings, what: str) -> tuple[Source, Source]:
    """The target and the EAGLE-3 head of --draft. Raises AdaptiveError for any other draft, for which ``what`` has no
    layout."""
    from adaptive.engines.head.kinds import HeadKind
    from adaptive.pair import sources

    target, draft = sources(settings)
    if draft is None or draft.head is not HeadKind.EAGLE3:
        named = "none" if draft is None else draft.id if draft.head is None else draft.head.words
        raise AdaptiveError(
            f"{what} writes an EAGLE-3 head, and the draft is {named}; name one with --draft (`adaptive head FOLDER` "
            "grows one on the log)"
        )
    return target, draft


def export_speculators(settings: Settings, adapter: Path | None, folder: Path, force: bool) -> None:
    """Write the EAGLE-3 head of --draft, with ``adapter`` merged into it if given, in the format of the speculators
    library, and print the command for vLLM.

    Raises AdaptiveError as ``eagle_of``.
    """
    from adaptive.engines.head.speculators import write_speculators
    from checkpoints.folder import check_destination

    target, draft = eagle_of(settings, "--format speculators")
    check_destination(folder, force)
    with working("writing the head"):
        write_speculators(draft.folder, target.folder, target.id, folder, adapter)
    typer.echo(f"the head {draft.id}{' with the adapter' if adapter else ''} is in {folder}; with vLLM:")
    typer.echo(for_vllm(target.id, folder))


def for_llama_server(target: str, draft: Path, kind: str) -> str:
    """The command that serves ``target`` in llama.cpp's server with this draft, at our usual draft length. ``kind``:
    what llama.cpp calls this sort of drafting."""
    models = ["--model", target, "--spec-type", kind, "--spec-draft-model", str(draft)]
    return shlex.join(["llama-server", *models, "--spec-draft-n-max", "4"])


def gguf_or(name: str | None, otherwise: str) -> str:
    """``name`` if it is that of a GGUF file, else ``otherwise``."""
    return name if name is not None and name.lower().endswith(".gguf") else otherwise


def for_vllm(target: str, folder: Path) -> str:
    """The command that serves ``target`` in vLLM with the EAGLE-3 head in ``folder`` as its draft."""
    said = json.dumps({"model": str(folder), "method": "eagle3", "num_speculative_tokens": 3})
    return shlex.join(["vllm", "serve", target, "--speculative-config", said])


def export_eagle_gguf(settings: Settings, adapter: Path | None, file: Path, encoding: str, force: bool) -> None:
    """Write the EAGLE-3 head of --draft, with ``adapter`` merged into it if given, as a GGUF file, and print the
    command for llama-server.

    Raises AdaptiveError as ``eagle_of``, and for a head that llama.cpp does not compute.
    """
    target, draft = eagle_of(settings, "--format gguf of a head")
    check_free(file, force)
    with working("writing the head"):
        write_eagle_gguf(settings, target, draft.folder, adapter, file, encoding)
    typer.echo(f"the head {draft.id}{' with the adapter' if adapter else ''} is in {file}; with llama.cpp's server:")
    typer.echo(for_llama_server("TARGET.gguf", file, "draft-eagle3"))


def write_eagle_gguf(
    settings: Settings, target: Source, head: Path, adapter: Path | None, file: Path, encoding: str
) -> None:
    """Write the EAGLE-3 head in the folder ``head`` of this ``target`` as a GGUF file, with ``adapter`` merged into it
    if given. Raises AdaptiveError for a head that llama.cpp does not compute."""
    from adaptive.engines.llamacpp.eagle import write_eagle
    from adaptive.engines.load import read_config
    from adaptive.tokenizers import read_tokenizer

    check_encoding(encoding)
    tokenizer = read_tokenizer(target, settings.trust_remote_code)
    config = read_config(target, settings).get_text_config()
    write_eagle(head, config, tokenizer, file, encoding, head.name, adapter)  # type: ignore[arg-type]
