"""Intercepts the functions by which transformers' models update a recurrent state, so that updates can be repeated.

A model gives its cache only the state after a whole pass, but a rollback needs a state within the pass. So the
functions in the model's modelling module are wrapped once. Within a pass of ours, each call is passed on to the
``State`` that the layer read last, with all that is needed to repeat it for fewer tokens. Outside such a pass, the
functions work as before.

Within a pass that continues a text, functions that transformers intends for whole prompts are also changed to give the
results of single steps: see ``_scan_chunks`` and ``_scan_selectively``.
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
# The longest pass for which the update runs token by token, as in single steps. The chunked form needs some hundred
# operations per chunk of 64 tokens, even for a few tokens.
FEW = 16


class State(Protocol):
    """The receiver of the calls: see ``recurrent.py``."""

    length: int
    kernel: int
    recurrent: torch.Tensor | None

    def convolve(self, inputs: torch.Tensor, kernel: int | None) -> torch.Tensor:
        """Append the inputs (batch, width, n) of a convolution."""

    def call(self, call: Call) -> None:
        """Announce ``call``, which computes the next state from the present one."""

    def own(self) -> torch.Tensor:
        """The recurrent state in memory that a function may write into."""

    def recur(self, state: torch.Tensor | None) -> None:
        """Set the state after the pass; None if it was written into ``own()``."""


class Pass(threading.local):
    """The present pass of this thread. ``count``: its tokens, 0 outside a pass. ``verifies``: whether tokens after its
    first may be rolled back. ``state``: the state that a layer read last."""

    count = 0
    verifies = False
    state: State | None = None


_PASS = Pass()


def current_pass() -> Pass:
    """The present pass of this thread."""
    return _PASS


@contextmanager
def recurrent_pass(count: int, verifies: bool) -> Iterator[None]:
    """Inside the context, calls belong to a pass of ``count`` tokens and are passed on to the states that it reads."""
    _PASS.count, _PASS.verifies, _PASS.state = count, verifies, None
    try:
        yield
    finally:
        _PASS.count, _PASS.verifies, _PASS.state = 0, False, None


@dataclass(frozen=True)
class Given:
    """The arguments of a call, by parameter names of transformers' function. The first ``places`` are passed by
    position, because kernels of other packages that may replace the function use other names for them."""

    values: dict[str, Any]
    places: int

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def but(self, **changed: Any) -> Given:
        """The same arguments with some values changed."""
        return Given({**self.values, **changed}, self.places)

    def to(self, function: Function) -> Any:
        """Call ``function`` with the arguments."""
        items = list(self.values.items())
        return function(*(value for _, value in items[: self.places]), **dict(items[self.places :]))

    def dims(self, names: tuple[str, ...], dim: int) -> dict[str, int]:
        """Those of ``names`` whose values are tensors, each with ``dim``, the dimension of the tokens."""
        return {name: dim for name in names if isinstance(self[name], torch.Tensor)}


@dataclass(frozen=True)
class Call:
    """A state update by ``count`` tokens from ``start`` on. ``run(state, given)`` returns the state after them.
    ``dims``: for each argument with tokens, the dimension of the tokens."""

    start: int
    count: int
    run: Callable[[torch.Tensor | None, Given], torch.Tensor]
    given: Given
    dims: dict[str, int]

    def first(self, count: int) -> Call:
        """The same update by at most the first ``count`` of its tokens."""
        if count >= self.count:
            return self
        cut = {name: self.given[name].narrow(dim, 0, count) for name, dim in self.dims.items()}
        return Call(self.start, count, self.run, self.given.but(**cut), self.dims)

    def after(self, state: torch.Tensor | None) -> torch.Tensor:
        """The state after the tokens, computed from the ``state`` before them, which is not changed."""
        return self.run(state, self.given)

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that are kept, for counting memory."""
        yield from (self.given[name] for name in self.dims)


def _start(state: State) -> int:
    """The number of the present pass's first token; the pass's convolution has already run."""
    return state.length - _PASS.count


def _delta(state: State, function: Function, given: Given, siblings: dict[str, Function]) -> Any:
    """A delta rule over tokens (batch, n, heads, ...), in chunks or as a loop over the tokens. A short pass that
    continues a text takes the loop."""
    if _PASS.count <= FEW and given["initial_state"] is not None:
        function = siblings.get(function.__name__.replace("chunk", "recurrent"), function)

    def run(before: torch.Tensor | None, given: Given) -> torch.Tensor:
        after: torch.Tensor = given.but(initial_state=before, output_final_state=True).to(function)[1]
        return after

    dims = given.dims(("query", "key", "value", "g", "beta"), 1)
    state.call(Call(_start(state), _PASS.count, run, given.but(initial_state=None), dims))
    return given.to(function)


def _scan_chunks(state: State, function: Function, given: Given, siblings: dict[str, Function]) -> Any:
    """A state space dual (Mamba 2) over tokens (batch, n, heads, ...), in chunks that are padded with zeros. A pass
    that continues a text takes smaller chunks, and no ``dt_limit`` unless it is a prompt's."""
    if given["initial_states"] is not None:
        least = max(FEW, 1 << (_PASS.count - 1).bit_length())
        given = given.but(chunk_size=min(given["chunk_size"], least))
        # In transformers this limit applies to prompts, which come in longer passes, but not to single steps.
        if (_PASS.verifies or _PASS.count < FEW) and given["dt_limit"] is not None:
            given = given.but(dt_limit=(0.0, float("inf")))

    def run(before: torch.Tensor | None, given: Given) -> torch.Tensor:
        after: torch.Tensor = given.but(initial_states=before, return_final_states=True).to(function)[1]
        return after

    dims = given.dims(("hidden_states", "dt", "B", "C", "z"), 1)
    state.call(Call(_start(state), _PASS.count, run, given.but(initial_states=None), dims))
    return given.to(function)


def _update(state: State, function: Function, given: Given, siblings: dict[str, Function]) -> Any:
    """A single step, which writes into the state."""
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
    """A selective scan (Mamba) over tokens (batch, width, n). transformers' function always begins with an empty state,
    so a pass that continues a text runs single steps instead."""
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
    """A single step of a convolution, which writes into its window. Here that is a copy, and the state takes the
    input."""
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
    """Wrap the functions in ``WRAPPERS`` in the model's modelling modules. A second call for the same module changes
    nothing."""
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
