"""Training of a head: batches with the target's features, the loss of its unrolled steps, its replay.

In: examples whose features are in the spool. Out: losses and acceptance, as for any draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from adaptive.engines.head.kinds import HeadModule
from trainers.batches import PASS_LOGITS, collate, longest_text, passes
from trainers.dataset import Example, Stopped
from trainers.per_position import position_losses
from trainers.recipe import LossName
from trainers.replay import Replay, position_acceptance
from trainers.unroll import unrolled


@dataclass(frozen=True)
class HeadBatch:
    """Right-padded inputs of B examples. ``ids`` (B, T), ``features`` (B, T, reads) and ``rows`` (B, R) are arguments
    of ``unrolled``; ``picks`` (B, R) bool marks the N rows that predict an output token."""

    ids: torch.Tensor
    features: torch.Tensor
    rows: torch.Tensor
    picks: torch.Tensor


def head_batch(examples: Sequence[Example], head: HeadModule, steps: int) -> HeadBatch:
    """A batch for ``head`` of ``examples``, all with features; texts are cut as in ``collate``.

    Raises LookupError if an example's features are no longer in the spool, do not cover its output, or have another
    width.
    """
    plain = collate(examples, longest_text(head), torch.device("cpu"))
    lengths = plain.mask.sum(1)
    features = torch.zeros(*plain.ids.shape, head.reads)
    begins = []
    for index, example in enumerate(examples):
        found = example.states()
        if found is None:
            raise LookupError(f"record {example.id} has no features")
        if not example.covered(found):
            raise LookupError(f"the features of record {example.id} do not cover its output")
        length = int(lengths[index])
        cut = len(example.prompt) + len(example.output) - 1 - length  # tokens of the prompt that are cut off
        # Row i reads the feature of the token before it, at position cut + i - 1 of the text.
        first = max(0, found.first - cut + 1)
        states = torch.from_numpy(found.states())[max(0, cut - 1 - found.first) :][: length - first]
        if states.shape[1] != head.reads:
            raise LookupError(f"record {example.id} has features of another width")
        features[index, first : first + len(states)] = states
        begins.append(max(0, length - len(example.output) - steps + 1))
    longest = max(int(length) - begin for length, begin in zip(lengths, begins, strict=True))
    rows = torch.tensor(begins)[:, None] + torch.arange(longest)[None]
    inside = rows < lengths[:, None]
    picks = inside & plain.rows.gather(1, rows.clamp(max=plain.ids.shape[1] - 1))
    return HeadBatch(*(x.to(head.device) for x in (plain.ids, features, rows, picks)))


def head_passes(head: HeadModule, batch: Sequence[Example], steps: int) -> Iterator[list[Example]]:
    """Groups of a batch whose logits of ``steps`` steps together fit into one pass each."""
    return passes(batch, longest_text(head), steps * _logits(head))


def _logits(head: HeadModule) -> int:
    """The number of logits at a position."""
    return head.vocab_size if head.ids is None else len(head.ids)


def step_logits(head: HeadModule, batch: HeadBatch, steps: int) -> Iterator[torch.Tensor]:
    """The head's own logits (N, m) of each step, at every output position of each example of ``batch`` in order."""
    for hidden in unrolled(head, batch.ids, batch.features, batch.rows, steps):
        yield head.own_logits(hidden[batch.picks])


def head_losses(head: HeadModule, examples: Sequence[Example], name: LossName, steps: int) -> torch.Tensor:
    """Loss (N,) at every output position, averaged over ``steps``. Raises LookupError as ``head_batch``.

    Of a single answer whose logits are too many for a pass, those of one step are in memory at a time; they are
    computed again for their gradient.
    """
    batch = head_batch(examples, head, steps)

    def of_step(hidden: torch.Tensor) -> torch.Tensor:
        return position_losses(head.own_logits(hidden), examples, name, head.ids, head.vocab_size)

    rows = sum(len(e.output) for e in examples)
    again = rows * steps * _logits(head) > PASS_LOGITS
    made = (hidden[batch.picks] for hidden in unrolled(head, batch.ids, batch.features, batch.rows, steps))
    losses = [checkpoint(of_step, one, use_reentrant=False) if again else of_step(one) for one in made]
    return torch.stack(losses).mean(0)


@torch.no_grad()
def replay_head(
    head: HeadModule, examples: Sequence[Example], steps: int, should_stop: Callable[[], bool] | None = None
) -> list[Replay]:
    """Acceptance of ``head`` by (step, position) along ``examples`` (all ``replayable``), in their order.

    Raises Stopped between two passes when ``should_stop`` returns True, LookupError as ``head_batch``.
    """
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].prompt) + len(examples[i].output))
    found: list[Replay] = []
    for group in passes([examples[i] for i in order], longest_text(head), _logits(head)):
        if should_stop is not None and should_stop():
            raise Stopped
        by_step: list[list[np.ndarray]] = [[] for _ in group]
        batch = head_batch(group, head, steps)
        for logits in step_logits(head, batch, steps):
            each = logits.float().split([len(e.output) for e in group])
            for place, (example, one) in enumerate(zip(group, each, strict=True)):
                by_step[place].append(position_acceptance(one, example, head.ids)[1:].cpu().numpy())
        for example, rows in zip(group, by_step, strict=True):
            found.append(Replay.of(example, np.stack(rows)))
    back = np.argsort(order)
    return [found[i] for i in back]
