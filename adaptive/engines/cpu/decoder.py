"""A decoder's pass, and a draft's proposal, as one call of our own (``native/decoder.h``, ``native/draft.h``)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from adaptive.engines.cpu.kernels import FLOAT, INT, POINTER, Attention, Cuts, First, Product, Rule, library
from adaptive.tokens import Rows, address


class _Norm(ctypes.Structure):
    """``Norm`` of ``native/decoder.h``."""

    _fields_ = (("weight", POINTER), ("side", FLOAT))


class _Layer(ctypes.Structure):
    """``Layer`` of ``native/decoder.h``."""

    _fields_ = (
        *((name, POINTER) for name in ("project", "output", "up", "down")),
        *((name, _Norm) for name in ("attention_norm", "mix_norm", "head_norm", "after_attention", "after_mix")),
        ("scale", FLOAT),
        *((name, INT) for name in ("rope", "window")),
    )


class _Decoder(ctypes.Structure):
    """``Decoder`` of ``native/decoder.h``."""

    _fields_ = (
        *((name, POINTER) for name in ("layers", "attention", "head", "embedding")),
        ("final_norm", _Norm),
        ("factor", FLOAT),
        *((name, INT) for name in ("gate", "count", "half", "vocab")),
    )


# From a position (from 1) and the largest probability there to an ``Advice``, as its number.
Adviser: TypeAlias = Callable[[int, float], int]
_ADVISER = ctypes.CFUNCTYPE(INT, INT, FLOAT)


class _Choice(ctypes.Structure):
    """``Choice`` of ``native/draft.h``."""

    _fields_ = (
        *((name, POINTER) for name in ("cuts", "shares", "probs")),
        ("advise", _ADVISER),
        ("stopping", POINTER),
        *((name, INT) for name in ("length", "vocab")),
    )


class Norm(NamedTuple):
    """An RMS norm: ``weight`` and ``side`` as in ``Product``."""

    weight: torch.Tensor
    side: float


@dataclass(frozen=True)
class DecoderLayer:
    """A layer of a ``Decoder``: its products and its norms. ``head_norm`` (heads + key heads, size) is that of each
    head's queries and keys, those ``after`` attention and feed-forward part of what they add."""

    project: Product
    output: Product
    up: Product
    down: Product
    attention_norm: Norm
    mix_norm: Norm
    head_norm: Norm | None
    after_attention: Norm | None
    after_mix: Norm | None
    scale: float
    rope: int
    window: int


class _Asked:
    """The adviser, as C calls it. It knows nothing of the choice that it is asked for: that would be a circle."""

    def __init__(self) -> None:
        self.advise: Adviser | None = None
        self.error: BaseException | None = None

    def __call__(self, position: int, confidence: float) -> int:
        """What is raised in here, ctrl-C too, would be lost among C's frames: the draft ends, ``error`` is kept."""
        try:
            assert self.advise is not None
            return self.advise(position, confidence)
        except BaseException as error:
            self.error = error
            return 0


class Choice:
    """How tokens of a proposal are chosen: the likeliest, or with ``cuts`` drawn; of the first ``vocab`` ids."""

    def __init__(self, vocab: int, cuts: Cuts | None) -> None:
        self.vocab = vocab
        self._cuts = cuts
        self._given = _Choice(None if cuts is None else ctypes.addressof(cuts), vocab=vocab)
        self.address = ctypes.addressof(self._given)
        self.probs = Rows(vocab)  # from the first on, the distributions that the last tokens were drawn from
        self.tokens: Any = (ctypes.c_int64 * 0)()
        self.length = 0
        self._asked = _Asked()

    def prepare(self, length: int, shares: int | None, advise: Adviser | None, stopping: int | None = None) -> None:
        """For a proposal of at most so many tokens. ``shares``, where there are cuts, is the address of as many uniform
        random numbers below 1, float64; ``stopping`` that of thresholds, instead of somebody to be asked."""
        given = self._given
        self.length = given.length = length
        given.shares = shares
        if length > len(self.tokens):
            self.tokens = (ctypes.c_int64 * length)()
            if self._cuts is not None:
                given.probs = address(self.probs(0, length))
        given.stopping = stopping
        if advise != self._asked.advise:
            self._asked.advise = advise
            given.advise = _ADVISER() if advise is None else _ADVISER(self._asked)

    def check(self) -> None:
        """Raise what was raised by the adviser."""
        if self._asked.error is not None:
            error, self._asked.error = self._asked.error, None
            raise error


class Decoder:
    """A whole pass in one call, for a model of RMS norms and gated feed-forward parts (``gate`` says how)."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        attention: Attention,
        gate: First,
        final_norm: Norm,
        head: Product,
        embedding: torch.Tensor,
        factor: float = 1.0,
    ) -> None:
        """``embedding`` (vocab, width) is multiplied by ``factor``."""
        found = library()
        assert found is not None
        self._parts = (layers, attention, head, final_norm, embedding)  # the structures point into them
        self._layers = (_Layer * len(layers))(
            *(
                _Layer(
                    *(part.address for part in (layer.project, layer.output, layer.up, layer.down)),
                    *map(_norm, (layer.attention_norm, layer.mix_norm, layer.head_norm)),
                    *map(_norm, (layer.after_attention, layer.after_mix)),
                    layer.scale,
                    layer.rope,
                    layer.window,
                )
                for layer in layers
            )
        )
        self._given = _Decoder(
            ctypes.addressof(self._layers),
            attention.address,
            head.address,
            embedding.data_ptr(),
            _norm(final_norm),
            factor,
            gate,
            len(layers),
            embedding.dtype == torch.bfloat16,
            len(embedding),
        )
        self._address = ctypes.addressof(self._given)
        self._run, self._draft, self._verify = found.decode, found.draft, found.verify
        self._tokens: Any = (ctypes.c_int64 * 0)()
        self._passed = ctypes.c_int()
        self._passed_at = ctypes.addressof(self._passed)

    def __call__(
        self, tokens: list[int], turns: int, caches: Any, capacity: int, start: int, logits: torch.Tensor, threads: int
    ) -> None:
        """Logits (rows, vocab), float32 and contiguous, of the last tokens. ``turns`` and ``caches``, an array of one
        for each layer, are addresses; they and the rest as in ``Attention``. Raises IndexError, and writes nothing,
        for an id beyond the vocabulary."""
        done = self._run(
            self._address,
            self._given_tokens(tokens),
            len(tokens),
            len(logits),
            turns,
            caches,
            capacity,
            start,
            address(logits),
            threads,
        )
        if not done:
            raise IndexError("a token is not of the model's vocabulary")

    def draft(
        self, tokens: list[int], choice: Choice, turns: int, caches: Any, capacity: int, start: int, threads: int
    ) -> tuple[list[int], int]:
        """At most as many tokens as ``choice`` is prepared for after ``tokens``, and how many the caches hold more by
        then. The rest, and IndexError, as above."""
        count = self._draft(
            self._address,
            choice.address,
            self._given_tokens(tokens),
            len(tokens),
            turns,
            caches,
            capacity,
            start,
            choice.tokens,
            self._passed_at,
            threads,
        )
        choice.check()
        if count < 0:
            raise IndexError("a token is not of the model's vocabulary")
        return choice.tokens[:count], self._passed.value

    def _given_tokens(self, tokens: list[int]) -> Any:
        """As an array, in room that is kept: making one takes four times as long as filling it."""
        if len(tokens) > len(self._tokens):
            self._tokens = (ctypes.c_int64 * len(tokens))()
        self._tokens[: len(tokens)] = tokens
        return self._tokens

    def verify(
        self,
        tokens: list[int],
        rule: Rule,
        turns: int,
        caches: Any,
        capacity: int,
        start: int,
        logits: torch.Tensor,
        threads: int,
    ) -> int:
        """A pass, and how many of the last tokens stand by ``rule``. The rest, and IndexError, as above."""
        accepted: int = self._verify(
            self._address,
            rule.address,
            self._given_tokens(tokens),
            len(tokens),
            turns,
            caches,
            capacity,
            start,
            address(logits),
            threads,
        )
        if accepted < 0:
            raise IndexError("a token is not of the model's vocabulary")
        return accepted


def _norm(norm: Norm | None) -> _Norm:
    return _Norm() if norm is None else _Norm(norm.weight.data_ptr(), norm.side)
