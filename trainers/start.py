"""Initialises a new head with the linear map that predicts the next hidden state from a token and the state before it.

A target's hidden state is largely a linear function of the previous one and of the token between them. Fitted in closed
form on a hundred answers, that function alone drafts as well as a head that was trained on them for minutes without it
(docs/notes/2026-11-heads.md). Its result is the first input of the head's layer, a copy of the target's last one. It is
scaled to the size that this layer's input has in the target, so that the layer adds the same to it as in the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from adaptive.engines.head.module import Head
from trainers.dataset import Example, Stopped

# Ridge regression: this share of the inputs' mean square is added to the diagonal. Too high: the map is too small. Too
# low: it fits coincidences of a few answers. Between 1e-4 and 1e-2 it makes no difference.
RIDGE = 1e-3
# Number of tokens used, the newest. At width 5,120 the map has 10,240 inputs, so this is a dozen tokens for each input;
# 80 answers are enough at width 256. More take time and change nothing; fewer make a wide map unreliable.
MOST_TOKENS = 2**17
# The part of the map's scale that is put into the weights of the two norms instead of the map's own weights. Adam moves
# all weights by about the same step, so small weights change fast relative to their size; with 10, the map's weights
# are as large as a layer's. Too low: the map hardly learns. Much too high: training destroys it in a few steps.
IN_NORMS = 10.0


@torch.no_grad()
def start_from(head: Head, examples: Sequence[Example], should_stop: Callable[[], bool] | None = None) -> None:
    """Initialise a ``head`` that is still ``fresh``, from the texts and hidden states of ``examples``.

    Examples without hidden states are skipped. Raises Stopped between two texts when ``should_stop`` returns True.
    """
    width, device = head.width, head.device
    squares = torch.zeros(2 * width, 2 * width, device=device)  # sum over tokens of inputs x inputs
    products = torch.zeros(2 * width, width, device=device)  # sum over tokens of inputs x outputs
    tokens, logarithms = 0, 0.0
    for example in reversed(examples):
        if should_stop is not None and should_stop():
            raise Stopped
        found = example.states()
        if found is None or found.values.shape[1] != width:
            continue
        text = torch.cat([torch.from_numpy(example.prompt), torch.from_numpy(example.output)]).long()
        text = text[found.first :].to(device)  # the end of a long answer is cut off, its states are not
        states = torch.from_numpy(found.states())[: len(text)].to(device)
        text = text[: len(states)]
        if len(states) < 2:
            continue
        reads = torch.cat([head.token_norm(head.body.get_input_embeddings()(text[1:])), unit(states[:-1])], dim=-1)
        squares += reads.T @ reads
        products += reads.T @ unit(states[1:])
        logarithms += float(states.square().mean(-1).clamp(min=1e-12).log().sum()) / 2
        tokens += len(states)
        if tokens >= MOST_TOKENS:
            break
    if not tokens:
        return
    size = float(torch.tensor(logarithms / tokens).exp())  # of a hidden state; a geometric mean ignores a few huge ones
    squares.diagonal().add_(RIDGE * float(squares.diagonal().mean()))
    head.fuse.weight.copy_(torch.linalg.solve(squares, products).T * (size / IN_NORMS))
    head.token_norm.weight.fill_(IN_NORMS)
    head.feature_norm.weight.fill_(IN_NORMS)
    head.fresh = False


def unit(states: torch.Tensor) -> torch.Tensor:
    """``states`` scaled to a mean square of one."""
    return torch.nn.functional.rms_norm(states, states.shape[-1:], eps=1e-6)
