"""One forward of a transformers model over tokens of several texts, each of which attends to its own cache.

The tokens of all texts form one row of the model's input, with the position of each token in its text. During such a
pass, transformers' lookup of the attention function returns ``_attend_apart``. It calls the usual function once for
each text, over views of the text's keys and values and with the text's mask. So texts of any lengths need no padding,
and no key is copied. The tokens appended to a text may be a tree: a node's position is its depth after the text, and it
attends to the text and to its ancestors.

An architecture that does not look up its attention function, or ignores the given positions, would give wrong results.
``proves`` tests that on a few tokens.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adaptive.engines.cpu.families import NO_WINDOW
from adaptive.engines.hf.cache import ATTENTION, RollbackCache, layer_kinds
from adaptive.engines.hf.graphs import NEAR
from adaptive.engines.protocol import ExtendCall
from adaptive.engines.tree import NO_TREE, TokenTree
from adaptive.errors import first_line

logger = logging.getLogger("adaptive.engines")

# The name under which the attention function of these passes is registered in transformers, and the names of the
# functions that it may call. Others do not take masks of any shape.
NAME, USUAL = "adaptive_joint", ("eager", "sdpa")
Mask = torch.Tensor | None
Attend = Callable[..., tuple[torch.Tensor, Any]]


class Part(NamedTuple):
    """Tokens (n,) to append to a text, with logits of the last ``rows``. With a ``tree`` they are its last nodes, and
    are not counted in the cache's length."""

    tokens: torch.Tensor
    rows: int
    cache: RollbackCache
    tree: TokenTree | None

    @property
    def begin(self) -> int:
        """The place of the first token in the cache."""
        return self.cache.length + (0 if self.tree is None else len(self.tree) - len(self.tokens))

    def places(self) -> torch.Tensor:
        """The position of every token in its text, (n,)."""
        count = len(self.tokens)
        if self.tree is None:
            return torch.arange(self.begin, self.begin + count)
        return torch.tensor(self.tree.depths[len(self.tree) - count :]) + self.cache.length

    def view(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions of the tokens (n, 1) and of all keys (1, keys), and a mask (n, keys), True for keys that a token
        must not see."""
        count = len(self.tokens)
        if self.tree is not None:
            return self.tree.view(self.cache.length, count, device)
        keys = torch.arange(self.begin + count, device=device)[None]
        query = keys[0, self.begin :, None]
        return query, keys, keys > query


class Runs(Protocol):
    """An engine with the forwards that a joint pass needs."""

    model: PreTrainedModel
    device: torch.device

    def eager(self, tokens: torch.Tensor, rows: int, cache: RollbackCache) -> torch.Tensor:
        """Append tokens (n,) to the cache. Returns logits (rows, vocab) of the last ones."""

    def run_joint(
        self, tokens: torch.Tensor, places: torch.Tensor, cache: JointCache, wanted: torch.Tensor
    ) -> torch.Tensor:
        """The model's own forward of tokens (n,) at ``places`` (n,). Returns logits (m, vocab) of tokens ``wanted``
        (m,)."""


class _Pass(threading.local):
    """The present joint pass of this thread."""

    cache: JointCache | None = None


_under_way = _Pass()


class JointLayer(CacheLayerMixin):
    """A cache layer of a joint pass: writes the new keys and values of each text into the text's own cache."""

    def __init__(self, cache: JointCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index
        self.kind: str = cache.parts[0].cache.layers[index].kind
        self.is_sliding = self.kind != "full_attention"

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to allocate."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states (1, heads, all tokens, size), and store views of each text's for ``_attend_apart``."""
        views = []
        for part, rows in zip(self.cache.parts, self.cache.rows, strict=True):
            layer = part.cache.layers[self.index]
            views.append(layer.write(part.begin, key_states[:, :, rows], value_states[:, :, rows]))
        self.cache.seen = views, self.kind
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Sizes of the mask that transformers makes, which is not used: each text has its own mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Raises NotImplementedError: each text has a length of its own. Positions are passed to the model; one that
        computes more from the cache's length (Llama 4) makes no joint passes."""
        raise NotImplementedError("it asks for the length of the text, and there are several")

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1


class JointCache(Cache):
    """The cache that a joint pass gives the model. ``rows``: the slice of the pass's tokens of each part. ``seen``: the
    keys and values of each text in the layer that was written last, and that layer's kind."""

    layers: list[JointLayer]  # type: ignore[assignment]

    def __init__(self, config: Any, parts: Sequence[Part]) -> None:
        self.config = config
        self.parts = parts
        self.rows: list[slice] = []
        begin = 0
        for part in parts:
            self.rows.append(slice(begin, begin + len(part.tokens)))
            begin += len(part.tokens)
        self.seen: tuple[list[tuple[torch.Tensor, torch.Tensor]], str] = [], ""
        self.usual = str(config._attn_implementation)
        self._masks: dict[tuple[int, str, torch.dtype], Mask] = {}
        super().__init__(layers=[JointLayer(self, index) for index in range(len(parts[0].cache.layers))])

    @property
    def keeps(self) -> bool:
        """Whether any of the texts keeps hidden states."""
        return any(part.cache.keeps for part in self.parts)

    def keep(self, hidden: torch.Tensor) -> None:
        """Store the pass's hidden states (1, all tokens, width) in the caches that keep them."""
        for part, rows in zip(self.parts, self.rows, strict=True):
            if part.cache.keeps:
                part.cache.hold(part.begin, hidden[0, rows])

    def places(self) -> torch.Tensor:
        """The position of every token in its text, (all tokens,)."""
        return torch.cat([part.places() for part in self.parts])

    def wanted(self) -> torch.Tensor:
        """The indices of the tokens whose logits are wanted. If there are none, index 0, because models always return
        some."""
        spans = [torch.arange(r.stop - part.rows, r.stop) for part, r in zip(self.parts, self.rows, strict=True)]
        found = torch.cat(spans)
        return found if len(found) else torch.zeros(1, dtype=torch.long)

    def mask(self, number: int, kind: str, dtype: torch.dtype, device: torch.device) -> Mask:
        """The additive mask (1, 1, n, keys) of part ``number`` in layers of a kind; None if nothing is masked."""
        which = number, kind, dtype
        if which not in self._masks:
            hidden, mask = _hidden(self.parts[number], kind, self.config, device), None
            if hidden is not None:
                mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
                mask = mask.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]
            self._masks[which] = mask
        return self._masks[which]


def _hidden(part: Part, kind: str, config: Any, device: torch.device) -> Mask:
    """A mask (n, keys), True for keys that the tokens of a part must not see in layers of a kind; None for no mask."""
    query, key, hidden = part.view(device)
    window: int = getattr(config, "sliding_window", None) or 0
    chunk: int = getattr(config, "attention_chunk_size", None) or 0
    if kind == "sliding_attention" and config.model_type not in NO_WINDOW:
        return hidden | (key <= query - window)
    if kind == "chunked_attention":
        return hidden | (key // chunk != query // chunk)
    return hidden if part.tree is not None or len(query) > 1 else None


def _attend_apart(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention text by text. ``query`` (1, heads, all tokens, size); the result is (1, all tokens, heads, size)."""
    joint = _under_way.cache
    assert joint is not None
    if joint.usual == "eager":
        attend: Attend = sys.modules[type(module).__module__].eager_attention_forward
    else:
        attend = ALL_ATTENTION_FUNCTIONS[joint.usual]
    views, kind = joint.seen
    found = []
    for number, ((keys, values), rows) in enumerate(zip(views, joint.rows, strict=True)):
        own = joint.mask(number, kind, query.dtype, query.device)
        found.append(attend(module, query[:, :, rows], keys, values, own, **options)[0])
    return torch.cat(found, 1), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend_apart)


@contextmanager
def _attending_apart(config: Any, joint: JointCache) -> Iterator[None]:
    config._attn_implementation, _under_way.cache = NAME, joint
    try:
        yield
    finally:
        config._attn_implementation, _under_way.cache = joint.usual, None


@torch.inference_mode()
def extend_together(engine: Runs, parts: Sequence[Part]) -> list[torch.Tensor]:
    """Append the tokens of each part in one forward. Returns logits (rows, vocab) of each. If the pass fails, every
    text stays as it was. ``proves`` must hold for the engine."""
    config = engine.model.config.get_text_config()
    joint = JointCache(config, parts)
    for part in parts:
        part.cache.ensure_capacity(part.begin + len(part.tokens))
    tokens = torch.cat([part.tokens for part in parts])
    with _attending_apart(config, joint):
        logits = engine.run_joint(tokens, joint.places().to(engine.device), joint, joint.wanted().to(engine.device))
    for part in parts:
        if part.tree is None:
            part.cache.advance(len(part.tokens))
    return list(logits[: sum(part.rows for part in parts)].split([part.rows for part in parts]))


@torch.inference_mode()
def proves(engine: Runs) -> bool:
    """Whether the model gives the same logits in a joint pass as text by text. Tested on a few tokens, some of which
    are a tree."""
    config = engine.model.config.get_text_config()
    if str(config._attn_implementation) not in USUAL or not set(layer_kinds(config)) <= ATTENTION:
        return False
    tokens = torch.arange(9, device=engine.device) % config.vocab_size
    texts = tokens[:3], tokens[3:4]
    steps = tokens[4:6], tokens[6:9]
    try:
        alone, caches = [], []
        for text, step in zip(texts, steps, strict=True):
            cache = RollbackCache(config)
            engine.eager(text, 1, cache)
            alone.append(engine.eager(step, len(step), cache).float())
            cache.rollback(len(text))
            caches.append(cache)
        branches = torch.cat([tokens[:1], steps[1]])  # an extra first node, which the other nodes must not see
        parts = [
            Part(steps[0], len(steps[0]), caches[0], None),
            Part(branches, len(steps[1]), caches[1], NO_TREE.grown([-1, -1, *range(1, len(steps[1]))])),
        ]
        together = extend_together(engine, parts)
        gaps = [float((a - b.float()).norm() / a.norm()) for a, b in zip(alone, together, strict=True)]
    except Exception as error:  # a forward that does not support this raises many kinds of errors
        gaps, why = [1.0], first_line(error)
    else:
        why = f"it gives other logits, by {max(gaps):.0%}"
    proved = all(gap < NEAR for gap in gaps)
    if not proved:
        logger.info("passes of %s over several texts come one after the other: %s", type(engine.model).__name__, why)
    return proved


def grown(call: ExtendCall) -> TokenTree | None:
    """The tree of the call's sequence with the nodes that the call appends; None if it appends no nodes of a tree.
    Raises ValueError if the parents do not fit."""
    if call.parents is None:
        return None
    if len(call.parents) != len(call.tokens):
        raise ValueError(f"{len(call.tokens)} tokens with {len(call.parents)} parents")
    sequence: Any = call.sequence
    tree: TokenTree = sequence.tree.grown(call.parents)
    return tree
