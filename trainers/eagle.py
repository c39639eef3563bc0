"""Grows an EAGLE-3 head from nothing: the kind of head that vLLM, SGLang and llama.cpp run.

The head has one layer of Llama's type, in which the token enters only through the attention, so it cannot start as a
copy of the target's last layer as a head that is grown for this engine does (``trainers.start``). It starts as nearly
the same function, by closed-form fits on some of the texts: ::

    fc          from the target's states before three of its layers to its state after the last one
    q, k        equal, random, of whitened inputs: each row attends to itself
    v, o        from a token and the state before it to the next state (``trainers.start``), less the residual
    mlp, norms  those of the target's last layer, and its final norm

Then all of it but embedding and projection is trained on unrolled drafts. In: a loaded target and examples with its
states. Out: tensors and config of a head in the format of the speculators library.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adaptive.engines.head.eagle import Eagle3Head, EagleConfig
from adaptive.engines.head.parts import decoder_of, parts_of_model, shared_of_model
from adaptive.engines.head.speculators import rewrite, save
from adaptive.errors import AdaptiveError
from checkpoints.manifest import HeldOut
from trainers.batches import longest_text
from trainers.dataset import Example
from trainers.fit import Fit, Progress, fit
from trainers.gate import held_out
from trainers.lora import AdapterState
from trainers.recipe import Recipe
from trainers.replay import Replay, Stopped, acceptance_rate
from trainers.sets import Sets
from trainers.start import IN_NORMS, RIDGE, unit
from trainers.states import States, text_of, with_states
from trainers.students import ShouldStop, WholeHead
from trainers.vocabulary import Reads, choose_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = Mapping[str, torch.Tensor]

# Tokens for the fits, for each input of ``fc`` (three states). Too low: the fits are unreliable. More take time.
FOR_EACH_INPUT = 24
# The score of a row with itself at first, where that with any other is about 0. Too low: rows mix with others, whose
# tokens say nothing about the next one (with 12, 1.50 tokens a round before training, with 24 1.71, with 48 or 96
# 1.77). Too high: attention hardly learns.
SHARP = 32.0
# Share of the mean variance that is added to each variance of the inputs before they are whitened. Too low: the
# attention goes by noise.
FLOOR = 0.02
# Of a target without a gated MLP of Llama's type, a head's MLP is at most this many times as wide as its input.
WIDEST = 4


def taps_of(layers: int) -> tuple[int, int, int]:
    """The layers of a target with ``layers`` layers (at least three) before which a head reads its states."""
    return (layers // 2, layers - 2, layers - 1) if layers > 4 else (layers - 3, layers - 2, layers - 1)


@dataclass(frozen=True)
class EagleStart:
    """A head before its training: its ``tensors``, by the names in a file, and its layer's ``config``."""

    tensors: dict[str, torch.Tensor]
    layer: dict[str, Any]
    taps: tuple[int, ...]


@torch.no_grad()
def start_of(target: PreTrainedModel, examples: Sequence[Example], longest: int) -> EagleStart:
    """A new head on ``target``, fitted to ``examples``, of which the last ``longest`` tokens are read.

    Raises AdaptiveError if the target is built so that no head can be grown on it.
    """
    config = target.config.get_text_config()
    count, width = int(config.num_hidden_layers), int(config.hidden_size)
    if count < 3:
        raise AdaptiveError(f"an EAGLE-3 head reads the states before three layers, and the target has {count}")
    parts, taps = parts_of_model(target), taps_of(count)
    final = _effective(decoder_of(target).norm, width)
    embedding = parts.embedding["weight"].float().cpu()
    every = States(target, (*taps, count))
    texts, read, tokens = [], [], 0
    for example in reversed(examples):
        text, _ = text_of(example, longest)
        if len(text) > 1:
            texts.append(text)
            read.append(every.of(text))
            tokens += len(text)
        if tokens >= FOR_EACH_INPUT * len(taps) * width:
            break
    before, after = (torch.cat([states[:, part] for states in read]) for part in _parts(width, len(taps)))
    fuse = _ridge(before, after)
    features = [unit(states[:-1, : len(taps) * width] @ fuse.T) for states in read]
    reads = torch.cat([torch.cat([unit(embedding[t[1:]]) for t in texts]), torch.cat(features)], dim=-1)
    step = _ridge(reads, unit(torch.cat([states[1:, len(taps) * width :] for states in read])))
    size = float(after.square().mean(-1).clamp(min=1e-12).log().mean().div(2).exp())
    layer = _layer(config, width, parts.layer)
    tensors = {
        "fc.weight": fuse,
        "norm.weight": final,
        "lm_head.weight": parts.projection["weight"].float().cpu(),
        "layers.0.input_layernorm.weight": torch.full((width,), IN_NORMS),
        "layers.0.hidden_norm.weight": torch.full((width,), IN_NORMS),
        **_attention(step, reads * IN_NORMS, layer),
        **_mlp(parts.layer, layer, IN_NORMS / size),
    }
    return EagleStart({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, layer, taps)


def _parts(width: int, taps: int) -> tuple[slice, slice]:
    """Where the states before the taps, and those after the last layer, stand side by side."""
    return slice(0, taps * width), slice(taps * width, (taps + 1) * width)


def _ridge(inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """The linear map (out, in) from ``inputs`` (n, in) to ``outputs`` (n, out), by ridge regression."""
    squares = inputs.T @ inputs
    squares.diagonal().add_(RIDGE * float(squares.diagonal().mean()))
    found: torch.Tensor = torch.linalg.solve(squares, inputs.T @ outputs).T
    return found


def _effective(norm: torch.nn.Module, width: int) -> torch.Tensor:
    """The factors (width,) of a root mean square norm, whatever its module stores (some store them less one). Raises
    AdaptiveError for another kind of norm."""
    weight = next(norm.parameters(), torch.zeros(0))
    signs = torch.ones(width, device=weight.device, dtype=weight.dtype)
    found: torch.Tensor = norm(signs).float().cpu()
    mirrored = norm(-signs).float().cpu()
    if not torch.allclose(found, -mirrored, atol=1e-5) or float(found.abs().max()) < 1e-3:
        raise AdaptiveError(f"no EAGLE-3 head can be grown on this target: its final norm is a {type(norm).__name__}")
    return found


def _layer(config: Any, width: int, last: Tensors) -> dict[str, Any]:
    """The config of the head's layer. ``last``: the tensors of the target's last layer."""
    size = int(getattr(config, "head_dim", None) or width // config.num_attention_heads)
    heads = max(1, width // size)
    rope = getattr(config, "rope_parameters", None) or {}
    gate = last.get("mlp.gate_proj.weight") if _copied(config, last) else None
    own = getattr(config, "intermediate_size", None)
    wide = WIDEST * width if not isinstance(own, int) else min(own, WIDEST * width)
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": wide if gate is None else int(gate.shape[0]),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": size,
        "hidden_act": "silu",
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", 1e-6)),
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "max_position_embeddings": int(getattr(config, "max_position_embeddings", 2048)),
        "vocab_size": int(config.vocab_size),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def _copied(config: Any, last: Tensors) -> bool:
    """Whether the target's last layer has an MLP that the head's layer can begin with."""
    act = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    names = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "post_attention_layernorm.weight")
    biased = any(name.startswith("mlp.") and name.endswith(".bias") for name in last)
    return act == "silu" and all(name in last for name in names) and not biased


def _attention(step: torch.Tensor, reads: torch.Tensor, layer: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The attention's tensors: each row attends to itself, and what it adds turns the residual, the normed feature,
    into ``step`` (width, 2 * width) of what it reads. ``reads`` (n, 2 * width) are such inputs."""
    width, inner = step.shape[0], layer["num_attention_heads"] * layer["head_dim"]
    added = step.clone()
    added[:, width:] -= torch.eye(width)
    left, sizes, right = torch.linalg.svd(added, full_matrices=False)
    rank = min(inner, width)
    output, value = torch.zeros(width, inner), torch.zeros(inner, 2 * width)
    output[:, :rank] = left[:, :rank] * sizes[:rank].sqrt()
    value[:rank] = sizes[:rank].sqrt()[:, None] * right[:rank]
    square = reads.T @ reads / len(reads)
    square.diagonal().add_(FLOOR * float(square.diagonal().mean()))
    variances, axes = torch.linalg.eigh(square)
    random = torch.randn(2 * width, inner, generator=torch.Generator().manual_seed(0))
    turned = torch.linalg.qr(random)[0].T @ (axes * variances.rsqrt()) @ axes.T
    # The squared length of a whitened row in a head is about head_dim, which attention divides by its square root.
    query = turned * math.sqrt(SHARP / math.sqrt(layer["head_dim"]))
    names = {"q": query, "k": query.clone(), "v": value, "o": output}
    return {f"layers.0.self_attn.{name}_proj.weight": tensor for name, tensor in names.items()}


def _mlp(last: Tensors, layer: dict[str, Any], scale: float) -> dict[str, torch.Tensor]:
    """The MLP's tensors: the target's own with its output times ``scale``, or one that adds nothing at first."""
    width, wide = layer["hidden_size"], layer["intermediate_size"]
    made = {"post_attention_layernorm": torch.ones(width), "mlp.down_proj": torch.zeros(width, wide)}
    generator = torch.Generator().manual_seed(1)
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        made[name] = torch.randn(wide, width, generator=generator) / math.sqrt(width)
    gate = last.get("mlp.gate_proj.weight")
    if gate is not None and gate.shape == made["mlp.gate_proj"].shape:
        made = {name: last[f"{name}.weight"].float().cpu() for name in made}
        made["mlp.down_proj"] = made["mlp.down_proj"] * scale
    return {f"layers.0.{name}.weight": tensor for name, tensor in made.items()}


class EagleStudent(WholeHead):
    """An EAGLE-3 head, all of whose own weights are trained. At a grown head's rate it unlearns what it starts with."""

    RATE = 1e-3

    def __init__(self, head: Eagle3Head, recipe: Recipe) -> None:
        super().__init__(head, recipe)
        own = {id(tensor) for tensor in head.own().values()}
        for parameter in head.parameters():
            parameter.requires_grad_(id(parameter) in own)

    def begin(self, train: Sequence[Example], should_stop: ShouldStop, resumed: bool = False) -> None:
        """See the protocol. Nothing to prepare: the head was started before (``start_of``)."""

    def write(self, state: AdapterState, folder: Path) -> None:
        """See the protocol: ``folder`` already holds the head as it was at first."""
        rewrite(folder, state)


@dataclass(frozen=True)
class Grown:
    """The result of growing a head. ``figures`` compares it with nothing drafted, on answers to prompts that it was not
    trained on; None if the run was ``stopped`` before. ``by_step``: acceptance at each step of a draft there.
    ``vocabulary`` is the number of tokens that it drafts among."""

    fit: Fit
    figures: HeldOut | None
    by_step: tuple[float, ...]
    train_generations: int
    vocabulary: int


def grow(
    load: Callable[[], PreTrainedModel],
    name: str,
    sets: Sets,
    recipe: Recipe,
    folder: Path,
    most_bytes: int,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Grown:
    """Grow a head on the target that ``load`` returns and that is called ``name``, from the examples of ``sets``, and
    write it into ``folder``. States of the newest texts are used, as many as ``most_bytes`` hold. Once these are
    computed, the target is freed but for its embedding and projection.

    Raises AdaptiveError if no head can be grown on this target, and Stopped if ``should_stop`` returns True before the
    first weights were judged; nothing is written then.
    """
    target = load()
    longest = longest_text(target)
    start = start_of(target, sets.train, longest)
    states = States(target, start.taps)
    texts = Texts(sum(map(len, (sets.train, sets.validation, sets.gate))), on_progress)
    validation, gate, train = (
        with_states(part, states, longest, most_bytes // share, texts.done, should_stop)
        for part, share in ((sets.validation, 8), (sets.gate, 4), (sets.train, 2))
    )
    config = target.config.get_text_config()
    count, width = int(config.vocab_size), int(config.hidden_size)
    ids = choose_vocabulary(train, count, _reads(start, int(config.num_hidden_layers)), recipe.draft_length)
    tensors = dict(start.tensors)
    if ids is not None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][ids]
        tensors["d2t"] = ids - torch.arange(len(ids))
    said = EagleConfig(None, count, count if ids is None else len(ids), width, start.taps, True, False)
    save(folder, tensors, said, start.layer, name, target.config.architectures)
    shared = shared_of_model(target)
    del target, states
    gc.collect()  # hooks and modules refer to each other
    head = Eagle3Head(shared, folder, torch.float32)
    student = EagleStudent(head, recipe)
    result = fit(student, train, lambda: acceptance_rate(student.replay(validation)), recipe, on_progress, should_stop)
    if result.best is None:
        raise Stopped
    student.restore(result.best)
    student.write(result.best, folder)
    figures: HeldOut | None = None
    by_step: tuple[float, ...] = ()
    if not result.stopped and gate:
        after = student.replay(gate, should_stop)
        before = [Replay.of(e, np.zeros((1, len(e.output) - 1))) for e in gate]
        figures = held_out(before, after, recipe.draft_length)
        by_step = tuple(float(row) for row in np.concatenate([r.acceptance for r in after], axis=1).mean(1))
    return Grown(result, figures, by_step, len(train), said.draft_vocab_size)


class Texts:
    """Reports how many of all texts have their states, over several calls of ``with_states``."""

    def __init__(self, texts: int, on_progress: Callable[[Progress], None] | None) -> None:
        self._texts, self._done, self._report = texts, 0, on_progress

    def done(self) -> None:
        """One more text has its states."""
        self._done += 1
        if self._report is not None:
            self._report(Progress(self._done, self._texts, math.nan, math.nan, math.inf, "texts read"))


def _reads(start: EagleStart, layers: int) -> Reads:
    """The numbers of weights that a step of the head reads. A layer of the target is counted like the head's."""
    own = sum(t.numel() for name, t in start.tensors.items() if name.startswith("layers."))
    return Reads(own, start.layer["hidden_size"], layers * own + start.tensors["lm_head.weight"].numel())
