"""Supervision from a server's log-probabilities is the target's own distribution, whatever the server did to it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from conftest import BUNDLED

from adaptive.sampling import transform_logits
from adaptive.types import SamplingParams
from adaptive.upstream.distributions import supervision
from adaptive.upstream.kinds import ADAPTIVE, LLAMA_SERVER, SGLANG, VLLM, Kind
from adaptive.upstream.reports import NONE_BELOW, Choice, Collected, Named, Report
from adaptive.upstream.surgery import cut
from adaptive.upstream.vocabulary import Tokens, Vocabulary


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    from transformers import AutoTokenizer

    return Vocabulary(AutoTokenizer.from_pretrained(BUNDLED / "target"))


@pytest.fixture(scope="module")
def logits(vocabulary: Vocabulary) -> torch.Tensor:
    """Logits of 60 positions, spread like a trained model's: a few likely tokens and a long tail."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.arange(1, vocabulary.size + 1).log()
    rows = [-(1.2 + 1.5 * torch.rand(1, generator=generator)) * ranks for _ in range(60)]
    return torch.stack([row[torch.randperm(len(row), generator=generator)] for row in rows])


def reported(logprobs: torch.Tensor, tokens: torch.Tensor, count: int) -> list[Report]:
    """The reports of a server for these tokens, from log-probabilities (n, vocab)."""
    top = logprobs.topk(count, dim=-1)
    reports = []
    for row, token, values, ids in zip(
        logprobs, tokens.tolist(), top.values.tolist(), top.indices.tolist(), strict=True
    ):
        alternatives = tuple(Named(i, "", v) for i, v in zip(ids, values, strict=True))
        reports.append(Report(Named(token, "", float(row[token])), alternatives))
    return reports


@pytest.mark.parametrize("kind", [LLAMA_SERVER, VLLM, SGLANG, ADAPTIVE], ids=lambda kind: kind.name)
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.4])
def test_supervision_is_the_distribution_at_temperature_1(
    kind: Kind, temperature: float, logits: torch.Tensor, vocabulary: Vocabulary
) -> None:
    sampling = SamplingParams(temperature=temperature)
    truth = logits.log_softmax(-1)
    shown = (logits / temperature).log_softmax(-1) if kind.tempered and temperature else truth
    tokens = truth.argmax(-1)
    made = supervision(reported(shown, tokens, 32), vocabulary, sampling, kind)
    assert made is not None
    top = truth.topk(32, dim=-1)
    assert np.array_equal(made.ids, top.indices.numpy())
    ratios = made.logprobs.astype(np.float32) - made.logprobs[:, :1].astype(np.float32)
    assert np.abs(ratios - (top.values - top.values[:, :1]).numpy()).max() < 0.01  # exact up to float16
    exact = not (kind.tempered and temperature not in (0.0, 1.0))
    assert np.abs(made.logprobs.astype(np.float32) - top.values.numpy()).max() < (0.01 if exact else 0.2)
    left = (1 - top.values.exp().sum(-1)).log().numpy()
    assert np.abs(made.rest.astype(np.float32) - left).max() < (0.01 if exact else 0.75)
    if not exact:  # the result is much nearer than the reported values
        assert (shown.topk(32).values - top.values).abs().max() > 0.5


@pytest.mark.parametrize("cuts", [{}, {"top_k": 10}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 12, "top_p": 0.8}])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("kind", [VLLM, SGLANG, LLAMA_SERVER], ids=lambda kind: kind.name)
def test_chosen_is_what_the_token_was_drawn_with(
    kind: Kind, temperature: float, cuts: dict[str, float], logits: torch.Tensor, vocabulary: Vocabulary
) -> None:
    sampling = SamplingParams(temperature=temperature, **cuts)  # type: ignore[arg-type]
    if kind.heat_last:
        kept = transform_logits(logits, SamplingParams(temperature=1.0, **cuts))  # type: ignore[arg-type]
        drawn = (kept / temperature).log_softmax(-1)
    else:
        drawn = transform_logits(logits, sampling).log_softmax(-1)
    torch.manual_seed(0)
    tokens = torch.multinomial(drawn.exp(), 1)[:, 0]
    shown = logits / temperature if kind.tempered else logits
    made = supervision(reported(shown.log_softmax(-1), tokens, 32), vocabulary, sampling, kind)
    assert made is not None
    truth = drawn.gather(-1, tokens[:, None])[:, 0].numpy()
    assert np.abs(made.chosen.astype(np.float32) - truth).max() < 0.06
    greedy = supervision(reported(logits.log_softmax(-1), tokens, 4), vocabulary, SamplingParams(), VLLM)
    assert greedy is not None
    assert not greedy.chosen.any()


def test_a_token_without_alternatives_leaves_the_answer_without_supervision(vocabulary: Vocabulary) -> None:
    """llama.cpp's server reports a token accepted from a draft like this: probability 1 and no alternatives."""
    known = Report(Named(5, "", -0.5), (Named(5, "", -0.5), Named(6, "", -1.5)))
    accepted = Report(Named(7, "", 0.0), ())
    assert supervision([known, known], vocabulary, SamplingParams(), LLAMA_SERVER) is not None
    assert supervision([known, accepted], vocabulary, SamplingParams(), LLAMA_SERVER) is None


def output(vocabulary: Vocabulary, choice: Choice, counted: int | None) -> list[int] | None:
    found = vocabulary.output(choice, counted)
    return None if found is None else found.ids


def test_tokens_are_known_by_id_by_number_or_by_text(vocabulary: Vocabulary) -> None:
    text = " the"
    number = vocabulary.tokenizer.encode(text, add_special_tokens=False)[0]
    chat = {"content": [
        {"id": 9, "token": "?", "logprob": -1.0, "top_logprobs": []},
        {"token": "token_id:11", "logprob": -1.0, "top_logprobs": [{"token": "token_id:12", "logprob": -2.0}]},
        {"token": vocabulary.tokenizer.decode([number]), "logprob": -1.0, "top_logprobs": []},
    ]}  # fmt: skip
    collected = Collected()
    add(collected, {"choices": [{"index": 0, "logprobs": chat, "text": text}]})
    older = {
        "tokens": ["token_id:3"],
        "token_logprobs": [-9999.0],
        "top_logprobs": [{"token_id:4": -0.1, "a": -9999.0}],
    }
    add(collected, {"choices": [{"index": 1, "logprobs": older, "finish_reason": "stop"}]})
    assert output(vocabulary, collected.choices[0], None) == [9, 11, number]
    (report,) = collected.choices[1].reports
    assert [vocabulary.id_of(one) for one in report.alternatives] == [4]
    assert report.token.logprob <= NONE_BELOW


def add(collected: Collected, said: object) -> None:
    collected.add(cut(json.dumps(said), absent=False))


def test_an_answer_that_is_only_text_is_logged_if_its_tokens_are_counted(vocabulary: Vocabulary) -> None:
    text = "Once upon a time there was a dog."
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False)
    collected = Collected()
    add(collected, {"choices": [{"index": 0, "message": {"content": text}, "finish_reason": "stop"}]})
    choice = collected.choices[0]
    assert output(vocabulary, choice, len(ids)) == ids
    assert output(vocabulary, choice, len(ids) + 1) == ids  # which token ended the answer is not known
    assert output(vocabulary, choice, len(ids) + 2) is None
    assert output(vocabulary, choice, None) is None
    cut = Choice(pieces=[text], finish_reason="length")
    assert output(vocabulary, cut, len(ids)) == ids
    assert output(vocabulary, cut, len(ids) + 1) is None
    thinking = {"message": {"reasoning": "It was. ", "content": text}, "finish_reason": "stop"}
    add(collected, {"choices": [{"index": 1, **thinking}]})
    whole = vocabulary.tokenizer.encode("It was. " + text, add_special_tokens=False)
    assert collected.choices[1].text == "It was. " + text
    assert output(vocabulary, collected.choices[1], len(whole) + 1) is None  # the count has the mark between them


def test_an_answer_of_which_tokens_are_not_reported_is_told_by_its_text(vocabulary: Vocabulary) -> None:
    """llama.cpp's server does not report tokens that end within a character, nor in a stream those that it verified
    together."""
    text = "A bird 🙂 sings in the old tree."
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False)

    def reported(places: Sequence[int], finish_reason: str | None) -> Choice:
        reports = [Report(Named(ids[place], "", -0.5), (Named(ids[place], "", -0.5),)) for place in places]
        return Choice(reports, [text], finish_reason=finish_reason)

    everything = range(len(ids))
    broken = next(n for n in everything if "\ufffd" in vocabulary.tokenizer.decode(ids[n : n + 1]))
    assert output(vocabulary, reported(everything, "length"), len(ids)) == ids
    assert output(vocabulary, reported(everything, "stop"), len(ids) + 1) == ids  # the end token has no event
    for places in ([n for n in everything if n != broken], [0, 1]):
        assert output(vocabulary, reported(places, "stop"), len(ids) + 1) == ids
        assert output(vocabulary, reported(places, "length"), len(ids)) == ids
        assert output(vocabulary, reported(places, None), None) is None  # cut off, and no count of tokens
    ids.append(vocabulary.tokenizer.eos_token_id)  # reported, so that there are as many reports as text tokens
    found = vocabulary.output(reported([n for n in range(len(ids)) if n != broken], "stop"), len(ids))
    assert found == Tokens(ids[:-1], reported=False)
    assert vocabulary.output(reported(range(len(ids)), "stop"), len(ids)) == Tokens(ids, reported=True)


def test_without_a_count_every_character_shown_must_be_of_a_reported_token(vocabulary: Vocabulary) -> None:
    """Servers hold text back that may begin a tool call, and show it later without a report of its token."""
    text = "The value of a < b is false"
    end = vocabulary.tokenizer.eos_token_id
    ids = [*vocabulary.tokenizer.encode(text, add_special_tokens=False), end]

    def said(ids: Sequence[int], text: str) -> list[int] | None:
        return output(vocabulary, Choice([Report(Named(id, "", -0.5), ()) for id in ids], [text]), None)

    for text_shown in (text, " " + text):  # the tokenizers of some models leave the first space out
        assert said(ids, text_shown) == ids
        for place in range(len(ids) - 1):
            assert said([*ids[:place], *ids[place + 1 :]], text_shown) is None


def test_the_end_is_the_only_token_that_may_be_missing(vocabulary: Vocabulary) -> None:
    text = "It is so."
    ids = [*vocabulary.tokenizer.encode(text, add_special_tokens=False), vocabulary.tokenizer.eos_token_id]
    reports = [Report(Named(id, "", -0.5), ()) for id in ids]
    assert output(vocabulary, Choice(reports[:-1], [text], finish_reason="stop"), len(ids)) == ids[:-1]
    assert output(vocabulary, Choice(reports, [text], finish_reason="stop"), len(ids)) == ids
    assert output(vocabulary, Choice(reports, [text], finish_reason="stop"), len(ids) + 1) is None
