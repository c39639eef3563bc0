"""Grows an EAGLE-3 head from nothing: the kind of head that vLLM and llama.cpp run.

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

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from adaptive.engines.head.eagle import Eagle3Head, EagleConfig
from adaptive.engines.head.parts import decoder_of, parts_of_model, shared_of_model
from adaptive.engines.head.speculators import rewrite, save
from adaptive.errors import AdaptiveError
from checkpoints import files
from checkpoints.manifest import HeldOut
from trainers.batches import longest_text
from trainers.dataset import Example, Stopped
from trainers.fit import Fit, Progress, fit
from trainers.gate import held_out
from trainers.lora import AdapterState
from trainers.recipe import Recipe
from trainers.replay import Replay, acceptance_rate
from trainers.sets import MIN_TRAIN, MIN_VALIDATION, Sets
from trainers.start import IN_NORMS, RIDGE, unit
from trainers.states import States, narrowed, text_of, with_states
from trainers.students import ShouldStop, WholeHead
from trainers.vocabulary import Reads, choose_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = Mapping[str, torch.Tensor]

# Tokens for the fits, for each input of ``fc`` (three states), and the most for any width. Too low: the fits are
# unreliable. More take time.
FOR_EACH_INPUT, MOST_TOKENS = 24, 2**17
# The score of a row with itself at first, where that with any other is about 0. Too low: rows mix with others, whose
# tokens say nothing about the next one (with 12, 1.50 tokens a round before training, with 24 1.71, with 48 or 96
# 1.77). Too high: attention hardly learns.
SHARP = 32.0
# Share of the mean variance that is added to each variance of the inputs before they are whitened. Too low: the
# attention goes by noise.
FLOOR = 0.02
# Of a target without a gated MLP of Llama's type, a head's MLP is at most this many times as wide as its input.
WIDEST = 4
# The norm that Llama's layers have before their MLP.
AFTER_ATTENTION = "post_attention_layernorm.weight"


def taps_of(layers: int) -> tuple[int, int, int]:
    """The layers of a target with ``layers`` layers before which a head reads its states. Raises AdaptiveError if they
    are fewer than three."""
    if layers < 3:
        raise AdaptiveError(f"an EAGLE-3 head reads the states before three layers, and the target has {layers}")
    return (layers // 2, layers - 2, layers - 1) if layers > 4 else (layers - 3, layers - 2, layers - 1)


@dataclass(frozen=True)
class EagleStart:
    """A head before its training: its ``tensors``, by the names in a file, and its ``layer``'s config."""

    tensors: dict[str, torch.Tensor]
    layer: dict[str, Any]
    taps: tuple[int, ...]


@torch.no_grad()
def start_of(target: PreTrainedModel, examples: Sequence[Example], taps: tuple[int, ...]) -> EagleStart:
    """A new head on ``target``, fitted to the newest of ``examples``. Their features are the states before the layers
    ``taps`` and those after the last layer, side by side.

    Raises AdaptiveError if the target is built so that no head can be grown on it.
    """
    config, parts = target.config.get_text_config(), parts_of_model(target)
    width, device = int(config.hidden_size), next(target.parameters()).device
    final, last = _effective(decoder_of(target).norm, width), dict(parts.layer)
    if _copied(config, last):  # its norm's factors, whatever the module stores
        last[AFTER_ATTENTION] = _effective(decoder_of(target).layers[-1].post_attention_layernorm, width)
    else:
        last = {}
    embedding = parts.embedding["weight"]
    chosen, tokens = [], 0
    for example in reversed(examples):
        chosen.append(example)
        tokens += len(example.prompt) + len(example.output) - 1
        if tokens >= min(MOST_TOKENS, FOR_EACH_INPUT * len(taps) * width):
            break

    def states_of(example: Example) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens (n,), states before the taps (n, taps * width) and after the last layer (n, width)."""
        found = example.states()
        assert found is not None
        both = torch.from_numpy(found.states()).to(device)
        text, _ = text_of(example, len(both))
        return (text.to(device), *both.split([len(taps) * width, width], dim=-1))

    fuse, size = _Fit(len(taps) * width, width, device), 0.0
    for example in chosen:
        _, before, after = states_of(example)
        fuse.add(before, after)
        size += float(after.square().mean(-1).clamp(min=1e-12).log().sum()) / 2
    fused = fuse.solved()
    step = _Fit(2 * width, width, device)
    for example in chosen:
        text, before, after = states_of(example)
        tokens_read = unit(torch.nn.functional.embedding(text[1:], embedding).float())
        step.add(torch.cat([tokens_read, unit(before[:-1] @ fused.T)], dim=-1), unit(after[1:]))
    layer = _layer(config, width, last)
    inputs = step.squares / step.count * IN_NORMS**2
    tensors = {
        "fc.weight": fused,
        "norm.weight": final,
        "layers.0.input_layernorm.weight": torch.full((width,), IN_NORMS),
        "layers.0.hidden_norm.weight": torch.full((width,), IN_NORMS),
        **_attention(step.solved(), inputs, layer),
        **_mlp(last, layer, IN_NORMS / math.exp(size / fuse.count)),
    }
    own = {name: tensor.float().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return EagleStart({**own, "lm_head.weight": parts.projection["weight"].cpu()}, layer, taps)


class _Fit:
    """A ridge regression from ``inputs`` to ``outputs`` numbers, from the sums over rows that are added."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        self.count = 0
        self.squares = torch.zeros(inputs, inputs, device=device)
        self._products = torch.zeros(inputs, outputs, device=device)

    def add(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Add rows (n, inputs) and (n, outputs)."""
        self.count += len(inputs)
        self.squares += inputs.T @ inputs
        self._products += inputs.T @ outputs

    def solved(self) -> torch.Tensor:
        """The linear map (outputs, inputs)."""
        squares = self.squares.clone()
        squares.diagonal().add_(RIDGE * float(squares.diagonal().mean()))
        found: torch.Tensor = torch.linalg.solve(squares, self._products).T
        return found


@torch.no_grad()
def _effective(norm: torch.nn.Module, width: int) -> torch.Tensor:
    """The factors (width,) of a root mean square norm, whatever its module stores (some store them less one). Raises
    AdaptiveError for another kind of norm."""
    weight = next(norm.parameters(), torch.zeros(0))
    signs = torch.ones(width, device=weight.device, dtype=weight.dtype)
    found: torch.Tensor = norm(signs).float().cpu()
    mirrored = norm(-signs).float().cpu()
    if not torch.allclose(found, -mirrored, atol=1e-5) or float(found.abs().max()) < 1e-3:
        raise AdaptiveError(f"no EAGLE-3 head can be grown on this target: it has a {type(norm).__name__}")
    return found


def _layer(config: Any, width: int, last: Tensors) -> dict[str, Any]:
    """The config of the head's layer. ``last``: the tensors of the target's last layer, if the head begins with its
    MLP."""
    size = int(getattr(config, "head_dim", None) or width // config.num_attention_heads)
    heads = max(1, width // size)
    rope = getattr(config, "rope_parameters", None) or {}
    own = getattr(config, "intermediate_size", None)
    wide = min(own, WIDEST * width) if isinstance(own, int) else WIDEST * width
    if last:
        wide = len(last["mlp.gate_proj.weight"])
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": wide,
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
    """Whether the target's last layer has an MLP that the head's layer can begin with, behind a norm at the same place.
    Layers that norm what attention and MLP return (OLMo 2, EXAONE 4) call another norm by the same name."""
    act = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    names = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
    there = all(name in last for name in (*names, AFTER_ATTENTION, "input_layernorm.weight"))
    other = any(name.startswith("post_feedforward_layernorm") for name in last)
    biased = any(name.startswith("mlp.") and name.endswith(".bias") for name in last)
    return act == "silu" and there and not biased and not other


def _attention(step: torch.Tensor, inputs: torch.Tensor, layer: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The attention's tensors: each row attends to itself, and what it adds turns the residual, the normed feature,
    into ``step`` (width, 2 * width) of what it reads. ``inputs`` (2 * width, 2 * width) is the mean of the products of
    what rows read."""
    width, inner = step.shape[0], layer["num_attention_heads"] * layer["head_dim"]
    added = step.clone()
    added[:, width:].diagonal().sub_(1.0)
    left, sizes, right = torch.linalg.svd(added, full_matrices=False)
    rank = min(inner, width)
    output, value = step.new_zeros(width, inner), step.new_zeros(inner, 2 * width)
    output[:, :rank] = left[:, :rank] * sizes[:rank].sqrt()
    value[:rank] = sizes[:rank].sqrt()[:, None] * right[:rank]
    floored = inputs.clone()
    floored.diagonal().add_(FLOOR * float(inputs.diagonal().mean()))
    variances, axes = torch.linalg.eigh(floored)
    random = torch.randn(2 * width, inner, generator=torch.Generator().manual_seed(0)).to(step.device)
    turned = torch.linalg.qr(random)[0].T @ (axes * variances.rsqrt()) @ axes.T
    # The squared length of a whitened row in a head is about head_dim, which attention divides by its square root.
    query = turned * math.sqrt(SHARP / math.sqrt(layer["head_dim"]))
    names = {"q": query, "k": query.clone(), "v": value, "o": output}
    return {f"layers.0.self_attn.{name}_proj.weight": tensor for name, tensor in names.items()}


def _mlp(last: Tensors, layer: dict[str, Any], scale: float) -> dict[str, torch.Tensor]:
    """The MLP's tensors: those of ``last`` with the output times ``scale``, or, if it is empty, of one that adds
    nothing at first."""
    width, wide = layer["hidden_size"], layer["intermediate_size"]
    made = {"post_attention_layernorm": torch.ones(width), "mlp.down_proj": torch.zeros(width, wide)}
    generator = torch.Generator().manual_seed(1)
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        made[name] = torch.randn(wide, width, generator=generator) / math.sqrt(width)
    if last:
        made = {name: last[f"{name}.weight"].float() for name in made}
        made["mlp.down_proj"] = made["mlp.down_proj"] * scale
    return {f"layers.0.{name}.weight": tensor for name, tensor in made.items()}


class EagleStudent(WholeHead):
    """An EAGLE-3 head, all of whose own weights are trained. At a grown head's rate it unlearns what it starts with."""

    RATE = 1e-3

    def __init__(self, head: Eagle3Head, recipe: Recipe, folder: Path) -> None:
        """``folder``: where ``head`` was read."""
        super().__init__(head, recipe)
        self._folder = folder
        own = {id(tensor) for tensor in head.own().values()}
        for parameter in head.parameters():
            parameter.requires_grad_(id(parameter) in own)

    def begin(self, train: Sequence[Example], should_stop: ShouldStop, resumed: bool = False) -> None:
        """See the protocol. Nothing to prepare: the head was started before (``start_of``)."""

    def write(self, state: AdapterState, folder: Path) -> None:
        """See the protocol."""
        rewrite(self._folder, state, folder)


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
    most: Callable[[], int],
    scratch: Path,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Grown:
    """Grow a head on the target that ``load`` returns and that is called ``name``, from the examples of ``sets``, and
    write it into ``folder``. States of the newest texts are used, as many as fit into the bytes that ``most`` returns
    when the target is loaded. Once these are computed, the target is freed but for its embedding and projection. The
    head is in the folder ``scratch`` meanwhile, and stays there if ``folder`` cannot be written in the end.

    Raises AdaptiveError if no head can be grown on this target or from so few texts, and Stopped if ``should_stop``
    returns True before the first weights were judged; nothing is written then.
    """
    target = load()
    config, longest, room = target.config.get_text_config(), longest_text(target), most()
    count, layers, width = int(config.vocab_size), int(config.num_hidden_layers), int(config.hidden_size)
    taps = taps_of(layers)
    _effective(decoder_of(target).norm, width)  # raised here, before the states of all texts are computed
    states = States(target, (*taps, layers))
    texts = Texts(sum(map(len, (sets.train, sets.validation, sets.gate))), on_progress)
    validation, gate, train = (
        with_states(part, states, longest, room // share, texts.done, should_stop)
        for part, share in ((sets.validation, 8), (sets.gate, 4), (sets.train, 2))
    )
    least = (len(train), MIN_TRAIN), (len(validation), MIN_VALIDATION), (len(gate), min(len(sets.gate), 1))
    if any(there < needed for there, needed in least):
        raise AdaptiveError(
            f"the hidden states of {len(train)} texts to train on, {len(validation)} to choose the weights by and "
            f"{len(gate)} to judge them by fit into memory, which is too few; free memory, or take a smaller target"
        )
    start = start_of(target, train, taps)
    for part in (validation, gate, train):  # one after the other, so that the wide ones are freed meanwhile
        part[:] = [narrowed(part.pop(0), len(taps) * width) for _ in range(len(part))]
    ids = choose_vocabulary(train, count, _reads(start, layers), recipe.draft_length)
    tensors = dict(start.tensors)
    if ids is not None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][ids]
        tensors["d2t"] = ids - torch.arange(len(ids))
    few = count if ids is None else len(ids)
    said = EagleConfig(None, count, few, width, taps, True, False)
    shared, architectures = shared_of_model(target), target.config.architectures
    del target, states
    gc.collect()  # hooks and modules refer to each other
    with _unfinished(scratch) as first:
        save(first, tensors, said, start.layer, name, architectures)
        student = EagleStudent(Eagle3Head(shared, first, torch.float32), recipe, first)

        def evaluate(step: int) -> float:
            return acceptance_rate(student.replay(validation))

        result = fit(student, train, evaluate, recipe, on_progress, should_stop)
        if result.best is None:
            raise Stopped
        student.restore(result.best)
        try:
            student.write(result.best, folder)
        except AdaptiveError as error:
            kept = scratch / f"head-{first.name.removeprefix(files.UNFINISHED)}"
            student.write(result.best, kept)
            raise AdaptiveError(f"{error}; the head is in {kept}") from error
    figures, by_step = (None, ()) if result.stopped or not gate else _judged(student, gate, recipe, should_stop)
    if figures is None and gate:
        result = replace(result, stopped=True)
    return Grown(result, figures, by_step, len(train), few)


@contextlib.contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """A path in ``folder`` for what is deleted in the end. Raises AdaptiveError if ``folder`` cannot be written."""
    try:
        path = files.unfinished(folder)
    except OSError as error:
        raise AdaptiveError(f"{folder} cannot be written ({error.strerror})") from error
    try:
        yield path
    finally:
        files.finished(path)


def _judged(
    student: EagleStudent, gate: Sequence[Example], recipe: Recipe, should_stop: Callable[[], bool] | None
) -> tuple[HeldOut | None, tuple[float, ...]]:
    """``Grown.figures`` and ``Grown.by_step``; None and nothing if ``should_stop`` returns True meanwhile."""
    try:
        after = student.replay(gate, should_stop)
    except Stopped:
        return None, ()
    before = [Replay.of(e, np.zeros((1, len(e.output) - 1))) for e in gate]
    by_step = np.concatenate([r.acceptance for r in after], axis=1).mean(1)
    return held_out(before, after, recipe.draft_length), tuple(map(float, by_step))


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
