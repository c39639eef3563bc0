"""From logits to distributions to tokens: every transform is a few tensor operations over all rows."""

from __future__ import annotations

import torch

from adaptive.decoding.params import SamplingParams


def transform_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Temperature, then top-k, top-p and min-p, on logits (n, vocab); -inf where a token is cut.

    The order is that of transformers. Rows are independent. Not for temperature 0.
    """
    logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        least = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        # A token stays while the mass before it is below top_p, so the first always stays.
        cut = probs.cumsum(-1) - probs >= params.top_p
        logits = logits.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -torch.inf)
    if params.min_p > 0.0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits


def shares(count: int, generator: torch.Generator) -> torch.Tensor:
    """Uniform random numbers (count, 1) below 1, for ``draw_at``: all that a round needs in one call."""
    # So that the mass of a large vocabulary adds up; one kind of device has no float64.
    double = generator.device.type != "mps"
    dtype = torch.float64 if double else torch.float32
    drawn = torch.rand(count, 1, generator=generator, dtype=dtype, device=generator.device)
    return drawn.mul_(1 - 2.0 ** (-40 if double else -20))  # so that rounding never makes them 1


def draw_at(probs: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """One token id a row from probs (n, vocab), not necessarily normalised, at share (n, 1) of its mass; (n,) int64.

    The first token at which the cumulative mass exceeds a uniform share of the whole (inverse transform): one
    random number a row, where an exponential race takes one a token and, on a CPU, twenty times as long. A token
    of probability 0 adds nothing and is never the first.
    """
    mass = probs.cumsum(-1, dtype=share.dtype)
    return torch.searchsorted(mass, share * mass[:, -1:], right=True)[:, 0]


def draw(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token id a row from probs (n, vocab), not necessarily normalised; (n,) int64."""
    return draw_at(probs, shares(len(probs), generator))


class Penalties:
    """Repetition, presence and frequency penalties and logit bias, as a function of what came before.

    Holds a count of every token of the text; the rows of one verification see, beyond the committed
    text, the drafted tokens before their own position.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, device: torch.device) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.active = params.penalised
        self.bias: torch.Tensor | None = None
        bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocab_size}
        if bias:
            self.bias = torch.zeros(vocab_size, device=device)
            self.bias[torch.tensor(list(bias), device=device)] = torch.tensor(list(bias.values()), device=device)
        if self.active:
            self.prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.output = torch.zeros(vocab_size, device=device)

    def start(self, prompt: torch.Tensor) -> None:
        """Begin a text: prompt (n,) int64."""
        if self.active:
            self.prompt[prompt.to(self.prompt.device)] = True

    def commit(self, tokens: list[int]) -> None:
        """Count tokens that became part of the output."""
        if self.active:
            counted = torch.tensor(tokens, dtype=torch.long, device=self.output.device)
            self.output.index_add_(0, counted, torch.ones(len(tokens), device=self.output.device))

    def apply(self, logits: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        """Penalised float32 logits (n, vocab), the last row of which follows all of ``drafted`` (k,) and
        each row before it one token less: a verification has k + 1 rows, a draft step one.
        """
        logits, device = logits.float(), logits.device
        if self.bias is not None:
            logits = logits + self.bias[: logits.shape[-1]].to(device)
        if not self.active:
            return logits
        rows, vocab = logits.shape
        output = self.output[:vocab].to(device).expand(rows, vocab)
        if len(drafted):
            hits = torch.nn.functional.one_hot(drafted, self.vocab_size)[:, :vocab].cumsum(0)
            output = output + torch.nn.functional.pad(hits, (0, 0, 1, 0))[-rows:]
        p = self.params
        seen = (output > 0) | self.prompt[:vocab].to(device)
        scaled = torch.where(logits > 0, logits / p.repetition_penalty, logits * p.repetition_penalty)
        logits = torch.where(seen, scaled, logits)
        return logits - p.frequency_penalty * output - p.presence_penalty * (output > 0)
