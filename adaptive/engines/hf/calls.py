"""The functions by which models of transformers update a recurrent state, seen as they are called.

A model's cache is handed the state after a pass, which says nothing of the states within it. So the functions of its
modelling module are wrapped once: within a pass of ours, each call tells the ``State`` that the layer has just asked
for with what it can be computed again, for fewer tokens. Outside of one they are what they were.

Within a pass that continues a text, functions that transformers means for whole prompts are also kept to what single
steps compute: see ``_scan_chunks`` and ``_scan_selectively``.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

Function = Callable[..., Any]
# Tokens of a pass for which the update runs token by token, as it does in single steps. The chunked form takes some
# hundred operations for 64 tokens at a time, however few there are.
FEW = 16


class State(Protocol):
    """What is told: see ``recurrent.py``."""

    length: int
    kernel: int
    recurrent: torch.Tensor | None

    def convolve(self, inputs: torch.Tensor, kernel: int | None) -> torch.Tensor:
        """Take the inputs (batch, width, n) of a convolution."""

    def call(self, call: Call) -> None:
        """``call`` computes the next state from this one."""

    def own(self) -> torch.Tensor:
        """The recurrent state, for a function that writes into it."""

    def recur(self, state: torch.Tensor | None) -> None:
        """The pass's last state; None where it was written into ``own()``."""


class Pass(threading.local):
    """The pass under way on this thread: its number of tokens, 0 outside of one; whether it ``verifies``, so that
    tokens after its first may be taken back; the state that was last asked for."""

    count = 0
    verifies = False
    state: State | None = None


_PASS = Pass()


def current_pass() -> Pass:
    """See above."""
    return _PASS


@contextmanager
def recurrent_pass(count: int, verifies: bool) -> Iterator[None]:
    """A pass of ``count`` tokens; what it calls is told to the states it asks for."""
    _PASS.count, _PASS.verifies, _PASS.state = count, verifies, None
    try:
        yield
    finally:
        _PASS.count, _PASS.verifies, _PASS.state = 0, False, None


@dataclass(frozen=True)
class Given:
    """What a function was called with, by the names of transformers' own one. The first ``places`` go by place: kernels
    of other packages, which may stand in for it, have other names for them."""

    values: dict[str, Any]
    places: int

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def but(self, **changed: Any) -> Given:
        """The same with some of it changed."""
        return Given({**self.values, **changed}, self.places)

    def to(self, function: Function) -> Any:
        """Call it."""
        items = list(self.values.items())
        return function(*(value for _, value in items[: self.places]), **dict(items[self.places :]))

    def dims(self, names: tuple[str, ...], dim: int) -> dict[str, int]:
        """Those of the ``names`` that are tensors, with the dimension in which their tokens lie."""
        return {name: dim for name in names if isinstance(self[name], torch.Tensor)}


@dataclass(frozen=True)
class Call:
    """An update by the tokens from ``start`` on. ``run(state, given)`` gives the state after them; ``dims`` says in
    which dimension of what was given the tokens lie."""

    start: int
    count: int
    run: Callable[[torch.Tensor | None, Given], torch.Tensor]
    given: Given
    dims: dict[str, int]

    def first(self, count: int) -> Call:
        """The same of its first tokens only, at most ``count``."""
        if count >= self.count:
            return self
        cut = {name: self.given[name].narrow(dim, 0, count) for name, dim in self.dims.items()}
        return Call(self.start, count, self.run, self.given.but(**cut), self.dims)

    def after(self, state: torch.Tensor | None) -> torch.Tensor:
        """The state after its tokens, from the one before; that one stays as it is."""
        return self.run(state, self.given)

    def tensors(self) -> Iterator[torch.Tensor]:
        """What takes memory."""
        yield from (self.given[name] for name in self.dims)


def _start(state: State) -> int:
    """The first token of the pass under way, whose convolution has run."""
    return state.length - _PASS.count


def _delta(state: State, function: Function, given: Given, siblings: dict[str, Function]) -> Any:
    """A delta rule over tokens (batch, n, heads, ...): a chunked one, or a loop over the tokens."""
    if _PASS.count <= FEW and given["initial_state"] is not None:
        function = siblings.get(function.__name__.replace("chunk", "recurrent"), function)

    def run(before: torch.Tensor | None, given: Given) -> torch.Tensor:
        after: torch.Tensor = given.but(initial_state=before, output_final_state=True).to(function)[1]
        return after

    dims = given.dims(("query", "key", "value", "g", "beta"), 1)
    state.call(Call(_start(state), _PASS.count, run, given.but(initial_state=None), dims))
    return given.to(function)


def _scan_chunks(state: State, function: Function, given: Given, siblings: dict[str, Function]) -> Any:
    """A state space dual over tokens (batch, n, heads, ...), in chunks that it fills up with zeros."""
    if given["initial_states"] is not None:
        least = max(FEW, 1 << (_PASS.count - 1).bit_length())
        given = given.but(chunk_size=min(given["chunk_size"], least))
        # Single steps have no such limit in transformers; a prompt has, which comes in longer passes.
        if (_PASS.verifies or _PASS.count < FEW) and given["dt_limit"] is not None:
            given = given.but(dt_limit=(0.0, float("inf")))

    def run(before: torch.Tensor | None, given: Given) -> torch.Tensor:
        after: torch.Tensor = given.but(initial_states=before, return_final_states=True).to(function)[1]
        return after

    dims = given.dims(("hidden_states", "dt", "B", "C", "z"), 1)
    state.call(Call(_start(state), _PASS.count, run, given.but(initial_states=None), dims))
    return given.to(function)


def _update(state: State, function: Function, given: Given, siblings: dict[str, Function]) -> Any:
    """One token, into the state itself."""
    if given["state"] is not state.recurrent:
        raise NotImplementedError("a recurrent state that is updated in parts")

    def run(before: torch.Tensor | None, given: Given) -> torch.Tensor:
        assert before is not None
        after = before.clone()
        given.but(state=after).to(function)
        return after

    state.call(Call(_start(state), 1, run, given.but(state=None), given.dims(("hidden_states", "dt", "B", "C"), 0)))
    out = given.but(state=state.own()).to(function)
    state.recur(None)
    return out


def _scan_selectively(state: State, function: Function, given: Given, siblings: dict[str, Function]) -> Any:
    """A selective scan over tokens (batch, width, n). transformers' begins from an empty state whatever there was; what
    continues a text goes token by token instead."""
    step = siblings.get("mamba_selective_state_update")
    if step is None:
        raise NotImplementedError("a selective scan without a single step")
    dims = given.dims(("hidden_states", "dt", "B", "C", "z"), 2)

    def steps(before: torch.Tensor, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
        after, outs = before.clone(), []
        for index in range(given["hidden_states"].shape[2]):
            x, dt, b, c = (given[name].select(2, index) for name in ("hidden_states", "dt", "B", "C"))
            gate = None if given["z"] is None else given["z"].select(2, index)
            bias, softplus = given["delta_bias"], bool(given["delta_softplus"])
            outs.append(step(after, x, dt, given["A"], b, c, given["D"], z=gate, dt_bias=bias, dt_softplus=softplus))
        return torch.stack(outs, dim=-1), after

    def run(before: torch.Tensor | None, given: Given) -> torch.Tensor:
        if before is None:
            first: torch.Tensor = given.but(return_last_state=True).to(function)[1]
            return first
        return steps(before, given)[1]

    state.call(Call(_start(state), _PASS.count, run, given, dims))
    return given.to(function) if state.recurrent is None else steps(state.recurrent, given)


def _convolve_one(state: State, function: Function, given: Given, siblings: dict[str, Function]) -> Any:
    """A convolution's step, into what it holds: which is a copy here, and the input is kept beside it."""
    out = given.but(conv_state=given["conv_state"].clone()).to(function)
    state.convolve(given["hidden_states"], state.kernel)
    return out


Wrapper = Callable[[State, Function, Given, dict[str, Function]], Any]
WRAPPERS: dict[str, Wrapper] = {
    "torch_chunk_gated_delta_rule": _delta,
    "torch_recurrent_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "recurrent_kimi_delta_attention": _delta,
    "mamba2_chunk_scan": _scan_chunks,
    "mamba2_selective_state_update": _update,
    "mamba_selective_scan": _scan_selectively,
    "mamba_selective_state_update": _update,
    "causal_conv1d_update": _convolve_one,
}


def watch(model: nn.Module) -> None:
    """Wrap the functions that the modelling modules of this model name so; once for all models of a module."""
    for name in {type(module).__module__ for module in model.modules()}:
        namespace = vars(sys.modules[name])
        plain = {key: namespace[key] for key in WRAPPERS if key in namespace}
        plain = {key: getattr(function, "watched", function) for key, function in plain.items()}
        for key, function in plain.items():
            namespace[key] = _watched(key, function, plain)


def _watched(name: str, function: Function, siblings: dict[str, Function]) -> Function:
    names = tuple(inspect.signature(function).parameters)
    wrapper = WRAPPERS[name]

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        state = _PASS.state
        if state is None:
            return function(*args, **kwargs)
        given = Given({**dict(zip(names, args, strict=False)), **kwargs}, len(args))
        return wrapper(state, function, given, siblings)

    wrapped.watched = function  # type: ignore[attr-defined]
    return wrapped
