"""What the decoding loop asks of a model.

An ``Engine`` is a model with its weights; a ``Sequence`` is one text in its cache. The loop never
sees more than this, so that any engine that can extend, roll back and return logits stands behind
it: transformers here, others beside it.
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
# Asked with a position (from 1) and the largest probability there, before anything is drawn; answers with the number of
# an ``Advice`` of control/policy.py.
Asked: TypeAlias = Callable[[int, float], int]
# Asked with tokens that are drafted; answers with the address of the tokens (vocab,) that may stand behind them, a bit
# each in words of 32, which stays until tokens are committed; 0 where all may.
Mask: TypeAlias = Callable[[Numbers[int]], int]


@dataclass(eq=False)
class Thresholds:
    """When a draft ends on its own confidence, as numbers, so that nobody has to be asked between two of its tokens.

    A confidence falls into one of n + 1 bins, of n ``edges`` (float64). By bin (n + 1): the probability that a token is
    ``accepted``, and that the one after it is (``follow``). By position (``longest``): that of all up to it below which
    it is dropped (``drop_below``), and that of the next one too at which it is the last (``last_below``). What is
    written: the ``bins`` (kept * longest) of each position that was asked about, of the last drafts, how many were
    ``asked`` about (kept), the number of ``drafts`` (1), all int32, and ``reach`` (1), the probability that all up to
    there are accepted. control/stopping.py applies them in Python.
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
        """Write what is written: somebody has applied them to a draft, and asked about positions of these ``bins``."""
        longest = len(self.drop_below)
        row = self.drafts[0] % len(self.asked)
        self.drafts[0] += 1
        self.asked[row] = len(bins)
        self.bins[row * longest : row * longest + len(bins)] = array("i", bins)
        self.reach[0] = math.prod(self.accepted[b] for b in bins)


@dataclass(slots=True)
class ProposalCall:
    """A whole proposal: feed ``tokens``, then one after the other choose at most ``length`` tokens of the first
    ``vocab`` ids by ``sampling``, and feed each but the last. ``uniform`` (length,) are random numbers below 1, one a
    token; none where the likeliest is taken, or a seed decides. ``advise`` says what becomes of each position, ``mask``
    what may stand there."""

    tokens: list[int]
    length: int
    vocab: int
    sampling: SamplingParams
    uniform: list[float]
    advise: Thresholds | Asked | None
    mask: Mask | None = None


class Proposed(NamedTuple):
    """What came of it: the tokens, and the distributions (n, vocab) that they were drawn from, which last until the
    sequence's next proposal; None where the likeliest were taken, or a seed decided."""

    tokens: list[int]
    probs: torch.Tensor | None


@dataclass(slots=True)
class VerificationCall:
    """A pass over tokens ``fed`` and those ``drafted``, and the acceptance rule over its logits; ``q``, ``uniform`` and
    ``allowed`` as in ``SamplingKernels.judge``."""

    fed: list[int]
    drafted: list[int]
    sampling: SamplingParams
    q: torch.Tensor | None
    uniform: list[float]
    allowed: Numbers[int] = ()


class Judgement(NamedTuple):
    """What stands of K drafted tokens: how many; the token that the target adds, -1 where its logits are not numbers;
    how many random numbers that took; the log-probabilities of the accepted + 1 tokens that are committed, None where
    the likeliest are."""

    accepted: int
    extra: int
    used: int
    chosen: list[float] | None


class SamplingKernels(Protocol):
    """Compiled code that chooses tokens. Logits and distributions are on the processor."""

    def probabilities(self, logits: torch.Tensor, params: SamplingParams, out: torch.Tensor) -> torch.Tensor:
        """Probabilities, into ``out`` (n, vocab) float32, of logits (n, vocab). A row in which a logit is no number
        has none."""

    def draw(self, probs: Floats, uniform: float, less: Floats | None = None) -> int | None:
        """The first token at which the mass of probs (vocab,), or of what they have more than ``less`` (at most
        vocab,), exceeds that share of it; None where there is no mass."""

    def race(self, probs: Floats, seed: int, position: int) -> int | None:
        """The token of probs (vocab,) that the noise of a seed chooses at a position of the text; None where there is
        no mass."""

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
        """The acceptance rule, given logits (K + 1, vocab) for the tokens at ``position`` of the text and behind it.
        ``q`` (K, at most vocab), float32 and contiguous, is what the K tokens were drawn from, ``uniform`` (K + 2,) are
        random numbers below 1; neither is looked at where the likeliest is taken, or a seed decides. ``allowed``
        (K + 1,) is what a ``Mask`` says of each row, or nothing where all may stand. Raises IndexError for an id beyond
        the vocabulary."""

    def likeliest_of(self, logits: torch.Tensor, count: int, kept: int, into: tuple[int, int, int]) -> None:
        """Of the first ``count`` rows of logits (n, vocab), float32 and contiguous, the ``kept`` likeliest tokens,
        likeliest first, their log-probabilities, and the logarithm of the mass of all others. ``into`` says where in
        memory to write them: int32 and float32 (count, kept), float32 (count,). A row in which a logit is no number
        has no numbers."""


def judged(kernels: SamplingKernels, logits: torch.Tensor, position: int, call: VerificationCall) -> Judgement:
    """The rule by itself, for a ``call`` whose pass has given these logits, for the tokens at ``position`` on."""
    return kernels.judge(logits, call.drafted, position, call.sampling, call.q, call.uniform, call.allowed)


class FusedCalls(Protocol):
    """A sequence of an engine that does in one call what ``extend`` and a choice do token by token, and what it and the
    acceptance rule do. What runs between two passes finds the processor's caches full of weights."""

    def propose(self, call: ProposalCall) -> Proposed:
        """Append the tokens of ``call`` and those that are chosen, but the last of them."""

    def verify(self, call: VerificationCall) -> tuple[Judgement, torch.Tensor]:
        """Append all tokens of ``call``; what stands of the K drafted ones, and the logits (K + 1, vocab) as from
        ``extend``."""


class Chooser(Protocol):
    """What chooses a token from the logits (1, vocab) of a pass by tensor operations that wait for no device, over
    tensors of its own; it may be recorded with the pass. ``outcome`` is what its calls have left in these."""

    def __call__(self, logits: torch.Tensor) -> None:
        """Choose, and remember what."""

    def reset(self) -> None:
        """Forget what was chosen."""

    def outcome(self) -> tuple[torch.Tensor, ...]:
        """See above."""


@runtime_checkable
class Chooses(Protocol):
    """A sequence of an engine that makes a pass and the choice behind it as one, where that has been recorded."""

    def choose(self, tokens: Ids, chooser: Chooser) -> None:
        """``Sequence.extend`` by ``tokens``, and then the ``chooser`` on the logits (1, vocab) of the last."""


@runtime_checkable
class Prepares(Protocol):
    """A sequence whose engine has passes to prepare, which takes a while the first time."""

    def prepare(self, length: int, chooser: Chooser | None = None) -> None:
        """Before an answer: a text of ``length`` tokens in all is to be decoded, with that ``chooser`` behind passes
        where they are proposals'. What can be prepared for that is; what cannot be is done without."""


@dataclass(frozen=True)
class Memory:
    """Bytes of what is held of a text, or of several: ``keys`` and values, recurrent ``states`` with what a rollback
    needs, ``checkpoints`` of them for going back further, hidden states (``features``)."""

    keys: int = 0
    states: int = 0
    checkpoints: int = 0
    features: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.keys + self.states + self.checkpoints + self.features

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            self.keys + other.keys,
            self.states + other.states,
            self.checkpoints + other.checkpoints,
            self.features + other.features,
        )


class Sequence(Protocol):
    """The cached context of one text. Its length is how many tokens the cache holds.

    ``fused`` is the same sequence where its engine offers that.
    """

    @property
    def fused(self) -> FusedCalls | None:
        """See above."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""

    @property
    def memory(self) -> Memory:
        """What the cache takes."""

    def reserve(self, length: int) -> None:
        """Reserve capacity for ``length`` tokens in all, so that no pass up to there allocates. Raises AdaptiveError
        where there is no memory for them; what is held stays."""

    def extend(self, tokens: Ids, rows: int, parents: list[int] | None = None) -> torch.Tensor:
        """Append n ``tokens`` and return the logits of the last ``rows`` of them, (rows, vocab).

        Row i predicts the token after the (n - rows + i)-th one. Tokens may be on any device; logits
        are on the engine's, in its dtype, and may be overwritten by the sequence's next ``extend``. The caller
        keeps ``length + n`` within the context.

        With ``parents`` (n,) the tokens are nodes of a tree, which is not in the text yet: ``length`` stays until
        ``keep`` chooses a path, and whatever else is done to the text forgets the tree. Each token follows the node of
        that number, or for -1 the last token held: it sees what is held and the nodes of its path, and stands as deep.
        Nodes are numbered in the order in which they come, over all passes since the tree began. Raises ValueError for
        a parent that is not there yet, and AdaptiveError where the engine makes no passes over ``trees``.
        """

    def keep(self, path: list[int]) -> None:
        """Append the nodes ``path`` of the tree, of which each follows the one before it, and forget the others. They
        are not computed again; nothing is copied where they are the first nodes in order, as those of a chain are.
        Raises ValueError for what is no path.
        """

    def features(self, begin: int, end: int) -> torch.Tensor:
        """The hidden states (end - begin, feature_width) of these tokens of the cache, as the last layer leaves them
        before the final norm: float32 on the engine's device, a view where they are held so, which lasts until the
        sequence is extended or rolled back. Raises ValueError where the sequence keeps none, or not so many.
        """

    def rollback(self, length: int) -> None:
        """Forget everything after the first ``length`` tokens. Copies no keys. States that cannot be taken back so far
        go back further, so that fewer are held then; not within the last pass, nor within the last single steps."""

    def copy_prefix(self, other: Sequence, length: int) -> None:
        """Hold the first ``length`` tokens of ``other``, a sequence of the same engine, instead of what is held; or
        fewer, as after a rollback. Either both keep features or neither.

        Raises AdaptiveError where there is no memory; nothing is held then.
        """


@dataclass(slots=True)
class ExtendCall:
    """What a pass over several sequences appends to one of them: ``tokens``, of how many of the last the logits are
    wanted (``rows``), and which they follow where they are nodes of a tree (``parents``), as in ``Sequence.extend``."""

    sequence: Sequence
    tokens: Ids
    rows: int
    parents: list[int] | None = None


def distinct(calls: Numbers[ExtendCall]) -> None:
    """Raises ValueError where a sequence is named twice."""
    if len({id(call.sequence) for call in calls}) < len(calls):
        raise ValueError("a pass over several sequences appends to each of them once")


def one_after_another(calls: Numbers[ExtendCall], shared: bool = False) -> list[torch.Tensor]:
    """``Engine.extend_together`` as a pass for each sequence. ``shared``: logits of one may lie where the next
    computes, as those of recorded passes do."""
    distinct(calls)
    each = (call.sequence.extend(call.tokens, call.rows, call.parents) for call in calls)
    return [logits.clone() for logits in each] if shared and len(calls) > 1 else list(each)


def no_trees(who: str) -> AdaptiveError:
    """What an engine whose ``trees`` are False raises for one."""
    return AdaptiveError(f"{who} makes no passes over trees of tokens; draft chains")


class Engine(Protocol):
    """A model that can score tokens in the context of a sequence.

    ``weights`` says how they are held (a dtype, a quantisation), ``end_tokens`` are the ids its
    checkpoint calls the end of a sequence, ``sampling`` what the checkpoint recommends. ``threads`` chooses how many
    threads short passes use; None where that is not chosen while it runs. ``feature_width``: numbers of a token's
    hidden state, 0 where sequences cannot keep them. ``undraftable``: why it decodes plainly and drafts nothing, in
    words that follow "it"; None where passes over several tokens may be taken back. ``joint``: whether
    ``extend_together`` reads the weights once for several sequences. ``trees``: whether ``Sequence.extend`` takes
    ``parents``.
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
        """``Sequence.extend`` of several sequences of this engine, each named once, in one pass where the engine is
        ``joint``, else one after the other. The logits (rows, vocab) of each, which may be overwritten by the engine's
        next ``extend_together`` too. They depend on the other sequences no more than on how a text is cut into
        passes: not at all, or by rounding; the engine says which.

        Raises ValueError for a sequence that is named twice, and what ``Sequence.extend`` raises; a sequence may
        then have been extended or not, and is to be rolled back.
        """

    def sequence(self, features: bool = False) -> Sequence:
        """A new empty sequence. With ``features`` it keeps the hidden state of every token in its cache, for
        ``Sequence.features``. Raises ValueError where the engine gives none."""

    def apply_adapter(self, folder: Path | None) -> None:
        """Use the weights with this LoRA adapter (a PEFT folder), or the pristine ones for None.

        Takes effect for the next ``extend`` of any sequence. Raises AdaptiveError, leaving the weights
        as they were, when the adapter does not fit.
        """

    def swap_adapter(self, folder: Path | None) -> Iterator[None]:
        """``apply_adapter`` in steps short enough to come between two rounds; it is checked up to the first.

        Between two steps other engines, and sequences of this one that are rolled back, may be used;
        this one may not be extended. Whoever begins it runs it to its end.
        """


@runtime_checkable
class ProposesTogether(Protocol):
    """An engine that makes proposals for several sequences, which are ``fused``, in one call."""

    def propose_together(self, calls: Numbers[tuple[Sequence, ProposalCall]]) -> list[Proposed]:
        """What ``FusedCalls.propose`` of each sequence gives, each named once. Raises what that raises; the sequences
        then hold what they held, or some of the tokens that they were to be fed."""


@runtime_checkable
class KeepsCaches(Protocol):
    """An engine whose sequences can be written to a file and read again."""

    @property
    def cache_layout(self) -> dict[str, str | int]:
        """What a file has to agree with to be read: how the numbers were computed, and how they lie."""

    def stored(self, sequence: Sequence) -> dict[str, torch.Tensor] | None:
        """What a sequence holds, contiguous and on the processor; None where that cannot be stored."""

    def restore(self, sequence: Sequence, stored: dict[str, torch.Tensor], length: int) -> None:
        """Have a sequence hold the first ``length`` tokens of what was ``stored``, instead of what it holds. Raises
        ValueError for what does not fit, AdaptiveError where there is no memory; it is then to be rolled back to 0."""


@runtime_checkable
class ReadsFeatures(Protocol):
    """An engine of a head: its sequences read the hidden states that another engine's keep.

    ``ready``: whether it is to draft. A head that is grown here is not, until it has been trained, which takes the
    features of what was said. ``words``: what kind of head it is, for people.
    """

    name: str
    ready: bool
    words: str

    def sequence_of(self, target: Sequence) -> Sequence:
        """A new empty sequence over the text of ``target``, which keeps features."""


def sequences(target: Engine, draft: Engine | None) -> tuple[Sequence, Sequence | None]:
    """New empty sequences of one text."""
    held = target.sequence(features=isinstance(draft, ReadsFeatures))
    return held, None if draft is None else draft_sequence(draft, held)


def draft_sequence(draft: Engine, target: Sequence) -> Sequence:
    """A new empty sequence over the text of ``target``, one of ``sequences`` for this draft."""
    return draft.sequence_of(target) if isinstance(draft, ReadsFeatures) else draft.sequence()
