"""Any causal language model of transformers as an engine, on our CPU forward or on the model's own."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from collections.abc import Sequence as Several
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from adaptive.engines.cpu import joint as cpu_joint
from adaptive.engines.cpu.cache import CpuCache
from adaptive.engines.cpu.forward import FEW, CpuForward, cpu_forward
from adaptive.engines.cpu.kernels import library
from adaptive.engines.cuda.forward import ShortForward, short_forward
from adaptive.engines.hf import joint as hf_joint
from adaptive.engines.hf.cache import RollbackCache, copy_prefix, no_room, reserve
from adaptive.engines.hf.calls import recurrent_pass, watch
from adaptive.engines.hf.features import FeatureHooks
from adaptive.engines.hf.generation import context_of, end_tokens, recommended_sampling, weights
from adaptive.engines.hf.graphs import SIZES, RecordedPasses
from adaptive.engines.hf.guard import disagreement, unused_cache
from adaptive.engines.hf.kinds import Kinds
from adaptive.engines.hf.lora import MergedAdapter
from adaptive.engines.hf.plain import PlainSequence
from adaptive.engines.hf.switching import SwitchingSequence, rope_border
from adaptive.engines.hf.together import Together
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
)
from adaptive.engines.state_checkpoints import REMEMBER_BEFORE
from adaptive.engines.threads import ThreadChoice
from adaptive.engines.tree import NO_TREE
from adaptive.errors import first_line
from adaptive.tokens import Ids, Rows, as_tensor, moved

logger = logging.getLogger("adaptive.engines")

# Tokens in one pass of a long prompt. Too high: attention scores need more memory, and ctrl-C takes effect later. Too
# low: the weights are read more often.
PREFILL_CHUNK = 512


class TransformersSequence:
    """One text in a cache: that of our CPU forward, or ours for the model's own forward."""

    def __init__(self, engine: TransformersEngine, features: bool = False) -> None:
        self.engine = engine
        self.cache: CpuCache | RollbackCache
        if engine.cpu_forward is not None:
            self.cache = engine.cpu_forward.cache(features)
        else:
            self.cache = RollbackCache(engine.model.config.get_text_config(), features)
        self._keeps = features
        self.tree = NO_TREE  # its nodes are stored after the cache's tokens
        self.rest()

    @property
    def fused(self) -> TransformersSequence | None:
        """This sequence if a pass is one native call."""
        return self if self.engine.cpu_forward is not None and self.engine.cpu_forward.fused else None

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.cache.length

    @property
    def memory(self) -> Memory:
        """The memory of the cache."""
        return self.cache.memory

    def reserve(self, length: int) -> None:
        """Reserve capacity for ``length`` tokens in all; see the protocol."""
        reserve(self.cache, min(length, self.engine.context_length))

    def rest(self) -> None:
        """Free the rows of logits and probabilities; see the protocol."""
        self._logits, self._probs = Rows(self.engine.vocab_size), Rows(0)

    def prepare(self, length: int, chooser: Chooser | None = None) -> None:
        """Record passes if the engine records them; see the protocol."""
        if self.engine.recorded is not None and isinstance(self.cache, RollbackCache):
            self.engine.recorded.ready(self.cache, min(length, self.engine.context_length), chooser)

    def choose(self, tokens: Ids, chooser: Chooser) -> None:
        """Extend, and choose the next token; see the protocol."""
        engine = self.engine
        if engine.records_at(self.cache):
            with torch.inference_mode():
                given = moved(as_tensor(tokens), engine.device)
                if engine.recorded(given, 1, self.cache, chooser) is not None:  # type: ignore[misc, arg-type]
                    self.tree = NO_TREE
                    return
        chooser(self.extend(tokens, 1))

    def extend(self, tokens: Ids, rows: int, parents: list[int] | None = None) -> torch.Tensor:
        """Append n tokens and return logits (rows, vocab) of the last rows; see the protocol."""
        if parents is not None:
            return self._extend_tree(tokens, rows, parents)
        self.tree = NO_TREE
        forward, before = self.engine.cpu_forward, self._remembered(len(tokens), rows)
        if before:
            self.extend(tokens[:before], 0)
            assert self.cache.states is not None
            self.cache.states.checkpoint()
            tokens = tokens[before:]
        if forward is not None and isinstance(tokens, list) and forward.fused:
            assert isinstance(self.cache, CpuCache)
            return forward.one_call(tokens, self._logits(0, rows), self.cache)
        return self._extend(tokens, rows)

    def _remembered(self, count: int, rows: int) -> int:
        """After how many of the ``count`` tokens of a pass the recurrent states are to be kept; 0 for no checkpoint."""
        return 0 if self.cache.states is None or not rows else max(0, count - max(rows, REMEMBER_BEFORE))

    @torch.inference_mode()
    def _extend(self, tokens: Ids, rows: int) -> torch.Tensor:
        tokens = moved(as_tensor(tokens), self.engine.device)
        while len(tokens) > PREFILL_CHUNK <= len(tokens) - rows:
            self.engine.forward(tokens[:PREFILL_CHUNK], 0, self.cache)
            tokens = tokens[PREFILL_CHUNK:]
        return self.engine.forward(tokens, rows, self.cache)

    @torch.inference_mode()
    def extend_at_once(self, tokens: Ids, rows: int) -> torch.Tensor:
        """``extend`` in one pass of the model's own forward, for any number of tokens."""
        assert isinstance(self.cache, RollbackCache)
        return self.engine.eager(moved(as_tensor(tokens), self.engine.device), rows, self.cache)

    def _extend_tree(self, tokens: Ids, rows: int, parents: list[int]) -> torch.Tensor:
        engine = self.engine
        if not engine.trees:
            raise no_trees(f"transformers' {type(engine.model).__name__}")
        if engine.cpu_forward is None or engine.cpu_forward.fused:
            return engine.together.one_pass([ExtendCall(self, tokens, rows, parents)])[0]
        assert isinstance(self.cache, CpuCache)
        tree = hf_joint.grown(ExtendCall(self, tokens, rows, parents))
        assert tree is not None
        logits = engine.cpu_forward.by_layers(as_tensor(tokens), rows, self.cache, tree)
        self.tree = tree
        return logits

    def keep(self, path: list[int]) -> None:
        """Append a path of the tree and drop the other nodes; see the protocol."""
        self.tree.check(path)
        self.cache.keep_path(path)
        self.tree = NO_TREE

    def propose(self, call: ProposalCall) -> Proposed:
        """Make a whole proposal; see ``FusedCalls``."""
        assert self.engine.cpu_forward is not None
        return self.engine.cpu_forward.propose(*self.draft(call))

    def draft(self, call: ProposalCall) -> cpu_joint.Draft:
        """The arguments of our forward for a proposal. If recurrent states are to be kept within the tokens to feed,
        feeds all but the last first."""
        self.tree = NO_TREE
        assert isinstance(self.cache, CpuCache)
        if self._probs.width != call.vocab:
            self._probs = Rows(call.vocab)
        if self._remembered(len(call.tokens), 1):
            self.extend(call.tokens[:-1], 1)
            call = replace(call, tokens=call.tokens[-1:])
        return cpu_joint.Draft(call, self._probs, self.cache)

    def verify(self, call: VerificationCall) -> tuple[Judgement, torch.Tensor]:
        """Run a pass and the acceptance rule; see ``FusedCalls``."""
        self.tree = NO_TREE
        count, forward = len(call.drafted), self.engine.cpu_forward
        assert forward is not None
        assert isinstance(self.cache, CpuCache)
        if len(call.fed) + count > FEW or self._remembered(len(call.fed) + count, count + 1):  # a prompt
            held = self.length + len(call.fed)
            logits = self.extend([*call.fed, *call.drafted], count + 1)
            return judged(forward.sampling, logits, held, call), logits
        logits = self._logits(0, count + 1)
        return forward.verify(call, logits, self.cache), logits

    def features(self, begin: int, end: int) -> torch.Tensor:
        """Hidden states (end - begin, feature_width), float32; see the protocol."""
        if not self._keeps or not 0 <= begin <= end <= self.length:
            raise ValueError(f"features {begin} to {end} of a text of {self.length} tokens, which are not kept")
        if not self.length:
            return torch.empty(0, self.engine.feature_width, device=self.engine.device)
        return self.cache.features(begin, end).float()

    def rollback(self, length: int) -> None:
        """Drop all tokens after the first ``length``; see the protocol."""
        self.tree = NO_TREE
        self.cache.rollback(length)

    def copy_prefix(self, other: Sequence, length: int) -> None:
        """Replace the contents by the first ``length`` tokens of another sequence; see the protocol."""
        assert isinstance(other, TransformersSequence)
        self.rollback(0)
        self.reserve(length)
        copy_prefix(self.cache, other.cache, length)


class TransformersEngine:
    """A loaded ``PreTrainedModel``.

    ``cpu_forward`` computes the same as the model's own forward, but faster. It runs on the CPU for supported
    architectures; otherwise the model's own forward is used, with our cache. ``int8`` requests int8 linear layers,
    which only ``cpu_forward`` has, on some processors; ``weights`` is the format that was chosen. ``forward`` is an
    existing CPU forward to use.
    """

    name = "transformers"

    def __init__(self, model: PreTrainedModel, int8: bool = False, forward: CpuForward | None = None) -> None:
        self.model = model.eval()
        config = model.config.get_text_config()
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.context_length = context_of(config)
        self.device = torch.device(str(model.get_input_embeddings().weight.device))
        self.end_tokens = end_tokens(model)
        self.sampling = recommended_sampling(model)
        self.adapter = MergedAdapter(model)
        self.cpu_forward = forward or (cpu_forward(model, int8=True) if int8 else None) or cpu_forward(model)
        if self.cpu_forward is not None:
            self.adapter.listeners.append(self.cpu_forward.refresh)
        rounded = self.cpu_forward is not None and self.cpu_forward.plan.lm_head.int8
        self.weights = "int8" if rounded else weights(model)
        self._features = FeatureHooks(self.model)
        # Layers that share keys see only the last tokens of a pass (Gemma 4 E2B).
        whole = self._features.norm is not None and not getattr(config, "num_kv_shared_layers", 0)
        gives = self.cpu_forward is not None or whole
        self.feature_width: int = config.hidden_size if gives else 0
        self.recorded: RecordedPasses | None = None
        self.short: ShortForward | None = None
        named = inspect.signature(type(model).forward).parameters
        self._keep = (lambda rows: {"logits_to_keep": rows}) if "logits_to_keep" in named else (lambda rows: {})
        self._placed = "position_ids" in named
        self.cache_name = "cache_params" if "cache_params" in named else "past_key_values"
        kinds = Kinds.of(config)
        self.recurrent = kinds.recurrent > 0
        self._border = rope_border(config)
        self.undraftable = None if self.cpu_forward is not None else kinds.problem
        self._give_no_features()
        if self.recurrent and self.cpu_forward is None:
            watch(model)
        self.together = Together(self, PREFILL_CHUNK)
        self._positions = torch.arange(min(self.context_length, 2**20), device=self.device)[None]

    @property
    def threads(self) -> ThreadChoice | None:
        """The thread choice of our own forward; None for the model's, which uses all of torch's threads."""
        return None if self.cpu_forward is None else self.cpu_forward.threads

    def check(self) -> None:
        """Test the model's own forward, and set ``undraftable`` to the reason if it fails: whether it uses our cache,
        and, if it has recurrent states or is not transformers' own code, whether its passes agree with single steps."""
        if self.cpu_forward is None and self.undraftable is None:
            self.undraftable = unused_cache(self)
            own = type(self.model).__module__.startswith("transformers.models.")
            if self.undraftable is None and (self.recurrent or not own):
                self.undraftable = disagreement(self, self.model.dtype, self.quantised)
        self._give_no_features()

    def _give_no_features(self) -> None:
        """Set ``feature_width`` to 0 if the model decodes plainly, because its cache keeps no features."""
        if self.undraftable is not None:
            self.feature_width = 0

    @property
    def quantised(self) -> bool:
        """Whether the weights are quantised by transformers."""
        return getattr(self.model, "quantization_method", None) is not None

    def record(self) -> None:
        """From now on, record short passes and replay them (``graphs.py``): of our forward for them, where it computes
        this model, else of the model's own. Does nothing for models that decode plainly or have recurrent states, which
        recordings do not support."""
        if self.undraftable is not None or self.recurrent:
            return
        try:
            self.short = short_forward(self.model) if self._features.norm is not None else None
        except Exception as error:  # no memory, or a compiler's, which raises many kinds
            logger.warning("%s: short passes are its own: %s", type(self.model).__name__, first_line(error))
            self.short = None
        if self.short is not None:
            self.short.layers_read = self._features.layers
        elif any(weight.dtype == torch.int8 for weight in self.model.parameters()):
            return  # bitsandbytes' int8 layers wait for the device
        self.recorded = RecordedPasses(self)

    @property
    def cache_layout(self) -> dict[str, str | int]:
        """See ``KeepsCaches``. Only caches of our own forward can be stored."""
        forward, kernels = self.cpu_forward, library()
        if forward is None:
            return {}
        computed = {"kernels": "" if kernels is None else kernels.name, "forward": forward.kind}
        return {"layout": 3, "weights": self.weights, "cache": str(forward.cache_dtype), **computed}

    def stored(self, sequence: Sequence) -> dict[str, torch.Tensor] | None:
        """See ``KeepsCaches``."""
        cache = getattr(sequence, "cache", None)
        return cache.stored() if isinstance(cache, CpuCache) else None

    def restore(self, sequence: Sequence, stored: dict[str, torch.Tensor], length: int) -> None:
        """See ``KeepsCaches``."""
        assert isinstance(sequence, TransformersSequence)
        assert isinstance(sequence.cache, CpuCache)
        sequence.rollback(0)
        try:
            sequence.cache.restore(stored, length)
        except MemoryError as error:
            raise no_room(length) from error

    def sequence(self, features: bool = False) -> TransformersSequence | PlainSequence | SwitchingSequence:
        """A new empty sequence; see the protocol."""
        if self.undraftable is not None and not features:
            return PlainSequence(self.model, self.device, self.cache_name)
        if self._border is not None and self.cpu_forward is None:
            return SwitchingSequence(self._border, lambda: self.unswitched(features))
        return self.unswitched(features)

    def unswitched(self, features: bool) -> TransformersSequence:
        """A new sequence with one cache, for texts within which the rotary embedding does not change. Raises ValueError
        if the model gives no ``features``."""
        if features and not self.feature_width:
            raise ValueError(f"a {type(self.model).__name__} gives no features: its final norm is not known")
        if features and self.cpu_forward is None:
            self._features.watch()
        return TransformersSequence(self, features)

    def give_features_before(self, layers: tuple[int, ...]) -> None:
        """From now on, features are the hidden states before these layers, side by side; the total number of layers
        stands for those before the final norm. Call it before any sequence that keeps features is made. Raises
        AdaptiveError if the model's layers are not known."""
        self._features.name(layers)
        if self.short is not None:
            self.short.layers_read = layers
        self.feature_width = len(layers) * int(self.model.config.get_text_config().hidden_size)
        if self.cpu_forward is not None:
            self.cpu_forward.give_features_before(layers)

    def forward(self, tokens: torch.Tensor, rows: int, cache: CpuCache | RollbackCache) -> torch.Tensor:
        """Append tokens (n,) to the cache in one pass. Returns logits (rows, vocab) of the last ones."""
        if isinstance(cache, CpuCache):
            assert self.cpu_forward is not None
            return self.cpu_forward(tokens, rows, cache)
        if self.recorded is not None and self.records_at(cache):
            recorded = self.recorded(tokens, rows, cache)
            if recorded is not None:
                return recorded
        return self.eager(tokens, rows, cache)

    def records_at(self, cache: CpuCache | RollbackCache) -> bool:
        """Whether the cache's next pass may be a recorded one. A recorded pass is padded, and the padding must not
        cross the border of the rotary embedding."""
        return self.recorded is not None and not (self._border or 0) - SIZES[-1] <= cache.length < (self._border or -1)

    def eager(self, tokens: torch.Tensor, rows: int, cache: RollbackCache) -> torch.Tensor:
        """``forward`` by the model's own forward, without a recording."""
        start = cache.length
        cache.ensure_capacity(start + len(tokens))
        with nullcontext() if cache.states is None else recurrent_pass(len(tokens), rows > 1):
            logits = self.run(
                tokens, self._positions[0, start : start + len(tokens)], cache, **self._keep(max(rows, 1))
            )
        return logits[len(logits) - rows :]

    @property
    def apart(self) -> bool:
        """Whether a pass of the model's own forward can extend only one sequence: it decodes plainly, has two caches
        for one text, or takes no positions."""
        return self.undraftable is not None or self._border is not None or not self._placed

    @property
    def joint(self) -> bool:
        """Whether one pass can extend several sequences (``Together.possible``)."""
        return self.together.possible

    def extend_together(self, calls: Several[ExtendCall]) -> list[torch.Tensor]:
        """Extend several sequences in one pass (``Together.extend``)."""
        return self.together.extend(calls)

    def propose_together(self, calls: Several[tuple[Sequence, ProposalCall]]) -> list[Proposed]:
        """Make several proposals; see ``ProposesTogether``."""
        return self.together.propose(calls)

    def prepare_together(self, texts: int, features: bool) -> None:
        """Record the passes over several sequences if passes are recorded; see ``PreparesTogether``. Not of quantised
        weights: kernels would be compiled for each number of tokens."""
        if self.recorded is not None and not self.apart and not self.quantised:
            self.recorded.ready_together(texts, features)

    @property
    def trees(self) -> bool:
        """Whether passes over trees are supported (``Together.trees``)."""
        return self.together.trees

    def run_joint(
        self, tokens: torch.Tensor, places: torch.Tensor, cache: hf_joint.JointCache, wanted: torch.Tensor
    ) -> torch.Tensor:
        """The model's own forward of the tokens (n,) of several texts at ``places`` (n,). Returns logits (m, vocab) of
        tokens ``wanted`` (m,)."""
        logits = self.run(tokens, places, cache, **self._keep(wanted))
        return logits if len(logits) == len(wanted) else logits[wanted]

    def run(
        self, tokens: torch.Tensor, places: torch.Tensor, cache: RollbackCache | hf_joint.JointCache, **options: Any
    ) -> torch.Tensor:
        """The model's own forward of tokens (n,) at ``places`` (n,), in a form that can be recorded. Returns logits (n
        or fewer, vocab). A cache that keeps hidden states stores them."""
        self._features.kept = cache if cache.keeps else None
        try:
            given = {self.cache_name: cache, **({"position_ids": places[None]} if self._placed else {}), **options}
            output = self.model(input_ids=tokens[None], use_cache=True, **given)
        finally:
            self._features.kept = None
        logits: torch.Tensor = output.logits[0]
        return logits

    def apply_adapter(self, folder: Path | None) -> None:
        """Merge a LoRA adapter in place, or restore the pristine weights for None."""
        self.adapter.apply(folder)

    def swap_adapter(self, folder: Path | None) -> Iterator[None]:
        """``apply_adapter`` in steps; see the protocol."""
        return self.adapter.steps(folder)
