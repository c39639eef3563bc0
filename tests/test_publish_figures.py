"""What is computed from the figures of another server: costs of a round, draft lengths, chances, and what is worse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from test_publish import measured

from adaptive.upstream.lengths import RoundCosts, advise, round_costs
from adaptive.upstream.measure import Answered, Measured, counted, each_accepted
from cli.publish import compared
from cli.publish_trial import Tried, worse_than


def answers(round_s: float, token_s: float, lengths: list[float]) -> list[Answered]:
    """One answer of 40 rounds per mean length in ``lengths``, with half of the drafted tokens accepted."""
    made = []
    for length in lengths:
        drafted = round(40 * length)
        accepted = drafted // 2
        made.append(Answered(40 + accepted, 40 * round_s + drafted * token_s, drafted, accepted))
    return made


def test_the_costs_of_a_round_are_told_by_answers_that_drafted_differently() -> None:
    found = round_costs([each(answers(0.05, 0.004, [1, 2, 2.5, 4, 0]))])
    assert found is not None
    assert (found.round_s, found.token_s) == (pytest.approx(0.05), pytest.approx(0.004))
    assert not found.assumed
    same = round_costs([each(answers(0.05, 0.004, [4, 4, 4]))])
    assert same is not None
    assert same.assumed
    assert same.round_s + 4 * same.token_s == pytest.approx(0.05 + 4 * 0.004)  # the cost at that length is known
    assert round_costs([each([Answered(10, 1.0, None, None)])]) is None


def each(answered: list[Answered]) -> Measured:
    return Measured(tuple(answered), None, None, None)


def test_the_costs_of_a_round_are_told_by_the_totals_of_two_measurements() -> None:
    """vLLM does not count the drafted tokens of an answer."""
    made = []
    for length in (0, 3):
        (one,) = answers(0.05, 0.004, [length])
        alone = dataclasses.replace(one, drafted=None, accepted=None)
        made.append(Measured((alone,), one.drafted, one.accepted, None))
    found = round_costs(made)
    assert found is not None
    assert (found.round_s, found.token_s) == (pytest.approx(0.05), pytest.approx(0.004))
    assert not found.assumed


def test_the_length_is_the_one_with_the_most_tokens_a_second() -> None:
    tokens = [sum(0.7**i for i in range(k + 1)) for k in range(9)]
    rates = [t / (0.05 + k * 0.006) for k, t in enumerate(tokens)]
    found = advise(tokens, RoundCosts(0.05, 0.006, False))
    assert found.length == int(np.argmax(rates)) == 4
    assert found.tokens_per_second == pytest.approx(max(rates))
    assert found.plain_per_second == pytest.approx(20)
    assert advise(tokens, RoundCosts(0.05, 0.05, False)).length == 0


def test_metrics_are_read_in_each_server_s_words() -> None:
    vllm = """# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 400.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 100.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 2.5e2
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
"""
    assert (counted(vllm).drafted, counted(vllm).accepted) == (500, 250)
    assert counted('sglang:spec_accept_length{model_name="m"} 2.75\n').length == 2.75
    assert counted("").drafted is None
    assert (counted("vllm:other 1\n").drafted, counted("vllm:other 1\n").accepted) == (0, 0)  # it runs without a draft


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8, 1.0])
def test_the_chance_of_a_token_does_not_depend_on_the_draft_length(chance: float) -> None:
    for length in (1, 2, 8):
        accepted = sum(chance**i for i in range(1, length + 1))
        found = each_accepted(measured(10_000 * length, round(10_000 * accepted), 10_000))
        assert found == pytest.approx(chance, abs=2e-3)
    assert each_accepted(measured(0, 0)) is None


def test_what_is_worse_is_told_by_acceptance_else_by_speed() -> None:
    assert worse_than(measured(400, 200), measured(400, 190)) is not None
    assert worse_than(measured(400, 200), measured(400, 210, seconds=9.0)) is None
    assert worse_than(measured(100, 50), measured(800, 100)) is None  # longer drafts, equal chance per token
    assert worse_than(measured(0, 0), measured(400, 200, seconds=4.0)) is not None
    assert worse_than(measured(0, 0), measured(400, 200)) is None
    assert worse_than(measured(400, 200), measured(0, 0)) is not None


@pytest.mark.parametrize(("plain_s", "busy"), [(0.1, False), (0.5, True)])
def test_a_gain_that_no_draft_can_bring_is_named(plain_s: float, busy: bool) -> None:
    """Two drafted tokens a round, half of them accepted: at most twice the speed of plain decoding at 0.1 s a token."""
    before = Measured((Answered(40, 40 * plain_s, None, None),), None, None, None)
    after = Measured((Answered(80, 40 * 0.11, 80, 40),), 80, 40, None)
    said = compared(before, Tried(2, after, None), None)
    assert ("cannot bring more than 2.0 times" in said) is busy
