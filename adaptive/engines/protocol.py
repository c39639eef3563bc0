"""The interface between the decoding loop and a model.

An ``Engine`` is a model with its weights; a ``Sequence`` is one text in its cache. The loop uses nothing else, so any
engine can be used that can extend a sequence, roll it back and return logits.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Numbers
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from adaptive.engines.threads import ThreadChoice
from adaptive.errors import AdaptiveError
from adaptive.tokens import Ids
from adaptive.types import SamplingParams

Floats: TypeAlias = npt.NDArray[np.float32]
# Called with a position (from 1) and the largest probability there, before anything is drawn; returns the number of an
# ``Advice`` of control/policy.py.
Adviser: TypeAlias = Callable[[int, float], int]
# Called with drafted tokens; returns the address of a mask of the tokens (vocab,) allowed after them, one bit per token
# in 32-bit words, valid until tokens are committed; 0 if all are allowed.
Mask: TypeAlias = Callable[[Numbers[int]], int]


@dataclass(eq=False)
class Thresholds:
    """When a draft ends by its own confidence, as numbers, so that kernels can decide it without a call into Python.

    A confidence falls into one of n + 1 bins between n ``edges`` (float64). By bin (n + 1): the probability that a
    token is ``accepted``, and that the token after it is (``follow``). By position (``longest``): a token is dropped if
    the probability that all tokens up to it are accepted is below ``drop_below``, and it is the last one if that
    probability for the next token is at most ``last_below``. Outputs, int32: the ``bins`` (kept * longest) of each
    position that the last drafts asked about, the number of positions ``asked`` about (kept), and the number of
    ``drafts`` (1). Output, float64: ``reach`` (1), the probability that all tokens up to the last of
    these positions are accepted. control/stopping.py applies the thresholds in Python.
    """

    edges: array[float]
    accepted: array[float]
    follow: array[float]
    drop_below: array[float]
    last_below: array[float]
    bins: array[int]
    asked: array[int]
    drafts: array[int]
    reach: array[float]

    def told(self, bins: Numbers[int]) -> None:
        """Write the outputs for a draft to which the caller has applied the thresholds; ``bins`` of its positions."""
        longest = len(self.drop_below)
        row = self.drafts[0] % len(self.asked)
        self.drafts[0] += 1
        self.asked[row] = len(bins)
        self.bins[row * longest : row * longest + len(bins)] = array("i", bins)
        self.reach[0] = math.prod(self.accepted[b] for b in bins)


@dataclass(slots=True)
class ProposalCall:
    """The arguments of a whole proposal: feed ``tokens``, then choose at most ``length`` tokens one after the other
    from the first ``vocab`` ids by ``sampling``, and feed each but the last. ``uniform`` (length,) are random numbers
    below 1, one per token; empty if the likeliest token is taken or a seed decides. ``advise`` decides about each
    position, ``mask`` gives the tokens allowed there."""

    tokens: list[int]
    length: int
    vocab: int
    sampling: SamplingParams
    uniform: list[float]
    advise: Thresholds | Adviser | None
    mask: Mask | None = None


class Proposed(NamedTuple):
    """The result: the tokens, and the distributions (n, vocab) that they were drawn from, valid until the sequence's
    next proposal; None if the likeliest tokens were taken, or a seed decided."""

    tokens: list[int]
    probs: torch.Tensor | None


@dataclass(slots=True)
class VerificationCall:
    """The arguments of a pass over the tokens ``fed`` and ``drafted``, and the acceptance rule over its logits; ``q``,
    ``uniform`` and ``allowed`` as in ``SamplingKernels.judge``."""

    fed: list[int]
    drafted: list[int]
    sampling: SamplingParams
    q: torch.Tensor | None
    uniform: list[float]
    allowed: Numbers[int] = ()


class Judgement(NamedTuple):
    """The result of the acceptance rule for K drafted tokens: the number accepted; the token that the target adds, -1
    if its logits are not numbers; the random numbers used; the log-probabilities of the accepted + 1 committed tokens,
    None if greedy."""

    accepted: int
    extra: int
    used: int
    chosen: list[float] | None


class SamplingKernels(Protocol):
    """Compiled code that chooses tokens. Logits and distributions are on the CPU."""

    def probabilities(self, logits: torch.Tensor, params: SamplingParams, out: torch.Tensor) -> torch.Tensor:
        """Write the probabilities of logits (n, vocab) into ``out`` (n, vocab) float32. A row with a NaN logit becomes
        NaN."""

    def draw(self, probs: Floats, uniform: float, less: Floats | None = None) -> int | None:
        """The first token at which the cumulative mass of probs (vocab,), or of max(probs - less, 0) with ``less`` (at
        most vocab,), exceeds the share ``uniform`` of all mass; None if there is no mass."""

    def race(self, probs: Floats, seed: int, position: int) -> int | None:
        """The token of probs (vocab,) that a seed's noise chooses at a position of the text; None if there is no
        mass."""

    def judge(
        self,
        logits: torch.Tensor,
        drafted: list[int],
        position: int,
        params: SamplingParams,
        q: torch.Tensor | None,
        uniform: Numbers[float],
        allowed: Numbers[int] = (),
    ) -> Judgement:
        """The acceptance rule, given logits (K + 1, vocab), the first for the token at ``position`` of the text. ``q``
        (K, at most vocab), float32 and contiguous, are the distributions of the K drafted tokens, ``uniform`` (K + 2,)
        random numbers below 1; both are unused if the likeliest token is taken or a seed decides. ``allowed`` (K + 1,)
        are the results of a ``Mask`` for each row, or empty if all tokens are allowed. Raises IndexError for an id
        beyond the vocabulary."""

    def likeliest_of(self, logits: torch.Tensor, count: int, kept: int, into: tuple[int, int, int]) -> None:
        """For each of the first ``count`` rows of logits (n, vocab), float32 and contiguous: the ``kept`` likeliest
        tokens, likeliest first, their log-probabilities, and the logarithm of the mass of all others. ``into`` are the
        addresses to write to: int32 and float32 (count, kept), float32 (count,). A row with a NaN logit becomes NaN."""


def judged(kernels: SamplingKernels, logits: torch.Tensor, position: int, call: VerificationCall) -> Judgement:
    """Apply the rule to the logits of the pass of a ``call``, the first for the token at ``position``."""
    return kernels.judge(logits, call.drafted, position, call.sampling, call.q, call.uniform, call.allowed)


class FusedCalls(Protocol):
    """A sequence whose engine does two things in one call each: ``extend`` and a choice, token by token; and ``extend``
    and the acceptance rule. Code that runs between two passes finds the processor's caches full of weights."""

    def propose(self, call: ProposalCall) -> Proposed:
        """Append the tokens of ``call`` and the chosen ones, except the last of them."""

    def verify(self, call: VerificationCall) -> tuple[Judgement, torch.Tensor]:
        """Append all tokens of ``call``. Returns the judgement of the K drafted ones, and the logits (K + 1, vocab) as
        from ``extend``."""


class Chooser(Protocol):
    """Chooses a token from the logits (1, vocab) of a pass, by tensor operations that do not synchronise with the
    device and write only tensors of its own. It may be recorded with the pass. ``outcome`` returns what its calls
    wrote."""

    def __call__(self, logits: torch.Tensor) -> None:
        """Choose a token, and store it."""

    def reset(self) -> None:
        """Forget the chosen tokens."""

    def outcome(self) -> tuple[torch.Tensor, ...]:
        """See above."""


@runtime_checkable
class Chooses(Protocol):
    """A sequence whose engine runs a pass and the following choice as one recorded unit, where that was recorded."""

    def choose(self, tokens: Ids, chooser: Chooser) -> None:
        """``Sequence.extend`` by ``tokens``, followed by the ``chooser`` on the logits (1, vocab) of the last token."""


@runtime_checkable
class Prepares(Protocol):
    """A sequence whose engine prepares passes, which takes a while the first time."""

    def prepare(self, length: int, chooser: Chooser | None = None) -> None:
        """Prepare, before an answer, the passes for a text of ``length`` tokens in all; those of proposals with
        ``chooser`` after them. What cannot be prepared is run unprepared."""


@runtime_checkable
class Rests(Protocol):
    """A sequence whose passes take memory that is no part of its cache: rows of logits."""

    def rest(self) -> None:
        """Free that memory until the next pass; the contents stay."""


@runtime_checkable
class PreparesTogether(Protocol):
    """An engine that prepares passes over several sequences, which takes a while the first time."""

    def prepare_together(self, texts: int, features: bool) -> None:
        """Prepare, when the model has been loaded, the passes over up to ``texts`` sequences, which keep hidden states
        if ``features``. What cannot be prepared is run unprepared."""


@dataclass(frozen=True)
class Memory:
    """Bytes held for one or several texts: ``keys`` and values; recurrent ``states`` with the data for a rollback;
    ``checkpoints`` of states for rolling back further; hidden states (``features``)."""

    keys: int = 0
    states: int = 0
    checkpoints: int = 0
    features: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.keys + self.states + self.checkpoints + self.features

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            self.keys + other.keys,
            self.states + other.states,
            self.checkpoints + other.checkpoints,
            self.features + other.features,
        )


class Sequence(Protocol):
    """The cached context of one text. Its length is the number of tokens in the cache.

    ``fused`` is the same sequence, if its engine supports fused calls.
    """

    @property
    def fused(self) -> FusedCalls | None:
        """See above."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""

    @property
    def memory(self) -> Memory:
        """The memory of the cache."""

    def reserve(self, length: int) -> None:
        """Reserve capacity for ``length`` tokens in all, so that passes up to there do not allocate. Raises
        AdaptiveError if there is not enough memory; the contents stay."""

    def extend(self, tokens: Ids, rows: int, parents: list[int] | None = None) -> torch.Tensor:
        """Append n ``tokens`` and return the logits of the last ``rows`` of them, (rows, vocab).

        Row i predicts the token after the (n - rows + i)-th one. Tokens may be on any device; logits
        are on the engine's, in its dtype, and may be overwritten by the sequence's next ``extend``. The caller
        keeps ``length + n`` within the context.

        With ``parents`` (n,) the tokens are nodes of a tree, which is not part of the text yet: ``length`` stays until
        ``keep`` chooses a path, and any other change of the text drops the tree. Each token follows the node of that
        number, or for -1 the last token of the text: it attends to the text and to the nodes of its path, and its
        position is its depth. Nodes are numbered in the order of their arrival, over all passes since the tree began.
        Raises ValueError for a parent that does not exist yet, and AdaptiveError if the engine has no ``trees``.
        """

    def keep(self, path: list[int]) -> None:
        """Append the nodes ``path`` of the tree, each of which follows the one before it, and drop the others. They are
        not computed again, and nothing is copied if they are the first nodes in order, as in a chain. Raises ValueError
        if ``path`` is not a path.
        """

    def features(self, begin: int, end: int) -> torch.Tensor:
        """The hidden states (end - begin, feature_width) of these tokens of the cache, after the last layer and before
        the final norm: float32 on the engine's device; a view if they are stored like this, valid until the sequence
        is extended or rolled back. Raises ValueError if the sequence does not keep them.
        """

    def rollback(self, length: int) -> None:
        """Forget everything after the first ``length`` tokens. Copies no keys. Recurrent states that cannot be rolled
        back that far go back further, and fewer tokens are held then; never within the last pass or the last single
        steps."""

    def copy_prefix(self, other: Sequence, length: int) -> None:
        """Replace the contents by the first ``length`` tokens of ``other``, a sequence of the same engine, or by fewer,
        as after a rollback. Either both keep features or neither.

        Raises AdaptiveError if there is not enough memory; the sequence is then empty.
        """


@dataclass(slots=True)
class ExtendCall:
    """The arguments of ``Sequence.extend`` for one sequence in a pass over several: ``tokens``, ``rows`` and
    ``parents``."""

    sequence: Sequence
    tokens: Ids
    rows: int
    parents: list[int] | None = None


def distinct(calls: Numbers[ExtendCall]) -> None:
    """Raises ValueError if two calls have the same sequence."""
    if len({id(call.sequence) for call in calls}) < len(calls):
        raise ValueError("a pass over several sequences appends to each of them once")


def one_after_another(calls: Numbers[ExtendCall], shared: bool = False) -> list[torch.Tensor]:
    """``Engine.extend_together`` as a pass for each sequence. ``shared``: the next pass may overwrite the logits of
    one, as recorded passes do, so they are copied."""
    distinct(calls)
    each = (call.sequence.extend(call.tokens, call.rows, call.parents) for call in calls)
    return [logits.clone() for logits in each] if shared and len(calls) > 1 else list(each)


def no_trees(who: str) -> AdaptiveError:
    """The error of an engine without ``trees`` that is given one."""
    return AdaptiveError(f"{who} makes no passes over trees of tokens; draft chains")


class Engine(Protocol):
    """A model that can score tokens in the context of a sequence.

    ``weights`` is the format of its weights (a dtype, a quantisation), ``end_tokens`` are the checkpoint's ids for the
    end of a sequence, ``sampling`` is the checkpoint's recommendation. ``threads`` chooses the number of threads of
    short passes; None if that is fixed. ``feature_width``: numbers of a token's hidden state, 0 if sequences cannot
    keep them. ``undraftable``: the reason why it decodes plainly and drafts nothing, in words that follow "it"; None if
    passes over several tokens can be rolled back. ``joint``: whether ``extend_together`` reads the weights once for
    several sequences. ``trees``: whether ``Sequence.extend`` supports ``parents``.
    """

    name: str
    weights: str
    vocab_size: int
    context_length: int
    feature_width: int
    device: torch.device
    end_tokens: frozenset[int]
    sampling: SamplingParams
    undraftable: str | None

    @property
    def threads(self) -> ThreadChoice | None:
        """See above."""

    @property
    def joint(self) -> bool:
        """See above."""

    @property
    def trees(self) -> bool:
        """See above."""

    def extend_together(self, calls: Numbers[ExtendCall]) -> list[torch.Tensor]:
        """``Sequence.extend`` for several sequences of this engine, each named once: in one pass if the engine is
        ``joint``, else one after the other. Returns the logits (rows, vocab) of each, which the engine's next
        ``extend_together`` may overwrite as well. They depend on the other sequences as little as on the division of a
        text into passes: not at all, or by rounding; the engine defines which.

        Raises ValueError for a sequence that is named twice, and the errors of ``Sequence.extend``. After an error each
        sequence may have been extended or not, and must be rolled back.
        """

    def sequence(self, features: bool = False) -> Sequence:
        """A new empty sequence. With ``features`` it keeps the hidden state of every token in its cache, for
        ``Sequence.features``. Raises ValueError if the engine cannot give them."""

    def apply_adapter(self, folder: Path | None) -> None:
        """Use the weights with this LoRA adapter (a PEFT folder), or the pristine ones for None.

        Takes effect for the next ``extend`` of any sequence. Raises AdaptiveError, leaving the weights
        as they were, when the adapter does not fit.
        """

    def swap_adapter(self, folder: Path | None) -> Iterator[None]:
        """``apply_adapter`` in steps short enough to run between two rounds. The first step reads and checks the
        adapter and changes nothing, so that any thread may do it while the engine computes.

        Between two steps, other engines may be used, and sequences of this one rolled back, but no sequence of this one
        may be extended. The caller must run the iterator to its end.
        """


@runtime_checkable
class ProposesTogether(Protocol):
    """An engine that makes proposals for several ``fused`` sequences in one call."""

    def propose_together(self, calls: Numbers[tuple[Sequence, ProposalCall]]) -> list[Proposed]:
        """The results of ``FusedCalls.propose`` for each sequence, each named once. Raises the same errors; the
        sequences then hold what they held before, or also some of the tokens to be fed."""


@runtime_checkable
class KeepsCaches(Protocol):
    """An engine whose sequences can be written to a file and read again."""

    @property
    def cache_layout(self) -> dict[str, str | int]:
        """The conditions under which a file can be read: how the numbers were computed, and their layout."""

    def stored(self, sequence: Sequence) -> dict[str, torch.Tensor] | None:
        """The contents of a sequence, on the CPU; None if they cannot be stored. They are views, valid until the
        sequence is used again."""

    def restore(self, sequence: Sequence, stored: dict[str, torch.Tensor], length: int) -> None:
        """Replace the contents of a sequence by the first ``length`` tokens of ``stored``. Raises ValueError if they do
        not fit, AdaptiveError if there is not enough memory; the caller must then roll it back to 0."""


@runtime_checkable
class ReadsFeatures(Protocol):
    """An engine of a head: its sequences read the hidden states that another engine's sequences keep.

    ``ready``: whether it can draft. A head that is grown here cannot until it has been trained, which needs the
    features of logged text. ``words``: the kind of head, for users.
    """

    name: str
    ready: bool
    words: str

    def sequence_of(self, target: Sequence) -> Sequence:
        """A new empty sequence over the text of ``target``, which must keep features."""


def sequences(target: Engine, draft: Engine | None) -> tuple[Sequence, Sequence | None]:
    """New empty sequences for one text: the target's and the draft's."""
    held = target.sequence(features=isinstance(draft, ReadsFeatures))
    return held, None if draft is None else draft_sequence(draft, held)


def draft_sequence(draft: Engine, target: Sequence) -> Sequence:
    """A new empty sequence of this draft over the text of ``target``, which comes from ``sequences``."""
    return draft.sequence_of(target) if isinstance(draft, ReadsFeatures) else draft.sequence()
