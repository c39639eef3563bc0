"""Compares two tokenizers, which must be equal for a target and its draft, by their tokens, not by their files."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Exercises spaces, digits, case, punctuation, accents, other scripts and line ends.
PROBE = "Hello, World! 3.14 + 2710 = def f(x):\n\treturn  naïve\u200b Straße 你好 мир 🙂\r\n\n"


class Vocabulary(BaseModel):
    """The compared parts of a tokenizer: the id of every token, and the ids of the probe text."""

    tokens: dict[str, int]
    probe: list[int]

    @property
    def digest(self) -> str:
        """A hash, the same for equal vocabularies."""
        return hashlib.sha256(json.dumps([sorted(self.tokens.items()), self.probe]).encode()).hexdigest()


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """The vocabulary of a tokenizer."""
    return Vocabulary(tokens=tokenizer.get_vocab(), probe=tokenizer.encode(PROBE, add_special_tokens=False))


def difference_of(target: Vocabulary, draft: Vocabulary) -> str | None:
    """The first difference that matters, in words, or None.

    Every id that both use must be the same token, special tokens included, and the probe text must give the same ids.
    Ids that only one of them has are padding or additions, and make no difference.
    """
    ours, theirs = ({i: t for t, i in vocabulary.tokens.items()} for vocabulary in (target, draft))
    for number in sorted(ours.keys() & theirs.keys()):
        if ours[number] != theirs[number]:
            return f"token {number} is {ours[number]!r} in the target and {theirs[number]!r} in the draft"
    for place, (one, other) in enumerate(zip(target.probe, draft.probe, strict=False)):
        if one != other:
            return f"the same text becomes {ours.get(one)!r} and {theirs.get(other)!r} at its token {place}"
    if len(target.probe) == len(draft.probe):
        return None
    return f"the same text becomes {len(target.probe)} and {len(draft.probe)} tokens"
