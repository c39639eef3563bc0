"""The drafts that ``adaptive publish`` puts into a server: a draft model with the adapter in use, or an EAGLE-3 head.

In: the settings, and a store or a head's folder. Out: a file or folder that the server reads, and replays of answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adaptive.errors import AdaptiveError, first_line
from adaptive.upstream.publishing import takes_gguf
from cli.publish_notes import discard

if TYPE_CHECKING:
    from adaptive.pair import Source
    from adaptive.settings import Settings
    from adaptive.upstream.kinds import Kind
    from checkpoints.manifest import Manifest
    from checkpoints.store import AdapterStore
    from trainers.dataset import Example
    from trainers.replay import Replay

# The newest held-out answers by which a head's draft length is chosen: the target's states of each are computed.
ANSWERS = 128
# Steps of a draft that are replayed with a head; its acceptance changes little beyond.
STEPS = 8


class Published(ABC):
    """A draft to be published. ``id`` names it to the user; ``is_head`` tells whether it is an EAGLE-3 head."""

    id: str
    is_head: bool
    words: str

    def path(self, folder: Path, kind: Kind, encoding: str) -> Path:
        """Its file or folder in ``folder`` in the server's format. Other pairs, whose drafts have the same ids, may use
        the same ``folder``."""
        return folder / (self._name() + (f"-{encoding}.gguf" if takes_gguf(kind) else ""))

    def write(self, path: Path, kind: Kind, encoding: str) -> None:
        """Write it to ``path``, unless it is there. Raises AdaptiveError if it cannot be written."""
        part = path.with_name(f".{path.name}.part")
        if path.exists():
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            discard(part)
            self._write(part, encoding if takes_gguf(kind) else None)
            os.replace(part, path)
        except OSError as error:
            why = error.strerror or first_line(error)
            raise AdaptiveError(f"{path} cannot be written ({why}); choose another folder with --to") from error
        finally:
            discard(part)

    @abstractmethod
    def _name(self) -> str:
        """A name that tells it apart by its weights."""

    @abstractmethod
    def _write(self, part: Path, encoding: str | None) -> None:
        """Write a GGUF file with ``encoding``, or a folder without one."""

    @abstractmethod
    def replays(self, *sets: Sequence[Example]) -> list[list[Replay]]:
        """Its replays of each of some sets of answers."""


class AdaptedDraft(Published):
    """The draft model with the adapter in use merged into it, and with so many ``rows`` of the vocabulary, None for its
    own number. Raises AdaptiveError if there is none."""

    is_head = False

    def __init__(self, settings: Settings, store: AdapterStore, rows: int | None = None) -> None:
        current = store.current_id()
        if current is None:
            raise AdaptiveError(
                "no adapter is in use; `adaptive distill` trains one from the log, `adapters promote` takes one"
            )
        self.manifest = store.verify(current)
        if self.manifest.kind == "head":
            raise AdaptiveError(
                f"adapter {self.manifest.id} is a head of a form that other servers do not run; `adaptive head FOLDER` "
                "grows one for them, which --head FOLDER publishes"
            )
        self.id, self.words = self.manifest.id, f"adapter {self.manifest.id}"
        self._settings, self._adapter = settings, store.path(current)
        self._rows = None if rows is None or rows == self._own_rows() else rows

    def _own_rows(self) -> int:
        from cli.adapters_export import model_of

        return _rows(model_of(self._settings, self.manifest), self._settings)

    def _name(self) -> str:
        rows = "" if self._rows is None else f"-{self._rows}"
        return f"draft-{self.id}-{digest(self.manifest)}{rows}"

    def _write(self, part: Path, encoding: str | None) -> None:
        from cli.adapters_export import model_of, write_merged
        from cli.export import write_checkpoint

        if encoding is not None:
            source = model_of(self._settings, self.manifest)
            write_checkpoint(source, self._adapter, part, encoding, self._settings)
        else:
            write_merged(self._settings, self._adapter, self.manifest, part, False, self._rows)

    def replays(self, *sets: Sequence[Example]) -> list[list[Replay]]:
        """See the base."""
        import torch

        from adaptive.engines.hf.lora import MergedAdapter
        from adaptive.engines.load import load_model, weights_progress
        from cli.adapters_export import model_of
        from trainers.batches import longest_output
        from trainers.replay import replay

        source = dataclasses.replace(model_of(self._settings, self.manifest), quantize="none")
        with weights_progress(lambda share: None):
            model = load_model(source, self._settings, "cpu", torch.float32)
        MergedAdapter(model).apply(self._adapter)
        longest = longest_output(model)
        return [replay(model, [e.shortened(longest) for e in one]) if one else [] for one in sets]


class PublishedHead(Published):
    """The EAGLE-3 head in ``folder``, for the target of ``settings``. Raises AdaptiveError if it is none, or one for
    another target."""

    is_head = True

    def __init__(self, settings: Settings, folder: Path) -> None:
        from adaptive.engines.head.eagle import read_eagle
        from adaptive.engines.head.kinds import HeadKind, head_kind
        from adaptive.engines.identity import weights_hash
        from adaptive.engines.load import read_config
        from adaptive.pair import sources

        if not folder.is_dir() or head_kind(folder) is not HeadKind.EAGLE3:
            raise AdaptiveError(f"--head {folder} is no EAGLE-3 head; `adaptive head FOLDER` grows one on the log")
        self.folder, self._settings = folder, settings
        self.id = self.words = f"head {folder.name} {weights_hash(folder)[:8]}"
        self._target, _ = sources(settings)
        if self._target.gguf is not None:
            raise AdaptiveError(
                f"target {self._target.id} is a GGUF file, and a head is exported with its target's Hugging Face "
                "checkpoint; name that as --target"
            )
        said, config = read_eagle(folder), read_config(self._target, settings).get_text_config()
        if (said.target_width, said.vocab_size) != (config.hidden_size, config.vocab_size):
            raise AdaptiveError(
                f"--head {folder} is for a target of width {said.target_width} with {said.vocab_size} tokens, and "
                f"{self._target.id} has width {config.hidden_size} and {config.vocab_size} tokens; name its own target "
                "with --target"
            )

    def _name(self) -> str:
        return f"{self.id}-{_described(self._target.folder)}".replace(" ", "-")

    def _write(self, part: Path, encoding: str | None) -> None:
        from adaptive.engines.head.speculators import write_speculators
        from cli.export import write_eagle_gguf

        if encoding is not None:
            write_eagle_gguf(self._settings, self._target, self.folder, None, part, encoding)
        else:
            write_speculators(self.folder, self._target.folder, self._target.id, part)

    def replays(self, *sets: Sequence[Example]) -> list[list[Replay]]:
        """See the base. Of each set the newest ANSWERS are replayed."""
        import torch

        from adaptive.engines.budget import check
        from adaptive.engines.head.eagle import Eagle3Head
        from adaptive.engines.head.parts import shared_of_model
        from adaptive.engines.load import load_model, weights_progress
        from trainers.batches import longest_output, longest_text
        from trainers.heads import replay_head
        from trainers.states import States, most_bytes, with_states

        there = {"device": "cpu", "draft_device": None, "memory": None}
        check(self._target, None, False, self._settings.model_copy(update=there))
        with weights_progress(lambda share: None):
            target = load_model(self._target, self._settings, "cpu")
        head = Eagle3Head(shared_of_model(target), self.folder, torch.float32).eval()
        states = States(target, head.taps)
        most, longest = most_bytes(len(sets)), longest_output(target)
        newest = ([e.shortened(longest) for e in one[-ANSWERS:]] for one in sets)
        known = [with_states(one, states, longest_text(target), most) for one in newest]
        if any(bool(one) and not found for one, found in zip(sets, known, strict=True)):
            raise AdaptiveError("not even one text's hidden states fit into memory; free memory, then try again")
        return [replay_head(head, one, STEPS) if one else [] for one in known]


def _described(target: Path) -> str:
    """Eight hexadecimal digits that tell apart targets by their config and tokenizer, parts of which are written beside
    a head."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        with contextlib.suppress(FileNotFoundError):
            digest.update((target / name).read_bytes())
    return digest.hexdigest()[:8]


def digest(manifest: Manifest) -> str:
    """Eight hexadecimal digits that tell apart adapters of one id, by their weights and those of their draft."""
    whole = json.dumps([manifest.base.weights, sorted(manifest.files.items())])
    return hashlib.sha256(whole.encode()).hexdigest()[:8]


def target_rows(settings: Settings) -> int | None:
    """The number of rows in the target's vocabulary projection, which vLLM wants of a draft, too; None if its config
    does not say."""
    from adaptive.pair import sources

    target, _ = sources(settings)
    return None if target.gguf is not None else _rows(target, settings)


def _rows(source: Source, settings: Settings) -> int:
    from adaptive.engines.load import read_config

    return int(read_config(source, settings).get_text_config().vocab_size)
