"""A GGUF file as an engine: llama.cpp does the arithmetic, the loop stays ours.

A sequence is one context of the library, with capacity for the text at hand; it grows by a new context
that takes the old one's state over. Tokens go in and logits come out as arrays: nothing here runs
once a token in Python. What recurrent layers need to be taken back is in ``states.py``.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adaptive.engines.llamacpp.adapter import LlamaAdapter
from adaptive.engines.llamacpp.merged import PASSES, Merging
from adaptive.engines.llamacpp.model import LlamaModel, complaint
from adaptive.engines.llamacpp.states import SNAPSHOTS, States
from adaptive.engines.protocol import ExtendCall, Memory, Sequence, no_trees, one_after_another
from adaptive.engines.threads import ThreadChoice
from adaptive.engines.tree import NO_TREE
from adaptive.errors import AdaptiveError
from adaptive.machine import LoadMeter
from adaptive.tokens import Ids, of_array
from adaptive.types import SamplingParams

# Tokens in one pass of the library. Larger keeps larger buffers and leaves ctrl-C unheard for longer,
# smaller reads the weights more often during a prompt.
BATCH = 512
# Rows of logits in one pass: their buffer is the largest of a context (vocabulary times 4 bytes a row).
# A verification of the longest draft needs 65.
ROWS = 128
# Tokens that a context has room for at least. Smaller and a chat's first turns build it anew, larger
# takes memory that most answers do not need.
CAPACITY = 1024
# Tokens of the context that is made to see what the library can do with a model: the fewest that it makes one for.
TRIED = 256
# Where the file recommends nothing: as for a checkpoint that does not.
FALLBACK_TEMPERATURE = 0.7


class Context:
    """A context of the library, which is given back when nobody has it or its logits any more."""

    def __init__(self, engine: LlamaCppEngine, capacity: int) -> None:
        library = engine.llama.library
        self.model = engine.running  # outlives its contexts
        self.capacity = capacity
        self.pointer = engine.new_context(self.model, capacity)
        self.memory = library.llama_get_memory(self.pointer)
        weakref.finalize(self, library.llama_free, self.pointer)


class LlamaCppSequence:
    """One text in a context of llama.cpp."""

    fused = None  # the library's pass ends with its logits

    def __init__(self, engine: LlamaCppEngine) -> None:
        self.engine = engine
        self.length = 0
        self.capacity = 0
        self._written = 0  # tokens that the library may hold, more than ``length`` after an interrupted pass
        self._context: Context | None = None
        self._pointer: Any = None  # the context's own, as the library wants it
        self._memory: Any = None
        self._threads = 0  # of the context's last pass
        self._shape = (0, 0)  # tokens and rows of the last pass
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        self._tokens: Any = (ctypes.c_int32 * BATCH)()
        self._flags = np.zeros(BATCH, dtype=np.int8)
        library = engine.llama.library
        self._batch = library.llama_batch()
        self._batch.token = ctypes.cast(self._tokens, ctypes.POINTER(ctypes.c_int32))
        self._batch.logits = self._flags.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        self._decode, self._logits = library.llama_decode, _address_of(library.llama_get_logits)
        self._remove = library.llama_memory_seq_rm
        self.states = States(engine.llama, engine.snapshots) if engine.recurrent else None

    @property
    def memory(self) -> Memory:
        """Of the keys and values that there is room for, and of recurrent states."""
        states, checkpoints = (0, 0) if self.states is None else self.states.nbytes
        if self._context is None:
            return Memory(checkpoints=checkpoints)
        return Memory(self._context.capacity * self.engine.bytes_per_token, states, checkpoints)

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens in all; what is held stays."""
        if length <= self.capacity:
            return
        limit = self.engine.context_length
        capacity = min(limit, max(CAPACITY, 1 << (min(length, limit) - 1).bit_length()))
        self._replace(max(capacity, length))

    def renew(self) -> None:
        """The engine runs other weights: go over to them at the next pass. For any thread."""
        self.capacity = 0

    def _replace(self, capacity: int) -> None:
        """A new context with room for ``capacity`` tokens, which takes over what the old one holds."""
        self._settle()
        state = self._state() if self.length else None
        self.close()
        try:
            self._context = Context(self.engine, capacity)
        except AdaptiveError:  # no memory: what was held is gone with the old one
            self._lose()
            raise
        self._pointer, self._memory = self._context.pointer, self._context.memory
        self._threads = 0
        self.capacity = capacity
        if self._context.model is self.engine.llama:
            self.engine.adapter.use(self._pointer)
        if self.states is not None:
            self.states.moved()
        if state is not None:
            self._restore(state)

    def _state(self) -> Any:
        """What the library holds of this text, as its own bytes."""
        library = self.engine.llama.library
        state = (ctypes.c_uint8 * library.llama_state_seq_get_size(self._pointer, 0))()
        size = library.llama_state_seq_get_data(self._pointer, state, len(state), 0)
        return state if size == len(state) else (ctypes.c_uint8 * size).from_buffer(state)

    def _restore(self, state: Any) -> None:
        """Have the library hold what another context gave as ``_state``."""
        size = len(state)
        if self.engine.llama.library.llama_state_seq_set_data(self._pointer, state, size, 0) != size:
            self._lose()
            raise AdaptiveError(f"{self.engine.llama.path}: llama.cpp could not move its cache; give the prompt again")

    def close(self) -> None:
        """Give the context back."""
        self._context = self._pointer = self._memory = None
        self._views.clear()
        self.capacity = 0

    def use_adapter(self) -> None:
        """The engine's adapter is another one: tell the context, or leave one in whose weights another is."""
        if self._context is not None and self._context.model is self.engine.llama:
            self.engine.adapter.use(self._pointer)
        else:
            self.renew()

    def extend(self, tokens: Ids, rows: int, parents: list[int] | None = None) -> torch.Tensor:
        """Append n tokens and return logits (rows, vocab), float32, of the last rows; see the protocol."""
        if parents is not None:
            raise no_trees("llama.cpp's engine")
        count = len(tokens)
        if self.length + count > self.capacity:
            self.reserve(self.length + count)
        self._settle()
        given: list[int] = tokens if isinstance(tokens, list) else tokens.tolist()
        if self.states is not None and count:
            before = self.states.remembered(count, rows)
            if before:
                self.extend(given[:before], 0)
                self.states.checkpoint(self._pointer, self.length)
                given, count = given[before:], count - before
            self.states.before(self._pointer, self.length, count, rows)
        if count <= BATCH and rows <= ROWS:
            return self._pass(given, rows) if count else torch.empty(0, self.engine.vocab_size)
        plain = count - rows
        found = []
        at = 0
        while at < count:
            end = min(at + BATCH, count, max(plain, at) + ROWS)
            found.append(self._pass(given[at:end], max(0, end - max(plain, at))).clone())
            at = end
        return torch.cat(found)

    def _pass(self, tokens: list[int], rows: int) -> torch.Tensor:
        """One call of the library: at most BATCH tokens, logits (rows, vocab) of the last ones."""
        try:
            return self._run(tokens, rows)
        except BaseException:
            self.rollback(self.length)  # of states what was held before the pass may be out of reach
            raise

    def _run(self, tokens: list[int], rows: int) -> torch.Tensor:
        count = len(tokens)
        self._tokens[:count] = tokens
        if self._shape != (count, rows):
            self._flags[: count - rows] = 0
            self._flags[count - rows : count] = 1
            self._batch.n_tokens = count
            self._shape = count, rows
        if self.states is not None:
            self.states.begins()
        self._written = self.length + count
        threads = self.engine.threads.choose(count)
        if threads != self._threads:
            self._threads = threads
            self.engine.llama.library.llama_set_n_threads(self._pointer, threads, threads)
        PASSES.last = math.inf
        began = time.perf_counter()
        status = self._decode(self._pointer, self._batch)
        address = self._logits(self._pointer) if rows and not status else 0  # waits for an accelerator
        PASSES.last = ended = time.perf_counter()
        if status:
            raise AdaptiveError(f"{self.engine.llama.path}: llama.cpp failed with status {status}: {complaint()}")
        self.engine.threads.observe(count, ended - began)
        self.length = self._written
        if self.states is not None:
            self.states.ended(self._pointer, count)
        if not rows:
            return torch.empty(0, self.engine.vocab_size)
        view = self._views.get((address, rows))
        if view is None:
            buffer = (ctypes.c_float * (rows * self.engine.vocab_size)).from_address(address)
            buffer.context = self._context  # type: ignore[attr-defined]  # outlives what is seen of it
            view = of_array(np.ctypeslib.as_array(buffer).reshape(rows, -1))
            self._views[address, rows] = view
        return view

    def keep(self, path: list[int]) -> None:
        """There is no tree; see the protocol."""
        NO_TREE.check(path)

    def copy_prefix(self, other: Sequence, length: int) -> None:
        """Hold the first ``length`` tokens of another sequence; see the protocol."""
        assert isinstance(other, LlamaCppSequence)
        self.rollback(0)
        self.reserve(max(length, other.length))  # the library moves a whole text
        self._settle()
        other._settle()
        self._restore(other._state())
        self.length = self._written = other.length
        if self.states is not None and other.states is not None:
            self.states.copy(other.states)
        self.rollback(length)

    def features(self, begin: int, end: int) -> torch.Tensor:
        """Not kept; see the protocol."""
        raise ValueError("sequences of llama.cpp keep no features")

    def rollback(self, length: int) -> None:
        """Forget everything after the first ``length`` tokens; the library does so before the next pass."""
        length = min(length, self.length)
        self.length = length if self.states is None else self.states.reach(length, self._written)

    def _settle(self) -> None:
        """Have the library forget what is not in the text any more."""
        length, written = self.length, self._written
        if length == written:
            return
        try:
            if self.states is not None:
                self.states.go_back(self._pointer, self._memory, length, written)
            elif not self._remove(self._memory, 0, length, -1):
                self._remove(self._memory, 0, -1, -1)
                raise AdaptiveError(
                    f"{self.engine.llama.path}: llama.cpp takes no tokens back of a model of architecture "
                    f"{self.engine.llama.architecture}; use the checkpoint in its place"
                )
        except AdaptiveError:
            self._lose()
            raise
        self._written = length

    def _lose(self) -> None:
        """What was held is gone."""
        self.length = self._written = 0
        if self.states is not None:
            self.states.reach(0, 0)


class LlamaCppEngine:
    """A GGUF file, loaded by llama.cpp. Not for several threads at once.

    ``threads`` is the most that a pass uses; ``gpu`` takes the layers to the accelerator that the library was
    built for, if it was.
    """

    name = "llama.cpp"
    weights = "gguf"
    feature_width = 0  # the library hands out hidden states after the final norm, if at all
    joint = False  # a pass of the library is over one context, and each sequence has its own
    trees = False

    def __init__(self, model: LlamaModel, end_tokens: frozenset[int], threads: int, gpu: bool = False) -> None:
        """Raises AdaptiveError where there is no memory to try a model with recurrent layers."""
        library = model.library
        self.recurrent = bool(
            library.llama_model_is_recurrent(model.pointer) or library.llama_model_is_hybrid(model.pointer)
        )
        self.llama = model
        self.running = model  # where new contexts are made: the file's weights, or those with an adapter merged
        self.threads = ThreadChoice(threads, LoadMeter())
        self.gpu = gpu
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.device = torch.device("cpu")  # where the logits are
        self.end_tokens = end_tokens
        self.sampling = _recommended_sampling(model)
        self.adapter = LlamaAdapter(model)
        self.merging = Merging(model, self._run)
        self.bytes_per_token = _bytes_per_token(model)
        self.snapshots = SNAPSHOTS if self.recurrent else 0  # tokens of a pass whose states can be taken back
        self.undraftable: str | None = None
        if self.recurrent:
            self._try()
        self._sequences: weakref.WeakSet[LlamaCppSequence] = weakref.WeakSet()
        self._lock = threading.Lock()  # of them

    def _try(self) -> None:
        """See whether the library keeps snapshots of this architecture's states: asked for them, it makes a context
        without any where it does not."""
        library = self.llama.library
        context = self.new_context(self.llama, TRIED)
        self.snapshots = library.llama_n_rs_seq(context)
        library.llama_free(context)
        if not self.snapshots:
            self.undraftable = (
                f"has recurrent layers of an architecture ({self.llama.architecture}) whose states llama.cpp does not "
                "take back after a rejected token"
            )

    def sequence(self, features: bool = False) -> LlamaCppSequence:
        """A new empty sequence; ``features`` are not to be had."""
        if features:
            raise ValueError("llama.cpp gives no features")
        sequence = LlamaCppSequence(self)
        with self._lock:
            self._sequences.add(sequence)
        return sequence

    def extend_together(self, calls: Several[ExtendCall]) -> list[torch.Tensor]:
        """One after the other: each sequence is a context of the library of its own; see the protocol."""
        return one_after_another(calls)

    def new_context(self, model: LlamaModel, capacity: int) -> Any:
        """A context of the library with room for ``capacity`` tokens of one text."""
        library = model.library
        params = library.llama_context_default_params()
        params.n_ctx = capacity
        params.n_batch = params.n_ubatch = min(BATCH, capacity)
        params.n_outputs_max = min(ROWS, params.n_batch)
        params.n_seq_max = 1
        params.n_rs_seq = self.snapshots
        params.n_threads = params.n_threads_batch = self.threads.most
        params.swa_full = True  # a window that forgets cannot take a token back
        params.offload_kqv = params.op_offload = self.gpu
        params.no_perf = True
        context = library.llama_init_from_model(model.pointer, params)
        if not context:
            raise AdaptiveError(
                f"{self.llama.path}: llama.cpp cannot make a context of {capacity} tokens: {complaint()}; "
                "choose a smaller --max-new-tokens or free memory"
            )
        return context

    def apply_adapter(self, folder: Path | None) -> None:
        """Use a LoRA adapter (a PEFT folder), merged where it can be, or the file's own weights for None; see the
        protocol."""
        for _ in self.swap_adapter(folder):
            pass
        self.merging.wait()

    def swap_adapter(self, folder: Path | None) -> Iterator[None]:
        """``apply_adapter`` in two steps; see the protocol.

        The adapter is used beside the weights at once, and merged into a copy of them when it is quiet.
        """
        for _ in self.adapter.steps(folder):
            yield
        self.merging.give_up()
        self.running = self.llama
        self._for_all(LlamaCppSequence.use_adapter)
        self.adapter.forget()
        if folder is not None:
            self.merging.begin(folder)

    def _run(self, model: LlamaModel) -> None:
        """Go over to weights in which the adapter is. On the thread that merged it."""
        self.running = model
        self._for_all(LlamaCppSequence.renew)

    def _for_all(self, act: Callable[[LlamaCppSequence], None]) -> None:
        with self._lock:
            for sequence in self._sequences:
                act(sequence)


def _address_of(function: Any) -> Callable[[Any], int]:
    """A function of the library that takes a context and returns a pointer, which comes as a number."""
    found: Any = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(ctypes.cast(function, ctypes.c_void_p).value or 0)
    return found  # type: ignore[no-any-return]


def _bytes_per_token(model: LlamaModel) -> int:
    """Bytes that keys and values of one token take, in 16 bits."""
    queries, keys = model.heads
    size = model.number("{arch}.attention.key_length", model.shape["width"] // max(1, queries))
    attend = model.shape["layers"] // max(1, model.number("{arch}.full_attention_interval", 1))
    return 2 * 2 * attend * keys * size


def _recommended_sampling(model: LlamaModel) -> SamplingParams:
    """The sampling that the file's metadata recommend, if they do."""

    def said(key: str, default: float) -> float:
        value = model.metadata(f"general.sampling.{key}")
        try:
            return default if value is None else float(value)
        except ValueError:
            return default

    return SamplingParams(
        temperature=said("temp", FALLBACK_TEMPERATURE),
        top_k=int(said("top_k", 0)),
        top_p=said("top_p", 1.0),
        min_p=said("min_p", 0.0),
        repetition_penalty=said("penalty_repeat", 1.0),
    )
