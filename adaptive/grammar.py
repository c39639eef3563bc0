"""Answers constrained to a JSON schema, a grammar or a regular expression: which tokens may come next.

In: a ``Grammar`` from a request. Out: a ``Constraint`` for one answer, which masks each row of logits by the tokens
before it, drafted ones included. It uses llguidance, which compiles a schema in milliseconds and can roll a state back,
as drafted tokens need (docs/notes/2026-11-constraints.md explains the choice).
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
# White space between the parts of JSON, unless the schema defines it. Too permissive: a small model writes spaces for
# ever. None at all: larger models cannot write the line breaks that they are used to.
WHITESPACE = r"[ ]?|\n[ ]{0,16}"
# Compiled grammars that are kept: agents send the same few with every request. One takes up to some megabytes.
COMPILED = 16
# Bits in one word of a mask.
WORD = 32


@dataclass(frozen=True)
class Grammar:
    """The form of an answer. ``text`` is the schema as JSON, the grammar (Lark's or llama.cpp's notation) or the
    regular expression."""

    kind: Kind
    text: str

    def source(self) -> str:
        """The grammar in llguidance's notation. Raises AdaptiveError if it cannot be parsed."""
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            if self.kind == "json_schema":
                return str(LLMatcher.grammar_from_json_schema(self.text, defaults={"whitespace_pattern": WHITESPACE}))
            if self.kind == "regex":
                return str(LLMatcher.grammar_from_regex(self.text))
            lark = gbnf_to_lark(self.text) if self.kind == "gbnf" else self.text
            return str(LLMatcher.grammar_from_lark(lark))
        except Exception as error:  # a parser may raise anything
            raise AdaptiveError(f"the {self.name} cannot be used: {first_line(error)}") from error

    def rule(self) -> str:
        """A schema or regular expression as the right side of a rule in Lark's notation. Raises AdaptiveError as
        ``source``."""
        (grammar,) = json.loads(self.source())["grammars"]
        if self.kind == "json_schema":
            return f"%json {json.dumps(grammar['json_schema'])}"
        return f"%lark {{\n{grammar['lark_grammar']}\n}}"

    @property
    def name(self) -> str:
        """The name of its kind, for messages."""
        return {"json_schema": "JSON schema", "regex": "regular expression"}.get(self.kind, "grammar")


def notation(text: str) -> Grammar:
    """A grammar in the notation it is written in: llama.cpp's defines ``root ::=``, Lark's ``start:``."""
    return Grammar("gbnf" if "::=" in text else "lark", text)


def json_schema(schema: dict[str, Any]) -> Grammar:
    """The grammar for a schema. Raises AdaptiveError as ``as_json``."""
    return Grammar("json_schema", as_json(schema))


def as_json(schema: dict[str, Any]) -> str:
    """A schema as text. Raises AdaptiveError if it is nested too deeply."""
    try:
        return json.dumps(schema)
    except RecursionError as error:
        raise AdaptiveError("the JSON schema cannot be used: it is nested too deeply") from error


class Grammars:
    """Compiles grammars for one tokenizer; thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_tokens: frozenset[int]) -> None:
        """``vocab_size`` is the target's; ``end_tokens`` are allowed where an answer may end."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = sorted(end_tokens)
        self._known: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()  # in their initial states, latest used last
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> None:
        """Compile a grammar in advance. Raises AdaptiveError with the reason if it cannot be used."""
        self.constraint(grammar)

    def constraint(self, grammar: Grammar) -> Constraint:
        """A constraint for a new answer. Raises AdaptiveError as ``compile``."""
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
    """The state of one answer in its grammar. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // WORD)
        self._ahead: list[int] = []  # drafted tokens that the matcher has consumed
        self._stands = True  # whether the committed text matches the grammar; text after a stop string need not
        self._known: dict[tuple[int, ...], Bits | None] = {}  # by drafted tokens: draft and target need the same masks

    def mask(self, logits: torch.Tensor, drafted: Sequence[int]) -> torch.Tensor:
        """Logits (n, vocab) with -inf for tokens that are not allowed; rows as in ``LogitsProcessor.apply``.

        A row after a drafted token that is not allowed stays unchanged, since it is never reached. So does a row of a
        draft whose vocabulary contains none of the allowed tokens.
        """
        rows, vocab = logits.shape
        first = len(drafted) - rows + 1
        every = [self._bits(drafted[: first + row]) for row in range(rows)]
        bits = np.stack([np.full(self._words, -1, np.int32) if one is None else one for one in every])
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)
        allowed[~allowed.any(1)] = True
        return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), -torch.inf)

    def place(self, drafted: Sequence[int]) -> int:
        """The address of the mask after ``drafted``, 0 if all tokens are allowed: a ``Mask`` for the kernels."""
        bits = self._bits(drafted)
        return 0 if bits is None else bits.ctypes.data

    def _bits(self, drafted: Sequence[int]) -> Bits | None:
        """The mask of tokens allowed after ``drafted``; None if a drafted token is not allowed itself."""
        key = tuple(drafted)
        if key not in self._known:
            bits = None
            if self._lead_to(key):
                bits = np.empty(self._words, np.int32)
                self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            self._known[key] = bits
        return self._known[key]

    def commit(self, tokens: Sequence[int]) -> None:
        """Advance the state by tokens that became part of the answer."""
        self._known.clear()
        self._stands = self._stands and self._lead_to(tokens)
        if not self._stands:
            self._take_back(0)
        self._ahead = []

    def forced(self, most: int) -> list[int]:
        """Tokens that must come next: at most ``most``, of those that the tokenizer makes of the forced text."""
        if not self._stands or most <= 0:
            return []
        self._take_back(0)
        return list(self._matcher.compute_ff_tokens()[:most])

    def _lead_to(self, tokens: Sequence[int]) -> bool:
        """Move the matcher to the state after ``tokens``. Returns False if one of them is not allowed."""
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
