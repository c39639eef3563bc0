"""The record of one generation, as it passes from the decoding loop to the log and to the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adaptive.decoding.params import SamplingParams


@dataclass(frozen=True)
class Message:
    """One chat message."""

    role: str
    content: str


class Round(NamedTuple):  # which is made in a third of the time that a frozen dataclass takes
    """One speculative round: what was drafted, what was accepted, what it cost.

    Each round commits ``accepted + 1`` tokens (the last round may commit fewer: a stop cuts it).
    ``drafted`` 0 is a plain decoding step. Seconds are wall-clock.
    """

    drafter: str
    drafted: int
    accepted: int
    draft_s: float
    verify_s: float


@dataclass(frozen=True)
class Timings:
    """Prompt tokens computed now and found in the cache; seconds for the prompt and for the rest.

    The first token comes out of the prompt's own pass, so ``predicted_s`` covers ``predicted_n - 1``.
    ``expected_s`` is what the draft-length policy expected of these before each round; 0 where it
    forecast nothing.
    """

    prompt_n: int
    cached_n: int
    prompt_s: float
    predicted_n: int
    predicted_s: float
    expected_s: float = 0.0

    @property
    def per_second(self) -> float:
        """Tokens per second of decoding, the prompt apart; 0 where nothing was timed."""
        return (self.predicted_n - 1) / self.predicted_s if self.predicted_s > 0 else 0.0


@dataclass(frozen=True)
class Supervision:
    """The target's distribution at each of the n output positions, at temperature 1, before any
    sampling transform: the k most probable ids with natural-log probabilities, best first, and the
    log of the mass left over (-inf when none is). ``chosen`` is the log-probability of the output
    token under the distribution it was really drawn from (0 when greedy).

    Shapes: ids (n, k) int32, logprobs (n, k) float16, rest (n,) float16, chosen (n,) float16.
    """

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float16]
    rest: npt.NDArray[np.float16]
    chosen: npt.NDArray[np.float16]


@dataclass(frozen=True)
class Generation:
    """One finished generation: everything the log keeps of it.

    ``prompt`` and ``output`` are token ids; ``messages`` is the chat that became the prompt (empty
    for a raw text prompt, whose text is then ``prompt_text``); ``text`` is what was shown. ``domain``
    is a free label of the kind of text. ``adapter`` is the id of the draft's adapter, or None.
    ``created`` is seconds since the epoch. ``finish_reason`` is ``stop``, ``length`` or ``cancelled``.
    """

    session: str
    created: float
    messages: tuple[Message, ...]
    prompt_text: str
    text: str
    prompt: npt.NDArray[np.int32]
    output: npt.NDArray[np.int32]
    sampling: SamplingParams
    adapter: str | None
    engine: str
    domain: str | None
    finish_reason: str
    rounds: tuple[Round, ...]
    timings: Timings
    supervision: Supervision | None
