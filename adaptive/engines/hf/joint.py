"""One forward of a transformers model over tokens of several texts, each of which attends to a cache of its own.

The tokens of all texts are one row of the model's input, and their positions say where each stands in its text. While
such a pass is under way, attention layers are given ``_attend_apart`` where they ask for their attention function: it
calls the one that they use otherwise, once for each text, over views of its keys and values and with a mask of its own.
So nothing is filled up to one length and no key is copied, whatever lengths come together. What is appended to a text
may be a tree, whose nodes stand where they are deep and see only what they follow.

An architecture that does not ask for its attention function, or takes positions from elsewhere, would compute something
else: ``proves`` tries it on a few tokens.
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

from adaptive.engines.hf.cache import ATTENTION, RollbackCache, layer_kinds
from adaptive.engines.hf.graphs import NEAR
from adaptive.engines.protocol import ExtendCall
from adaptive.engines.tree import NO_TREE, TokenTree
from adaptive.errors import first_line

logger = logging.getLogger("adaptive.engines")

# What the attention function of these passes is called where transformers looks for it, and of which functions it
# calls: others take no mask of any shape.
NAME, USUAL = "adaptive_joint", ("eager", "sdpa")
Mask = torch.Tensor | None
Attend = Callable[..., tuple[torch.Tensor, Any]]


class Part(NamedTuple):
    """Tokens (n,) to append to a text, and of how many of the last the logits are wanted. With a ``tree`` they are its
    last nodes, and not counted in the cache's length."""

    tokens: torch.Tensor
    rows: int
    cache: RollbackCache
    tree: TokenTree | None

    @property
    def begin(self) -> int:
        """Where they lie."""
        return self.cache.length + (0 if self.tree is None else len(self.tree) - len(self.tokens))

    def places(self) -> torch.Tensor:
        """The position of every token in its text, (n,)."""
        count = len(self.tokens)
        if self.tree is None:
            return torch.arange(self.begin, self.begin + count)
        return torch.tensor(self.tree.depths[len(self.tree) - count :]) + self.cache.length

    def view(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions of the tokens (n, 1) and of all keys (1, keys), and which keys they do not follow (n, keys)."""
        count = len(self.tokens)
        if self.tree is not None:
            return self.tree.view(self.cache.length, count, device)
        keys = torch.arange(self.begin + count, device=device)[None]
        query = keys[0, self.begin :, None]
        return query, keys, keys > query


class Runs(Protocol):
    """What such a pass is made with: an engine's own forwards."""

    model: PreTrainedModel
    device: torch.device

    def eager(self, tokens: torch.Tensor, rows: int, cache: RollbackCache) -> torch.Tensor:
        """Append tokens (n,) to the cache; logits (rows, vocab) of the last ones."""

    def run_joint(
        self, tokens: torch.Tensor, places: torch.Tensor, cache: JointCache, wanted: torch.Tensor
    ) -> torch.Tensor:
        """The model's own forward of tokens (n,) at ``places`` (n,); logits (m, vocab) of those ``wanted`` (m,)."""


class _Pass(threading.local):
    """The pass under way on a thread."""

    cache: JointCache | None = None


_under_way = _Pass()


class JointLayer(CacheLayerMixin):
    """A layer of a joint pass: writes what is new of each text into its own cache."""

    def __init__(self, cache: JointCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index
        self.kind: str = cache.parts[0].cache.layers[index].kind
        self.is_sliding = self.kind != "full_attention"

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing of its own."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states (1, heads, all tokens, size), and have attention see each text's."""
        views = []
        for part, rows in zip(self.cache.parts, self.cache.rows, strict=True):
            layer = part.cache.layers[self.index]
            views.append(layer.write(part.begin, key_states[:, :, rows], value_states[:, :, rows]))
        self.cache.seen = views, self.kind
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of no mask: each text has its own."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Positions are given."""
        return 0

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1


class JointCache(Cache):
    """What a joint pass gives the model as its cache. ``rows`` says which of the pass's tokens are each part's;
    ``seen`` are the keys and values of each text in the layer that was written last, and the layer's kind."""

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
        """Whether any of the texts keeps its hidden states."""
        return any(part.cache.keeps for part in self.parts)

    def keep(self, hidden: torch.Tensor) -> None:
        """Hold the hidden states (1, all tokens, width) of the pass where they are kept."""
        for part, rows in zip(self.parts, self.rows, strict=True):
            if part.cache.keeps:
                part.cache.hold(part.begin, hidden[0, rows])

    def places(self) -> torch.Tensor:
        """The position of every token in its text, (all tokens,)."""
        return torch.cat([part.places() for part in self.parts])

    def wanted(self) -> torch.Tensor:
        """Which tokens' logits are wanted; one where none are, since models give some."""
        spans = [torch.arange(r.stop - part.rows, r.stop) for part, r in zip(self.parts, self.rows, strict=True)]
        found = torch.cat(spans)
        return found if len(found) else torch.zeros(1, dtype=torch.long)

    def mask(self, number: int, kind: str, dtype: torch.dtype, device: torch.device) -> Mask:
        """The additive mask (1, 1, n, keys) of a part in layers of a kind, None where every key is seen."""
        which = number, kind, dtype
        if which not in self._masks:
            hidden, mask = _hidden(self.parts[number], kind, self.config, device), None
            if hidden is not None:
                mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
                mask = mask.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]
            self._masks[which] = mask
        return self._masks[which]


def _hidden(part: Part, kind: str, config: Any, device: torch.device) -> Mask:
    """Which keys (n, keys) the tokens of a part do not see in layers of a kind; None where they see all."""
    query, key, hidden = part.view(device)
    window: int = getattr(config, "sliding_window", None) or 0
    chunk: int = getattr(config, "attention_chunk_size", None) or 0
    if kind == "sliding_attention":
        return hidden | (key <= query - window)
    if kind == "chunked_attention":
        return hidden | (key // chunk != query // chunk)
    return hidden if part.tree is not None or len(query) > 1 else None


def _attend_apart(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention of query (1, heads, all tokens, size) text by text, (1, all tokens, heads, size)."""
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
    """Append to each text its tokens, in one forward; the logits (rows, vocab) of each. A pass that fails leaves every
    text as it was. The model is one that ``proves``."""
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
    """Whether the model gives in a joint pass what it gives text by text, tried on a few tokens, of which some are a
    tree."""
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
        branches = torch.cat([tokens[:1], steps[1]])  # the second node follows the text too, as if the first were not
        parts = [
            Part(steps[0], len(steps[0]), caches[0], None),
            Part(branches, len(steps[1]), caches[1], NO_TREE.grown([-1, -1, *range(1, len(steps[1]))])),
        ]
        together = extend_together(engine, parts)
        gaps = [float((a - b.float()).norm() / a.norm()) for a, b in zip(alone, together, strict=True)]
    except Exception as error:  # a forward that takes other ways fails in many
        gaps, why = [1.0], first_line(error)
    else:
        why = f"it gives other logits, by {max(gaps):.0%}"
    proved = all(gap < NEAR for gap in gaps)
    if not proved:
        logger.info("passes of %s over several texts come one after the other: %s", type(engine.model).__name__, why)
    return proved


def grown(call: ExtendCall) -> TokenTree | None:
    """The tree of a call's sequence with what the call appends to it; None where that is no node. Raises ValueError."""
    if call.parents is None:
        return None
    if len(call.parents) != len(call.tokens):
        raise ValueError(f"{len(call.tokens)} tokens with {len(call.parents)} parents")
    sequence: Any = call.sequence
    tree: TokenTree = sequence.tree.grown(call.parents)
    return tree
