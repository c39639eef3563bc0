"""From what a server calls a token to its id, by the target's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from adaptive.upstream.reports import Choice, Named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# What stands for bytes that are no character.
BROKEN = "\ufffd"


@dataclass(frozen=True)
class Tokens:
    """The ``ids`` of an answer, without its end where that is not known. ``reported``: they are those of the server's
    reports, one for each; else those of its text."""

    ids: list[int]
    reported: bool


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

    @cached_property
    def _special(self) -> frozenset[int]:
        """Ids of the control tokens, such as those that end an answer."""
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset(self.tokenizer.all_special_ids).union(number for number, token in added if token.special)

    def output(self, choice: Choice, counted: int | None) -> Tokens | None:
        """The tokens of an answer, of which the server has ``counted`` so many; None if they are not certain.

        They are those that the server reports, if none is missing there; else those of the text, if there are as many
        as the server has counted.
        """
        ids = self._reported(choice)
        if ids and self._whole(choice, ids, counted):
            return Tokens(ids, True)
        ids = self._of_text(choice, counted)
        return None if ids is None else Tokens(ids, False)

    def _reported(self, choice: Choice) -> list[int] | None:
        """The ids of the reported tokens; those of parts of characters follow from the whole text. None if unknown."""
        ids = [self.id_of(report.token) for report in choice.reports]
        known = [number for number in ids if number is not None]
        return known if len(known) == len(ids) else self._aligned(choice, ids)

    def _whole(self, choice: Choice, ids: Sequence[int], counted: int | None) -> bool:
        """Whether no token of the answer is missing among the reported ``ids``, but for its end.

        llama.cpp's server reports no token that ends within a character and, in a stream, none of a round in which a
        draft was verified. Of an answer with ``marks_missing`` all that are counted must be there, since the missing
        one may be a mark.
        """
        if choice.marks_missing and counted is None:
            return False
        ended = choice.finish_reason not in (None, "length") and ids[-1] not in self._special
        if counted is not None and len(ids) < counted - (ended and not choice.marks_missing):
            return False
        whole = str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        said = whole.rstrip(BROKEN)
        if said.count(BROKEN) > choice.text.count(BROKEN):
            return False
        # What was shown may begin with a space that a tokenizer leaves out where a text begins.
        if counted is not None:
            return len(said) + 1 >= len(choice.text)
        rest = iter(whole)  # must contain what was shown, in order; it also contains the text of control tokens
        return all(character in rest for character in choice.text.removeprefix(" "))

    def _of_text(self, choice: Choice, counted: int | None) -> list[int] | None:
        """The ids of the answer's text, if there are as many as ``counted``, or one less: the end of the answer, which
        has no text. Reasoning and calls are not shown as the model wrote them."""
        if choice.parsed or counted is None:
            return None
        ids = self._encode(choice.text)
        ended = choice.finish_reason == "stop"
        return ids if counted in (len(ids), len(ids) + ended) else None

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
