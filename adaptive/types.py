"""Data types that pass between the parts of the program: plain data, no torch.

These are the parameters of one generation (``SamplingParams``, ``StopParams``), and its record, which passes from the
decoding loop to the log and to the trainer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from adaptive.errors import AdaptiveError

if TYPE_CHECKING:  # settings import this module before anything is shown, and numpy takes 50 ms
    import numpy as np
    import numpy.typing as npt

# Prefix of ``Generation.engine`` for answers of another server, and the engines of those servers that are known to
# propose the draft's likeliest tokens and to accept each one that the target chooses too, at any temperature.
UPSTREAM_PREFIX = "upstream "
LIKELIEST_PROPOSED = frozenset(UPSTREAM_PREFIX + name for name in ("llama-server", "vllm", "sglang", "lm-studio"))

# Names of drafters in rounds, records and figures; heads have names of their own. FREE drafters take no forward and are
# not trained: earlier text, and a grammar. TREE is the model drafting trees; REMOTE is a draft server's model, and
# REMOTE_TREE its trees. GRAFT joins the names of two drafters that took turns.
MODEL, TREE, HISTORY, GRAMMAR, GRAFT = "model", "tree", "history", "grammar", "+"
REMOTE, REMOTE_TREE = "remote", "remote-tree"
FREE = frozenset({HISTORY, GRAMMAR})
# Below this temperature, divided logits may no longer be numbers. A client that sends 1e-8 wants the likeliest token.
LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen from the target's logits.

    ``temperature`` 0 is greedy, and so is any below ``LEAST_TEMPERATURE``. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are
    off. Penalties are the usual ones: ``repetition`` divides positive and multiplies negative logits of every token of
    prompt and output (CTRL, 1 = off); ``presence`` and ``frequency`` subtract from tokens of the output (OpenAI, 0 =
    off). ``logit_bias`` maps token id to an addend. ``seed`` fixes the text for every drafter (``adaptive/noise.py``);
    None draws tokens by chance, and accepts more drafted tokens. ``constrained``: a grammar masked the logits, which
    the stored distributions do not show.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    constrained: bool = False

    def __post_init__(self) -> None:
        """Raise AdaptiveError, naming the parameter, for a value outside its range."""
        ranges = {
            "temperature": (self.temperature, 0.0, 100.0),
            "top_k": (self.top_k, 0, 2**31 - 1),
            "top_p": (self.top_p, 0.0, 1.0),
            "min_p": (self.min_p, 0.0, 1.0),
            "repetition_penalty": (self.repetition_penalty, 0.01, 100.0),
            "presence_penalty": (self.presence_penalty, -100.0, 100.0),
            "frequency_penalty": (self.frequency_penalty, -100.0, 100.0),
        }
        for name, (value, low, high) in ranges.items():
            if not low <= value <= high:  # also refuses nan
                raise AdaptiveError(f"{name} is {value}; it must lie between {low} and {high}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise AdaptiveError(f"seed is {self.seed}; it must be a whole number of 64 bits")
        if self.top_p == 0.0:
            raise AdaptiveError("top_p is 0; it must be above 0 (1 turns it off)")

    @property
    def cuts(self) -> bool:
        """Whether some tokens are excluded by their probability."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < LEAST_TEMPERATURE

    @property
    def seeded(self) -> bool:
        """Whether tokens are drawn by the noise that a seed fixes."""
        return self.seed is not None and not self.greedy

    @property
    def penalised(self) -> bool:
        """Whether logits depend on which tokens came before, beyond the model itself."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def to_json(self) -> str:
        """One JSON object with every field, as stored in the log."""
        return json.dumps({**asdict(self), "logit_bias": {str(k): v for k, v in self.logit_bias.items()}})

    @classmethod
    def from_json(cls, text: str) -> SamplingParams:
        """The inverse of ``to_json``; unknown keys of later versions are ignored."""
        values = json.loads(text)
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        known["logit_bias"] = {int(k): float(v) for k, v in known.get("logit_bias", {}).items()}
        return cls(**known)


# Most stop strings of a request, and most characters of one. OpenAI allows 4. Their total length costs memory and some
# milliseconds of preparation.
MOST_STOPS, LONGEST_STOP = 64, 512


@dataclass(frozen=True)
class StopParams:
    """When a generation ends, besides the end-of-sequence tokens of the model.

    Raises AdaptiveError for more than MOST_STOPS strings, one longer than LONGEST_STOP characters, or an empty one.
    """

    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise AdaptiveError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if any(not text for text in self.stop):
            raise AdaptiveError("a stop string is empty; give at least one character")
        if len(self.stop) > MOST_STOPS:
            raise AdaptiveError(f"stop: {len(self.stop)} strings are given; at most {MOST_STOPS} are looked for")
        longest = max((len(text) for text in self.stop), default=0)
        if longest > LONGEST_STOP:
            raise AdaptiveError(f"stop: a string has {longest} characters; at most {LONGEST_STOP} are looked for")


@dataclass(frozen=True)
class Message:
    """One chat message."""

    role: str
    content: str


class Part(NamedTuple):
    """One drafter's share of a round: the tokens it drafted, and those that were accepted. ``judged``: all tokens
    before them were accepted; else the target's logits do not apply to them."""

    drafter: str
    drafted: int
    accepted: int
    judged: bool


class Round(NamedTuple):  # made in a third of the time of a frozen dataclass
    """One speculative round: what was drafted, what was accepted, and its seconds.

    Each round commits ``accepted + 1`` tokens (the last round may commit fewer: a stop cuts it). ``drafted`` 0 is a
    plain decoding step. Seconds are wall-clock; if a ``LengthPolicy`` observes rounds by a clock of its own, the
    wall-clock time of a burst is divided among its rounds in proportion to that. If two drafters took turns,
    ``drafter`` names both ("model+history"), and ``first`` is the number of tokens, at least 1, that the first one
    drafted; else ``first`` is 0. ``shared`` is the number of other answers whose tokens were in the same pass; the
    seconds are then this answer's share.
    """

    drafter: str
    drafted: int
    accepted: int
    draft_s: float
    verify_s: float
    first: int = 0
    shared: int = 0

    @property
    def parts(self) -> tuple[Part, ...]:
        """The round by drafter, in order."""
        if not self.first:
            return (Part(self.drafter, self.drafted, self.accepted, True),)
        one, _, other = self.drafter.partition(GRAFT)
        beyond = self.accepted - self.first
        return (
            Part(one, self.first, min(self.first, self.accepted), True),
            Part(other, self.drafted - self.first, max(0, beyond), beyond >= 0),
        )

    @property
    def learned(self) -> Round | None:
        """The round from the view of the trained drafter (a model or a head): the tokens that it drafted, and those
        accepted. None if only other drafters drafted, if none of its tokens was judged, or for a tree, most of whose
        nodes are not expected to be accepted. A plain step stays as it is."""
        if not self.first:
            return None if self.drafter in (*FREE, TREE, REMOTE_TREE) else self
        for part in self.parts:
            if part.drafter not in FREE and part.judged:
                return Round(part.drafter, part.drafted, part.accepted, self.draft_s, self.verify_s)
        return None

    def stretched(self, times: float) -> Round:
        """The same with its seconds multiplied by ``times``."""
        return self._replace(draft_s=times * self.draft_s, verify_s=times * self.verify_s)

    def cut(self, tokens: int) -> Round:
        """The round as if only its first ``tokens`` tokens, all of them accepted, had been drafted."""
        if not self.first or tokens > self.first:
            return self._replace(drafted=tokens, accepted=tokens)
        return self._replace(drafter=self.parts[0].drafter, drafted=tokens, accepted=tokens, first=0)


@dataclass(frozen=True)
class Timings:
    """Prompt tokens computed now and found in the cache; seconds of the prompt and of the rest.

    The prompt's own pass gives the first token, so ``predicted_s`` covers ``predicted_n - 1`` tokens. ``expected_s`` is
    the sum of the seconds that the draft-length policy expected of each round; 0 if it forecasts nothing.
    """

    prompt_n: int
    cached_n: int
    prompt_s: float
    predicted_n: int
    predicted_s: float
    expected_s: float = 0.0

    @property
    def per_second(self) -> float:
        """Tokens per second of decoding, without the prompt; 0 if nothing was timed."""
        return (self.predicted_n - 1) / self.predicted_s if self.predicted_s > 0 else 0.0


@dataclass(frozen=True)
class Supervision:
    """The target's distribution at each of the n output positions, at temperature 1, before any sampling transform: the
    k most probable ids with natural-log probabilities, best first, and the log of the remaining mass (-inf if there is
    none). ``chosen`` is the log-probability of the output token under the distribution it was drawn from (0 when
    greedy).

    Shapes: ids (n, k) int32, logprobs (n, k) float16, rest (n,) float16, chosen (n,) float16.
    """

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float16]
    rest: npt.NDArray[np.float16]
    chosen: npt.NDArray[np.float16]


@dataclass(frozen=True)
class Generation:
    """One finished generation, as it is logged.

    ``prompt`` and ``output`` are token ids; ``messages`` is the chat that became the prompt (empty for a raw text
    prompt, whose text is then ``prompt_text``); ``text`` is the shown text. ``domain`` is a free label of the kind of
    text. ``owner`` is a digest of the user or key, if the server distinguishes them, else empty. ``adapter`` is the id
    of the draft's adapter, or None. ``created`` is seconds since the epoch. ``finish_reason`` is ``stop``, ``length``
    or ``cancelled``.
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
    owner: str = ""
