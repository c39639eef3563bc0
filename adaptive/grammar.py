"""Answers that keep to a JSON schema, a grammar or a regular expression: which tokens may come next.

In: a ``Grammar`` as a request names it. Out: a ``Constraint`` for one answer, which masks logits by what stands before
each of them, the drafted tokens among it. The engine behind it is llguidance, which compiles a schema in milliseconds
and lets a state be taken back, as drafted tokens are (docs/notes/2026-11-constraints.md says why this one).
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from adaptive.errors import AdaptiveError, first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

Kind = Literal["json_schema", "lark", "gbnf", "regex"]
Bits: TypeAlias = npt.NDArray[np.int32]
# White space between the parts of JSON, where a schema does not say otherwise. More lets a small model write spaces
# for ever; none keeps larger ones from the lines that they are used to.
WHITESPACE = r"[ ]?|\n[ ]{0,16}"
# Grammars that stay compiled: agents send the same few with every request. One takes up to some megabytes.
COMPILED = 16
# Bits of one number of a mask.
WORD = 32


@dataclass(frozen=True)
class Grammar:
    """What an answer may be. ``text`` is the schema as JSON, the grammar (Lark's or llama.cpp's notation) or the
    regular expression."""

    kind: Kind
    text: str

    def source(self) -> str:
        """As llguidance takes it. Raises AdaptiveError for what cannot be read."""
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            if self.kind == "json_schema":
                return str(LLMatcher.grammar_from_json_schema(self.text, defaults={"whitespace_pattern": WHITESPACE}))
            if self.kind == "regex":
                return str(LLMatcher.grammar_from_regex(self.text))
            lark = gbnf_to_lark(self.text) if self.kind == "gbnf" else self.text
            return str(LLMatcher.grammar_from_lark(lark))
        except Exception as error:  # a parser raises whatever its author chose
            raise AdaptiveError(f"the {self.name} cannot be used: {first_line(error)}") from error

    @property
    def name(self) -> str:
        """What a person calls it."""
        return {"json_schema": "JSON schema", "regex": "regular expression"}.get(self.kind, "grammar")


def notation(text: str) -> Grammar:
    """A grammar in whichever notation it is written: llama.cpp's defines ``root ::=``, Lark's ``start:``."""
    return Grammar("gbnf" if "::=" in text else "lark", text)


def json_schema(schema: dict[str, Any]) -> Grammar:
    """The grammar of a schema. Raises AdaptiveError as ``as_json``."""
    return Grammar("json_schema", as_json(schema))


def as_json(schema: dict[str, Any]) -> str:
    """A schema as text. Raises AdaptiveError for one that is nested beyond reason."""
    try:
        return json.dumps(schema)
    except RecursionError as error:
        raise AdaptiveError("the JSON schema cannot be used: it is nested too deeply") from error


class Grammars:
    """Compiles grammars for one tokenizer; safe for several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_tokens: frozenset[int]) -> None:
        """``vocab_size`` is the target's, ``end_tokens`` what may stand where an answer may end."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = sorted(end_tokens)
        self._known: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()  # at their beginnings, the latest used last
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> None:
        """Have a grammar ready. Raises AdaptiveError, saying why, for one that cannot be used."""
        self.constraint(grammar)

    def constraint(self, grammar: Grammar) -> Constraint:
        """For a new answer. Raises AdaptiveError as ``compile``."""
        from llguidance import LLMatcher

        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                matcher = LLMatcher(self._tokens(), grammar.source(), log_level=0)
                if matcher.is_error():
                    said = " ".join(matcher.get_error().split())[:500]
                    raise AdaptiveError(f"the {grammar.name} cannot be used: {said}")
                self._compiled[grammar] = matcher
                if len(self._compiled) > COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return Constraint(matcher.deep_copy(), self._vocab_size)

    def _tokens(self) -> LLTokenizer:
        if self._known is None:
            import llguidance.hf

            try:
                self._known = llguidance.hf.from_tokenizer(
                    self._tokenizer,  # type: ignore[arg-type]  # one without a fast twin is refused there
                    n_vocab=self._vocab_size,
                    eos_token=self._ends or None,
                )
            except Exception as error:
                raise AdaptiveError(f"this tokenizer cannot be constrained: {first_line(error)}") from error
        return self._known


class Constraint:
    """Where one answer stands in its grammar. Not for several threads."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // WORD)
        self._ahead: list[int] = []  # drafted tokens that the matcher has been led along
        self._stands = True  # what was committed keeps to the grammar; behind a stop string, say, it need not
        self._known: dict[tuple[int, ...], Bits | None] = {}  # by drafted tokens: draft and target ask

    def mask(self, logits: torch.Tensor, drafted: Sequence[int]) -> torch.Tensor:
        """Logits (n, vocab), -inf where a token may not stand; rows as in ``LogitsProcessor.apply``.

        A row behind a drafted token that may not stand is left as it is: it is never reached. So is one of a draft that
        knows none of the tokens that may.
        """
        rows, vocab = logits.shape
        first = len(drafted) - rows + 1
        every = [self._bits(drafted[: first + row]) for row in range(rows)]
        bits = np.stack([np.full(self._words, -1, np.int32) if one is None else one for one in every])
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)
        allowed[~allowed.any(1)] = True
        return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), -torch.inf)

    def place(self, drafted: Sequence[int]) -> int:
        """A ``Mask``, as the kernels ask for it."""
        bits = self._bits(drafted)
        return 0 if bits is None else bits.ctypes.data

    def _bits(self, drafted: Sequence[int]) -> Bits | None:
        """What may stand behind tokens that are drafted; None behind one that may not stand itself."""
        key = tuple(drafted)
        if key not in self._known:
            bits = None
            if self._lead_to(key):
                bits = np.empty(self._words, np.int32)
                self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            self._known[key] = bits
        return self._known[key]

    def commit(self, tokens: Sequence[int]) -> None:
        """These tokens became part of the answer."""
        self._known.clear()
        self._stands = self._stands and self._lead_to(tokens)
        if not self._stands:
            self._take_back(0)
        self._ahead = []

    def forced(self, most: int) -> list[int]:
        """At most so many of the tokens that a tokenizer makes of what must come next."""
        if not self._stands or most <= 0:
            return []
        self._take_back(0)
        return list(self._matcher.compute_ff_tokens()[:most])

    def _lead_to(self, tokens: Sequence[int]) -> bool:
        """Have the matcher stand behind ``tokens``; False where one of them may not stand."""
        if not self._stands:
            return False
        same = 0
        while same < min(len(self._ahead), len(tokens)) and self._ahead[same] == tokens[same]:
            same += 1
        self._take_back(same)
        wanted = list(tokens[same:])
        taken = self._matcher.try_consume_tokens(wanted) if wanted else 0
        self._ahead += wanted[:taken]
        return taken == len(wanted)

    def _take_back(self, length: int) -> None:
        if len(self._ahead) > length:
            self._matcher.rollback(len(self._ahead) - length)
            del self._ahead[length:]
