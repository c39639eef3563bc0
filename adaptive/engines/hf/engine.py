"""Any causal language model of transformers as an engine."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from collections.abc import Sequence as Several
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from adaptive.engines.checkpoints import REMEMBER_BEFORE
from adaptive.engines.cpu import joint as cpu_joint
from adaptive.engines.cpu.cache import CpuCache
from adaptive.engines.cpu.forward import FEW, CpuForward, cpu_forward
from adaptive.engines.cpu.kernels import library
from adaptive.engines.hf import joint as hf_joint
from adaptive.engines.hf.cache import RollbackCache, reserve
from adaptive.engines.hf.calls import recurrent_pass, watch
from adaptive.engines.hf.features import FeatureHooks
from adaptive.engines.hf.generation import end_tokens, recommended_sampling, weights
from adaptive.engines.hf.graphs import SIZES, RecordedPasses
from adaptive.engines.hf.guard import disagreement, unused_cache
from adaptive.engines.hf.kinds import Kinds
from adaptive.engines.hf.lora import MergedAdapter
from adaptive.engines.hf.plain import PlainSequence
from adaptive.engines.hf.switching import SwitchingSequence, rope_border
from adaptive.engines.protocol import (
    Chooser,
    ExtendCall,
    Judgement,
    Memory,
    ProposalCall,
    Proposed,
    Sequence,
    VerificationCall,
    distinct,
    judged,
    no_trees,
    one_after_another,
)
from adaptive.engines.threads import ThreadChoice
from adaptive.engines.tree import NO_TREE
from adaptive.tokens import Ids, Rows, as_tensor, moved

# Tokens scored in one forward of a long prompt. Larger needs more memory for attention scores and
# leaves a person waiting longer between two looks at ctrl-C; smaller reads the weights more often.
PREFILL_CHUNK = 512


class TransformersSequence:
    """One text in a cache: our CPU forward's, or one that the model's own forward writes."""

    def __init__(self, engine: TransformersEngine, features: bool = False) -> None:
        self.engine = engine
        self.cache: CpuCache | RollbackCache
        if engine.cpu_forward is not None:
            self.cache = engine.cpu_forward.cache(features)
        else:
            self.cache = RollbackCache(engine.model.config.get_text_config(), features)
        self._keeps = features
        self.tree = NO_TREE  # whose nodes lie behind the cache's tokens
        self._logits, self._probs = Rows(engine.vocab_size), Rows(0)

    @property
    def fused(self) -> TransformersSequence | None:
        """Itself where passes are one call."""
        return self if self.engine.cpu_forward is not None and self.engine.cpu_forward.fused else None

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.cache.length

    @property
    def memory(self) -> Memory:
        """What the cache takes."""
        return self.cache.memory

    def reserve(self, length: int) -> None:
        """Reserve capacity for ``length`` tokens in all; see the protocol."""
        reserve(self.cache, min(length, self.engine.context_length))

    def prepare(self, length: int, chooser: Chooser | None = None) -> None:
        """Have passes recorded where they are; see the protocol."""
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
        """Of so many tokens, behind how many recurrent states are to be remembered; 0 for nowhere."""
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
        """``extend`` in one pass of the model's own forward, however many tokens they are."""
        assert isinstance(self.cache, RollbackCache)
        return self.engine.eager(moved(as_tensor(tokens), self.engine.device), rows, self.cache)

    def _extend_tree(self, tokens: Ids, rows: int, parents: list[int]) -> torch.Tensor:
        engine = self.engine
        if not engine.trees:
            raise no_trees(f"transformers' {type(engine.model).__name__}")
        if engine.cpu_forward is None or engine.cpu_forward.fused:
            return engine.joint_pass([ExtendCall(self, tokens, rows, parents)])[0]
        assert isinstance(self.cache, CpuCache)
        tree = hf_joint.grown(ExtendCall(self, tokens, rows, parents))
        assert tree is not None
        logits = engine.cpu_forward.by_layers(as_tensor(tokens), rows, self.cache, tree)
        self.tree = tree
        return logits

    def keep(self, path: list[int]) -> None:
        """Append a path of the tree, and forget the rest of it; see the protocol."""
        self.tree.check(path)
        self.cache.keep_path(path)
        self.tree = NO_TREE

    def propose(self, call: ProposalCall) -> Proposed:
        """A whole proposal; see ``FusedCalls``."""
        assert self.engine.cpu_forward is not None
        return self.engine.cpu_forward.propose(*self.draft(call))

    def draft(self, call: ProposalCall) -> cpu_joint.Draft:
        """A proposal that our own forward is to make."""
        self.tree = NO_TREE
        assert isinstance(self.cache, CpuCache)
        if self._probs.width != call.vocab:
            self._probs = Rows(call.vocab)
        if self._remembered(len(call.tokens), 1):
            self.extend(call.tokens[:-1], 1)
            call = replace(call, tokens=call.tokens[-1:])
        return cpu_joint.Draft(call, self._probs, self.cache)

    def verify(self, call: VerificationCall) -> tuple[Judgement, torch.Tensor]:
        """A pass with its acceptance rule; see ``FusedCalls``."""
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
        """Forget everything after the first ``length`` tokens."""
        self.tree = NO_TREE
        self.cache.rollback(length)

    def copy_prefix(self, other: Sequence, length: int) -> None:
        """Hold the first ``length`` tokens of another sequence; see the protocol."""
        assert isinstance(other, TransformersSequence)
        self.rollback(0)
        self.reserve(length)
        self.cache.copy_prefix(other.cache, length)  # type: ignore[arg-type]  # one engine's caches are of one kind


class TransformersEngine:
    """A loaded ``PreTrainedModel``.

    ``cpu_forward`` computes what its forward computes, faster, on a CPU and where the architecture is known; elsewhere
    the model's own forward does the arithmetic over a cache of ours. ``int8`` asks for int8 linear layers, which only
    ``cpu_forward`` has, on some processors; ``weights`` says what came of it. ``forward`` is one that was made already.
    """

    name = "transformers"

    def __init__(self, model: PreTrainedModel, int8: bool = False, forward: CpuForward | None = None) -> None:
        self.model = model.eval()
        config = model.config.get_text_config()
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.context_length: int = getattr(config, "max_position_embeddings", None) or 2**31
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
        gives = self.cpu_forward is not None or self._features.norm is not None
        self.feature_width: int = config.hidden_size if gives else 0
        self.recorded: RecordedPasses | None = None
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
        self._joint_logits = Rows(self.vocab_size)
        self._proved: bool | None = None  # whether the model's own forward makes joint passes; None before it is tried
        self._positions = torch.arange(min(self.context_length, 2**20), device=self.device)[None]

    @property
    def threads(self) -> ThreadChoice | None:
        """Of our own forward; the model's uses all that torch was given."""
        return None if self.cpu_forward is None else self.cpu_forward.threads

    def check(self) -> None:
        """Try whether the model's own forward uses our cache, and where it is not known to be of attention alone,
        whether its passes agree with each other; where that is not so, ``undraftable`` says why."""
        if self.cpu_forward is None and self.undraftable is None:
            self.undraftable = unused_cache(self)
            own = type(self.model).__module__.startswith("transformers.models.")
            if self.undraftable is None and (self.recurrent or not own):
                self.undraftable = disagreement(self, self.model.dtype, self.quantised)
        self._give_no_features()

    def _give_no_features(self) -> None:
        """Where it decodes plainly, by a cache that keeps none."""
        if self.undraftable is not None:
            self.feature_width = 0

    @property
    def quantised(self) -> bool:
        """Whether the weights were quantised by transformers."""
        return getattr(self.model, "quantization_method", None) is not None

    def record(self) -> None:
        """From now on, record short passes and replay them (``graphs.py``), but for recurrent states, which are kept
        otherwise, and models that decode plainly."""
        if self.undraftable is None and not self.recurrent:
            self.recorded = RecordedPasses(self)

    @property
    def cache_layout(self) -> dict[str, str | int]:
        """See ``KeepsCaches``; of our own forward's caches."""
        forward, kernels = self.cpu_forward, library()
        if forward is None:
            return {}
        computed = {"kernels": "" if kernels is None else kernels.name, "forward": forward.kind}
        return {"layout": 2, "weights": self.weights, **computed}

    def stored(self, sequence: Sequence) -> dict[str, torch.Tensor] | None:
        """See ``KeepsCaches``."""
        cache = getattr(sequence, "cache", None)
        return cache.stored() if isinstance(cache, CpuCache) else None

    def restore(self, sequence: Sequence, stored: dict[str, torch.Tensor], length: int) -> None:
        """See ``KeepsCaches``."""
        assert isinstance(sequence, TransformersSequence)
        assert isinstance(sequence.cache, CpuCache)
        sequence.rollback(0)
        sequence.reserve(length)
        sequence.cache.restore(stored, length)

    def sequence(self, features: bool = False) -> TransformersSequence | PlainSequence | SwitchingSequence:
        """A new empty sequence; see the protocol."""
        if self.undraftable is not None and not features:
            return PlainSequence(self.model, self.device, self.cache_name)
        if self._border is not None and self.cpu_forward is None:
            return SwitchingSequence(self._border, lambda: self.unswitched(features))
        return self.unswitched(features)

    def unswitched(self, features: bool) -> TransformersSequence:
        """A new sequence of one cache, for texts over which the rotary embedding does not change."""
        if features and not self.feature_width:
            raise ValueError(f"a {type(self.model).__name__} gives no features: its final norm is not known")
        if features and self.cpu_forward is None:
            self._features.watch()
        return TransformersSequence(self, features)

    def give_features_before(self, layers: tuple[int, ...]) -> None:
        """From now on features are the hidden states before these layers, side by side; the number of all layers names
        those before the final norm. Our own forward then goes layer by layer. Before any sequence is made that keeps
        features. Raises AdaptiveError where the layers are not known."""
        self._features.name(layers)
        self.feature_width = len(layers) * int(self.model.config.get_text_config().hidden_size)
        if self.cpu_forward is not None:
            self.cpu_forward.give_features_before(layers)

    def forward(self, tokens: torch.Tensor, rows: int, cache: CpuCache | RollbackCache) -> torch.Tensor:
        """One pass over tokens (n,) after what the cache holds; logits (rows, vocab) of the last ones."""
        if isinstance(cache, CpuCache):
            assert self.cpu_forward is not None
            return self.cpu_forward(tokens, rows, cache)
        if self.recorded is not None and self.records_at(cache):
            recorded = self.recorded(tokens, rows, cache)
            if recorded is not None:
                return recorded
        return self.eager(tokens, rows, cache)

    def records_at(self, cache: CpuCache | RollbackCache) -> bool:
        """Whether a pass behind what the cache holds may be a recorded one: it is filled up with tokens, which must not
        take it behind a border."""
        return self.recorded is not None and not (self._border or 0) - SIZES[-1] <= cache.length < (self._border or -1)

    def eager(self, tokens: torch.Tensor, rows: int, cache: RollbackCache) -> torch.Tensor:
        """The same by the model's own forward, as it comes."""
        start = cache.length
        cache.ensure_capacity(start + len(tokens))
        with nullcontext() if cache.states is None else recurrent_pass(len(tokens), rows > 1):
            logits = self.run(
                tokens, self._positions[0, start : start + len(tokens)], cache, **self._keep(max(rows, 1))
            )
        return logits[len(logits) - rows :]

    @property
    def joint(self) -> bool:
        """Whether passes over several sequences are made: by our own forward where a pass is one native call, else by
        the model's own, where all that it holds of a text are keys and values in one cache, and where it gives what it
        gives text by text, which is tried once."""
        if self.cpu_forward is not None:
            return self.cpu_forward.fused
        if self._proved is None:
            plain = self.undraftable is not None or self._border is not None or not self._placed
            self._proved = not plain and hf_joint.proves(self)
        return self._proved

    def extend_together(self, calls: Several[ExtendCall]) -> list[torch.Tensor]:
        """Extend several sequences in one pass; see the protocol.

        On our own forward logits are those of lone passes, bit for bit, on transformers' they equal them to rounding.
        A long piece of a prompt has a pass of its own, in which the weights are read once for many tokens anyway.
        """
        distinct(calls)
        some = [call for call in calls if self._is_part(call)] if self.joint else []
        if len(some) < 2:
            return one_after_another(calls, self.recorded is not None)
        found = dict(zip(map(id, some), self.joint_pass(some), strict=True))
        return [found[id(c)] if id(c) in found else c.sequence.extend(c.tokens, c.rows, c.parents) for c in calls]

    def _is_part(self, call: ExtendCall) -> bool:
        """Whether these tokens of a sequence can be part of a joint pass."""
        forward, count = self.cpu_forward, len(call.tokens)
        if call.parents is not None:
            return count > 0 and self.trees
        if forward is None or (self.recurrent and count > REMEMBER_BEFORE):  # behind which states may be remembered
            return forward is None and 0 < count <= PREFILL_CHUNK
        return cpu_joint.is_part(forward, count)

    def joint_pass(self, calls: Several[ExtendCall]) -> list[torch.Tensor]:
        """The pass over some sequences of a ``joint`` engine; each is given some tokens, and no long piece of a
        prompt. Logits (rows, vocab) of each."""
        sequences: list[Any] = [call.sequence for call in calls]
        caches, trees = [sequence.cache for sequence in sequences], [hf_joint.grown(call) for call in calls]
        rows = [call.rows for call in calls]
        if self.cpu_forward is None:
            given = [moved(as_tensor(call.tokens), self.device) for call in calls]
            logits = hf_joint.extend_together(self, list(map(hf_joint.Part, given, rows, caches, trees)))
        else:
            listed = [c.tokens if isinstance(c.tokens, list) else c.tokens.tolist() for c in calls]
            parts = list(map(cpu_joint.Part, listed, rows, caches, trees))
            logits = cpu_joint.extend_together(self.cpu_forward, parts, self._joint_logits)
        for sequence, tree in zip(sequences, trees, strict=True):
            sequence.tree = tree or NO_TREE
        return logits

    def propose_together(self, calls: Several[tuple[Sequence, ProposalCall]]) -> list[Proposed]:
        """Several proposals; see ``ProposesTogether``."""
        sequences: list[Any] = [sequence for sequence, _ in calls]
        if self.cpu_forward is None or not self.cpu_forward.fused or len(calls) < 2:
            return [sequence.propose(call) for sequence, (_, call) in zip(sequences, calls, strict=True)]
        drafts = [sequence.draft(call) for sequence, (_, call) in zip(sequences, calls, strict=True)]
        return cpu_joint.propose_together(self.cpu_forward, drafts)

    @property
    def trees(self) -> bool:
        """Whether passes over trees are made: by our own forward and the model's own where it makes ``joint`` passes,
        which are made in the same way; never of recurrent states, which would be one for each path."""
        return not self.recurrent and (self.cpu_forward is not None or self.joint)

    def run_joint(
        self, tokens: torch.Tensor, places: torch.Tensor, cache: hf_joint.JointCache, wanted: torch.Tensor
    ) -> torch.Tensor:
        """The model's own forward of the tokens (n,) of several texts at ``places`` (n,); logits (m, vocab) of those
        ``wanted`` (m,)."""
        logits = self.run(tokens, places, cache, **self._keep(wanted))
        return logits if len(logits) == len(wanted) else logits[wanted]

    def run(
        self, tokens: torch.Tensor, places: torch.Tensor, cache: RollbackCache | hf_joint.JointCache, **options: Any
    ) -> torch.Tensor:
        """The model's own forward of tokens (n,) at ``places`` (n,), which may be recorded; logits (n or fewer, vocab),
        and in a cache that keeps them the hidden states."""
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
        """Merge it in steps; see the protocol."""
        return self.adapter.steps(folder)
