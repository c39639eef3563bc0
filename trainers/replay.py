"""Replay: the acceptance that a draft would have had, computed from the log without the target.

In: a draft and logged generations. Out: per generation the acceptance at every position, and from it
acceptance rate and mean acceptance length at any draft length.

**One position.** Greedy: a drafted token is accepted when it is the target's argmax, which is the
output token, so acceptance is 1 where the draft's argmax is the output token and 0 elsewhere.
Sampled: the draft proposes y from q, and y is accepted with probability min(1, p(y) / q(y)). The
output is token x *by an accepted proposal* with probability q(x) min(1, p(x) / q(x)) =
min(p, q)(x). Because decoding is lossless, the output is x in either way with probability p(x), for
any draft. Hence, given that the output was x, it came from an accepted proposal with probability

    min(p(x), q(x)) / p(x) = min(1, q(x) / p(x)).

This is exact for a draft that did not run when the text was generated, and averages over x ~ p to
sum min(p, q). log p(x) is stored in the record (``chosen``); q is the draft's distribution after
the record's own penalties, temperature and cuts, as the drafter applies them.

**Any draft length K.** Given the text, acceptance at different positions is independent, so rounds
form a renewal process along the output. The prefill commits output token 0 without a draft; the
first round starts at token 1. A round that starts at i accepts exactly j tokens with probability
a_i ... a_(i+j-1) (1 - a_(i+j)) for j < K, a_i ... a_(i+K-1) for j = K, and the next round starts at
i + j + 1. Accepted tokens past the end of the answer do not count. Where a length limit ends the answer,
the drafter knew the limit and drafts one token less than remain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from adaptive.engines.head.vocabulary import columns_of, spread
from adaptive.engines.protocol import Engine
from adaptive.sampling import LogitsProcessor, transform_logits
from trainers.batches import collate, longest_text, over_all_tokens, passes, supervised_logits, token_count
from trainers.dataset import Example, Stopped

# Rows of an answer whose acceptance is computed at a time. Penalties and cuts need a dozen copies of the logits, some
# in int64, which is gigabytes for a whole answer and a large vocabulary. Too low: many small calls.
ROWS = 32


@dataclass(frozen=True)
class Replay:
    """Acceptance of one draft along one generation.

    ``acceptance`` (steps, n - 1) float32: row s is the probability, at output positions 1 to n - 1, that a drafted
    token with s tokens of its draft before it is accepted, given that it is reached. A draft whose acceptance does not
    depend on s has one row. Steps beyond the last row are taken to equal it. ``limited`` and ``fold`` as in
    ``Example``.
    """

    id: int
    acceptance: npt.NDArray[np.float32]
    limited: bool
    fold: float = math.nan

    @classmethod
    def of(cls, example: Example, acceptance: npt.NDArray[Any]) -> Replay:
        """The replay of ``example`` with this ``acceptance`` (steps, n - 1)."""
        return cls(example.id, acceptance.astype(np.float32), example.limited, example.fold)

    @property
    def positions(self) -> int:
        """Number of output positions at which a token may be drafted."""
        return int(self.acceptance.shape[1])

    @property
    def rate(self) -> float:
        """Mean acceptance over positions and steps."""
        return float(self.acceptance.mean(dtype=np.float64))


def acceptance_rate(replays: Sequence[Replay]) -> float:
    """Mean acceptance over all positions of all generations, and over the steps where there are several."""
    return sum(r.rate * r.positions for r in replays) / sum(r.positions for r in replays)


def mean_acceptance_length(replays: Sequence[Replay], draft_length: int) -> float:
    """Expected 1 + accepted / rounds over all generations at this draft length."""
    accepted, rounds = expected_rounds(replays, draft_length)
    return float(1 + accepted.sum() / rounds.sum())


def expected_rounds(
    replays: Sequence[Replay], draft_length: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Expected accepted tokens (G,) and rounds (G,) of each of G generations at ``draft_length``.

    Exact, by recursion over the positions at which a round may start, for all generations at once.
    """
    count, longest = len(replays), max(r.positions for r in replays)
    steps = max(len(r.acceptance) for r in replays)
    probability = np.zeros((steps, count, longest + draft_length + 1))
    lengths = np.array([r.positions for r in replays])
    for index, replay in enumerate(replays):
        draftable = lengths[index] - 1 if replay.limited else lengths[index]
        probability[:, index, :draftable] = replay.acceptance[:, :draftable]
    starts = np.zeros((count, longest + draft_length + 2))
    starts[:, 0] = 1.0
    accepted = np.zeros(count)
    for position in range(longest):
        reached = starts[:, position].copy()
        for step in range(draft_length):
            onward = reached * probability[min(step, steps - 1), :, position + step]
            accepted += onward
            starts[:, position + step + 1] += reached - onward
            reached = onward
        starts[:, position + draft_length + 1] += reached
    # A round that would start past the end of the answer never runs.
    within = np.arange(starts.shape[1])[None] < lengths[:, None]
    return accepted, (starts * within).sum(axis=1)


@torch.no_grad()
def replay(
    draft: torch.nn.Module,
    examples: Sequence[Example],
    should_stop: Callable[[], bool] | None = None,
) -> list[Replay]:
    """Teacher-force ``draft`` over ``examples`` (all ``replayable``); the results are in the same order.

    Raises Stopped between two passes when ``should_stop`` returns True.
    """
    was_training = draft.training
    draft.eval()
    device = next(draft.parameters()).device
    limit, vocab = longest_text(draft), int(draft.config.get_text_config().vocab_size)  # type: ignore[operator, union-attr]
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].prompt) + len(examples[i].output))
    found: list[Replay] = []
    try:
        for group in passes([examples[i] for i in order], limit, vocab):
            if should_stop is not None and should_stop():
                raise Stopped
            batch = collate(group, limit, device)
            each = supervised_logits(draft, batch).split([len(e.output) for e in group])
            for example, logits in zip(group, each, strict=True):
                acceptance = position_acceptance(logits.float(), example)[None, 1:]
                found.append(Replay.of(example, acceptance.cpu().numpy()))
    finally:
        draft.train(was_training)
    back = np.argsort(order)
    return [found[i] for i in back]


def replay_on(engine: Engine, examples: Sequence[Example]) -> list[Replay]:
    """``replay`` of the draft that ``engine`` runs, its adapter included, in the order of ``examples``."""
    found = []
    for example in examples:
        tokens = torch.from_numpy(np.concatenate([example.prompt, example.output[:-1]])).long()
        logits = engine.sequence().extend(tokens.clamp_(max=engine.vocab_size - 1), len(example.output))
        acceptance = position_acceptance(logits.float(), example)[None, 1:]
        found.append(Replay.of(example, acceptance.cpu().numpy()))
    return found


def position_acceptance(logits: torch.Tensor, example: Example, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Acceptance (n,) at every output position, from the draft's raw float32 logits (n, m). ``ids`` (m,): the tokens of
    these logits, if they are not the first m."""
    sampling = example.sampling
    if ids is not None and (sampling.penalised or sampling.logit_bias):  # which go by the tokens' ids
        logits, ids = spread(logits, ids, max(token_count([example]), int(ids.max()) + 1)), None
    blocks = _blocks(over_all_tokens(logits, [example]), example) if ids is None else _own_blocks(logits, ids, example)
    if sampling.greedy:
        return torch.cat([(rows.argmax(-1) == output).float() for rows, output in blocks])
    assert example.supervision is not None, "a sampled record without supervision cannot be replayed"
    log_q = [transform_logits(rows, sampling).log_softmax(-1).gather(-1, output[:, None]) for rows, output in blocks]
    log_p = torch.from_numpy(example.supervision.chosen).float().to(logits.device)
    return (torch.cat(log_q)[:, 0] - log_p).clamp(max=0).exp()


def _own_blocks(
    logits: torch.Tensor, ids: torch.Tensor, example: Example
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of up to ROWS rows at a time, logits (rows, m + 1), the last one -inf, and the columns of the output tokens
    (rows,): the last one for a token that is not among ``ids`` (m,)."""
    output = torch.from_numpy(example.output).long().to(logits.device)
    columns = columns_of(ids, max(int(output.max()), int(ids.max())) + 1)[output]
    for rows, places in zip(logits.split(ROWS), columns.split(ROWS), strict=True):
        yield torch.nn.functional.pad(rows, (0, 1), value=-torch.inf), places


def _blocks(logits: torch.Tensor, example: Example) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of up to ROWS rows at a time, logits (rows, vocab) with the example's penalties and biases, and the output tokens
    (rows,)."""
    processor = LogitsProcessor(example.sampling, logits.shape[-1], logits.device)
    processor.start(torch.from_numpy(example.prompt).long())
    tokens = torch.from_numpy(example.output).long().to(logits.device)
    for rows, output in zip(logits.split(ROWS), tokens.split(ROWS), strict=True):
        yield processor.apply(rows, output[:-1]), output
        processor.commit(output.tolist())
