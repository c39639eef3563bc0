"""A text in the cache that transformers itself makes, for models whose passes cannot be rolled back here.

Every pass is one of transformers' ``generate``: the prompt at once, however it is sliced, then one token at a time. A
rollback computes the whole text again, and so does a long message in a conversation. So does every token if the model
returns no cache, or a cache without the right length.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel

from adaptive.engines.protocol import Memory, Sequence, no_trees
from adaptive.engines.tree import NO_TREE
from adaptive.tokens import Ids, as_tensor

# New tokens from which the whole text is computed again at once, and not one after the other. Too low: a long text is
# computed again for a short message. Too high: that takes a pass a token.
ANEW = 16


class PlainSequence:
    """One text of such a model. It is used without a draft, but would verify one correctly."""

    fused = None

    def __init__(self, model: PreTrainedModel, device: torch.device, cache_name: str) -> None:
        """``cache_name``: the parameter name of the cache in the model's forward."""
        self.model = model
        self.device = device
        self.cache_name = cache_name
        self._tokens: list[int] = []  # those that were fed
        self._waiting: list[int] = []  # those after them, of which no logits were wanted yet
        self._cache: Any = None
        self._config = GenerationConfig(
            max_new_tokens=1, do_sample=False, use_cache=True, output_logits=True, return_dict_in_generate=True
        )
        self._config.pad_token_id = 0  # unused; avoids a warning

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return len(self._tokens) + len(self._waiting)

    @property
    def memory(self) -> Memory:
        """The memory of the cache, all counted as keys, because its contents are unknown."""
        storages = [tensor.untyped_storage() for tensor in _tensors(self._cache)]
        return Memory(keys=sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))

    def reserve(self, length: int) -> None:
        """Does nothing: a cache of transformers cannot be reserved."""

    @torch.inference_mode()
    def extend(self, tokens: Ids, rows: int, parents: list[int] | None = None) -> torch.Tensor:
        """Append n tokens and return logits (rows, vocab) of the last rows; see the protocol."""
        if parents is not None:
            raise no_trees("a model that decodes plainly")
        new = [*self._waiting, *as_tensor(tokens).tolist()]
        if not rows:
            self._waiting = new
            return torch.empty(0, self.model.config.get_text_config().vocab_size, device=self.device)
        self._waiting = []
        if self._cache is None or len(new) - rows >= ANEW:  # the whole text at once
            new, self._tokens, self._cache = [*self._tokens, *new], [], None
        first = 1 if self._tokens else max(1, len(new) - rows + 1)
        logits = [self._feed(new[:first]), *(self._feed([token]) for token in new[first:])]
        return torch.cat(logits[len(logits) - rows :])

    def _feed(self, new: list[int]) -> torch.Tensor:
        """Append tokens. Returns logits (1, vocab) of the last one."""
        whole, cache = [*self._tokens, *new], self._cache
        self._tokens, self._cache = [], None  # in case the pass is interrupted
        ids = torch.tensor([whole], device=self.device)
        given = {} if cache is None else {self.cache_name: cache}
        model: Any = self.model
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=self._config, **given)
        cache = output.get(self.cache_name)
        self._tokens, self._cache = whole, cache if _holds(cache, len(whole)) else None
        logits: torch.Tensor = output.logits[0]
        return logits

    def features(self, begin: int, end: int) -> torch.Tensor:
        """Raises ValueError, because no features are kept."""
        raise ValueError("a model that decodes plainly keeps no features")

    def keep(self, path: list[int]) -> None:
        """Accept only the empty path, because there are no trees; see the protocol."""
        NO_TREE.check(path)

    def rollback(self, length: int) -> None:
        """Drop all tokens if ``length`` is less than what was fed; the caller feeds the text again."""
        del self._waiting[max(0, length - len(self._tokens)) :]
        if length < len(self._tokens):
            self._tokens, self._cache = [], None

    def copy_prefix(self, other: Sequence, length: int) -> None:
        """Drop all tokens, because nothing can be copied; the caller feeds the text again."""
        self.rollback(0)


def _holds(cache: Any, length: int) -> bool:
    """Whether ``generate`` can continue from this cache after ``length`` tokens. It feeds all tokens beyond the cache's
    length, so this must be right."""
    try:
        return isinstance(cache, Cache) and cache.get_seq_length() == length
    except ValueError:  # a cache that does not count tokens
        return False


def _tensors(thing: Any, deep: int = 0) -> list[torch.Tensor]:
    """The tensors in a cache: in its attributes, its layers, and their lists and dictionaries. One may occur twice."""
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
