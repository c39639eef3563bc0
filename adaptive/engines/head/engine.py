"""A head as an engine: a draft whose sequences read the hidden states of the target's sequences.

Row i of a head reads token i and the feature of token i - 1. The feature is the target's hidden state if the target's
sequence holds that token, else the head's own hidden state, which the head's cache keeps. A rollback drops rows that
were computed from the head's own features; they are computed again once the target's features exist. In a head that
was trained elsewhere, the first token of a text has no row, and the sequence only counts it. If our kernels support
the layer of a grown head, a pass or a whole proposal is one native call; otherwise transformers' forward of the layer
is used. With a draft vocabulary (``vocabulary.py``), a whole proposal chooses among its tokens, and a pass returns
logits of all tokens, -inf outside the vocabulary. On our kernels a pass may be over nodes of a tree; each reads the
feature of its parent, which an earlier pass has computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from pathlib import Path

import torch

from adaptive.engines.cpu.cache import CpuCache
from adaptive.engines.cpu.forward import CpuForward, Given
from adaptive.engines.cpu.packing import Packed
from adaptive.engines.head.foreign import ForeignHead
from adaptive.engines.head.kinds import HeadModule
from adaptive.engines.head.module import VOCABULARY, Head
from adaptive.engines.head.passes import HeadPasses
from adaptive.engines.head.plan import forward_of, packed_of, plan_of
from adaptive.engines.hf.cache import RollbackCache, copy_prefix, reserve
from adaptive.engines.hf.engine import PREFILL_CHUNK, TransformersEngine, TransformersSequence
from adaptive.engines.hf.generation import FALLBACK_SAMPLING
from adaptive.engines.hf.lora import MergedAdapter
from adaptive.engines.protocol import (
    Chooser,
    ExtendCall,
    Judgement,
    Memory,
    ProposalCall,
    Proposed,
    Sequence,
    VerificationCall,
    judged,
    no_trees,
    one_after_another,
)
from adaptive.engines.threads import ThreadChoice
from adaptive.engines.tree import NO_TREE, TokenTree
from adaptive.errors import AdaptiveError, first_line
from adaptive.tokens import Ids, Rows, as_tensor, moved


class HeadSequence:
    """A head's cache of one text. It reads features from ``target``, a sequence that keeps them; with None it reads
    only its own features."""

    def __init__(self, engine: HeadEngine, target: Sequence | None) -> None:
        self.engine = engine
        self.target = target
        self.cache: CpuCache | RollbackCache
        if engine.cpu_forward is not None:
            self.cache = engine.cpu_forward.cache(features=True)
        else:
            self.cache = RollbackCache(engine.head.config, keeps=True)
        self.tree = NO_TREE  # its nodes are stored after the cache's tokens
        self._skipped = 0  # leading tokens without a row
        self._exact = 0  # leading tokens that were computed from the target's features
        self._read: torch.Tensor | None = None  # keeps the features alive that a native call reads
        self.rest()

    @property
    def fused(self) -> HeadSequence | None:
        """This sequence if a pass is one native call."""
        return None if self.engine.cpu_forward is None else self

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._skipped + self.cache.length

    @property
    def memory(self) -> Memory:
        """The memory of the cache, including its own features."""
        return self.cache.memory

    @property
    def _known(self) -> int:
        """The number of leading tokens whose features the target holds."""
        return 0 if self.target is None else self.target.length

    def reserve(self, length: int) -> None:
        """Reserve capacity for ``length`` tokens in all; see the protocol."""
        reserve(self.cache, min(length, self.engine.context_length))

    def rest(self) -> None:
        """Free the rows of logits and probabilities; see the protocol."""
        self._logits, self._few, self._probs = Rows(self.engine.vocab_size), Rows(0), Rows(0)

    def prepare(self, length: int, chooser: Chooser | None = None) -> None:
        """Record passes if the engine records them; see the protocol."""
        if isinstance(self.cache, RollbackCache):
            self.engine.passes.ready(self.cache, min(length, self.engine.context_length), chooser)

    def choose(self, tokens: Ids, chooser: Chooser) -> None:
        """Extend, and choose the next token; see the protocol."""
        start, count = self.length, len(tokens)
        if isinstance(self.cache, RollbackCache) and start >= self.engine.head.begins and count <= self._together:
            with torch.inference_mode():
                given = moved(as_tensor(tokens), self.engine.device)
                if self.engine.passes.choose(given, self._before(start, count), self.cache, chooser):
                    self._passed(start)
                    return
        chooser(self.extend(tokens, 1))

    def extend(self, tokens: Ids, rows: int, parents: list[int] | None = None) -> torch.Tensor:
        """Append n tokens and return logits (rows, vocab) of the last rows; see the protocol. A token that reads the
        head's own feature of another of the n tokens gets a separate pass."""
        if parents is not None:
            return self._extend_tree(tokens, rows, parents)
        self.tree = NO_TREE
        if len(tokens) and self.length < self.engine.head.begins:
            return self._begin(tokens, rows)
        count, found = len(tokens), []
        end = min(count, self._together)
        if end == count:
            return self._extend(tokens, rows)
        begin = 0
        while begin < count:
            found.append(self._extend(tokens[begin:end], max(0, min(end - begin, rows - count + end))).clone())
            begin, end = end, end + 1
        return torch.cat(found)

    def _begin(self, tokens: Ids, rows: int) -> torch.Tensor:
        """``extend`` for an empty sequence of a head whose first token has no row; the logits of that token are
        zeros."""
        self._skipped = self._exact = 1
        rest = tokens[1:]
        logits = torch.zeros(0, self.engine.vocab_size, device=self.engine.device)
        if len(rest):
            logits = self.extend(rest, min(rows, len(rest)))
        return logits if rows <= len(rest) else torch.cat([logits.new_zeros(1, self.engine.vocab_size), logits])

    def _extend_tree(self, tokens: Ids, rows: int, parents: list[int]) -> torch.Tensor:
        """``extend`` over nodes of a tree. A node that follows another of them gets a later pass, since it reads the
        feature of that one."""
        if not self.engine.trees:
            raise no_trees(f"a head on {self.engine.head.config.model_type}")
        listed, count, held = tokens if isinstance(tokens, list) else tokens.tolist(), len(tokens), len(self.tree)
        whole, begin, found = self.tree.grown(parents), 0, list[torch.Tensor]()
        while True:
            end = next((at for at in range(begin, count) if parents[at] >= held + begin), count)
            tree = TokenTree(whole.parents[: held + end], whole.depths[: held + end])
            wanted = max(0, min(end - begin, rows - count + end))
            logits = self._over_nodes(listed[begin:end], wanted, tree)
            if end == count:
                break
            found.append(logits.clone())  # the next pass writes to the same place
            begin = end
        self.tree = whole
        return torch.cat([*found, logits]) if found else logits

    def _over_nodes(self, tokens: list[int], rows: int, tree: TokenTree) -> torch.Tensor:
        forward, cache, given = self.engine.cpu_forward, self.cache, self._given(self.length)
        assert forward is not None
        assert isinstance(cache, CpuCache)
        return self._wide(forward, rows, lambda few: forward.one_call(tokens, few, cache, given, tree))

    def keep(self, path: list[int]) -> None:
        """Append a path of the tree and drop the other nodes; see the protocol."""
        self.tree.check(path)
        if path:
            assert isinstance(self.cache, CpuCache)
            self.cache.keep_path(path)
        self.tree = NO_TREE

    @property
    def _together(self) -> int:
        """How many tokens one pass may append: those whose feature is available before the pass, at least 1."""
        return max(1, self._known + 1 - self.length)

    def _extend(self, tokens: Ids, rows: int) -> torch.Tensor:
        start, forward = self.length, self.engine.cpu_forward
        if forward is not None:
            assert isinstance(self.cache, CpuCache)
            listed: list[int] = tokens if isinstance(tokens, list) else tokens.tolist()
            cache, given = self.cache, self._given(start)
            logits = self._wide(forward, rows, lambda few: forward.one_call(listed, few, cache, given))
        else:
            logits = self._by_transformers(moved(as_tensor(tokens), self.engine.device), rows)
        self._passed(start)
        return logits

    def _wide(self, forward: CpuForward, rows: int, run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Logits (rows, vocab) of a pass: ``run`` fills those of the draft vocabulary."""
        ids, logits = forward.plan.ids, self._logits(0, rows)
        if ids is None:
            return run(logits)
        if self._few.width != len(ids):
            self._few = Rows(len(ids))
        return logits.fill_(-torch.inf).index_copy_(1, ids, run(self._few(0, rows)))

    def propose(self, call: ProposalCall) -> Proposed:
        """Make a whole proposal; see ``FusedCalls``."""
        self.tree = NO_TREE
        forward = self.engine.cpu_forward
        assert forward is not None
        assert isinstance(self.cache, CpuCache)
        if self._probs.width != call.vocab:
            self._probs = Rows(call.vocab)
        if len(call.tokens) > self._together:
            self.extend(call.tokens[:-1], 0)
            call = dataclasses.replace(call, tokens=call.tokens[-1:])
        start = self.length
        proposed = forward.propose(call, self._probs, self.cache, self._given(start))
        self._passed(start)
        return proposed

    def verify(self, call: VerificationCall) -> tuple[Judgement, torch.Tensor]:
        """Run a pass, then the acceptance rule; see ``FusedCalls``."""
        assert self.engine.cpu_forward is not None
        logits = self.extend([*call.fed, *call.drafted], len(call.drafted) + 1)
        held = self.length - len(call.drafted)
        return judged(self.engine.cpu_forward.sampling, logits, held, call), logits

    def _given(self, start: int) -> Given:
        """The target's features for a native call that begins at token ``start``. The call reads no feature before that
        of token ``start`` - 1."""
        target, known = self.target, self._known
        if isinstance(target, TransformersSequence) and isinstance(target.cache, CpuCache):
            return Given(target.cache.hidden_address, known)
        first = max(0, start - 1)
        if target is None or known <= first:
            return Given()
        self._read = target.features(first, known).contiguous()
        return Given(self._read.data_ptr() - first * self._read[0].nbytes, known)

    @torch.inference_mode()
    def _by_transformers(self, tokens: torch.Tensor, rows: int) -> torch.Tensor:
        assert isinstance(self.cache, RollbackCache)
        passes = self.engine.passes
        while len(tokens) > PREFILL_CHUNK <= len(tokens) - rows:
            passes(tokens[:PREFILL_CHUNK], self._before(self.length, PREFILL_CHUNK), 0, self.cache)
            tokens = tokens[PREFILL_CHUNK:]
        return passes(tokens, self._before(self.length, len(tokens)), rows, self.cache)

    def _before(self, start: int, count: int) -> torch.Tensor:
        """The features (count, width) that ``count`` tokens from ``start`` on read: those of the tokens before each."""
        parts, first, end = [], max(0, start - 1), start + count - 1
        border = max(first, min(self._known, end))
        if not start:
            parts.append(torch.zeros(1, self.engine.feature_width, device=self.engine.device))
        if self.target is not None and first < border:
            parts.append(self.engine.head.of_target(self.target.features(first, border)).float())
        if border < end:
            parts.append(self.features(border, end))
        return torch.cat(parts)

    def _passed(self, start: int) -> None:
        """Update ``_exact`` after a pass that began at token ``start``."""
        if self._exact == start:
            self._exact = min(self.length, self._known + 1)

    def features(self, begin: int, end: int) -> torch.Tensor:
        """The head's own hidden states (end - begin, width), zeros for a token without a row; see the protocol."""
        if not 0 <= begin <= end <= self.length:
            raise ValueError(f"features {begin} to {end} of a text of {self.length} tokens")
        first, last = max(0, begin - self._skipped), max(0, end - self._skipped)
        if not last:
            return torch.zeros(end - begin, self.engine.feature_width, device=self.engine.device)
        found = self.cache.features(first, last).float()
        return found if len(found) == end - begin else torch.cat([found.new_zeros(1, found.shape[1]), found])

    def rollback(self, length: int) -> None:
        """Drop all tokens after the first ``length``, and those that were computed from the head's own features."""
        self.tree = NO_TREE
        length = min(length, self._exact)
        self._skipped = min(self._skipped, length)
        self.cache.rollback(length - self._skipped)
        self._exact = self.length

    def copy_prefix(self, other: Sequence, length: int) -> None:
        """Replace the contents by the first ``length`` tokens of another sequence, without those that were computed
        from its own features; see the protocol."""
        assert isinstance(other, HeadSequence)
        length = min(length, other._exact)
        self.tree = NO_TREE
        self.cache.rollback(0)
        self._skipped = self._exact = 0
        self.reserve(length)
        skipped = min(self.engine.head.begins, length)
        if length > skipped:
            copy_prefix(self.cache, other.cache, length - skipped)
        self._skipped, self._exact = skipped, length


class HeadEngine:
    """A head on a loaded ``target``. It shares the target's embedding and projection and runs on the target's device.

    ``grown``: the head is made here and drafts (``ready``) only after weights have been trained for it. A head that was
    trained elsewhere takes LoRA adapters, which are merged into its weights. ``cpu_forward`` computes the layer if the
    kernels support it, otherwise ``passes`` does. ``int8`` requests int8 linear layers of the kernels; the target's
    projection is then copied as int8, which is faster, unless ``as_it_is``, which takes no memory.
    """

    undraftable: str | None = None
    joint = False

    def __init__(
        self,
        head: HeadModule,
        target: TransformersEngine,
        int8: bool = False,
        grown: bool = False,
        as_it_is: bool = False,
    ) -> None:
        head.eval()
        self.head = head
        self.name, self.words = head.kind.value, head.kind.words
        self.grown = grown
        self.ready = not grown
        self.vocab_size: int = head.vocab_size
        self.context_length: int = getattr(head.config, "max_position_embeddings", None) or 2**31
        self.feature_width = head.width
        self.device = head.device
        self.end_tokens: frozenset[int] = frozenset()
        self.sampling = FALLBACK_SAMPLING
        self.cpu_forward: CpuForward | None = None
        # The target's packed linear layers, including its projection, as ``packed`` or as ``shared`` of ``plan_of``.
        self._packed: tuple[Packed, ...] = ()
        self._shared: tuple[Packed, ...] = ()
        if isinstance(head, Head):
            found = packed_of(head, target)
            self._packed, self._shared = ((), found) if as_it_is else (found, ())
            forward = forward_of(head, True, self._packed, self._shared) if int8 else None
            self.cpu_forward = forward or forward_of(head, False, self._packed, self._shared)
        rounded = self.cpu_forward is not None and self.cpu_forward.plan.linears[-1].int8
        self.weights = "int8" if rounded else str(head.dtype).removeprefix("torch.")
        self.passes = HeadPasses(head, self.context_length)
        self._merged = MergedAdapter(head) if isinstance(head, ForeignHead) else None
        self._first: dict[str, torch.Tensor] | None = None  # the head's weights before the first ``swap_adapter``

    @property
    def trees(self) -> bool:
        """Whether passes over trees are supported: by our own forward."""
        return self.cpu_forward is not None

    @property
    def threads(self) -> ThreadChoice | None:
        """The thread choice of our own forward; None for transformers' forward, which uses all of torch's threads."""
        return None if self.cpu_forward is None else self.cpu_forward.threads

    def extend_together(self, calls: Several[ExtendCall]) -> list[torch.Tensor]:
        """Extend one after the other, because the tokens of one text may need several passes; see the protocol."""
        return one_after_another(calls, self.passes.recorded is not None)

    def sequence(self, features: bool = False) -> HeadSequence:
        """A new empty sequence without a target; it always keeps its features."""
        return HeadSequence(self, None)

    def sequence_of(self, target: Sequence) -> HeadSequence:
        """A new empty sequence for the text of ``target``; see ``ReadsFeatures``."""
        return HeadSequence(self, target)

    def apply_adapter(self, folder: Path | None) -> None:
        """Use the weights of the head in ``folder``, or the original ones for None. A head that was trained elsewhere
        takes a LoRA adapter in ``folder`` instead. See the protocol."""
        for _ in self.swap_adapter(folder):
            pass

    def swap_adapter(self, folder: Path | None) -> Iterator[None]:
        """``apply_adapter`` in steps; see the protocol."""
        head = self.head
        if self._merged is not None:
            yield from self._merged.steps(folder)
            return
        assert isinstance(head, Head)
        tensors = None if folder is None else head.fitting(folder)
        yield
        try:
            if self._first is None:
                first: dict[str, torch.Tensor] = {}
                for name, tensor in head.own().items():
                    first[name] = tensor.to("cpu", copy=True)
                    yield
                self._first = first
            yield from self._take(head, self._first if tensors is None else tensors)
        except BaseException as error:  # out of memory, or interrupted: never leave a mixture of two heads
            for _ in self._take(head, self._first) if self._first is not None else ():
                pass
            self.ready = not self.grown
            if isinstance(error, (RuntimeError, MemoryError)):
                raise AdaptiveError(f"the head in {folder} could not be used ({first_line(error)})") from error
            raise
        self.ready = folder is not None or not self.grown

    def _take(self, head: Head, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
        """Take over weights from ``fitting``, in steps of one tensor, then of one linear layer of the kernels."""
        among = head.ids
        head.draft_among(tensors.get(VOCABULARY))
        if head.ids is not among and self.passes.recorded is not None:
            self.passes.recorded.changed()  # recordings read the projection to the old draft vocabulary
        head.fresh = False
        for name, tensor in head.own().items():
            tensor.copy_(tensors[name])
            yield
        if self.cpu_forward is None:
            return
        projection = self.cpu_forward.plan.lm_head
        # The projection to a draft vocabulary belongs to the head and is packed again if the vocabulary changes. The
        # projection to all tokens is the target's and stays.
        stays = self.cpu_forward.plan.ids is head.ids
        linears = tuple(one for one in self.cpu_forward.plan.linears if stays or one is not projection)
        self.cpu_forward.forget_pass()
        for linear in linears:
            if linear is not projection:
                linear.refresh()
                yield
        plan = plan_of(head, linears[-1].int8, (*linears, *self._packed), self._shared, again=True)
        assert plan is not None
        self.cpu_forward.use(plan)
