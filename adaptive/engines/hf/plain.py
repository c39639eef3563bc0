"""A text in the cache that transformers makes for a model itself: for models whose passes cannot be taken back here.

Every pass is one that transformers' own ``generate`` makes: the prompt at once, then token after token. What was fed
stays; going back means to compute the text anew, and so does every token of a model that gives no cache, or one that
does not know its length.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel

from adaptive.engines.protocol import Memory, Sequence, no_trees
from adaptive.engines.tree import NO_TREE
from adaptive.tokens import Ids, as_tensor


class PlainSequence:
    """See above. Nothing is drafted for it, though a draft would be verified correctly."""

    fused = None

    def __init__(self, model: PreTrainedModel, device: torch.device, cache_name: str) -> None:
        """``cache_name`` is what the model's forward calls its cache."""
        self.model = model
        self.device = device
        self.cache_name = cache_name
        self._tokens: list[int] = []
        self._cache: Any = None
        self._config = GenerationConfig(
            max_new_tokens=1, do_sample=False, use_cache=True, output_logits=True, return_dict_in_generate=True
        )
        self._config.pad_token_id = 0  # of which none is needed, but for a warning

    @property
    def length(self) -> int:
        """Tokens fed."""
        return len(self._tokens)

    @property
    def memory(self) -> Memory:
        """What the cache takes, of which is not known what it is."""
        return Memory(keys=sum(tensor.nbytes for tensor in _tensors(self._cache)))

    def reserve(self, length: int) -> None:
        """Nothing can be reserved in a cache of transformers."""

    @torch.inference_mode()
    def extend(self, tokens: Ids, rows: int, parents: list[int] | None = None) -> torch.Tensor:
        """Append n tokens and return logits (rows, vocab) of the last rows; see the protocol."""
        if parents is not None:
            raise no_trees("a model that decodes plainly")
        new = as_tensor(tokens).tolist()
        first = 1 if self._tokens else max(1, len(new) - max(rows, 1) + 1)
        logits = [self._feed(new[:first]), *(self._feed([token]) for token in new[first:])]
        return torch.cat(logits[len(logits) - rows :]) if rows else logits[0][:0]

    def _feed(self, new: list[int]) -> torch.Tensor:
        """Logits (1, vocab) after these too."""
        whole, cache = [*self._tokens, *new], self._cache
        self._tokens, self._cache = [], None  # in case that this is interrupted
        ids = torch.tensor([whole], device=self.device)
        given = {} if cache is None else {self.cache_name: cache}
        model: Any = self.model
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=self._config, **given)
        cache = output.get(self.cache_name)
        self._tokens, self._cache = whole, cache if _holds(cache, len(whole)) else None
        logits: torch.Tensor = output.logits[0]
        return logits

    def features(self, begin: int, end: int) -> torch.Tensor:
        """None are kept: ValueError."""
        raise ValueError("a model that decodes plainly keeps no features")

    def keep(self, path: list[int]) -> None:
        """There is no tree; see the protocol."""
        NO_TREE.check(path)

    def rollback(self, length: int) -> None:
        """Forget everything where that is less than what is held: it is computed anew."""
        if length < len(self._tokens):
            self._tokens, self._cache = [], None

    def copy_prefix(self, other: Sequence, length: int) -> None:
        """Nothing can be copied: it is computed anew."""
        self.rollback(0)


def _holds(cache: Any, length: int) -> bool:
    """Whether ``generate`` goes on from this cache after so many tokens: it feeds what the cache says it lacks."""
    try:
        return isinstance(cache, Cache) and cache.get_seq_length() == length
    except ValueError:  # a cache that counts none
        return False


def _tensors(thing: Any, deep: int = 0) -> list[torch.Tensor]:
    """The tensors of a cache, its layers, and lists and dictionaries of them."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if deep > 4:
        return []
    if isinstance(thing, dict):
        parts: list[Any] = list(thing.values())
    elif isinstance(thing, list | tuple):
        parts = list(thing)
    else:
        parts = list(getattr(thing, "__dict__", {}).values())
    return [tensor for part in parts for tensor in _tensors(part, deep + 1)]
