"""The feed-forward parts of our forward, dense or mixtures of experts, and their computation in passes by layers.

In: a layer's module of a loaded transformers model. Out: an ``Mlp``, a ``Mixture`` of packed linear layers, two for
each expert, or both (``Beside``). A pass reads only the experts that its tokens choose. A pass in one native call
computes mixtures by ``native/mixture.h``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from adaptive.engines.cpu.kernels import Prologue, library
from adaptive.engines.cpu.layers import Gate, RmsNorm, TensorFunction
from adaptive.engines.cpu.packing import Packed, PackedExperts, Packing
from adaptive.engines.cpu.weights import PackedLinear, native_linear


@dataclass(frozen=True)
class Mlp:
    """A dense part, down(gate(gate_up(x))). The gate projection, if there is one, and the up projection are one linear
    layer."""

    gate_up: PackedLinear
    gate: Gate
    down: PackedLinear

    @property
    def linears(self) -> list[Packed]:
        """All packed linear layers."""
        return [self.gate_up, self.down]

    def __call__(self, x: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
        """The result (n, width) for x (n, width), which is normalised first."""
        return self.down(self.gate_up(x, norm), self.gate)

    def add_to(self, x: torch.Tensor, norm: RmsNorm | None, after: RmsNorm | None) -> None:
        """Add to x (n, width) the result for it; ``norm`` applies to the input, ``after`` to the result."""
        add(x, self.down, self.gate_up(x, norm), self.gate, after)


def add(
    x: torch.Tensor, linear: PackedLinear, y: torch.Tensor, prologue: TensorFunction | None, norm: RmsNorm | None
) -> None:
    """Add ``norm(linear(prologue(y)))`` to x."""
    if norm is None:
        linear(y, prologue, out=x, add=True)
    else:
        x += norm(linear(y, prologue))


class ClampedGate(Gate):
    """The gate of gpt-oss: ``CLAMPED_GATE`` of ``native/linear.h``."""

    def __init__(self, alpha: float, limit: float) -> None:
        self.prologue, self.limits, self.gated = Prologue.CLAMPED_GATE, torch.tensor([alpha, limit]), True
        self.alpha, self.limit = alpha, limit

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up.clamp(-self.limit, self.limit) + 1)


class Mixture:
    """Experts, of which a router chooses some for each token, and at most one shared expert, which all tokens have:
    ``Mixture`` of ``native/mixture.h``. The router computes in the activations' dtype, whatever the dtype of the
    weights: a rounded score may choose another expert."""

    def __init__(self, module: Any, pack: Packing, factor: float = 1.0) -> None:
        """``module`` is transformers'; ``factor`` multiplies the result."""
        router = module.gate if hasattr(module, "gate") else module.router
        scored = getattr(router, "proj", router)
        self.top_k: int = router.top_k if hasattr(router, "top_k") else router.config.top_k_experts
        self.normalised = bool(getattr(router, "norm_topk_prob", True))
        # Added to the sigmoids for the choice only. A router with a softmax has no bias.
        holder = module if hasattr(module, "e_score_correction_bias") else router
        bias = getattr(holder, "e_score_correction_bias", None)
        self.bias: torch.Tensor | None = None if bias is None else bias.float()
        self.factor = factor * float(getattr(router, "routed_scaling_factor", 1.0))
        self.experts: PackedExperts = pack.experts(module.experts)
        shared = getattr(module, "shared_expert", None) or getattr(module, "shared_experts", None)
        gated = hasattr(module, "shared_expert_gate")
        self.router: PackedLinear = pack.exact(scored, module.shared_expert_gate) if gated else pack.exact(scored)
        self.shared: tuple[PackedLinear, PackedLinear] | None = None
        if shared is not None:
            assert factor == 1, "no architecture here has both"
            self.shared = pack(shared.gate_proj, shared.up_proj), pack(shared.down_proj)
        self.gate = _gate(module.experts)
        # The router may have a norm of its own for the input that the experts read through theirs, and a factor for
        # each expert's share.
        self.router_norm: RmsNorm | None = _router_norm(router) if hasattr(router, "norm") else None
        scales = getattr(router, "per_expert_scale", None)
        self.scales: torch.Tensor | None = None if scales is None else scales.to(self.router.dtype)

    @property
    def linears(self) -> list[Packed]:
        """All packed linear layers."""
        return [self.router, self.experts, *(self.shared or ())]

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For normalised x (n, width): the experts of each token and their shares, both (n, top_k), and the shared
        expert's share (n, 1), or (n, 0) if that is 1."""
        scores = self.router(x.to(self.router.dtype))
        count = len(self.experts.up)
        if self.bias is None:
            shares, chosen = scores[:, :count].softmax(-1).topk(self.top_k)
        else:
            every = scores[:, :count].sigmoid()
            chosen = (every + self.bias).topk(self.top_k).indices
            shares = every.gather(1, chosen)
        if self.normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        if self.scales is not None:
            shares = shares * self.scales[chosen]
        return chosen, shares * self.factor, scores[:, count:].sigmoid()

    def __call__(self, x: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
        """The result (n, width) for x (n, width), which is normalised first; in the router's dtype."""
        given, x = x, x if norm is None else norm(x)
        chosen, shares, of_shared = self.choose(x if self.router_norm is None else self.router_norm(given))
        y = torch.zeros(len(x), x.shape[1], dtype=shares.dtype)
        for number in chosen.unique().tolist():
            rows, places = (chosen == number).nonzero(as_tuple=True)
            found = self._expert(self.experts.up[number], self.experts.down[number], x[rows])
            y.index_add_(0, rows, found.to(y.dtype) * shares[rows, places, None])
        if self.shared is not None:
            found = self._expert(*self.shared, x)
            y += found * of_shared if of_shared.numel() else found
        return y

    def add_to(self, x: torch.Tensor, norm: RmsNorm | None, after: RmsNorm | None) -> None:
        """See ``Mlp.add_to``."""
        y = self(x, norm)
        x += y if after is None else after(y)

    def _expert(self, up: PackedLinear, down: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        return down(up(x), self.gate)

    @property
    def native(self) -> Any:
        """The mixture for the kernels, with its linear layers as they are now, all of which must be native. Valid while
        this object lives and none of its linear layers is refreshed."""
        found = library()
        assert found is not None
        up, down = [*self.experts.up], [*self.experts.down]
        if self.shared is not None:
            up.append(self.shared[0])
            down.append(self.shared[1])
        limits, own = self.gate.limits, self.router_norm
        assert self.gate.prologue is not None
        return found.module.Mixture(
            router=native_linear(self.router),
            up=[native_linear(linear) for linear in up],
            down=[native_linear(linear) for linear in down],
            top_k=self.top_k,
            sigmoid=self.bias is not None,
            normalised=self.normalised,
            shared=self.shared is not None,
            factor=self.factor,
            bias=0 if self.bias is None else self.bias.data_ptr(),
            gate=int(self.gate.prologue),
            limits=0 if limits is None else limits.data_ptr(),
            router_norm=native_norm(own),
            scales=0 if self.scales is None else self.scales.data_ptr(),
        )


def _gate(experts: Any) -> Gate:
    return ClampedGate(experts.alpha, experts.limit) if hasattr(experts, "limit") else Gate(experts.act_fn)


def _router_norm(router: Any) -> RmsNorm:
    """The norm of a Gemma 4 router, with its scales."""
    dtype = torch.promote_types(router.scale.dtype, torch.float32)
    norm = RmsNorm(router.norm, dtype, dtype, size=len(router.scale))
    norm.weight = norm.weight * router.scale.to(dtype) * router.scalar_root_size
    return norm


def native_norm(norm: RmsNorm | None) -> Any:
    """A norm for the kernels, valid as long as ``norm`` lives; for None one that the kernels take as none."""
    found = library()
    assert found is not None
    kind = found.module.Norm
    return kind() if norm is None else kind(norm.weight.data_ptr(), norm.eps_sum, len(norm.weight))


@dataclass(frozen=True)
class Beside:
    """The sum of a dense part and a mixture on the same input (Gemma 4). ``before`` is the norm of the mixture's input,
    ``after`` of its result, ``after_dense`` of the dense part's result."""

    dense: Mlp
    mixture: Mixture
    before: RmsNorm
    after: RmsNorm
    after_dense: RmsNorm

    @property
    def gate(self) -> Gate:
        """The gate of both parts."""
        return self.dense.gate

    @property
    def linears(self) -> list[Packed]:
        """All packed linear layers."""
        return [*self.dense.linears, *self.mixture.linears]

    def add_to(self, x: torch.Tensor, norm: RmsNorm | None, after: RmsNorm | None) -> None:
        """See ``Mlp.add_to``."""
        y = self.after_dense(self.dense(x, norm)) + self.after(self.mixture(x, self.before))
        x += y if after is None else after(y)

    @property
    def native(self) -> Any:
        """The three norms for the kernels, valid as long as this object lives."""
        found = library()
        assert found is not None
        return found.module.Beside(*(native_norm(norm) for norm in (self.before, self.after, self.after_dense)))


def feed_forward(
    block: Any, pack: Packing, norm: Callable[..., RmsNorm], dtype: torch.dtype, factor: float = 1.0
) -> Mlp | Mixture | Beside:
    """The feed-forward part of a transformers layer; ``factor`` multiplies its result. ``norm`` reads a norm within the
    part; its second argument is the dtype of that norm's results."""
    module = block.mlp if hasattr(block, "mlp") else block.block_sparse_moe
    if hasattr(module, "experts"):
        return Mixture(module, pack, factor)
    act = module.act_fn if hasattr(module, "act_fn") else module.activation_fn
    names = [name for name in ("gate_up_proj", "gate_proj", "up_proj") if hasattr(module, name)]
    gate_up = pack(*(getattr(module, name) for name in names))
    dense = Mlp(gate_up, Gate(act, gated=names != ["up_proj"]), pack(module.down_proj, factor=factor))
    if not hasattr(block, "experts"):
        return dense
    return Beside(
        dense,
        Mixture(block, pack),
        before=norm(block.pre_feedforward_layernorm_2),
        after=norm(block.post_feedforward_layernorm_2, dtype),
        after_dense=norm(block.post_feedforward_layernorm_1, dtype),
    )


def known_router(config: Any) -> bool:
    """Whether a router, if there is one, chooses among all experts at once, without choosing groups of them first."""
    return (getattr(config, "topk_group", None) or 1) >= (getattr(config, "n_group", None) or 1)
