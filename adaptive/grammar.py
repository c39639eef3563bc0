"""Answers constrained to a JSON schema, a grammar or a regular expression: which tokens may come next.

In: a ``Grammar`` from a request. Out: a ``Constraint`` for one answer, which masks each row of logits by the tokens
before it, drafted ones included. It uses llguidance, which compiles a schema in milliseconds and can roll a state back,
as drafted tokens need (docs/notes/2026-11-constraints.md explains the choice).
"""

from __future__ import annotations

import json
import re
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


class GrammarError(AdaptiveError):
    """A grammar that cannot be used, or led an answer to a place where it cannot go on."""


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
            raise GrammarError(f"the {self.name} cannot be used: {first_line(error)}") from error

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
    return Grammar("gbnf" if re.search(r"(?m)^\s*[\w-]+\s*::=", text) else "lark", text)


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

    def holds(self, grammar: Grammar) -> bool:
        """Whether a grammar is compiled already."""
        with self._lock:
            return grammar in self._compiled

    def compile(self, grammar: Grammar) -> None:
        """Compile a grammar in advance. Raises AdaptiveError with the reason if it cannot be used."""
        self.constraint(grammar)

    def constraint(self, grammar: Grammar) -> Constraint:
        """A constraint for a new answer. Raises AdaptiveError as ``compile``."""
        from llguidance import LLMatcher

        with self._lock:
            matcher, tokens = self._compiled.get(grammar), self._tokens()
        if matcher is None:  # not under the lock: another answer need not wait for a large grammar
            matcher = LLMatcher(tokens, grammar.source(), log_level=0)
            matcher.compute_bitmask()  # the first mask may already exceed a limit
            if matcher.is_error():
                raise GrammarError(f"the {grammar.name} cannot be used: {_error(matcher)}")
        with self._lock:
            self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
            return Constraint(matcher, self._vocab_size, grammar.name)

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
                raise GrammarError(f"this tokenizer cannot be constrained: {first_line(error)}") from error
        return self._known


def _error(matcher: LLMatcher) -> str:
    """The error that a matcher is in, without the listing of its state."""
    return " ".join(matcher.get_error().partition("<state>")[0].split())[:500]


class Constraint:
    """The state of one answer in its grammar. Not thread-safe.

    llguidance limits its work on a token. A matcher that exceeds a limit is in an error state for good, so it is made
    anew. If the answer itself leads there, it ends with an AdaptiveError: from ``mask`` or ``place`` if there is no
    mask for the next token, else from ``commit``. A drafted text that leads there and is rejected changes nothing.
    """

    def __init__(self, initial: LLMatcher, vocab_size: int, name: str = "grammar") -> None:
        """``initial`` is a matcher in its initial state, which is not changed; ``name`` is for messages."""
        self._initial, self._name = initial, name
        self._matcher = initial.deep_copy()
        self._words = -(-vocab_size // WORD)
        self._text: list[int] = []  # committed tokens that the matcher has consumed
        self._ahead: list[int] = []  # drafted tokens that it has consumed
        self._stands = True  # whether the committed text matches the grammar; text after a stop string need not
        self._known: dict[tuple[int, ...], Bits | None] = {}  # by drafted tokens: draft and target need the same masks
        self._failed: dict[tuple[int, ...], str] = {}  # by drafted tokens: why the matcher failed behind them

    def mask(self, logits: torch.Tensor, drafted: Sequence[int]) -> torch.Tensor:
        """Logits (n, vocab) with -inf for tokens that are not allowed; rows as in ``LogitsProcessor.apply``.

        A row after a drafted token that is not allowed stays unchanged, since it is never reached. So does a row that
        the matcher cannot reach, and a row of a draft whose vocabulary contains none of the allowed tokens.
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
        """The mask of tokens allowed after ``drafted``; None if a drafted token is not allowed itself, or if the
        matcher fails behind drafted tokens."""
        key = tuple(drafted)
        if key not in self._known:
            self._known[key] = self._computed(key)
        return self._known[key]

    def _computed(self, drafted: tuple[int, ...]) -> Bits | None:
        if self._failure(drafted) is not None or not self._lead_to(drafted):
            return None
        bits = np.empty(self._words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if not self._matcher.is_error():
            return bits
        self._restart(drafted)
        if not drafted:
            raise self._ended(self._failed[drafted])
        return None

    def commit(self, tokens: Sequence[int]) -> None:
        """Advance the state by tokens that became part of the answer. Raises AdaptiveError if the matcher failed on the
        way: the tokens behind that place were chosen without a mask."""
        failure = self._failure(tokens[:-1])
        self._known.clear()
        self._failed.clear()
        if failure is None and self._stands:
            self._stands = self._lead_to(tokens)
            failure = self._failure(tokens)
        if failure is not None:
            raise self._ended(failure)
        if self._stands:
            self._text += tokens
        else:
            self._take_back(0)
        self._ahead = []

    def forced(self, most: int) -> list[int]:
        """Tokens that must come next: at most ``most``, of those that the tokenizer makes of the forced text."""
        if not self._stands or most <= 0:
            return []
        self._take_back(0)
        tokens = list(self._matcher.compute_ff_tokens()[:most])
        if self._matcher.is_error():
            self._restart(None)
        return tokens

    def _lead_to(self, tokens: Sequence[int]) -> bool:
        """Move the matcher to the state after ``tokens``. Returns False if one of them is not allowed, or if the
        matcher fails on the way."""
        if not self._stands:
            return False
        same = 0
        while same < min(len(self._ahead), len(tokens)) and self._ahead[same] == tokens[same]:
            same += 1
        self._take_back(same)
        wanted = list(tokens[same:])
        taken = self._matcher.try_consume_tokens(wanted) if wanted else 0
        self._ahead += wanted[:taken]
        if taken == len(wanted):
            return True
        if self._matcher.is_error():
            self._restart(tuple(tokens[: same + taken + 1]))
        return False

    def _take_back(self, length: int) -> None:
        if len(self._ahead) > length:
            self._matcher.rollback(len(self._ahead) - length)
            del self._ahead[length:]

    def _failure(self, tokens: Sequence[int]) -> str | None:
        """Why the matcher failed in a state on the way to the one after ``tokens``, or there; None if it did not."""
        reached = (tuple(tokens[:count]) for count in range(len(tokens) + 1)) if self._failed else ()
        return next((self._failed[state] for state in reached if state in self._failed), None)

    def _restart(self, state: tuple[int, ...] | None) -> None:
        """Replace the matcher, which failed in a ``state`` (None: none that an answer needs), by one behind the
        committed text."""
        if state is not None:
            self._failed[state] = _error(self._matcher)
        self._matcher = self._initial.deep_copy()
        self._matcher.consume_tokens(self._text)
        self._ahead = []

    def _ended(self, failure: str) -> GrammarError:
        return GrammarError(f"the answer cannot go on with its {self._name}: {failure}")
