"""Where a head that is grown starts: the linear map by which a token and the hidden state before it say the next state.

A target's hidden state is largely a linear function of the one before and of the token between them. Fitted in closed
form on a hundred answers, that function alone drafts as well as a head that was trained on them for minutes without it
(docs/notes/2026-11-heads.md). It is what the head's layer, the target's last one, reads at first, in the size that
this layer reads in the target, so that the layer adds to it what it adds there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from adaptive.engines.head.module import Head
from trainers.dataset import Example
from trainers.replay import Stopped

# Ridge regression: this share of the mean square of what is read is added to the diagonal. With more the map is too
# small, with less it follows what a few answers have by chance; from 1e-4 to 1e-2 it makes no difference.
RIDGE = 1e-3
# Tokens that are looked at, the newest. At width 5,120 the map has 10,240 inputs, so that these are a dozen for each;
# 80 answers are enough at width 256. More take time and change nothing, fewer leave a wide map to chance.
MOST_TOKENS = 2**17
# The factor of the size that is in the weights of the two norms instead of in the map's. Adam moves all weights by
# about the same step, so that small weights change fast for their size: with 10, the map's are as large as a layer's.
# With less it would hardly learn, with much more it would be lost in a few steps.
IN_NORMS = 10.0


@torch.no_grad()
def start_from(head: Head, examples: Sequence[Example], should_stop: Callable[[], bool] | None = None) -> None:
    """Have a ``head`` that is as it was made start so, by the texts and hidden states of ``examples``.

    Examples without hidden states are passed over. Raises Stopped between two texts when ``should_stop`` says so.
    """
    width, device = head.width, head.device
    squares = torch.zeros(2 * width, 2 * width, device=device)  # sums over tokens of what is read, by itself
    products = torch.zeros(2 * width, width, device=device)  # and by what comes of it
    tokens, logarithms = 0, 0.0
    for example in reversed(examples):
        if should_stop is not None and should_stop():
            raise Stopped
        found = None if example.features is None else example.features.read()
        if found is None or found.values.shape[1] != width:
            continue
        text = torch.cat([torch.from_numpy(example.prompt), torch.from_numpy(example.output)]).long()
        text = text[found.first :].to(device)  # of a long answer the end is cut off, and its states are not
        states = torch.from_numpy(found.states())[: len(text)].to(device)
        text = text[: len(states)]
        if len(states) < 2:
            continue
        reads = torch.cat([head.token_norm(head.body.get_input_embeddings()(text[1:])), _unit(states[:-1])], dim=-1)
        squares += reads.T @ reads
        products += reads.T @ _unit(states[1:])
        logarithms += float(states.square().mean(-1).clamp(min=1e-12).log().sum()) / 2
        tokens += len(states)
        if tokens >= MOST_TOKENS:
            break
    if not tokens:
        return
    size = float(torch.tensor(logarithms / tokens).exp())  # of a hidden state; a few that are huge say nothing here
    squares.diagonal().add_(RIDGE * float(squares.diagonal().mean()))
    head.fuse.weight.copy_(torch.linalg.solve(squares, products).T * (size / IN_NORMS))
    head.token_norm.weight.fill_(IN_NORMS)
    head.feature_norm.weight.fill_(IN_NORMS)
    head.fresh = False


def _unit(states: torch.Tensor) -> torch.Tensor:
    """With a mean square of one."""
    return torch.nn.functional.rms_norm(states, states.shape[-1:], eps=1e-6)
