"""Replay predicts speculative decoding without the target; here it is compared with real decoding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from adaptive.decoding.verify import verify_sampled
from adaptive.sampling import Uniform, transform_logits
from adaptive.types import SamplingParams, Supervision
from trainers import replay as replay_module
from trainers.batches import PASS_TOKENS, passes
from trainers.dataset import Example
from trainers.replay import (
    ROWS,
    Replay,
    Stopped,
    acceptance_rate,
    expected_rounds,
    mean_acceptance_length,
    position_acceptance,
    replay,
)

VOCAB = 5


def llama(seed: int, layers: int = 1) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


def next_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, -1].float()


def greedy_example(target: PreTrainedModel, prompt: list[int], length: int, limited: bool = True) -> Example:
    ids = list(prompt)
    for _ in range(length):
        ids.append(int(next_logits(target, ids).argmax()))
    return Example(
        1, "", np.array(prompt, np.int32), np.array(ids[len(prompt) :], np.int32), SamplingParams(), limited, None
    )


def speculative_rounds(
    accepts: Callable[[list[int], int], bool], example: Example, draft_length: int, known_limit: bool
) -> tuple[int, int]:
    """Accepted tokens and rounds of decoding ``example`` step by step, as the loop does."""
    output = example.output.tolist()
    done, accepted, rounds = 1, 0, 0
    while done < len(output):
        left = len(output) - done
        length = min(draft_length, left - 1) if known_limit else draft_length
        rounds += 1
        kept = 0
        while kept < min(length, left) and accepts(
            example.prompt.tolist() + output[: done + kept], output[done + kept]
        ):
            kept += 1
        accepted += kept
        done += kept + 1
    return accepted, rounds


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("draft_length", [1, 4, 9])
def test_greedy_replay_equals_decoding_step_by_step(draft_length: int, limited: bool) -> None:
    target, draft = llama(0, layers=2), llama(1)
    examples = [greedy_example(target, [seed, 4 - seed], 20 + seed, limited) for seed in range(5)]
    # At a few positions the draft is made right, so that rounds of every length occur.
    rng = np.random.default_rng(0)
    found = replay(draft, examples)
    for example, one in zip(examples, found, strict=True):
        text = torch.tensor([example.prompt.tolist() + example.output.tolist()])
        with torch.no_grad():
            best = draft(input_ids=text).logits[0].argmax(-1)[len(example.prompt) : -1].numpy()
        right = (best == example.output[1:]).tolist()
        assert one.acceptance.tolist() == [right]
        mixed = Replay(1, (rng.random((1, len(right))) < 0.7).astype(np.float32), limited)
        offset = len(example.prompt) + 1

        def accepts(context: list[int], token: int, mixed: Replay = mixed, offset: int = offset) -> bool:
            return bool(mixed.acceptance[0, len(context) - offset])

        wanted = speculative_rounds(accepts, example, draft_length, limited)
        accepted, rounds = expected_rounds([mixed], draft_length)
        assert (accepted[0], rounds[0]) == pytest.approx(wanted)
        assert mean_acceptance_length([mixed], draft_length) == pytest.approx(1 + wanted[0] / wanted[1])


def test_expected_rounds_of_several_generations_do_not_mix() -> None:
    rng = np.random.default_rng(0)
    several = [Replay(i, rng.random((1, n)).astype(np.float32), i % 2 == 0) for i, n in enumerate((1, 3, 40, 17))]
    accepted, rounds = expected_rounds(several, 4)
    for index, one in enumerate(several):
        alone = expected_rounds([one], 4)
        assert (accepted[index], rounds[index]) == pytest.approx((alone[0][0], alone[1][0]))


def test_a_further_step_of_a_draft_takes_its_own_row() -> None:
    """Against all outcomes of a short text, enumerated."""
    rng = np.random.default_rng(1)
    one = Replay(1, rng.random((3, 5)).astype(np.float32), limited=False)
    wanted = dict.fromkeys(("accepted", "rounds"), 0.0)

    def follow(position: int, step: int, probability: float) -> None:
        """Enumerate all continuations from here; ``step`` tokens of this round's draft were accepted."""
        if position == 5:
            return
        if step == 0:
            wanted["rounds"] += probability
        if step == 4:  # the draft has ended, and the target adds a token
            follow(position + 1, 0, probability)
            return
        stands = float(one.acceptance[min(step, 2), position])
        wanted["accepted"] += probability * stands
        follow(position + 1, step + 1, probability * stands)
        follow(position + 1, 0, probability * (1 - stands))

    follow(0, 0, 1.0)
    accepted, rounds = expected_rounds([one], 4)
    assert (accepted[0], rounds[0]) == pytest.approx((wanted["accepted"], wanted["rounds"]))


def next_token_tables(
    model: PreTrainedModel, prompt: list[int], depth: int, params: SamplingParams
) -> list[torch.Tensor]:
    """Distributions after every continuation of ``prompt``: table d is (VOCAB ** d, VOCAB), in counting order."""
    tables = []
    for length in range(depth):
        continuations = list(itertools.product(range(VOCAB), repeat=length))
        every = torch.tensor(continuations, dtype=torch.long).reshape(len(continuations), length)
        ids = torch.cat([torch.tensor(prompt).expand(len(every), -1), every], dim=1)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, -1].float()
        tables.append(transform_logits(logits, params).softmax(-1))
    return tables


def place(ids: list[int]) -> int:
    """Row of the continuation ``ids`` in its table."""
    return sum(token * VOCAB**power for power, token in enumerate(reversed(ids)))


@pytest.mark.thorough(but="params0")
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, top_k=3),
    ],
)
def test_sampled_replay_agrees_with_really_running_the_acceptance_rule(params: SamplingParams) -> None:
    """Over texts made by speculative sampling, the mean of replayed acceptance is the mean of real acceptance."""
    target, draft = llama(0, layers=2), llama(1)
    generator = torch.Generator().manual_seed(0)
    uniform = Uniform(generator)
    prompt, length, runs, draft_length = [3, 4], 5, 1500, 3
    p_tables, q_tables = (next_token_tables(model, prompt, length, params) for model in (target, draft))
    examples, accepted, rounds = [], [], []
    for _ in range(runs):
        first = p_tables[0][0]
        ids = [int(torch.multinomial(first, 1, generator=generator))]
        chosen = [float(first[ids[0]].log())]
        accepted.append(0)
        rounds.append(0)
        while len(ids) < length:
            drafted: list[int] = []
            while len(drafted) < min(draft_length, length - len(ids) - 1):
                q_row = q_tables[len(ids) + len(drafted)][place(ids + drafted)]
                drafted.append(int(torch.multinomial(q_row, 1, generator=generator)))
            at = [(len(ids) + i, place(ids + drafted[:i])) for i in range(len(drafted) + 1)]
            p = torch.stack([p_tables[depth][row] for depth, row in at])
            q = torch.stack([q_tables[depth][row] for depth, row in at])[:-1]
            verdict = verify_sampled(p, drafted, q, uniform)
            ids += verdict.tokens
            chosen += map(float, verdict.chosen)
            accepted[-1] += verdict.accepted
            rounds[-1] += 1
        examples.append(sampled_example(prompt, ids, chosen, params))
    expected_accepted, expected_count = expected_rounds(replay(draft, examples), draft_length)
    for really, expected in ((np.array(accepted), expected_accepted), (np.array(rounds), expected_count)):
        error = (really - expected).std() / runs**0.5
        assert really.mean() == pytest.approx(expected.mean(), abs=4 * error + 1e-3)


def sampled_example(prompt: list[int], output: list[int], chosen: list[float], params: SamplingParams) -> Example:
    n = len(output)
    supervision = Supervision(
        np.zeros((n, 1), np.int32), np.zeros((n, 1), np.float16), np.zeros(n, np.float16), np.array(chosen, np.float16)
    )
    return Example(1, "", np.array(prompt, np.int32), np.array(output, np.int32), params, True, supervision)


def test_sampled_acceptance_averages_to_the_overlap_of_the_distributions() -> None:
    """Exact at one position: the mean over x ~ p of min(1, q(x) / p(x)) is sum min(p, q)."""
    target, draft = llama(0, layers=2), llama(1)
    params = SamplingParams(temperature=0.8)
    p, q = (transform_logits(next_logits(m, [3, 4, 0])[None], params)[0].softmax(-1) for m in (target, draft))
    examples = [sampled_example([3, 4], [0, token], [0.0, float(p[token].log())], params) for token in range(VOCAB)]
    examples = [replace(example, limited=False) for example in examples]
    found = np.array([r.acceptance[0, 0] for r in replay(draft, examples)])
    assert float((p.numpy() * found).sum()) == pytest.approx(float(torch.minimum(p, q).sum()), abs=2e-3)


def test_batches_of_unequal_lengths_do_not_change_a_replay() -> None:
    target, draft = llama(0, layers=2), llama(1)
    examples = [greedy_example(target, [i % VOCAB for i in range(1, 2 + seed)], 5 + 3 * seed) for seed in range(6)]
    together = replay(draft, examples)
    for example, one in zip(examples, together, strict=True):
        np.testing.assert_array_equal(one.acceptance, replay(draft, [example])[0].acceptance)


def test_replay_works_for_an_architecture_with_absolute_positions() -> None:
    torch.manual_seed(0)
    draft = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=16, n_layer=1, n_head=2)).eval()
    examples = [greedy_example(draft, [i % VOCAB for i in range(1, 3 + seed)], 8 + seed) for seed in range(3)]
    assert acceptance_rate(replay(draft, examples)) == 1.0


def test_penalties_apply_to_the_draft_as_they_did_when_the_text_was_made() -> None:
    draft = llama(1)
    params = SamplingParams(repetition_penalty=3.0, frequency_penalty=0.5, logit_bias={4: 2.0})
    from adaptive.sampling import LogitsProcessor

    penalties = LogitsProcessor(params, VOCAB, torch.device("cpu"))
    prompt, ids = [1, 2, 3], [1, 2, 3]
    penalties.start(torch.tensor(prompt))
    for _ in range(15):
        logits = penalties.apply(next_logits(draft, ids)[None], torch.empty(0, dtype=torch.long))
        ids.append(int(logits.argmax()))
        penalties.commit(ids[-1:])
    output = np.array(ids[3:], np.int32)
    example = Example(1, "", np.array(prompt, np.int32), output, params, True, None)
    assert acceptance_rate(replay(draft, [example])) == 1.0
    plain = Example(1, "", np.array(prompt, np.int32), output, SamplingParams(), True, None)
    assert acceptance_rate(replay(draft, [plain])) < 1.0


def test_passes_lose_nothing_and_stay_within_their_limit() -> None:
    rng = np.random.default_rng(0)
    examples = [
        Example(i, "", np.zeros(p, np.int32), np.zeros(o, np.int32), SamplingParams(), False, None)
        for i, (p, o) in enumerate(rng.integers(1, 900, (60, 2)))
    ]
    groups = list(passes(examples, 1024, 1000))
    assert [e.id for group in groups for e in group] == list(range(60))
    for group in groups:
        width = max(min(1024, len(e.prompt) + len(e.output) - 1) for e in group)
        assert len(group) == 1 or width * len(group) <= PASS_TOKENS


def test_replay_stops_between_passes_when_asked() -> None:
    target = llama(0)
    with pytest.raises(Stopped):
        replay(target, [greedy_example(target, [1, 2], 5)], should_stop=lambda: True)


class MostRows(TorchDispatchMode):
    """Notes the most rows of ``vocab`` numbers that any operation returns."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.rows = vocab, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self.vocab,):
                self.rows = max(self.rows, tensor.numel() // self.vocab)
        return made


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1),
        SamplingParams(temperature=0.8, top_k=30, top_p=0.9, min_p=0.01, frequency_penalty=0.3, logit_bias={4: 2.0}),
    ],
)
def test_a_long_answer_is_judged_in_blocks_with_the_same_result(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, vocab = np.random.default_rng(0), 101
    output = rng.integers(0, vocab, 200).tolist()
    example = sampled_example([1, 2, 3], output, rng.normal(-2, 1, 200).tolist(), params)
    logits = torch.randn(200, vocab, generator=torch.Generator().manual_seed(0))
    logits[torch.arange(0, 200, 3), torch.tensor(output)[::3]] += 5  # so that some are accepted
    with MostRows(vocab) as most:
        found = position_acceptance(logits, example)
    assert most.rows <= ROWS < 200
    monkeypatch.setattr(replay_module, "ROWS", 200)
    with MostRows(vocab) as most:
        assert torch.equal(found, position_acceptance(logits, example))
    assert most.rows == 200
    assert 0.1 < float(found.mean()) < 0.9


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=30, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=0.8, frequency_penalty=0.3, logit_bias={4: 2.0}),
    ],
)
def test_a_draft_of_few_tokens_is_judged_by_its_own_logits_as_by_all(params: SamplingParams) -> None:
    rng, vocab = np.random.default_rng(0), 101
    output = rng.integers(0, vocab, 200).tolist()
    example = sampled_example([1, 2, 3], output, rng.normal(-2, 1, 200).tolist(), params)
    ids = torch.arange(0, 90, 2)
    logits = torch.randn(200, len(ids), generator=torch.Generator().manual_seed(0)) * 3
    whole = torch.full((200, vocab), -torch.inf).index_copy(1, ids, logits)
    found = position_acceptance(logits, example, ids)
    torch.testing.assert_close(found, position_acceptance(whole, example))
    lacking = torch.tensor([token % 2 == 1 or token >= 90 for token in output])
    assert lacking.any()
    assert not found[lacking].any()
    assert found.any()


def test_a_replay_keeps_the_fold_of_its_prompt() -> None:
    target = llama(0)
    example = replace(greedy_example(target, [1, 2], 5), fold=0.25)
    assert [one.fold for one in replay(target, [example])] == [0.25]
