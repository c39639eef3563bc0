"""Our gated delta net kernels against the recurrence in float64, for every instruction set of this processor."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from adaptive.engines.cpu.delta import HELD, ROOM, DeltaNet, DeltaSizes, States

pytestmark = pytest.mark.usefixtures("instructions")
# Key heads, value heads, key size, value size, kernel.
SIZES = [DeltaSizes(1, 2, 16, 48, 4), DeltaSizes(2, 2, 128, 128, 4), DeltaSizes(2, 4, 32, 16, 2)]


def layer(sizes: DeltaSizes) -> Qwen3_5GatedDeltaNet:
    """A layer of transformers with random weights that hide no mistake, and with slowly decaying states."""
    torch.manual_seed(3)
    config = Qwen3_5TextConfig(
        hidden_size=32,
        linear_num_key_heads=sizes.key_heads,
        linear_num_value_heads=sizes.value_heads,
        linear_key_head_dim=sizes.key_size,
        linear_value_head_dim=sizes.value_size,
        linear_conv_kernel_dim=sizes.kernel,
    )
    module = Qwen3_5GatedDeltaNet(config, 0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        module.A_log.sub_(3)
    return module


def inputs(sizes: DeltaSizes, count: int) -> torch.Tensor:
    return torch.randn(count, sizes.channels + sizes.value_heads * (sizes.value_size + 2))


def through(net: DeltaNet, states: States, projected: torch.Tensor) -> torch.Tensor:
    """One pass through a model of this one layer."""
    out = torch.empty(len(projected), states.sizes.value_heads * states.sizes.value_size)
    net(projected.contiguous(), out, 0, len(projected), states.begin(len(projected)))
    states.end(len(projected))
    return out


def by_the_rule(module: Qwen3_5GatedDeltaNet, sizes: DeltaSizes, projected: torch.Tensor) -> torch.Tensor:
    """The input of the layer's output projection, computed token by token in float64."""
    mixed, gate, correction, decay = projected.double().split(
        [sizes.channels, sizes.value_heads * sizes.value_size, sizes.value_heads, sizes.value_heads], 1
    )
    padded = nn.functional.pad(mixed.T[None], (sizes.kernel - 1, 0))
    mixed = nn.functional.silu(nn.functional.conv1d(padded, module.conv1d.weight.double(), groups=sizes.channels))[0].T
    keys = sizes.key_heads * sizes.key_size
    parts = mixed.split([keys, keys, sizes.value_heads * sizes.value_size], 1)
    query, key, value = (part.unflatten(1, (-1, size)) for part, size in zip(
        parts, (sizes.key_size, sizes.key_size, sizes.value_size), strict=True
    ))  # fmt: skip
    group = sizes.value_heads // sizes.key_heads
    query, key = (x.repeat_interleave(group, 1) for x in (query, key))
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    decay = (-module.A_log.double().exp() * nn.functional.softplus(decay + module.dt_bias.double())).exp()
    state, found = torch.zeros(sizes.value_heads, sizes.key_size, sizes.value_size, dtype=torch.float64), []
    for q, k, v, a, b in zip(query, key, value, decay, correction.sigmoid(), strict=True):
        state = state * a[:, None, None]
        change = (v - (state * k[:, :, None]).sum(1)) * b[:, None]
        state = state + k[:, :, None] * change[:, None]
        found.append((state * q[:, :, None]).sum(1) * sizes.key_size**-0.5)
    x = torch.stack(found)
    x = x / (x.square().mean(-1, keepdim=True) + module.norm.variance_epsilon).sqrt() * module.norm.weight.double()
    return (x * nn.functional.silu(gate.unflatten(1, (sizes.value_heads, -1)))).flatten(1)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@torch.inference_mode()
def test_a_text_follows_the_rule(sizes: DeltaSizes) -> None:
    module = layer(sizes)
    net, projected = DeltaNet(module, sizes), inputs(sizes, 200)
    right, states = by_the_rule(module, sizes, projected), States(sizes, [net])
    got = torch.cat([through(net, states, part) for part in projected.split([3, 1, 1, 14, 9, 100, 8, 16, 1, 40, 7])])
    torch.testing.assert_close(got.double() / right.std(), right / right.std(), rtol=0, atol=2e-4)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@torch.inference_mode()
def test_a_token_does_not_depend_on_the_passes_that_brought_it(sizes: DeltaSizes) -> None:
    """Bit for bit, also after rollbacks, after checkpoints, and in copies."""
    dice, net = random.Random(7), DeltaNet(layer(sizes), sizes)
    projected = inputs(sizes, 400)
    right, ahead = through(net, States(sizes, [net]), projected), 0
    for _ in range(10):
        states = States(sizes, [net])
        for _ in range(40):
            held = states.length
            count = min(dice.choice([1, 1, 2, 5, 9, 16, 30, HELD, HELD + 1, 100]), len(projected) - held)
            assert torch.equal(through(net, states, projected[held : held + count]), right[held : held + count])
            if dice.random() < 0.3:
                through(net, states, inputs(sizes, dice.randrange(1, 20)))  # tokens that the rollback below removes
                ahead += states._ahead is not None
            states.rollback(min(held + count, held + dice.randrange(1, 40)))
            if dice.random() < 0.1:
                states.checkpoint()
            if dice.random() < 0.05 or states.length > 390:
                states.rollback(dice.randrange(states.length + 1))
            if dice.random() < 0.05:
                other = States(sizes, [net])
                other.copy(states, dice.randrange(states.length + 1))
                states = other
    assert ahead > 10


@torch.inference_mode()
def test_growing_that_fails_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SIZES[0]
    net, projected = DeltaNet(layer(sizes), sizes), inputs(sizes, 40 + ROOM)
    right = through(net, States(sizes, [net]), projected)
    states, made, zeros = States(sizes, [net]), [], torch.zeros

    def no_memory(*shape: int) -> torch.Tensor:
        made.append(shape)
        if len(made) > 1:
            raise MemoryError
        return zeros(*shape)

    found = [through(net, states, projected[:20])]
    monkeypatch.setattr(torch, "zeros", no_memory)
    with pytest.raises(MemoryError):
        through(net, states, projected[20:])
    monkeypatch.undo()
    found += [through(net, states, projected[at : at + 10]) for at in range(20, len(projected), 10)]
    torch.testing.assert_close(torch.cat(found), right)


@torch.inference_mode()
def test_a_copy_of_an_empty_text_begins_anew() -> None:
    sizes = SIZES[0]
    net, projected = DeltaNet(layer(sizes), sizes), inputs(sizes, 40)
    used = States(sizes, [net])
    through(net, used, inputs(sizes, 100))
    assert used.copy(States(sizes, [net]), 0) == 0
    assert torch.equal(through(net, used, projected), through(net, States(sizes, [net]), projected))
