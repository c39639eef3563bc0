"""What ``adaptive adapters export`` writes besides copies of an adapter: merged drafts, and files for llama.cpp.

In: the settings, an adapter's folder and its manifest. Out: a checkpoint or a GGUF file.
"""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from adaptive.errors import AdaptiveError, first_line
from cli.state import working

if TYPE_CHECKING:
    from adaptive.pair import Source
    from adaptive.settings import Settings
    from checkpoints.manifest import Manifest


def drafts_by_eagle(settings: Settings) -> bool:
    """Whether --draft names an EAGLE-3 head."""
    from adaptive.engines.head.kinds import HeadKind
    from adaptive.pair import sources

    if settings.draft is None:
        return False
    draft = sources(settings)[1]
    return draft is not None and draft.head is HeadKind.EAGLE3


def write_merged(
    settings: Settings, adapter: Path, manifest: Manifest, destination: Path, force: bool, rows: int | None = None
) -> None:
    """Write the draft's language model with ``adapter`` merged, and its tokenizer. The dtype is that of the draft's
    config, or float32 if it names none. Quantised weights are written dequantised. ``rows``: how many rows embedding
    and vocabulary projection get, None for the draft's own number.

    Raises AdaptiveError as ``model_of``, if the draft cannot be loaded, or if ``destination`` is not empty or cannot be
    written.
    """
    from checkpoints.folder import check_destination, filling

    check_destination(destination, force)
    source = model_of(settings, manifest)
    import torch
    from safetensors import SafetensorError

    from adaptive.engines.cpu.torch_threads import set_threads
    from adaptive.engines.hf.language import is_part
    from adaptive.engines.hf.lora import MergedAdapter
    from adaptive.engines.hf.quantised import settings_of
    from adaptive.engines.hf.rows import set_rows
    from adaptive.engines.load import load_model, read_config, weights_progress
    from adaptive.tokenizers import read_tokenizer

    set_threads(settings.threads)
    config = read_config(source, settings)
    # Saving would reverse what loading did to names and formats, except where the config then describes another model.
    reverse = not is_part(source.folder, config) and not settings_of(config)
    tokenizer = read_tokenizer(source, settings.trust_remote_code)
    dtype = getattr(config, "dtype", None) or torch.float32
    with weights_progress(lambda share: None):
        model = load_model(dataclasses.replace(source, quantize="none"), settings, "cpu", dtype)
        MergedAdapter(model).apply(adapter)
        if rows is not None:
            set_rows(model, rows)
        try:
            with filling(destination):
                model.save_pretrained(destination, save_original_format=reverse)
                tokenizer.save_pretrained(destination)
        except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
            reason = getattr(error, "strerror", None) or first_line(error)
            raise AdaptiveError(f"{destination} cannot be written ({reason}); choose another folder") from error


def base_of(settings: Settings, manifest: Manifest) -> Source:
    """The checkpoint that an adapter belongs to: that of --draft or --draft-checkpoint, else the one in the manifest.

    Raises AdaptiveError if it is missing or has other weights.
    """
    from adaptive.engines.identity import weights_hash
    from adaptive.pair import MTP, sources, trained_draft

    named = trained_draft(settings) if settings.draft is not None or manifest.base.id == MTP else None
    if named is None:
        here = {"target": manifest.base.id, "draft": None, "draft_checkpoint": None}
        named = sources(settings.model_copy(update=here))[0]
    if weights_hash(named.folder) != manifest.base.weights:
        raise AdaptiveError(
            f"{named.folder} holds other weights than adapter {manifest.id} was trained for ({manifest.base.id}); "
            "name that checkpoint with --draft"
        )
    return named


def model_of(settings: Settings, manifest: Manifest) -> Source:
    """``base_of``, if that is a model by itself. Raises AdaptiveError."""
    source = base_of(settings, manifest)
    if source.head is not None:
        raise AdaptiveError(
            f"adapter {manifest.id} is for {source.head.words}, which is no model by itself; --format speculators and "
            "--format gguf write an EAGLE-3 head with its adapter"
        )
    return source


def export_gguf(
    settings: Settings,
    adapter: Path,
    manifest: Manifest,
    file: Path | None,
    merged: Path | None,
    encoding: str,
    force: bool,
) -> None:
    """Write an adapter or a merged draft for llama.cpp's own programs, and print the command that uses it."""
    from cli.export import check_free, for_llama_server, gguf_or, write_checkpoint

    destination = file or merged
    assert destination is not None
    check_free(destination, force)
    source = model_of(settings, manifest)
    if merged is not None:
        with working("writing the draft"):
            write_checkpoint(source, adapter, merged, encoding, settings)
        typer.echo(f"the draft with adapter {manifest.id} is in {merged}; with llama.cpp's server:")
        typer.echo(for_llama_server(gguf_or(settings.target, "TARGET.gguf"), merged, "draft-simple"))
        return
    from adaptive.engines.llamacpp.lora import write_adapter
    from adaptive.engines.llamacpp.names import Base
    from adaptive.engines.load import read_config

    write_adapter(adapter, Base.of_config(read_config(source, settings)), destination)
    typer.echo(f"adapter {manifest.id} is in {destination}; with llama.cpp's server, on the draft itself:")
    typer.echo(
        shlex.join(["llama-server", "--model", gguf_or(settings.draft, "DRAFT.gguf"), "--lora", str(destination)])
    )
    typer.echo("As a draft llama-server takes no adapter; write the merged one (--merged FILE --format gguf).")
