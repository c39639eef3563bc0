"""What a caller may ask of one generation. No torch here: the log and the command line import it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from adaptive.errors import AdaptiveError

# Below it logits divided by a temperature are no numbers any more; a client that sends 1e-8 wants the likeliest token.
LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen from the target's logits.

    ``temperature`` 0 is greedy, and so is one below ``LEAST_TEMPERATURE``. ``top_k`` 0, ``top_p`` 1 and
    ``min_p`` 0 are off. Penalties follow the field: ``repetition`` divides positive and multiplies negative
    logits of every token of prompt and output (CTRL, 1 = off); ``presence`` and ``frequency`` subtract from
    tokens of the output (OpenAI, 0 = off). ``logit_bias`` maps token id to an addend. ``seed`` None draws one.
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

    def __post_init__(self) -> None:
        """Raise AdaptiveError, naming the parameter, for a value outside its range."""
        ranges = {
            "temperature": (self.temperature, 0.0, 100.0),
            "top_k": (self.top_k, 0, 2**31),
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
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < LEAST_TEMPERATURE

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


@dataclass(frozen=True)
class StopParams:
    """When a generation ends, besides the end-of-sequence tokens of the model."""

    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise AdaptiveError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if any(not text for text in self.stop):
            raise AdaptiveError("a stop string is empty; give at least one character")
