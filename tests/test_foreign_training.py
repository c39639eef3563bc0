"""A published head is trained like any draft: the trained module computes what drafts, and decoding stays exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BUNDLED, Command
from foreign_heads import MTP_TYPES, save_eagle, save_eagle_target, save_with_mtp
from safetensors.torch import load_file, save_file

from adaptive.engines.head.engine import HeadEngine, HeadSequence
from adaptive.engines.head.foreign import ForeignHead
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.protocol import sequences
from adaptive.pair import load_draft_for_training, load_pair, pair_identity, trained_draft
from adaptive.records.features import FeatureSpool
from adaptive.records.log import Log
from adaptive.settings import load_settings
from checkpoints.store import AdapterStore
from trainers import lora
from trainers.losses import LOG_FLOOR, cross_entropy, forward_kl, outcomes
from trainers.recipe import Recipe
from trainers.unroll import unrolled

EAGLES: dict[str, dict[str, Any]] = {
    "specforge": {},
    "speculators": {"kind": "qwen3", "norm_output": True, "fc_norm": True},
}
ANSWERS = 40


def saved(name: str, folder: Path, alike: bool = True) -> list[str]:
    """Save a target with a multi-token head, or with a separate EAGLE-3 head. Returns the options that name them."""
    if name in MTP_TYPES:
        return ["--target", str(save_with_mtp(name, folder / "target", alike))]
    target = save_eagle_target(folder / "target")
    head = save_eagle(target, folder / "head", name, alike=alike, **EAGLES[name])
    return ["--target", str(target), "--draft", str(head)]


def spoil(file: Path, name: str) -> None:
    """Change a head's predictions: add a rank-one matrix to the tensor whose name ends in ``name``."""
    tensors = load_file(file)
    (weight,) = (tensor for key, tensor in tensors.items() if key.endswith(name))
    generator = torch.Generator().manual_seed(4)
    one, other = (torch.nn.functional.normalize(torch.randn(n, generator=generator), dim=0) for n in weight.shape)
    weight += 2 * weight.norm() * torch.outer(one, other)
    save_file(tensors, file, metadata={"format": "pt"})


def settings_of(named: list[str]) -> Any:
    options = {option.removeprefix("--"): value for option, value in zip(named[::2], named[1::2], strict=True)}
    return load_settings({**options, "dtype": "float32", "device": "cpu"})


def with_adapter(head: ForeignHead, folder: Path) -> None:
    """Write an adapter of random weights for ``head`` into ``folder``."""
    model = lora.attach(head, Recipe(rank=4))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    folder.mkdir()
    lora.write(model, lora.snapshot(model), folder)


@pytest.mark.parametrize("name", [*EAGLES, *MTP_TYPES])
def test_what_is_trained_is_what_drafts_with_the_adapter_too(name: str, tmp_path: Path) -> None:
    """At every step of every draft, the head loaded for training without its target agrees with the head in use."""
    settings = settings_of(saved(name, tmp_path, alike=False))
    pair, trained = load_pair(settings), load_draft_for_training(settings)
    assert isinstance(pair.target, TransformersEngine)
    assert isinstance(pair.draft, HeadEngine)
    assert isinstance(trained, ForeignHead)
    tokens = torch.randint(3, 4000, (14,), generator=torch.Generator().manual_seed(2))
    held, _ = sequences(pair.target, pair.draft)
    held.extend(tokens, 1)
    features = torch.cat([torch.zeros(1, trained.reads), held.features(0, len(tokens) - 1)])
    with_adapter(trained, tmp_path / "adapter")
    plain: list[torch.Tensor] = []
    for folder in (None, tmp_path / "adapter"):
        pair.draft.apply_adapter(folder)
        model = lora.load(load_draft_for_training(settings), folder) if folder else load_draft_for_training(settings)
        head: Any = model.base_model.model if folder else model
        rows = torch.arange(len(tokens))[None]
        with torch.no_grad():
            steps = [head.logits(hidden[0]) for hidden in unrolled(head, tokens[None], features[None], rows, 4)]
        for start in (1, 6):
            known, draft = sequences(pair.target, pair.draft)
            assert isinstance(draft, HeadSequence)
            known.extend(tokens[:start], 1)
            drafted = draft.extend(tokens[: start + 4], 4)
            for step in range(4):
                one, other = drafted[step], steps[step][start + step]
                some = ~one.isinf()
                assert torch.equal(some, ~other.isinf())
                scale = one[some].abs().max()
                torch.testing.assert_close(one[some] / scale, other[some] / scale, rtol=0, atol=1e-4)
        plain.append(steps[0][5])
    assert not torch.allclose(plain[0], plain[1], atol=0.01), "the adapter does nothing: this would test one half"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "spoiled", "where"),
    [("specforge", "o_proj.weight", "head"), ("glm4_moe", "eh_proj.weight", "target")],
    ids=["specforge", "glm4_moe"],
)
def test_it_learns_from_the_log_is_used_and_stays_exact(
    name: str, spoiled: str, where: str, tmp_path: Path, adaptive: Command
) -> None:
    named = saved(name, tmp_path)
    spoil(tmp_path / where / "model.safetensors", spoiled)
    pair = [*named, "--state-dir", str(tmp_path / "state")]
    options = [*pair, "--dtype", "float32", "--device", "cpu"]
    lines = (BUNDLED / "prompts" / "math.jsonl").read_text(encoding="utf-8").splitlines()[: ANSWERS + 3]
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("\n".join(lines[:ANSWERS]), encoding="utf-8")
    others = [str(json.loads(line)["prompt"]) for line in lines[ANSWERS:]]
    short = ("--max-new-tokens", "48", "--draft-length", "4", "--history", "off", "--json")

    def said(prompt: str, *more: str) -> dict[str, Any]:
        status, out, errors = adaptive("generate", prompt, *options, *short, "--temperature", "0", *more)
        assert status == 0, errors
        found: dict[str, Any] = json.loads(out)
        return found

    status, _, errors = adaptive("generate", "--prompts", str(asked), *options, *short, "--temperature", "0.7")
    assert status == 0, errors
    settings = settings_of(named)
    kept = tmp_path / "state" / pair_identity(settings).id
    with Log(kept / "records.db") as log:
        assert len(FeatureSpool(kept / "features", 0).ids()) == log.count() == ANSWERS
    status, out, errors = adaptive("distill", *options, "--epochs", "20", "--rank", "8", "--lr", "3e-3", "--json")
    assert status == 0, errors
    store = AdapterStore(kept / "adapters")
    learned = store.current()
    assert learned is not None, out
    assert learned.kind == "lora"
    assert learned.recent is not None
    assert learned.recent.gain.low > 0, out
    for prompt in others:
        alone = said(prompt, "--draft", "none")["tokens"]
        drafted = said(prompt)
        assert drafted["tokens"] == alone
        assert drafted["adapter"] == learned.id
    status, _, errors = adaptive("adapters", "export", "current", "--merged", str(tmp_path / "y"), *pair)
    assert status == 2
    assert "which is no model by itself" in errors.replace("\n", " ")


def test_an_eagle_head_is_exported_with_what_it_learned(tmp_path: Path, adaptive: Command) -> None:
    from adaptive.engines.head.speculators import write_speculators

    named = saved("specforge", tmp_path)
    settings = settings_of(named)
    trained = load_draft_for_training(settings)
    assert isinstance(trained, ForeignHead)
    with_adapter(trained, tmp_path / "adapter")
    write_speculators(tmp_path / "head", tmp_path / "target", "target", tmp_path / "made", tmp_path / "adapter")
    tokens = torch.randint(3, 4000, (12,), generator=torch.Generator().manual_seed(2))
    logits = []
    for head, adapter in ((tmp_path / "head", tmp_path / "adapter"), (tmp_path / "made", None)):
        pair = load_pair(settings_of([*named[:3], str(head)]))
        assert isinstance(pair.draft, HeadEngine)
        pair.draft.apply_adapter(adapter)
        held, draft = sequences(pair.target, pair.draft)
        held.extend(tokens[:-1], 1)
        assert draft is not None
        logits.append(draft.extend(tokens, 11).clone())
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5)
    assert trained_draft(settings) is not None


def test_what_a_draft_can_never_say_is_not_asked_of_it() -> None:
    """Tokens outside the draft's vocabulary: the gradient is that of the target's distribution over those inside."""
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(5, 9, generator=generator), torch.randn(5, 9, generator=generator) * 2
    inside = torch.tensor([0, 2, 3, 5, 8])
    few = logits[:, inside].requires_grad_()
    whole = torch.full((5, 9), -torch.inf).index_copy(1, inside, few)
    top = target.log_softmax(-1).topk(9)
    log_p, log_q = outcomes(whole, top.indices, top.values, torch.full((5,), -torch.inf), 1.0)
    assert (log_q == LOG_FLOOR).sum() == 5 * 4
    forward_kl(log_p, log_q).sum().backward()
    p = target.softmax(-1)[:, inside]
    assert few.grad is not None
    torch.testing.assert_close(few.grad, p.sum(-1, keepdim=True) * few.detach().softmax(-1) - p)
    few.grad = None
    whole = torch.full((5, 9), -torch.inf).index_copy(1, inside, few)
    cross_entropy(whole, torch.tensor([0, 1, 4, 6, 7])).sum().backward()
    assert few.grad[0].abs().sum() > 0
    assert few.grad[1:].abs().sum() == 0
