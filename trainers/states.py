"""Computes the target's hidden states of logged texts from its checkpoint.

For heads that read other states than the log's spool holds. The states are held in memory, since on disk a purge of
their records would have to find them.
In: examples and a loaded target. Out: the examples with their states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adaptive.engines.hf.features import FeatureHooks
from adaptive.machine import memory
from adaptive.records.features import BLOCK, Features
from trainers.dataset import Example, Stopped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The share of the free memory that states may take.
OF_FREE = 0.4


def most_bytes(sets: int = 1) -> int:
    """The bytes that the states of each of ``sets`` sets of texts may take now."""
    return int(OF_FREE * memory().available / max(1, sets))


class _Last:
    """Keeps the hidden states (1, n, width) of the last pass."""

    hidden: torch.Tensor

    def keep(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class States:
    """Computes hidden states of ``target`` before each of ``layers``, side by side; the number of its layers stands for
    the states before the final norm. Raises AdaptiveError if the target's layers are not known."""

    def __init__(self, target: PreTrainedModel, layers: tuple[int, ...]) -> None:
        self._decoder: Any = target.get_decoder()
        self._device = next(target.parameters()).device
        self._hooks = FeatureHooks(target)
        self._hooks.name(layers)
        self._hooks.watch()

    def of(self, text: torch.Tensor) -> torch.Tensor:
        """The states (n, layers * width) of a text (n,), in float32 on the CPU."""
        last = _Last()
        self._hooks.kept = last
        try:
            with torch.inference_mode():
                self._decoder(input_ids=text[None].to(self._device), use_cache=False)
        finally:
            self._hooks.kept = None
        return last.hidden[0].float().cpu()


def text_of(example: Example, longest: int) -> tuple[torch.Tensor, int]:
    """The last ``longest`` tokens of an example that a draft reads (its last token predicts nothing), and how many
    tokens before them are left out."""
    text = np.concatenate([example.prompt, example.output[:-1]])
    cut = max(0, len(text) - longest)
    return torch.from_numpy(text[cut:]).long(), cut


def narrowed(example: Example, width: int) -> Example:
    """The example with only the first ``width`` numbers of each state."""
    found = example.states()
    if found is None:
        return example
    if width % BLOCK == 0:
        kept = Features(found.first, found.values[:, :width].copy(), found.scales[:, : width // BLOCK].copy())
    else:
        kept = Features.of(found.states()[:, :width], found.first)
    return replace(example, features=kept)


def with_states(
    examples: Sequence[Example],
    states: States,
    longest: int,
    most: int,
    on_text: Callable[[], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> list[Example]:
    """The newest of ``examples`` whose states fit into ``most`` bytes, with these states, in their order. Texts are cut
    to their last ``longest`` tokens. ``on_text`` is called after each text. Raises Stopped
    between two texts when ``should_stop`` returns True."""
    found: list[Example] = []
    taken = 0
    for example in reversed(examples):
        if should_stop is not None and should_stop():
            raise Stopped
        text, cut = text_of(example, longest)
        features = Features.of(states.of(text).numpy(), cut)
        taken += features.nbytes
        if taken > most:
            break
        found.append(replace(example, features=features))
        if on_text is not None:
            on_text()
    return found[::-1]
