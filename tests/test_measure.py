"""Measured costs are right whatever load the machine had while they were measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import BUNDLED
from spinning import spinning
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from adaptive import timed_rounds
from adaptive.control.bounds import bounded, doubtful, with_neighbours
from adaptive.control.costs import LONGEST
from adaptive.engines.threads import ThreadChoice
from adaptive.measure import Measured, measure, measuring
from adaptive.pair import Pair, load_pair
from adaptive.settings import load_settings
from adaptive.timed_rounds import Samples, TimedRounds
from adaptive.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(load_settings({}))


def test_what_other_lengths_contradict_is_measured_again() -> None:
    # Once measured beside another program: verifying two tokens took 3.2 times as long as one.
    poisoned = {1: 1.5, 2: 1.59, 3: 5.13, 4: 5.2, 5: 5.3, 7: 5.5, 9: 5.6}
    assert 3 in doubtful(poisoned)
    assert doubtful({1: 1.0, 2: 1.05, 3: 1.6, 4: 1.12, 5: 1.15}) == {3}  # above longer passes
    assert doubtful({1: 8.0, 2: 1.05, 3: 1.1, 4: 1.12}) == {1}  # plain decoding measured in a bad moment
    assert with_neighbours({3}, [1, 2, 3, 4, 5]) == {2, 3, 4}


@pytest.mark.parametrize(
    "sound",
    [
        {1: 1.0, 2: 1.05, 3: 1.1, 4: 1.15, 5: 1.2, 7: 1.3, 9: 1.4, 13: 1.6, 17: 1.8},
        {1: 1.0, 2: 1.0, 3: 1.02, 4: 1.03, 5: 1.5, 7: 1.52, 9: 1.55, 13: 2.1, 17: 2.2},  # other kernel from 5 tokens
        {1: 22.0, 2: 33.0, 3: 36.0, 4: 39.0, 5: 42.0, 7: 45.0},  # llama.cpp's
        {count: float(count) for count in (1, 2, 3, 4, 5, 7, 9, 13, 17)},  # verifying together saves nothing
    ],
)
def test_a_sound_profile_is_believed(sound: dict[int, float]) -> None:
    assert doubtful(sound) == set()
    assert bounded(sound) == pytest.approx(sound)


def test_verifying_costs_between_one_pass_and_as_many_as_tokens() -> None:
    found = bounded({1: 1.5, 2: 9.0, 3: 5.1, 4: 2.0, 5: 50.0})
    assert found == pytest.approx({1: 1.5, 2: 2.0, 3: 2.0, 4: 2.0, 5: 3.5})


def check(found: Measured) -> None:
    """What a pair of a 5 and a half million parameters can cost beside any load, as shares of a plain step."""
    costs = found.costs
    assert list(costs.verify_s) == sorted(costs.verify_s)
    assert costs.verify_s[2] < 1.7 * costs.plain_step_s
    assert costs.verify_s[4] < 2.2 * costs.plain_step_s
    assert costs.verify_s[LONGEST] < 7 * costs.plain_step_s
    assert 0.01 * costs.plain_step_s < costs.draft_s < 0.3 * costs.plain_step_s
    assert costs.token_s < costs.plain_step_s
    assert costs.overhead_s < costs.plain_step_s


@pytest.mark.thorough
@pytest.mark.usefixtures("whole_measurement")
def test_other_programs_do_not_show_in_what_passes_cost(pair: Pair) -> None:
    with spinning(3):
        found = measure(pair, GREEDY)
    assert found.load is not None
    assert found.load.busy
    assert not found.trusted
    check(found)


@pytest.mark.thorough
@pytest.mark.usefixtures("whole_measurement")
def test_measuring_gives_way_at_every_round(pair: Pair) -> None:
    """Between two rounds the engine is free, threads are chosen as usual, and an abort takes effect."""
    rounds, given = measuring(pair, GREEDY), torch.get_num_threads()
    for _ in range(60):
        next(rounds)
        sequence = pair.target.sequence()
        sequence.extend([1, 2, 3], 1)
        assert torch.get_num_threads() == given
        assert pair.target.threads is not None
        assert pair.target.threads.held is None
    rounds.close()
    assert sum(1 for _ in measuring(pair, GREEDY)) > 100


def test_rounds_are_timed_at_several_places_of_real_text(pair: Pair) -> None:
    """With random tokens a mixture would read other experts, and at one place always the same ones."""
    rounds, samples, seen = TimedRounds(pair, GREEDY, 64, attentive=True), Samples(), set()
    for _ in range(3):
        for _ in rounds.sweep(samples, [0, 2], 1):
            pass
        seen.add(len(rounds.committed))
        written = str(pair.tokenizer.decode(rounds.committed))
        assert written[:150] in Path(timed_rounds.__file__).read_text(encoding="utf-8")
        assert rounds.target.length >= len(rounds.committed)
    assert len(seen) == 3


def test_what_is_measured_tries_no_other_number_of_threads() -> None:
    choice = ThreadChoice(2)
    choice.held = 1
    for _ in range(500):
        assert choice.choose(1) == 1
        choice.observe(1, 0.01)
    choice.held = None
    assert choice.choose(1) == 2  # passes with a held number of threads taught nothing


@pytest.mark.thorough
def test_where_engines_do_not_choose_threads_they_are_measured_as_they_run(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    for name, layers in (("target", 3), ("draft", 1)):
        config = GPT2Config(vocab_size=len(tokenizer), n_positions=512, n_embd=32, n_layer=layers, n_head=2)
        GPT2LMHeadModel(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    other = load_pair(load_settings({"target": str(tmp_path / "target"), "draft": str(tmp_path / "draft")}))
    assert other.target.threads is None
    costs = measure(other, GREEDY).costs
    assert costs.draft_s > 0
    assert list(costs.verify_s) == sorted(costs.verify_s)
