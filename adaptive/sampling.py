"""Converts logits to distributions, and distributions to tokens, by a few tensor operations over all rows."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch

from adaptive.engines.load import sampling_kernels
from adaptive.grammar import Constraint
from adaptive.tokens import Rows, moved, on_one_thread, uploaded
from adaptive.types import SamplingParams

# Numbers from which threads share the work on a few distributions. torch would share five rows of any length, and
# waking the other threads takes 70 us: as long as one thread needs for this many numbers.
SHARED = 1 << 17
# Random numbers drawn in one call. Too high: more are wasted at the end of an answer. Too low: more calls.
AHEAD = 256
# Factor for random numbers, far enough below 1 that no rounding gives 1.
MOST = 1 - 2.0**-40
# A vocabulary larger than LARGE is summed in blocks first, and then one block token by token: a running sum waits for
# every addition. Below that size the extra calls cost more than they save.
LARGE, BLOCK = 8192, 256


def alone_if_few(logits: torch.Tensor) -> AbstractContextManager[None]:
    """Runs torch's operations on one thread if these are few numbers on the CPU."""
    return nullcontext() if logits.device.type != "cpu" or logits.numel() > SHARED else on_one_thread()


def transform_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Temperature, then top-k, top-p and min-p, on logits (n, vocab); -inf for tokens that are cut off.

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


class Transform:
    """Converts logits to the distributions that tokens are drawn from under ``params``.

    On the CPU the distributions are in a buffer whose address numpy has as well: asking torch for the address of a
    result takes 35 us after a pass over a model's weights, as long as summing its numbers.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.kernels = sampling_kernels()
        self._rows: Rows | None = None

    def __call__(self, logits: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Distributions (n, vocab), float32, of logits (n, vocab). On the CPU they are in rows ``first`` to ``first +
        n`` of the buffer, and valid until another call for one of these rows."""
        if logits.device.type != "cpu":
            return transform_logits(logits.float(), self.params).softmax(-1)
        if self._rows is None:
            self._rows = Rows(logits.shape[1])
        out = self._rows(first, len(logits))
        if self.kernels is not None:
            return self.kernels.probabilities(logits, self.params, out)
        with alone_if_few(logits):
            return torch.softmax(transform_logits(logits.float(), self.params), -1, out=out)


class Uniform:
    """Uniform random numbers below 1 from one generator, drawn many at a time because a call costs more than a
    number."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._numbers: list[float] = []
        self._used = 0
        self._column = torch.empty(0, 1)

    def next(self) -> float:
        """One number, as a Python float."""
        if self._used == len(self._numbers):
            self._draw(1)
        self._used += 1
        return self._numbers[self._used - 1]

    def ahead(self, count: int) -> list[float]:
        """The numbers that the next ``count`` calls of ``next`` would return; ``skip`` consumes them."""
        if self._used + count > len(self._numbers):
            self._draw(count)
        return self._numbers[self._used : self._used + count]

    def skip(self, count: int) -> None:
        """Consume ``count`` of the numbers from ``ahead``."""
        self._used += count

    def _draw(self, count: int) -> None:
        """Draw until at least ``count`` unused numbers are there."""
        self._numbers = self._numbers[self._used :] + self._drawn(count)[:, 0].tolist()
        self._used = 0

    def column(self, count: int) -> torch.Tensor:
        """Numbers (count, 1) on the generator's device, consumed."""
        taken = self.column_ahead(count)
        self.skip_column(count)
        return taken

    def column_ahead(self, count: int) -> torch.Tensor:
        """The numbers (count, 1) that the next calls of ``column`` would return; ``skip_column`` consumes them."""
        left = self._column
        if count > len(left):
            drawn = self._drawn(count)
            self._column = torch.cat([left, drawn]) if len(left) else drawn
        return self._column[:count]

    def skip_column(self, count: int) -> None:
        """Consume ``count`` of the numbers from ``column_ahead``."""
        self._column = self._column[count:]

    def _drawn(self, least: int = 0) -> torch.Tensor:
        device = self.generator.device
        double = device.type != "mps"  # float64, so that the mass of a large vocabulary adds up; MPS has none
        dtype = torch.float64 if double else torch.float32
        drawn = torch.rand(max(least, AHEAD), 1, generator=self.generator, dtype=dtype, device=device)
        return drawn.mul_(MOST if double else 1 - 2.0**-20)


def draw_on_device(probs: torch.Tensor, uniform: Uniform) -> torch.Tensor:
    """One token id per row, drawn from probs (n, vocab), which need not be normalised; (n,) int64.

    It is the first token at which the cumulative mass exceeds a uniform share of the whole (inverse transform). This
    takes one random number per row, where an exponential race takes one per token. A token of probability 0 adds no
    mass and is never chosen.
    """
    return draw_at(probs, uniform.column(len(probs)))


def draw_at(probs: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """``draw_on_device`` with these random numbers (n, 1)."""
    mass = probs.cumsum(-1, dtype=share.dtype)
    # A row of NaN gives an arbitrary token: an id outside of the vocabulary would make the device unusable.
    return torch.searchsorted(mass, share * mass[:, -1:], right=True)[:, 0].clamp_(max=probs.shape[1] - 1)


def pick(probs: npt.NDArray[np.float32], share: float, less: npt.NDArray[np.float32] | None = None) -> int | None:
    """``draw_at`` for one row on the CPU: the token id at ``share`` of the mass of probs (vocab,), None if there is no
    mass. With ``less`` (at most vocab,), the mass is that of max(probs - less, 0)."""
    kernels = sampling_kernels()
    if kernels is not None:
        return kernels.draw(probs, share, less)
    if less is not None:
        probs = np.maximum(probs - np.pad(less, (0, len(probs) - len(less))), 0)
    begins = 0
    if len(probs) > LARGE:
        sums = np.add.reduceat(probs, np.arange(0, len(probs), BLOCK), dtype=np.float64).cumsum()
        if not sums[-1] > 0:
            return None
        wanted = share * sums[-1]
        block = int(sums.searchsorted(wanted, side="right"))
        before = sums[block - 1] if block else 0.0
        share = min((wanted - before) / (sums[block] - before), MOST)
        begins = block * BLOCK
        probs = probs[begins : begins + BLOCK]
    mass = probs.cumsum(dtype=np.float64)
    if not mass[-1] > 0:
        return None
    return begins + int(mass.searchsorted(share * mass[-1], side="right"))


class LogitsProcessor:
    """Applies repetition, presence and frequency penalties, logit bias and the mask of a grammar, given the text before
    each row.

    Keeps a count of every token of the text. The rows of one verification see, after the committed text, the drafted
    tokens before their own position. ``active``: whether logits are changed at all. ``alters``: whether they are
    changed by more than a mask, which kernels can apply.
    """

    def __init__(
        self, params: SamplingParams, vocab_size: int, device: torch.device, constraint: Constraint | None = None
    ) -> None:
        self.params = params
        self.constraint = constraint
        self.vocab_size = vocab_size
        self.penalised = params.penalised
        self.bias: torch.Tensor | None = None
        bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocab_size}
        if bias:
            self.bias = torch.zeros(vocab_size, device=device)
            places = uploaded(list(bias), torch.long, device)
            self.bias[places] = uploaded(list(bias.values()), self.bias.dtype, device)
        self.alters = self.penalised or self.bias is not None
        self.active = self.alters or constraint is not None
        if self.penalised:
            self.prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.output = torch.zeros(vocab_size, device=device)

    def start(self, prompt: torch.Tensor) -> None:
        """Begin a text with a prompt (n,) int64."""
        if self.penalised:
            self.prompt[prompt.to(self.prompt.device)] = True

    def commit(self, tokens: list[int]) -> None:
        """Take in tokens that became part of the output."""
        if self.constraint is not None:
            self.constraint.commit(tokens)
        if self.penalised:
            counted = uploaded(tokens, torch.long, self.output.device)
            self.output.index_add_(0, counted, torch.ones(len(tokens), device=self.output.device))

    def apply(self, logits: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        """Processed float32 logits (n, vocab). The last row follows all of ``drafted`` (k,), on any device, each row
        before it one token less: a verification has k + 1 rows, a draft step one.
        """
        logits = self._penalise(logits.float(), drafted)
        return logits if self.constraint is None else self.constraint.mask(logits, drafted.tolist())

    def _penalise(self, logits: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        device = logits.device
        if self.bias is not None:
            logits = logits + self.bias[: logits.shape[-1]].to(device)
        if not self.penalised:
            return logits
        rows, vocab = logits.shape
        output = self.output[:vocab].to(device).expand(rows, vocab)
        if len(drafted):
            # Ids that are known without waiting for the device, such as history's, are on the CPU.
            hits = torch.nn.functional.one_hot(moved(drafted, device), self.vocab_size)[:, :vocab].cumsum(0)
            output = output + torch.nn.functional.pad(hits, (0, 0, 1, 0))[-rows:]
        p = self.params
        seen = (output > 0) | self.prompt[:vocab].to(device)
        scaled = torch.where(logits > 0, logits / p.repetition_penalty, logits * p.repetition_penalty)
        logits = torch.where(seen, scaled, logits)
        return logits - p.frequency_penalty * output - p.presence_penalty * (output > 0)
