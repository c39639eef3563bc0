"""From what a server calls a token to its id, by the target's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from adaptive.upstream.reports import Choice, Named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# What stands for bytes that are no character.
BROKEN = "\ufffd"


class Vocabulary:
    """The tokens of a target. The table of texts is made when it is first needed, which takes a second or two."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.size = len(tokenizer)

    @cached_property
    def _by_text(self) -> dict[str, int]:
        """Ids of the texts that only one token has; parts of a character all read the same, and are left out."""
        texts = self.tokenizer.batch_decode([[number] for number in range(self.size)])
        found: dict[str, int] = {}
        for number, text in enumerate(texts):
            found[text] = number if text not in found else -1
        return {text: number for text, number in found.items() if number >= 0}

    def id_of(self, named: Named) -> int | None:
        """The id of a token, None where its text does not tell."""
        if named.id is not None:
            return named.id if 0 <= named.id < self.size else None
        return self._by_text.get(named.text)

    def output(self, choice: Choice, completion_tokens: int | None) -> list[int] | None:
        """The token ids of an answer, None where they cannot be told for certain.

        Without reports of all of them they are those of its text, if there are as many as the server has counted (or
        one less, the end of the answer, which has no text).
        """
        if choice.reports:
            ids = [self.id_of(report.token) for report in choice.reports]
            known: list[int] | None = [number for number in ids if number is not None]
            if len(known or ()) < len(ids):
                known = self._aligned(choice, ids)
            if known is not None and self._whole(choice, known, completion_tokens):
                return known
        if choice.calls or completion_tokens is None:
            return None  # calls are not said as the model wrote them
        encoded = self._encode(choice.text)
        end = self.tokenizer.eos_token_id
        if len(encoded) == completion_tokens - 1 and choice.finish_reason == "stop" and isinstance(end, int):
            encoded.append(end)
        return encoded if len(encoded) == completion_tokens else None

    def _whole(self, choice: Choice, ids: Sequence[int], completion_tokens: int | None) -> bool:
        """Whether no token of the answer is missing among the reported ``ids``, but for its end.

        llama.cpp's server reports no token that ends within a character and, in a stream, none of a round in which a
        draft was verified.
        """
        ended = choice.finish_reason not in (None, "length")
        if completion_tokens is not None and len(ids) < completion_tokens - ended:
            return False
        whole = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        said = str(whole).rstrip(BROKEN)
        # What was shown may begin with a space that a tokenizer leaves out where a text begins.
        return len(said) + 1 >= len(choice.text) and said.count(BROKEN) <= choice.text.count(BROKEN)

    def _aligned(self, choice: Choice, ids: Sequence[int | None]) -> list[int] | None:
        """Ids of an answer of which some tokens are parts of characters: those of its whole text, if they agree with
        all that are known."""
        encoded = self._encode(choice.text)
        if len(encoded) not in (len(ids), len(ids) - 1):
            return None
        encoded += [number for number in ids[len(encoded) :] if number is not None]
        agree = all(known in (None, number) for known, number in zip(ids, encoded, strict=False))
        return encoded if agree and len(encoded) == len(ids) else None

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))
