"""The messages between a program and a draft server, as bytes: a JSON head followed by arrays.

A body is the length of its head (4 bytes, little-endian), the head, and the arrays that the head lists as
``[dtype, length]``, one after the other, little-endian. A request (``Asked``) has the tokens that the server has not
seen; the response (``Drafted``) has tokens, and for a drawn chain the distributions they were drawn from, each as the
tokens of a probability above 0; its head names the draft that made it (``Origin``). All received data are validated:
anything that is not a valid message raises ``Refused``.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field

from adaptive.errors import AdaptiveError
from adaptive.types import SamplingParams

# Paths of a draft server: its description, its vocabulary, and a proposal.
HELLO, VOCABULARY, PROPOSE = "/draft", "/draft/vocabulary", "/draft/propose"
CONTENT_TYPE = "application/octet-stream"
# Most bytes of a head and of a body. A proposal of 64 tokens, each drawn from a thousand, has half a megabyte; a text
# of a million tokens has four.
MOST_HEAD, MOST_BODY = 1 << 16, 1 << 24
# Most tokens that a drafted token is drawn from: the likeliest. Too high: more time on the line. Too low: more tokens
# that the target would accept are never drafted.
TOP = 256
# Allowed deviation of a distribution's sum from 1: the float32 rounding when a vocabulary is summed.
ROUNDING = 1e-5
# Sampling parameters that are sent. Penalties, biases and grammars change only the target's logits.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
DTYPES = {"int32": np.dtype("<i4"), "float32": np.dtype("<f4")}

Array = npt.NDArray[Any]


class Refused(ValueError):  # noqa: N818 - its text says what is refused
    """A message that is invalid, or does not match its request."""


class Hello(BaseModel):
    """A draft server's description: its model (``id`` and the hash of its ``weights``), whether it drafts ``trees``,
    the hash of its ``vocabulary``, and the adapter in use."""

    protocol: Literal[1] = 1
    id: str = Field(min_length=1, max_length=200)
    weights: str = Field(pattern=r"^[0-9a-f]{1,64}$")
    vocab_size: int = Field(gt=0, le=1 << 24)
    context_length: int = Field(gt=0, le=1 << 31)
    trees: bool
    vocabulary: str
    adapter: str | None = None


class Body(NamedTuple):
    """A message that was received: its head and its arrays."""

    head: dict[str, Any]
    arrays: list[Array]


class Origin(NamedTuple):
    """The draft that made a proposal: the hash of its ``weights`` and its ``adapter``."""

    weights: str
    adapter: str | None


@dataclass(frozen=True)
class Asked:
    """A request for a proposal after a text: at most ``length`` tokens among the first ``vocab`` ids. 0 requests no
    proposal; the server then only reads the text. The text is the first ``common`` tokens of the server's copy of the
    ``conversation``, followed by ``tokens``. ``tree``: the tokens are the nodes of a tree."""

    conversation: str
    common: int
    tokens: list[int]
    length: int
    tree: bool
    vocab: int
    sampling: SamplingParams

    def to_bytes(self) -> bytes:
        """The request as a body."""
        sampling = {name: getattr(self.sampling, name) for name in SAMPLING}
        head = {name: getattr(self, name) for name in ("conversation", "common", "length", "tree", "vocab")}
        return packed({**head, "sampling": sampling}, np.array(self.tokens, DTYPES["int32"]))

    @classmethod
    def from_bytes(cls, body: bytes) -> Asked:
        """The request in a body. Raises Refused."""
        head, arrays = unpacked(body)
        try:
            found = _AskedHead.model_validate(head)
            sampling = SamplingParams(**found.sampling.model_dump())
        except (ValueError, AdaptiveError) as error:
            raise Refused(f"the head is not what was expected: {error}") from error
        if len(arrays) != 1 or arrays[0].dtype != DTYPES["int32"] or (arrays[0] < 0).any():
            raise Refused("the tokens are missing")
        given = found.model_dump(exclude={"sampling"})
        return cls(tokens=arrays[0].tolist(), sampling=sampling, **given)


class _Sampling(BaseModel):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None


class _AskedHead(BaseModel):
    conversation: str = Field(min_length=1, max_length=64)
    common: int = Field(ge=0)
    length: int = Field(ge=0, le=1024)
    tree: bool
    vocab: int = Field(gt=0)
    sampling: _Sampling


class Drafted(NamedTuple):
    """A server's proposal: tokens, the ``parents`` of a tree, and the distributions ``probs`` (K, vocab), float32, of a
    drawn chain."""

    tokens: list[int]
    parents: list[int] | None
    probs: Array | None


def drafted_bytes(
    tokens: list[int], parents: list[int] | None, probs: list[Array] | None, origin: Origin | None = None
) -> bytes:
    """A proposal as a body; ``probs`` are the rows (vocab,) that its tokens were drawn from."""
    arrays: list[Array] = [np.array(tokens, DTYPES["int32"])]
    if parents is not None:
        arrays.append(np.array(parents, DTYPES["int32"]))
    if probs is not None:
        ids = [row.nonzero()[0] for row in probs]
        arrays.append(np.array([len(one) for one in ids], DTYPES["int32"]))
        arrays.append(np.concatenate(ids).astype(DTYPES["int32"]))
        arrays.append(np.concatenate([row[one] for row, one in zip(probs, ids, strict=True)]).astype(DTYPES["float32"]))
    named = {} if origin is None else origin._asdict()
    return packed({"tree": parents is not None, "drawn": probs is not None, **named}, *arrays)


def origin_of(body: Body) -> Origin | None:
    """The draft that made the proposal in a body; None if the body does not name it, as an older server's. Raises
    Refused."""
    head = body.head
    if "weights" not in head:
        return None
    weights, adapter = head["weights"], head.get("adapter")
    if not isinstance(weights, str) or not isinstance(adapter, str | None):
        raise Refused("the draft's name is not one")
    return Origin(weights, adapter)


def read_drafted(body: Body, asked: Asked, drawn: bool) -> Drafted | None:
    """The validated response to ``asked``; None for no proposal. ``drawn``: the target samples, so distributions are
    wanted for a chain; without them its tokens are verified as point masses. Raises Refused."""
    head, arrays = body
    tree, has_probs = head.get("tree") is True, head.get("drawn") is True
    expected = ["int32"] + ["int32"] * tree + ["int32", "int32", "float32"] * has_probs
    if [one.dtype for one in arrays] != [DTYPES[name] for name in expected]:
        raise Refused("the arrays are not those of a proposal")
    tokens = arrays[0]
    if len(tokens) > asked.length:
        raise Refused(f"{len(tokens)} tokens were proposed where {asked.length} were asked for")
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < asked.vocab):
        raise Refused("a proposed token is not in the vocabulary")
    if not len(tokens):
        return None
    listed: list[int] = tokens.tolist()
    if tree:
        if not asked.tree or has_probs:
            raise Refused("a tree was proposed where a chain was asked for")
        return Drafted(listed, _parents(arrays[1], listed), None)
    if not has_probs or not drawn:
        return Drafted(listed, None, None)
    return Drafted(listed, None, _distributions(asked.vocab, *arrays))


def _parents(parents: Array, tokens: list[int]) -> list[int]:
    """The parent of each node, which must come before it; siblings must be different tokens. Raises Refused."""
    count = len(tokens)
    if len(parents) != count or not ((parents >= -1) & (parents < np.arange(count))).all():
        raise Refused("the parents are not those of a tree")
    listed: list[int] = parents.tolist()
    if len(set(zip(listed, tokens, strict=True))) < count:
        raise Refused("two nodes of the tree are the same text")
    return listed


def _distributions(vocab: int, tokens: Array, counts: Array, ids: Array, probs: Array) -> Array:
    """Rows (K, vocab), each a distribution in which its token has a probability above 0. Raises Refused."""
    count = len(tokens)
    if len(counts) != count or (counts < 1).any() or counts.sum(dtype=np.int64) != len(ids) or len(ids) != len(probs):
        raise Refused("the distributions have another shape than the tokens")
    if not (ids.min() >= 0 and ids.max() < vocab):
        raise Refused("a distribution has a token that is not in the vocabulary")
    if not (np.isfinite(probs).all() and (probs >= 0).all()):
        raise Refused("a probability is negative or no number")
    rows = np.repeat(np.arange(count), counts)
    if len(np.unique(rows * np.int64(vocab) + ids)) < len(ids):
        raise Refused("a distribution has a token twice")
    sums = np.bincount(rows, probs.astype(np.float64), count)
    if (np.abs(sums - 1) > ROUNDING).any():
        raise Refused(f"the probabilities of a distribution add up to {sums[np.abs(sums - 1).argmax()]:.4g}")
    full = np.zeros((count, vocab), np.float32)
    full[rows, ids] = probs
    if not (full[np.arange(count), tokens] > 0).all():
        raise Refused("a token was proposed that its distribution cannot give")
    return full


def packed(head: dict[str, Any], *arrays: Array) -> bytes:
    """A body with this head and these arrays."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    listed = [[names[one.dtype], len(one)] for one in arrays]
    text = json.dumps({**head, "arrays": listed}).encode()
    return b"".join([struct.pack("<I", len(text)), text, *(one.tobytes() for one in arrays)])


def unpacked(body: bytes) -> Body:
    """The head and the arrays in these bytes. Raises Refused."""
    if len(body) < 4 or not 0 < (size := struct.unpack_from("<I", body)[0]) <= min(MOST_HEAD, len(body) - 4):
        raise Refused("the body has no head")
    try:
        head = json.loads(body[4 : 4 + size])
        listed = [(DTYPES[name], int(count)) for name, count in head["arrays"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise Refused("the head cannot be read") from error
    arrays, at = [], 4 + size
    for dtype, count in listed:
        if not 0 <= count <= (len(body) - at) // dtype.itemsize:
            raise Refused("the body is shorter than its head says")
        arrays.append(np.frombuffer(body, dtype, count, at))
        at += count * dtype.itemsize
    if at != len(body):
        raise Refused("the body is longer than its head says")
    return Body(head, arrays)
