"""The models that can be trained, behind one interface.

These are a draft or an external head with LoRA, all of a draft, or all of a head that is trained here from scratch.
A ``Student`` is a model while it is trained or judged. ``Students`` makes them for a run: the one in use, and the one
to train, each from the weights of an adapter folder or from none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch

from adaptive.engines.head.foreign import ForeignHead
from adaptive.engines.head.module import Head
from trainers import lora
from trainers.batches import collate, longest_output, longest_text, passes, supervised_logits
from trainers.dataset import Example, held
from trainers.heads import head_losses, head_passes, replay_head
from trainers.lora import AdapterState, default_learning_rate, width_of
from trainers.per_position import position_losses
from trainers.recipe import Recipe
from trainers.replay import Replay, replay
from trainers.start import start_from
from trainers.vocabulary import Reads, choose_vocabulary, noted

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from adaptive.engines.head.eagle import Eagle3Head
    from adaptive.engines.head.kinds import HeadModule

ShouldStop = Callable[[], bool]


class Student(Protocol):
    """A model that is trained."""

    @property
    def module(self) -> torch.nn.Module:
        """The module with the parameters; those that are trained require a gradient."""

    def learning_rate(self) -> float:
        """The peak learning rate for its size."""

    def begin(self, train: Sequence[Example], should_stop: ShouldStop, resumed: bool = False) -> None:
        """Prepare for training on ``train``: called before the first step of a new run, or of a ``resumed`` one.
        Raises ``Stopped``."""

    def passes(self, batch: Sequence[Example]) -> Iterator[list[Example]]:
        """Groups of a batch that fit into one pass each."""

    def losses(self, group: Sequence[Example], recipe: Recipe) -> torch.Tensor:
        """Losses (N,) at the output positions of a group, with their gradient."""

    def replay(self, examples: Sequence[Example], should_stop: ShouldStop | None = None) -> list[Replay]:
        """Acceptance along ``examples``. Raises ``Stopped``."""

    def snapshot(self) -> AdapterState:
        """A copy, on the CPU, of the trained weights."""

    def restore(self, state: AdapterState) -> None:
        """Restore a snapshot."""

    def write(self, state: AdapterState, folder: Path) -> None:
        """Write a snapshot as an adapter folder."""


class Draft:
    """A draft, plain or with an adapter."""

    def __init__(self, model: PeftModel | PreTrainedModel | ForeignHead) -> None:
        self.model = model

    @property
    def module(self) -> torch.nn.Module:
        """See the protocol."""
        return self.model

    def learning_rate(self) -> float:
        """See the protocol."""
        return default_learning_rate(width_of(self.model))

    def begin(self, train: Sequence[Example], should_stop: ShouldStop, resumed: bool = False) -> None:
        """See the protocol. Nothing to prepare: the initial weights are already there."""

    def passes(self, batch: Sequence[Example]) -> Iterator[list[Example]]:
        """See the protocol."""
        return passes(batch, longest_text(self.model), int(self.model.config.get_text_config().vocab_size))

    def losses(self, group: Sequence[Example], recipe: Recipe) -> torch.Tensor:
        """See the protocol."""
        batch = collate(group, longest_text(self.model), next(self.model.parameters()).device)
        return position_losses(supervised_logits(self.model, batch), group, recipe.loss)

    def replay(self, examples: Sequence[Example], should_stop: ShouldStop | None = None) -> list[Replay]:
        """See the protocol."""
        return replay(self.model, examples, should_stop)

    def snapshot(self) -> AdapterState:
        """See the protocol."""
        return lora.snapshot(self.model)

    def restore(self, state: AdapterState) -> None:
        """See the protocol."""
        lora.restore(self.model, state)

    def write(self, state: AdapterState, folder: Path) -> None:
        """See the protocol."""
        lora.write(self.model, state, folder)  # type: ignore[arg-type]  # only a model with an adapter is written


class AdaptedHead(Draft):
    """A head that was not trained here: ``model`` is the ``head`` itself, or the head with an adapter."""

    def __init__(self, head: ForeignHead, model: PeftModel | PreTrainedModel | ForeignHead, recipe: Recipe) -> None:
        super().__init__(model)
        self.head = head
        self.steps, self.unroll = recipe.draft_length, recipe.unroll

    def passes(self, batch: Sequence[Example]) -> Iterator[list[Example]]:
        """See the protocol."""
        return head_passes(self.head, batch, self.unroll)

    def losses(self, group: Sequence[Example], recipe: Recipe) -> torch.Tensor:
        """See the protocol, and ``held_losses``."""
        return held_losses(self.head, self.model, group, recipe)

    def replay(self, examples: Sequence[Example], should_stop: ShouldStop | None = None) -> list[Replay]:
        """See the protocol."""
        self.model.eval()
        return replay_head(self.head, examples, self.steps, should_stop)


class WholeHead(ABC):
    """A head all of whose own weights are trained; embedding and projection are the target's."""

    # Peak learning rate of AdamW at width AT (docs/notes/2026-11-heads.md); it falls with the width as LoRA's does.
    RATE, AT, FALLS = 3e-3, 256, 0.78

    def __init__(self, head: Head | Eagle3Head, recipe: Recipe) -> None:
        self._head = head
        self.steps, self.unroll = recipe.draft_length, recipe.unroll

    @property
    def module(self) -> torch.nn.Module:
        """See the protocol."""
        return self._head

    def learning_rate(self) -> float:
        """See the protocol."""
        return float(self.RATE * (self.AT / self._head.width) ** self.FALLS)

    def passes(self, batch: Sequence[Example]) -> Iterator[list[Example]]:
        """See the protocol."""
        return head_passes(self._head, batch, self.unroll)

    def losses(self, group: Sequence[Example], recipe: Recipe) -> torch.Tensor:
        """See the protocol, and ``held_losses``."""
        return held_losses(self._head, self._head, group, recipe)

    def replay(self, examples: Sequence[Example], should_stop: ShouldStop | None = None) -> list[Replay]:
        """See the protocol."""
        self._head.eval()
        return replay_head(self._head, examples, self.steps, should_stop)

    def snapshot(self) -> AdapterState:
        """See the protocol: the head's own tensors, by their names in its file."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._head.own().items()}

    def restore(self, state: AdapterState) -> None:
        """See the protocol."""
        self._head.put(state)

    @abstractmethod
    def begin(self, train: Sequence[Example], should_stop: ShouldStop, resumed: bool = False) -> None:
        """See the protocol."""

    @abstractmethod
    def write(self, state: AdapterState, folder: Path) -> None:
        """See the protocol."""


class HeadStudent(WholeHead):
    """A head that is grown here from nothing."""

    def __init__(self, head: Head, recipe: Recipe) -> None:
        super().__init__(head, recipe)
        self.head = head

    def begin(self, train: Sequence[Example], should_stop: ShouldStop, resumed: bool = False) -> None:
        """See the protocol. Each run chooses the draft vocabulary anew; a resumed run chooses the same one."""
        head = self.head
        head.draft_among(choose_vocabulary(train, head.vocab_size, Reads.of(head), self.steps))
        if head.fresh and not resumed:
            start_from(self.head, train, should_stop)

    def write(self, state: AdapterState, folder: Path) -> None:
        """See the protocol."""
        before = self.snapshot()
        self.restore(state)
        self.head.write(folder)
        self.restore(before)


def held_losses(head: HeadModule, learns: torch.nn.Module, group: Sequence[Example], recipe: Recipe) -> torch.Tensor:
    """Losses (N,) of ``head``; ``learns`` holds the parameters that are trained. Examples whose features have left the
    spool meanwhile are skipped; without any other example the loss is 0."""
    there = [e for e in held(group) if e.features is not None]
    if not there:
        return next(p for p in learns.parameters() if p.requires_grad).sum()[None] * 0.0
    return head_losses(head, there, recipe.loss, recipe.unroll)


class NoHead(HeadStudent):
    """The baseline for a first head: nothing is drafted, so nothing is accepted."""

    def replay(self, examples: Sequence[Example], should_stop: ShouldStop | None = None) -> list[Replay]:
        """See the protocol."""
        return [Replay.of(e, np.zeros((1, len(e.output) - 1))) for e in examples]


class Students(Protocol):
    """Makes the students of a run."""

    kind: Literal["lora", "head"]
    device: torch.device
    reads_features: bool  # whether the target's hidden states are needed

    @property
    def longest_output(self) -> int:
        """Largest number of an answer's tokens that are used."""

    def in_use(self, folder: Path | None, recipe: Recipe) -> AbstractContextManager[Student]:
        """The drafter in use: with the adapter in ``folder``, or without one."""

    def trainable(self, parent: Path | None, recipe: Recipe) -> AbstractContextManager[Student]:
        """The student to train: a copy of ``parent``, or a new one."""

    def notes(self, state: AdapterState, held_out: Sequence[Example]) -> dict[str, Any]:
        """Entries of the manifest on a snapshot, besides the recipe, as plain JSON values."""


class DraftStudents:
    """A plain draft or an external head, for which adapters are trained; its own weights stay unchanged."""

    kind: Literal["lora", "head"] = "lora"

    def __init__(self, draft: PreTrainedModel | ForeignHead) -> None:
        self.draft = draft
        self.device = next(draft.parameters()).device
        self.reads_features = isinstance(draft, ForeignHead)

    @property
    def longest_output(self) -> int:
        """See the protocol."""
        return longest_output(self.draft)

    @contextmanager
    def in_use(self, folder: Path | None, recipe: Recipe) -> Iterator[Student]:
        """See the protocol."""
        if folder is None:
            yield self._student(self.draft, recipe)
            return
        model = lora.load(self.draft, folder)
        try:
            yield self._student(model, recipe)
        finally:
            lora.remove(model)

    @contextmanager
    def trainable(self, parent: Path | None, recipe: Recipe) -> Iterator[Student]:
        """See the protocol."""
        model = lora.attach(self.draft, recipe) if parent is None else lora.load(self.draft, parent, trainable=True)
        try:
            yield self._student(model, recipe)
        finally:
            lora.remove(model)

    def notes(self, state: AdapterState, held_out: Sequence[Example]) -> dict[str, Any]:
        """See the protocol."""
        return {}

    def _student(self, model: PeftModel | PreTrainedModel | ForeignHead, recipe: Recipe) -> Student:
        return AdaptedHead(self.draft, model, recipe) if isinstance(self.draft, ForeignHead) else Draft(model)


class HeadStudents:
    """A head whose training continues from the last promoted one; a head that came with weights begins from these."""

    kind: Literal["lora", "head"] = "head"
    reads_features = True

    def __init__(self, head: Head) -> None:
        self.head = head
        self.device = head.fuse.weight.device

    @property
    def longest_output(self) -> int:
        """See the protocol."""
        return longest_output(self.head)

    @contextmanager
    def in_use(self, folder: Path | None, recipe: Recipe) -> Iterator[Student]:
        """See the protocol. Without a folder and without weights that were given, decoding is plain."""
        folder = folder or self.head.came_from
        if folder is None:
            yield NoHead(self.head, recipe)
            return
        self.head.load(folder)
        yield HeadStudent(self.head, recipe)

    @contextmanager
    def trainable(self, parent: Path | None, recipe: Recipe) -> Iterator[Student]:
        """See the protocol."""
        parent = parent or self.head.came_from
        if parent is None:
            self.head.reset()
        else:
            self.head.load(parent)
        yield HeadStudent(self.head, recipe)

    def notes(self, state: AdapterState, held_out: Sequence[Example]) -> dict[str, Any]:
        """See the protocol: the draft vocabulary."""
        return noted(state, self.head.vocab_size, held_out)


def students_of(draft: PreTrainedModel | Head | ForeignHead) -> Students:
    """The students for ``draft``."""
    return HeadStudents(draft) if isinstance(draft, Head) else DraftStudents(draft)


def student_of(model: PeftModel | PreTrainedModel | Head, recipe: Recipe) -> Student:
    """``model`` as it is, to be trained in place."""
    return HeadStudent(model, recipe) if isinstance(model, Head) else Draft(model)
