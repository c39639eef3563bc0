"""A head is grown on a mixture of experts, and on a target whose last layer is quantised: it starts with what can be
read of that layer, adds nothing elsewhere, and learns there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from test_head_engine import bound, module_logits
from test_head_module import randomised
from test_trainer import BASE, VOCAB, speak
from tiny_models import tiny_model
from transformers import PreTrainedModel

from adaptive.engines.head.engine import HeadEngine
from adaptive.engines.head.module import FEW, Head
from adaptive.engines.head.parts import decoder_of, parts_of_folder, parts_of_model
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.records.features import Features, FeatureSpool
from adaptive.records.writer import LogWriter
from adaptive.types import SamplingParams
from checkpoints.store import AdapterStore
from trainers.recipe import Recipe
from trainers.run import distill

KINDS = ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "deepseek_v3", "glm4_moe", "qwen3_next", "granitemoe", "phimoe"]


def of_folder(model: PreTrainedModel, folder: Path) -> Head:
    """A head from the target's folder, where the experts of some kinds have tensors of their own."""
    model.save_pretrained(folder)
    return Head(parts_of_folder(folder), torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_it_has_few_experts_and_the_attention_of_the_targets_last_layer(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    ours, theirs = of_folder(model, tmp_path).layer, decoder_of(model).layers[-1]
    there = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if "experts" in name.split(".") and parameter.ndim == 3:
            assert len(parameter) == FEW
        elif "attn" in name or "layernorm" in name:
            torch.testing.assert_close(parameter, there[name])
    assert sum(p.numel() for p in ours.parameters()) < sum(p.numel() for p in there.values())
    loaded = Head.from_target(model)  # as where a server makes it from the loaded model
    assert {name: x.shape for name, x in loaded.own().items()} == {
        name: x.shape for name, x in of_folder(model, tmp_path).own().items()
    }


@pytest.mark.parametrize("kind", [*KINDS, "llama", "gemma2", "qwen3", "phi3", "olmo2"])
def test_a_layer_that_cannot_be_read_adds_nothing_at_first_and_learns(kind: str) -> None:
    head = Head(dataclasses.replace(parts_of_model(tiny_model(kind)), layer={}), torch.float32)
    tokens, features = torch.randint(3, 40, (1, 6)), torch.randn(1, 6, head.width)
    optimizer = torch.optim.SGD(head.layer.parameters(), lr=1e-2)
    for step in range(2):
        fused, hidden = head.fused(tokens, features), head(tokens, features)
        assert step or torch.allclose(fused, hidden)
        (hidden - torch.ones_like(hidden)).square().sum().backward()
        optimizer.step()
    still = [name for name, p in head.layer.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not [name for name in still if name.endswith("_proj.weight")]


def test_the_start_is_the_same_each_time() -> None:
    parts = dataclasses.replace(parts_of_model(tiny_model("qwen3_moe")), layer={})
    one, other = (Head(parts, torch.float32) for _ in range(2))
    for name, tensor in one.own().items():
        assert torch.equal(tensor, other.own()[name])


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "olmoe"])
def test_our_forward_computes_what_the_module_does(kind: str) -> None:
    model = tiny_model(kind)
    target = TransformersEngine(model)
    head = HeadEngine(randomised(Head.from_target(model)), target)
    held, draft = bound(target, head)
    tokens = torch.randint(3, 200, (40,))
    held.extend(tokens[:30], 1)
    right = module_logits(head.head, held.features(0, 30), tokens)
    scale = right.abs().max()
    got = torch.cat([draft.extend(tokens[a:b], b - a).clone() for a, b in ((0, 20), (20, 21), (21, 35), (35, 40))])
    torch.testing.assert_close(got / scale, right / scale, rtol=0, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_it_grows_from_what_the_mixture_said(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind, vocab_size=VOCAB)
    said = speak(model, 60, SamplingParams(temperature=0.7))
    spool, seen = FeatureSpool(tmp_path / "features", 10**9), []
    handle = decoder_of(model).norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0].numpy()))
    with LogWriter(tmp_path / "records.db", spool=spool) as writer:
        for one in said:
            with torch.no_grad():
                model(input_ids=torch.from_numpy(np.concatenate([one.prompt, one.output[:-1]])).long()[None])
            writer.write(one, Features.of(seen.pop()))
        assert writer.flush()
    handle.remove()
    head = of_folder(model, tmp_path / "target")
    recipe = Recipe(epochs=6, evaluations=4, learning_rate=1e-2, batch=16)
    outcome = distill(tmp_path / "records.db", AdapterStore(tmp_path / "store"), BASE, head, recipe, spool=spool)
    assert outcome.manifest is not None
    assert outcome.manifest.status == "promoted", outcome.message
