"""A GGUF file as an engine: llama.cpp computes the passes, our loop decodes.

A sequence is one context of the library, with capacity for the present text. To grow, it makes a larger context and
copies the old one's state. Tokens and logits are passed as arrays, without a Python loop over tokens. ``states.py``
rolls back recurrent layers.
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

# Tokens in one pass of the library. Too high: larger buffers, and ctrl-C takes effect later. Too low: a prompt reads
# the weights more often.
BATCH = 512
# Rows of logits in one pass. Too high: memory, since the logits are the largest buffer of a context (vocabulary * 4
# bytes per row). Too low: a verification of the longest draft, which needs 65, takes several passes.
ROWS = 128
# The least capacity of a context, in tokens. Too low: the first turns of a chat build a new context. Too high: memory
# that most answers do not need.
CAPACITY = 1024
# Capacity of the context that tests the library's support of a model: the smallest that the library makes.
TRIED = 256
# The temperature if the file recommends none; the same as for checkpoints.
FALLBACK_TEMPERATURE = 0.7


class Context:
    """A context of the library. It is freed when neither it nor its logits are referenced any more."""

    def __init__(self, engine: LlamaCppEngine, capacity: int) -> None:
        library = engine.llama.library
        self.model = engine.running  # a reference, because the model must outlive its contexts
        self.capacity = capacity
        self.pointer = engine.new_context(self.model, capacity)
        self.memory = library.llama_get_memory(self.pointer)
        weakref.finalize(self, library.llama_free, self.pointer)


class LlamaCppSequence:
    """One text in a context of llama.cpp."""

    fused = None  # the library has no call that continues after the logits

    def __init__(self, engine: LlamaCppEngine) -> None:
        self.engine = engine
        self.length = 0
        self.capacity = 0
        self._written = 0  # tokens that the library may hold; above ``length`` after a rollback or an interrupted pass
        self._context: Context | None = None
        self._pointer: Any = None  # the library's pointer to the context
        self._memory: Any = None
        self._threads = 0  # threads of the context's last pass
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
        """The memory of recurrent states, and of keys and values for the whole capacity."""
        states, checkpoints = (0, 0) if self.states is None else self.states.nbytes
        if self._context is None:
            return Memory(checkpoints=checkpoints)
        return Memory(self._context.capacity * self.engine.bytes_per_token, states, checkpoints)

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens in all; the contents stay. See the protocol."""
        if length <= self.capacity:
            return
        limit = self.engine.context_length
        capacity = min(limit, max(CAPACITY, 1 << (min(length, limit) - 1).bit_length()))
        self._replace(max(capacity, length))

    def renew(self) -> None:
        """Make the next pass create a context with the engine's present weights. Any thread may call this."""
        self.capacity = 0

    def _replace(self, capacity: int) -> None:
        """Replace the context by one with room for ``capacity`` tokens and the same contents."""
        self._settle()
        state = self._state() if self.length else None
        self.close()
        try:
            self._context = Context(self.engine, capacity)
        except AdaptiveError:  # no memory: the contents are lost with the old context
            self._lose()
            raise
        self._pointer, self._memory = self._context.pointer, self._context.memory
        self._threads = 0
        self.capacity = capacity
        if self._context.model is not self.engine.running:  # ``renew`` was called in the meantime
            self.renew()
        if self._context.model is self.engine.llama:
            self.engine.adapter.use(self._pointer)
        if self.states is not None:
            self.states.moved()
        if state is not None:
            self._restore(state)

    def _state(self) -> Any:
        """The contents of the context in the library's own format."""
        library = self.engine.llama.library
        state = (ctypes.c_uint8 * library.llama_state_seq_get_size(self._pointer, 0))()
        size = library.llama_state_seq_get_data(self._pointer, state, len(state), 0)
        return state if size == len(state) else (ctypes.c_uint8 * size).from_buffer(state)

    def _restore(self, state: Any) -> None:
        """Load the ``_state`` of another context. Raises AdaptiveError, with the sequence empty, if that fails."""
        size = len(state)
        if self.engine.llama.library.llama_state_seq_set_data(self._pointer, state, size, 0) != size:
            self._lose()
            raise AdaptiveError(f"{self.engine.llama.path}: llama.cpp could not move its cache; give the prompt again")

    def close(self) -> None:
        """Release the context."""
        self._context = self._pointer = self._memory = None
        self._views.clear()
        self.capacity = 0

    def use_adapter(self) -> None:
        """Use the engine's new adapter: set it in the context, or replace a context of weights with a merged one."""
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
        """Run one call of the library over at most BATCH tokens. Returns logits (rows, vocab) of the last ones."""
        try:
            return self._run(tokens, rows)
        except BaseException:
            self.rollback(self.length)  # recurrent states may have to go back further than to before the pass
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
            buffer.context = self._context  # type: ignore[attr-defined]  # views must keep the context alive
            view = of_array(np.ctypeslib.as_array(buffer).reshape(rows, -1))
            self._views[address, rows] = view
        return view

    def keep(self, path: list[int]) -> None:
        """Accept only the empty path, because the engine has no trees; see the protocol."""
        NO_TREE.check(path)

    def copy_prefix(self, other: Sequence, length: int) -> None:
        """Replace the contents by the first ``length`` tokens of another sequence; see the protocol."""
        assert isinstance(other, LlamaCppSequence)
        self.rollback(0)
        self.reserve(max(length, other.length))  # the library can only copy a whole text
        self._settle()
        other._settle()
        self._restore(other._state())
        self.length = self._written = other.length
        if self.states is not None and other.states is not None:
            self.states.copy(other.states)
        self.rollback(length)

    def features(self, begin: int, end: int) -> torch.Tensor:
        """Raise ValueError, because no features are kept; see the protocol."""
        raise ValueError("sequences of llama.cpp keep no features")

    def rollback(self, length: int) -> None:
        """Drop all tokens after the first ``length``, in the library only before the next pass; see the protocol."""
        length = min(length, self.length)
        self.length = length if self.states is None else self.states.reach(length, self._written)

    def _settle(self) -> None:
        """Remove the tokens from the library that are not in the text any more. Raises AdaptiveError, with the sequence
        empty, if the library cannot do that."""
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
        """Record that the contents are lost."""
        self.length = self._written = 0
        if self.states is not None:
            self.states.reach(0, 0)


class LlamaCppEngine:
    """A GGUF file, loaded by llama.cpp. Not thread-safe.

    ``threads`` is the most that a pass uses. ``gpu`` puts the layers on the accelerator if the library was built for
    one.
    """

    name = "llama.cpp"
    weights = "gguf"
    feature_width = 0  # the library returns only hidden states after the final norm
    joint = False  # a pass of the library runs in one context, and each sequence has its own
    trees = False

    def __init__(self, model: LlamaModel, end_tokens: frozenset[int], threads: int, gpu: bool = False) -> None:
        """Raises AdaptiveError if there is no memory for the test of a model with recurrent layers."""
        library = model.library
        self.recurrent = bool(
            library.llama_model_is_recurrent(model.pointer) or library.llama_model_is_hybrid(model.pointer)
        )
        self.llama = model
        self.running = model  # the model of new contexts: the file's weights, or those with a merged adapter
        self.threads = ThreadChoice(threads, LoadMeter())
        self.gpu = gpu
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.device = torch.device("cpu")  # the device of the logits
        self.end_tokens = end_tokens
        self.sampling = _recommended_sampling(model)
        self.adapter = LlamaAdapter(model)
        self.merging = Merging(model, self._run)
        self.bytes_per_token = _bytes_per_token(model)
        self.snapshots = SNAPSHOTS if self.recurrent else 0  # tokens of a pass that recurrent states can roll back
        self.undraftable: str | None = None
        if self.recurrent:
            self._try()
        self._sequences: weakref.WeakSet[LlamaCppSequence] = weakref.WeakSet()
        self._lock = threading.Lock()  # guards ``_sequences``

    def _try(self) -> None:
        """Test whether the library keeps snapshots of this architecture's states. If not, the context that it makes
        has none, and the engine is ``undraftable``."""
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
        """A new empty sequence. Raises ValueError for ``features``."""
        if features:
            raise ValueError("llama.cpp gives no features")
        sequence = LlamaCppSequence(self)
        with self._lock:
            self._sequences.add(sequence)
        return sequence

    def extend_together(self, calls: Several[ExtendCall]) -> list[torch.Tensor]:
        """Extend one after the other, because each sequence has a separate context of the library; see the protocol."""
        return one_after_another(calls)

    def new_context(self, model: LlamaModel, capacity: int) -> Any:
        """A context of the library with room for ``capacity`` tokens of one text. Raises AdaptiveError if there is not
        enough memory."""
        library = model.library
        params = library.llama_context_default_params()
        params.n_ctx = capacity
        params.n_batch = params.n_ubatch = min(BATCH, capacity)
        params.n_outputs_max = min(ROWS, params.n_batch)
        params.n_seq_max = 1
        params.n_rs_seq = self.snapshots
        params.n_threads = params.n_threads_batch = self.threads.most
        params.swa_full = True  # a rollback may need keys that have left the sliding window
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
        """Use a LoRA adapter (a PEFT folder), merged if possible, or the file's own weights for None; see the
        protocol."""
        for _ in self.swap_adapter(folder):
            pass
        self.merging.wait()

    def swap_adapter(self, folder: Path | None) -> Iterator[None]:
        """``apply_adapter`` in two steps; see the protocol.

        The adapter is first used beside the weights, and merged into a copy of them later, while no model computes.
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
        """Switch to a model with the merged adapter. Runs on the thread that merged it."""
        self.running = model
        self._for_all(LlamaCppSequence.renew)

    def _for_all(self, act: Callable[[LlamaCppSequence], None]) -> None:
        with self._lock:
            for sequence in self._sequences:
                act(sequence)


def _address_of(function: Any) -> Callable[[Any], int]:
    """A function of the library that takes a context and returns a pointer, with the pointer as an int."""
    found: Any = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(ctypes.cast(function, ctypes.c_void_p).value or 0)
    return found  # type: ignore[no-any-return]


def _bytes_per_token(model: LlamaModel) -> int:
    """Bytes of the keys and values of one token, at 16 bits per number."""
    queries, keys = model.heads
    size = model.number("{arch}.attention.key_length", model.shape["width"] // max(1, queries))
    attend = model.shape["layers"] // max(1, model.number("{arch}.full_attention_interval", 1))
    return 2 * 2 * attend * keys * size


def _recommended_sampling(model: LlamaModel) -> SamplingParams:
    """The sampling that the file's metadata recommend, with defaults for missing values."""

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
