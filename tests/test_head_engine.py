"""A head on our kernels computes what its module computes, reads the target's features where they exist, and drops its
own features at a rollback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_cpu_forward import CONFIGS, made, text
from test_head_module import randomised
from transformers import DynamicCache, PreTrainedModel

from adaptive.control.policy import Advice
from adaptive.drafting.model import ModelDrafter
from adaptive.engines.cpu import families, kernels
from adaptive.engines.cpu.forward import FEW
from adaptive.engines.head.engine import HeadEngine, HeadSequence
from adaptive.engines.head.module import Head
from adaptive.engines.hf.engine import PREFILL_CHUNK, TransformersEngine, TransformersSequence
from adaptive.engines.protocol import ReadsFeatures, draft_sequence, sequences
from adaptive.errors import AdaptiveError
from adaptive.sampling import LogitsProcessor
from adaptive.types import SamplingParams

VOCAB = 97
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=0.9, seed=3),
]


def engines(
    name: str, ours: bool = True, dtype: torch.dtype = torch.float32, grown: bool = False
) -> tuple[TransformersEngine, HeadEngine]:
    """A target of random weights with a head of random weights, on our forward or on transformers' own."""
    model = made(name, dtype)
    model.config.max_position_embeddings = 4096
    target = TransformersEngine(model)
    if not ours:
        target.cpu_forward = None
    head = HeadEngine(randomised(Head.from_target(model)), target, grown=grown)
    if not ours:
        head.cpu_forward = None
    return target, head


def bound(target: TransformersEngine, head: HeadEngine) -> tuple[TransformersSequence, HeadSequence]:
    """A target's and a head's sequence of the same text."""
    held, draft = sequences(target, head)
    assert isinstance(held, TransformersSequence)
    assert isinstance(draft, HeadSequence)
    return held, draft


def module_logits(head: Head, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The module's logits (n, vocab) of a text (n,), given the target's features (known, width) of its beginning. After
    these the head reads its own."""
    known, width = features.shape
    cache = DynamicCache()  # with a config it would drop the keys outside a window, which the mask decides
    shifted = torch.cat([torch.zeros(1, width), features])[: len(tokens)].to(head.fuse.weight.dtype)
    with torch.inference_mode():
        hidden = head(tokens[None, : known + 1], shifted[None], past_key_values=cache)
        logits = [head.logits(hidden[0])]
        for place in range(known + 1, len(tokens)):
            hidden = head(
                tokens[None, place : place + 1], hidden[:, -1:], torch.tensor([[place]]), past_key_values=cache
            )
            logits.append(head.logits(hidden[0]))
    return torch.cat(logits)


@pytest.mark.parametrize("way", ["kernels", "transformers", "recorded"])
@pytest.mark.parametrize("name", [*CONFIGS, "granite, logits as they are", "olmo3", "smollm3"])
def test_logits_equal_those_of_the_module_chained_over_its_own_features(name: str, way: str) -> None:
    target, head = engines(name, way == "kernels")
    if way == "recorded":
        head.passes.record()
    known, tokens = FEW + 30, text(FEW + 38)
    held, draft = bound(target, head)
    draft.prepare(len(tokens))
    assert (draft.fused is not None) == (target.cpu_forward is not None and target.cpu_forward.fused)
    held.extend(tokens[:known], 1)
    right = module_logits(head.head, held.features(0, known), tokens)
    scale = right.abs().max()
    done = 0
    for count in (9, 1, FEW + 4, known + 1 - FEW - 14, 1, 1, 5):  # the last passes read the head's own features
        given = tokens[done : done + count]
        got = draft.extend(given.tolist() if count % 2 else given, count)
        assert got.shape == (count, VOCAB)
        torch.testing.assert_close(got / scale, right[done : done + count] / scale, rtol=0, atol=1e-4)
        done += count
    assert draft.length == done == len(tokens)
    if way == "recorded":
        assert head.passes.recorded is not None
        assert head.passes.recorded.problem is None
        replayed = head.passes.recorded.replayed
        assert replayed > 5
        draft.rollback(known - 3)
        found = draft.extend(tokens[known - 3 : known + 1], 4)
        assert head.passes.recorded.replayed == replayed + 1
        torch.testing.assert_close(found / scale, right[known - 3 : known + 1] / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("among", [None, 3], ids=["all-tokens", "a-third"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_node_of_a_tree_has_the_logits_of_its_path(name: str, among: int | None) -> None:
    """Its row reads the feature of its parent, and sees the text and its ancestors only."""
    target, head = engines(name)
    if not head.trees:
        pytest.skip("the kernels do not support the layer")
    assert isinstance(head.head, Head)
    if among is not None:
        head.head.draft_among(torch.arange(0, VOCAB, among))
        head = HeadEngine(head.head, target)
    known, tokens = 24, text(25)
    held, draft = bound(target, head)
    held.extend(tokens[:known], 1)
    draft.extend(tokens, 1)
    parents, nodes = [-1, -1, 0, 1, 2, 2, 5, 5, 4], text(34)[25:].tolist()
    first = draft.extend(nodes[:2], 2, parents[:2]).clone()
    found = torch.cat([first, draft.extend(nodes[2:], 7, parents[2:])])
    features = held.features(0, known)
    for node in range(len(nodes)):
        path, at = list[int](), node
        while at >= 0:
            path, at = [nodes[at], *path], parents[at]
        right = module_logits(head.head, features, torch.cat([tokens, torch.tensor(path)]))[-1]
        finite = right.isfinite()
        assert torch.equal(found[node].isfinite(), finite)
        torch.testing.assert_close(
            found[node][finite], right[finite], atol=2e-4 * float(right[finite].abs().max()), rtol=0
        )
    draft.keep([0, 2])
    assert draft.length == len(tokens) + 2
    right = module_logits(head.head, features, torch.cat([tokens, torch.tensor([nodes[0], nodes[2], 7])]))[-1]
    kept = draft.extend([7], 1)[0]
    finite = right.isfinite()
    torch.testing.assert_close(kept[finite], right[finite], atol=2e-4 * float(right[finite].abs().max()), rtol=0)
    draft.rollback(len(tokens) + 2)  # all of them were computed from its own features
    assert draft.length == len(tokens)
    with pytest.raises(ValueError, match="cannot follow node 3"):
        draft.extend([1], 1, [3])


@pytest.mark.parametrize("ours", [True, False], ids=["kernels", "transformers"])
def test_a_rollback_forgets_what_was_computed_from_its_own_features(ours: bool) -> None:
    target, head = engines("qwen3", ours)
    held, draft = bound(target, head)
    tokens = text(60)
    held.extend(tokens[:40], 1)
    draft.extend(tokens[:45], 1)
    assert draft.length == 45
    held.extend(tokens[40:44], 1)
    draft.rollback(44)
    assert draft.length == 41  # the token after the target's first 40 also reads a feature of the target
    right = module_logits(head.head, held.features(0, 44), tokens[:45])
    got = draft.extend(tokens[41:45], 2)
    torch.testing.assert_close(got, right[43:45], rtol=0, atol=1e-3)
    draft.rollback(30)
    assert draft.length == 30
    held.rollback(28)
    held.extend(text(9), 1)  # another text from there
    draft.rollback(28)
    other = torch.cat([tokens[:28], text(9)])
    right = module_logits(head.head, held.features(0, 37), other)
    torch.testing.assert_close(draft.extend(other[28:], 3), right[-3:], rtol=0, atol=1e-3)


@pytest.mark.parametrize("ours", [True, False], ids=["kernels", "transformers"])
def test_a_copy_reads_the_sequence_that_it_is_bound_to(ours: bool) -> None:
    target, head = engines("llama", ours)
    held, draft = bound(target, head)
    tokens = text(60)
    held.extend(tokens[:40], 1)
    draft.extend(tokens[:44], 1)
    other, copied = bound(target, head)
    other.copy_prefix(held, 40)
    copied.extend(text(5), 1)
    copied.copy_prefix(draft, 43)
    assert copied.length == 41
    other.extend(tokens[40:50], 1)
    right = module_logits(head.head, other.features(0, 50), tokens[:51])
    torch.testing.assert_close(copied.extend(tokens[41:51], 10), right[41:51], rtol=0, atol=1e-3)
    assert draft.length == 44


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_our_kernels_it_reads_a_target_that_transformers_runs(dtype: torch.dtype) -> None:
    """As with a quantised target. Features are then in the target's dtype."""
    model = made("qwen3", dtype)
    target = TransformersEngine(model)
    module = randomised(Head.from_target(model))
    head, alike = HeadEngine(module, target), HeadEngine(module, target)
    alike.cpu_forward = target.cpu_forward = None
    tokens = text(50)
    held, draft = bound(target, head)
    held.extend(tokens[:40], 1)
    other = alike.sequence_of(held)
    assert (draft.fused is not None) == (kernels.library() is not None)
    for begin, end in ((0, 1), (1, 20), (20, 44), (44, 45)):
        one, theirs = (sequence.extend(tokens[begin:end], end - begin).float() for sequence in (draft, other))
        tolerance = 1e-4 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(one / theirs.abs().max(), theirs / theirs.abs().max(), rtol=0, atol=tolerance)
    draft.rollback(45)
    assert draft.length == 41


def test_a_long_text_is_caught_up_with_in_parts() -> None:
    for ours in (True, False):
        target, head = engines("llama", ours)
        held, draft = bound(target, head)
        tokens = text(PREFILL_CHUNK + 100)
        held.extend(tokens[:-1], 1)
        right = module_logits(head.head, held.features(0, len(tokens) - 1), tokens)
        torch.testing.assert_close(draft.extend(tokens, 3), right[-3:], rtol=0, atol=1e-3)


def test_alone_it_reads_its_own_features() -> None:
    target, head = engines("llama")
    tokens = text(12)
    right = module_logits(head.head, torch.empty(0, head.feature_width), tokens)
    torch.testing.assert_close(head.sequence().extend(tokens, 12), right, rtol=0, atol=1e-3)
    assert isinstance(head, ReadsFeatures)
    assert not isinstance(target, ReadsFeatures)
    assert isinstance(draft_sequence(target, head.sequence()), TransformersSequence)


def drafter(
    target: TransformersEngine, head: HeadEngine, params: SamplingParams, fused: bool
) -> tuple[TransformersSequence, ModelDrafter]:
    """The target's sequence and a drafter, with the same random numbers each time."""
    held, draft = bound(target, head)
    processor = LogitsProcessor(params, VOCAB, torch.device("cpu"))
    made = ModelDrafter(draft, head, VOCAB, params, processor, torch.Generator().manual_seed(7))
    if not fused:
        made._fused = None
    return held, made


@pytest.mark.skipif(kernels.library() is None, reason="the kernels are not built, or not for this processor")
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "cut", "seeded"])
@pytest.mark.parametrize("below", [None, 0.05])
def test_a_proposal_in_one_call_is_the_one_made_token_by_token(params: SamplingParams, below: float | None) -> None:
    target, head = engines("qwen3")
    pairs = [drafter(target, head, params, fused) for fused in (True, False)]
    assert pairs[0][1].name == "head"
    committed = text(FEW + 20).tolist()
    chance = torch.Generator().manual_seed(1)

    def advise(position: int, confidence: float) -> Advice:
        return Advice.DROP if confidence < (below or 0) else Advice.MORE

    lengths = set()
    for turn in range(30):
        length = 1 + turn % 6
        found = []
        for held, drafts in pairs:
            held.extend(committed[held.length : -1], 1)
            assert drafts.unseen(len(committed)) == len(committed) - 1 - drafts.sequence.length
            found.append(drafts.propose(committed, length, None if below is None else advise))
        one, other = found
        assert (one is None) == (other is None)
        lengths.add(0 if one is None else len(one.tokens))
        if one is not None and other is not None:
            assert one.tokens == other.tokens
            if one.probs is not None:
                for mine, theirs in zip(one.probs, other.probs, strict=True):  # type: ignore[arg-type]
                    torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(theirs), rtol=0, atol=1e-5)
        # Accept some of the tokens, as a verification does.
        tokens = [] if one is None else one.tokens
        accepted = int(torch.randint(0, len(tokens) + 1, (1,), generator=chance))
        said = int(torch.randint(0, VOCAB, (1,), generator=chance))
        for _, drafts in pairs:
            drafts.rollback(len(committed) + accepted)
        committed += [*tokens[:accepted], said]
    assert len(lengths) > 3


@pytest.mark.parametrize("ours", [True, False], ids=["kernels", "transformers"])
def test_other_weights_are_taken_over_and_given_back(ours: bool, tmp_path: Path) -> None:
    target, head = engines("gemma3", ours, grown=True)
    assert not head.ready
    held, draft = bound(target, head)
    processor = LogitsProcessor(PARAMS[0], VOCAB, head.device)
    assert ModelDrafter(draft, head, VOCAB, PARAMS[0], processor, None).limit(5) == 0  # type: ignore[arg-type]
    tokens = text(30)
    held.extend(tokens[:-1], 1)

    def said() -> torch.Tensor:
        return head.sequence_of(held).extend(tokens, 5).clone()

    before = said()
    other = randomised(randomised(Head.from_target(target.model)))
    other.write(tmp_path)
    steps = head.swap_adapter(tmp_path)
    next(steps)
    assert torch.equal(said(), before)
    assert not head.ready
    list(steps)
    assert head.ready
    right = module_logits(other, held.features(0, 29), tokens)[-5:]
    assert not torch.allclose(right, before, atol=0.1)
    torch.testing.assert_close(said(), right, rtol=0, atol=1e-3)
    head.apply_adapter(None)
    assert torch.equal(said(), before)
    assert not head.ready
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(AdaptiveError, match="cannot be read"):
        head.apply_adapter(tmp_path)
    assert torch.equal(said(), before)


@pytest.mark.parametrize("ours", [True, False], ids=["kernels", "transformers"])
def test_other_weights_are_taken_over_in_steps_of_one_tensor(ours: bool, tmp_path: Path) -> None:
    """So that an answer pauses for one tensor, not for a whole head."""
    target, head = engines("gemma3", ours, grown=True)
    randomised(randomised(Head.from_target(target.model))).write(tmp_path)
    module: Head = head.head  # type: ignore[assignment]
    for folder in (tmp_path, None):
        before = {name: tensor.clone() for name, tensor in module.own().items()}
        changed: list[str] = []
        for _ in head.swap_adapter(folder):
            now = {name: tensor.clone() for name, tensor in module.own().items()}
            changes = [name for name, tensor in now.items() if not torch.equal(tensor, before[name])]
            assert len(changes) <= 1
            changed, before = changed + changes, now
        assert len(changed) == len(set(changed))
        assert {name for name, tensor in before.items() if tensor.ndim > 1} <= set(changed)


def test_other_weights_are_taken_over_however_little_memory_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are packed into the memory of the weights before them."""
    target, head = engines("llama", grown=True)
    if head.cpu_forward is None:
        pytest.skip("there are no kernels for this processor, or none were built")
    held, tokens = bound(target, head)[0], text(30)
    held.extend(tokens[:-1], 1)
    other = randomised(randomised(Head.from_target(target.model)))
    other.write(tmp_path)
    monkeypatch.setattr(families, "PACKED_SHARE", 0.0)
    head.apply_adapter(tmp_path)
    right = module_logits(other, held.features(0, 29), tokens)[-5:]
    torch.testing.assert_close(head.sequence_of(held).extend(tokens, 5), right, rtol=0, atol=1e-3)


def test_what_is_shared_with_the_target_is_not_packed_twice() -> None:
    target, head = engines("llama")
    if target.cpu_forward is None or head.cpu_forward is None:
        pytest.skip("there are no kernels for this processor, or none were built")
    assert head.cpu_forward.plan.lm_head is target.cpu_forward.plan.lm_head
    own = {id(linear) for linear in head.cpu_forward.plan.linears}
    assert not own & {id(linear) for linear in target.cpu_forward.plan.linears[:-1]}


def test_half_as_wide_numbers_and_whole_ones_are_close(tmp_path: Path) -> None:
    """In bfloat16 and int8 the head proposes nearly the same as in float32."""
    model: PreTrainedModel = made("qwen3", torch.bfloat16)
    target = TransformersEngine(model)
    module = randomised(Head.from_target(model))
    tokens, found = text(40), []
    for int8 in (False, True):
        head: Any = HeadEngine(module, target, int8=int8)
        assert head.weights == ("int8" if int8 else "bfloat16")
        held, draft = bound(target, head)
        held.extend(tokens[:-1], 1)
        found.append(draft.extend(tokens, 20).float().softmax(-1).clone())
    exact = Head.read(written(module, tmp_path), parts(model), torch.float32)
    right = module_logits(exact, held.features(0, 39), tokens)[-20:].softmax(-1)
    for probs in found:
        assert float((probs - right).abs().sum(-1).mean() / 2) < 0.1


def written(head: Head, folder: Path) -> Path:
    """Write the head into the folder and return the folder."""
    head.write(folder)
    return folder


def parts(model: PreTrainedModel) -> Any:
    """The parts of this target that a head uses."""
    from adaptive.engines.head.parts import parts_of_model

    return parts_of_model(model)
