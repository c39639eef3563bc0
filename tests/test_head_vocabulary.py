"""Heads with a draft vocabulary: their proposals stay within the vocabulary, the output stays the target's, and a
training run chooses the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BUNDLED, save_head
from safetensors.torch import save_file
from test_head_lossless import GREEDY, alone, said, settings_of
from test_head_module import randomised
from test_head_training import SHORT, keep
from test_lossless_sampled import IDS, PARAMS, PROMPT, VOCAB, exact_distribution, p_value, run_loop
from test_trainer import BASE, speak, target
from transformers import LlamaConfig, LlamaForCausalLM

from adaptive.assistant import Assistant
from adaptive.control.policy import FixedLength
from adaptive.control.stopping import Stopping
from adaptive.engines.head.engine import HeadEngine, HeadSequence
from adaptive.engines.head.module import VOCABULARY, WEIGHTS, Head
from adaptive.engines.head.parts import parts_of_folder
from adaptive.engines.hf.engine import TransformersEngine, TransformersSequence
from adaptive.engines.protocol import ProposalCall, sequences
from adaptive.errors import AdaptiveError
from adaptive.pair import load_pair
from adaptive.types import SamplingParams
from checkpoints.store import AdapterStore
from trainers.dataset import Example, examples, read_log, split
from trainers.heads import replay_head
from trainers.replay import mean_acceptance_length
from trainers.run import distill
from trainers.vocabulary import Reads, best_size, choose_vocabulary, held_out_coverage, order, sizes
from trainers.vocabulary import said as masses

FEW = [0, 2, 3, 6, 7]


def model_of_eight() -> LlamaForCausalLM:
    """A tiny target with a vocabulary of eight tokens."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, **sizes))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


@pytest.fixture(scope="module")
def models() -> tuple[TransformersEngine, HeadEngine]:
    """``model_of_eight`` and a head that drafts among five of its tokens and disagrees with it in some places."""
    model = model_of_eight()
    target, head = TransformersEngine(model), randomised(Head.from_target(model))
    head.draft_among(torch.tensor(FEW))
    return target, HeadEngine(head, target)


def fused_head(target: TransformersEngine, head: HeadEngine) -> Any:
    """A sequence of the head whose whole proposals are one call of the kernels; skips the test without these."""
    _, found = sequences(target, head)
    assert found is not None
    if found.fused is None:
        pytest.skip("the kernels were not built, or this processor has other instructions")
    return found


def few_of(folder: Path, target: Path, ids: torch.Tensor) -> Path:
    """Give the head in ``folder`` the draft vocabulary ``ids``, in place."""
    head = Head.read(folder, parts_of_folder(target), torch.float32)
    head.draft_among(ids)
    head.write(folder)
    return folder


def both_ways(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "by-token":
        monkeypatch.setattr(TransformersSequence, "fused", None)
        monkeypatch.setattr(HeadSequence, "fused", None)


@pytest.mark.thorough(but="t1.3-one-call")
@pytest.mark.parametrize("way", ["one-call", "by-token"])
@pytest.mark.parametrize("params", PARAMS, ids=IDS)
def test_the_whole_loop_samples_from_the_target(
    models: tuple[TransformersEngine, HeadEngine], params: SamplingParams, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_ways(way, monkeypatch)
    counts = run_loop(models, params, length=2)
    assert any(set(text) - set(FEW) for text in counts)
    assert p_value(counts, exact_distribution(models[0], params)) > 0.001


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["one-call", "by-token"])
def test_over_all_seeds_the_whole_loop_samples_from_the_target(
    models: tuple[TransformersEngine, HeadEngine], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_ways(way, monkeypatch)
    counts = run_loop(models, PARAMS[1], length=2, seeded=True)
    assert p_value(counts, exact_distribution(models[0], PARAMS[1])) > 0.001


@pytest.mark.parametrize(
    "ours", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["kernels", "transformers"]
)
def test_greedy_and_seeded_output_equal_the_target_alone(ours: bool, prompts: list[str], tmp_path: Path) -> None:
    folder = BUNDLED / "target"
    head = few_of(save_head(folder, tmp_path / "head"), folder, torch.arange(0, 4096, 2))
    pair = load_pair(settings_of(folder, head))
    if not ours:
        pair.target.cpu_forward = pair.draft.cpu_forward = None  # type: ignore[union-attr, attr-defined]
    assistant, plain = Assistant(pair, FixedLength(4), None), Assistant(pair, FixedLength(0), None)
    assert said(assistant, prompts[::8], most=50) == alone(pair, prompts[::8], 50)
    assert assistant.last is not None
    assert 0 < assistant.last.accepted < assistant.last.drafted
    seeded = SamplingParams(temperature=0.8, seed=5)
    assert said(assistant, prompts[:2], seeded, 40) == said(plain, prompts[:2], seeded, 40)


@pytest.mark.thorough
@pytest.mark.parametrize("int8", [False, True], ids=["shared", "int8"])
def test_a_swap_within_an_answer_to_fewer_tokens_and_back_changes_no_token_of_it(
    int8: bool, prompts: list[str], tmp_path: Path
) -> None:
    folder = BUNDLED / "target"
    whole, few = (
        save_head(folder, tmp_path / "whole"),
        few_of(save_head(folder, tmp_path / "few"), folder, torch.arange(0, 4096, 2)),
    )
    fewer = few_of(save_head(folder, tmp_path / "fewer"), folder, torch.arange(1, 4096, 3))
    pair = load_pair(settings_of(folder, whole, draft_quantize="int8" if int8 else "none"))
    assert isinstance(pair.draft, HeadEngine)
    assistant, looks, seen = Assistant(pair, FixedLength(4), None), 0, []
    swaps = {3: ("0001", few), 8: ("0002", fewer), 13: (None, None)}

    def between() -> bool:
        nonlocal looks
        looks += 1
        if looks in swaps:
            assistant.begin_swap(*swaps[looks])
        done = assistant.finish_swap(10.0)
        seen.append(None if pair.draft.head.ids is None else len(pair.draft.head.ids))  # type: ignore[union-attr, attr-defined]
        return done

    assistant.between_rounds = between
    assert said(assistant, prompts[4:5]) == alone(pair, prompts[4:5])
    assert [size for size, last in zip(seen, [0, *seen], strict=False) if size != last] == [None, 2048, 1365, None]
    forward = pair.draft.cpu_forward
    if forward is not None:  # its forward computes what that of a freshly loaded head computes
        fresh = load_pair(settings_of(folder, whole, draft_quantize="int8" if int8 else "none"))
        found, right = (engine.sequence().extend([5, 9, 80], 2).clone() for engine in (pair.draft, fresh.draft))  # type: ignore[union-attr]
        torch.testing.assert_close(found, right)


def test_a_proposal_is_within_the_vocabulary_and_what_a_grammar_allows(
    models: tuple[TransformersEngine, HeadEngine],
) -> None:
    head = fused_head(*models)
    allowed = np.zeros(1, np.uint32)
    uniform = [0.3, 0.999, 0.6]
    for params, numbers in (
        (GREEDY, []),
        (SamplingParams(temperature=1.5), uniform),
        (SamplingParams(temperature=1.5, seed=3), []),
    ):
        for tokens in (FEW, [3, 4], [1, 4, 5]):
            allowed[0] = sum(1 << token for token in tokens)
            for mask in (None, lambda drafted: allowed.ctypes.data):
                head.rollback(0)
                found = head.fused.propose(ProposalCall(PROMPT, 3, VOCAB, params, numbers, None, mask))
                among = set(FEW) if mask is None else set(FEW) & set(tokens)
                assert len(found.tokens) == (3 if among else 0)
                assert set(found.tokens) <= among
                if found.probs is not None:
                    outside = [token for token in range(VOCAB) if token not in among]
                    assert not found.probs[:, outside].any()
                    torch.testing.assert_close(found.probs.sum(1), torch.ones(len(found.tokens)))


def test_a_draft_that_no_allowed_token_begins_is_counted_with_the_others(
    models: tuple[TransformersEngine, HeadEngine],
) -> None:
    """Else the confidences of each draft after it would be taken for those of the one before."""
    head = fused_head(*models)
    stopping, allowed = Stopping(4, 8), np.zeros(1, np.uint32)
    stopping.exactly(3)
    for tokens in (FEW, sorted(set(range(VOCAB)) - set(FEW)), FEW):
        allowed[0] = sum(1 << token for token in tokens)
        head.rollback(0)
        head.fused.propose(ProposalCall(PROMPT, 3, VOCAB, GREEDY, [], stopping, lambda drafted: allowed.ctypes.data))
    assert [len(stopping.bins_of(number)) for number in range(4)] == [3, 0, 3, 0]


def test_a_draft_vocabulary_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    model = model_of_eight()
    head = Head.from_target(model)
    head.draft_among(torch.tensor(FEW))
    head.write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["head"]["vocabulary"] == len(FEW)
    again = Head.from_target(model)
    again.load(tmp_path)
    assert again.ids is not None
    assert again.ids.tolist() == FEW
    hidden = torch.randn(2, head.width)
    with torch.no_grad():
        assert torch.equal(again.logits(hidden), head.logits(hidden))
    own = head.own()

    def refused(ids: Any, words: str, says: object = len(FEW)) -> None:
        tensors = {**own, VOCABULARY: ids} if ids is not None else {k: v for k, v in own.items() if k != VOCABULARY}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / WEIGHTS)
        (tmp_path / "config.json").write_text(json.dumps(config | {"head": {**config["head"], "vocabulary": says}}))
        with pytest.raises(AdaptiveError, match=words) as raised:
            again.load(tmp_path)
        assert "\n" not in str(raised.value)
        assert again.ids is not None
        assert again.ids.tolist() == FEW, "what it drafted among before stays"

    refused(torch.tensor([0, 2, 2, 6, 7]), "names a token twice")
    refused(torch.tensor([0, 3, 2, 6, 7]), "not in increasing order")
    refused(torch.tensor([0, 2, 3, 6, 8]), "tokens from 0 to 8, and the target's are 0 to 7")
    refused(torch.tensor([-1, 2, 3, 6, 7]), "tokens from -1 to 7")
    refused(torch.tensor([0.0, 2.0, 3.0, 6.0, 7.0]), "no list of token ids")
    refused(torch.zeros(0, dtype=torch.long), "no list of token ids")
    refused(torch.tensor([0, 2]), "says that it drafts among 5 tokens, and .* lists 2")
    refused(None, "says that it drafts among 5 tokens, and .* lists none")
    refused(torch.tensor(FEW), "lists 5", says=None)
    refused(torch.tensor(FEW), "another format", says="many")


def answer(tokens: list[int], prompt: tuple[int, ...] = (1,)) -> Example:
    """A greedy answer."""
    output = np.array(tokens, np.int32)
    return Example(1, "", np.array(prompt, np.int32), output, SamplingParams(temperature=0.0), False, None)


def test_as_many_tokens_are_drafted_among_as_pay() -> None:
    vocab = 100_000
    reads = Reads(layer=20_000, row=10, target=2_000_000)
    # Frequencies fall with the rank, as those of words do: each further token adds less coverage.
    rng = np.random.default_rng(0)
    shares = 1 / np.arange(1, vocab + 1) ** 1.3
    names = rng.permutation(vocab)
    spoken = [answer(names[rng.choice(vocab, 300, p=shares / shares.sum())].tolist()) for _ in range(100)]
    covered = held_out_coverage(spoken, vocab, sizes(vocab))
    assert list(covered.values()) == sorted(covered.values())
    assert 0.5 < covered[2048] < covered[65536] < 1
    found = choose_vocabulary(spoken, vocab, reads, 4)
    assert found is not None
    size = best_size(covered, reads, vocab, 4)
    assert len(found) == size < vocab
    assert torch.equal(found, found.unique())
    assert {int(names[i]) for i in range(20)} <= set(found.tolist())
    # The dearer a row, the fewer tokens pay for theirs; where rows cost next to nothing, all tokens stay.
    dear, cheap = Reads(20_000, 100, 2_000_000), Reads(2_000_000, 1, 20_000_000)
    assert best_size(covered, dear, vocab, 4) <= size
    assert best_size(covered, cheap, vocab, 4) == vocab
    # All tokens also stay with a small target vocabulary, an empty log, or a log that does not predict later answers.
    assert choose_vocabulary(spoken, 4096, dear, 4) is None
    assert choose_vocabulary([], vocab, dear, 4) is None
    apart = [answer(list(range(place, place + 50))) for place in range(50_000, 90_000, 100)]
    assert choose_vocabulary(apart, vocab, reads, 4) is None


def test_answers_count_more_than_prompts_and_those_before_what_nobody_said() -> None:
    mass, asked = masses([answer([7, 7, 5], prompt=(9,) * 5)], 12)
    assert order(mass, asked)[:6].tolist() == [7, 5, 9, 0, 1, 2]


def wide_target(folder: Path, vocab: int) -> Path:
    """The trainer's tiny target with a vocabulary of ``vocab`` tokens; embeddings of the added tokens are zero."""
    small = target()
    config = type(small.config)(**{**small.config.to_dict(), "vocab_size": vocab})
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    weights = small.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        wide = torch.zeros(vocab, config.hidden_size)
        wide[: len(weights[name])] = weights[name]
        weights[name] = wide
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    return folder


@pytest.mark.thorough
def test_a_training_run_chooses_one_and_the_gate_judges_with_it(tmp_path: Path) -> None:
    vocab = 12_000
    spool = keep(tmp_path, speak(target(), 100, SamplingParams(temperature=0.7)))
    folder, log, store = wide_target(tmp_path / "wide", vocab), tmp_path / "records.db", AdapterStore(tmp_path / "a")
    head = Head(parts_of_folder(folder), torch.float32)
    first = distill(log, store, BASE, head, SHORT, spool=spool)
    assert first.manifest is not None
    assert first.manifest.status == "promoted", first.message
    noted = first.manifest.hyperparameters
    assert (noted["vocabulary"], noted["vocabulary_of"], noted["vocabulary_coverage"]) == (2048, vocab, 1.0)
    assert first.manifest.vocabulary == "drafts among 2,048 of 12,000 tokens: 100.0% of what was said"
    assert first.manifest.recent is not None
    parts = parts_of_folder(folder)
    again = Head.read(store.path(first.manifest.id), parts, torch.float32)
    assert again.ids is not None
    assert set(range(48)) <= set(again.ids.tolist())
    gate = [e for e in examples(split(read_log(log, 1000), first=True).gate, 64, spool) if e.replayable]
    after = first.manifest.recent.mean_acceptance_length_after.mean
    assert mean_acceptance_length(replay_head(again, gate, 4), 4) == pytest.approx(after, rel=1e-5)
    # The gate counts tokens outside the draft vocabulary as never accepted, and the others as at least as likely as
    # before.
    before = replay_head(again, gate, 4)
    again.draft_among(again.ids[again.ids >= 24])
    for example, one, other in zip(gate, before, replay_head(again, gate, 4), strict=True):
        outside = example.output[1:] < 24
        assert outside.any()
        assert not other.acceptance[:, outside].any()
        assert (other.acceptance[:, ~outside] >= one.acceptance[:, ~outside] - 1e-6).all()


@pytest.mark.thorough
def test_it_is_chosen_again_at_the_next_run(tmp_path: Path) -> None:
    spool = keep(tmp_path, speak(target(), 100, SamplingParams(temperature=0.7)))
    folder = wide_target(tmp_path / "wide", 12_000)
    given = Head(parts_of_folder(folder), torch.float32)
    given.draft_among(torch.arange(10_000, 12_000))
    (tmp_path / "given").mkdir()
    given.write(tmp_path / "given")
    head = Head.read(tmp_path / "given", parts_of_folder(folder), torch.float32)
    store = AdapterStore(tmp_path / "a")
    outcome = distill(tmp_path / "records.db", store, BASE, head, SHORT, spool=spool, promotion="never")
    assert outcome.manifest is not None
    assert outcome.manifest.recent is not None
    assert outcome.manifest.recent.acceptance_before.mean == 0.0, "it could say nothing of what is said"
    assert outcome.manifest.recent.acceptance_after.mean > 0.1
    assert outcome.manifest.hyperparameters["vocabulary"] == 2048


def test_passes_that_were_recorded_for_other_tokens_are_not_replayed() -> None:
    """Passes that a device would replay are recorded here, and run again."""
    model = model_of_eight()
    target = TransformersEngine(model)
    head = HeadEngine(randomised(Head.from_target(model)), target)
    target.cpu_forward = head.cpu_forward = None
    head.passes.record()
    recorded = head.passes.recorded
    assert recorded is not None
    _, sequence = sequences(target, head)
    assert isinstance(sequence, HeadSequence)

    def passes() -> torch.Tensor:
        sequence.rollback(len(PROMPT))
        return sequence.extend([4], 1).clone()

    sequence.extend(PROMPT, 1)
    sequence.prepare(32)
    whole, replayed = passes(), recorded.replayed
    assert replayed == 1
    few = {name: tensor.clone() for name, tensor in head.head.own().items()} | {VOCABULARY: torch.tensor(FEW)}
    for _ in head._take(head.head, few):
        pass
    outside = [token for token in range(VOCAB) if token not in FEW]
    for count in (replayed, replayed + 1):
        found = passes()
        assert recorded.replayed == count
        assert (found[:, outside] == -torch.inf).all()
        torch.testing.assert_close(found[:, FEW], whole[:, FEW])
        sequence.rollback(len(PROMPT))
        sequence.prepare(32)
