"""However a policy chooses lengths and ends drafts, the output distribution stays the target's."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import BUNDLED, save_random_pair
from length_policies import AdditiveLength, AverageLength, BanditLength, ThresholdLength
from test_lossless_sampled import PARAMS, PROMPT, VOCAB, NoText, exact_distribution, models, p_value  # noqa: F401

from adaptive.assistant import Assistant
from adaptive.control.confidence import bin_of
from adaptive.control.costs import CostTable
from adaptive.control.goodput import GoodputLength
from adaptive.control.memory import load, remembered, save
from adaptive.control.policy import Advice, Adviser, FixedLength, LengthPolicy
from adaptive.decoding.loop import Decoding, Request
from adaptive.decoding.verifier import Verifier
from adaptive.drafting.model import ModelDrafter
from adaptive.drafting.proposal import Proposal
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.pair import load_pair
from adaptive.sampling import LogitsProcessor
from adaptive.settings import load_settings
from adaptive.types import Message, Round, SamplingParams, StopParams

RUNS = 4000
# Costs of a draft that is very cheap compared with its target, so that drafts are long and end by advice.
CHEAP = CostTable(0.0, 0.01, 0.001, tuple(1 + 0.1 * k for k in range(17)), 0.01, 0.01, 0.0, 0, 1.0)


class Stopping(FixedLength):
    """Ends drafts by confidence: drops a token below 0.3, ends with a token below 0.45. (There are eight tokens.)"""

    @property
    def adviser(self) -> Adviser:
        return self._advise

    def _advise(self, position: int, confidence: float) -> Advice:
        if confidence < 0.3:
            return Advice.DROP
        return Advice.LAST if confidence < 0.45 else Advice.MORE


class DropsTheUnlikely(ModelDrafter):
    """Breaks the rule on purpose: proposes a drawn token only if it was likely."""

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        proposal = super().propose(committed, length)
        assert proposal is not None
        assert proposal.probs is not None
        drawn = [q[token] for q, token in zip(proposal.probs, proposal.tokens, strict=True)]
        kept = next((i for i, probability in enumerate(drawn) if probability <= 0.2), len(drawn))
        if not kept:
            self.rollback(len(committed))
            return None
        return Proposal(self.name, proposal.tokens[:kept], proposal.probs[:kept])


def run_loop(
    pair: tuple[TransformersEngine, TransformersEngine],
    params: SamplingParams,
    policy: LengthPolicy,
    kind: type[ModelDrafter] = ModelDrafter,
    runs: int = RUNS,
) -> tuple[Counter[tuple[int, ...]], Counter[int]]:
    """Counts of the first three tokens of ``runs`` generations, and of the tokens that their rounds drafted."""
    target, draft = pair
    one, other = target.sequence(), draft.sequence()
    generator = torch.Generator().manual_seed(11)
    counts: Counter[tuple[int, ...]] = Counter()
    drafted: Counter[int] = Counter()
    for _ in range(runs):
        one.rollback(0)
        other.rollback(0)
        penalties = LogitsProcessor(params, VOCAB, torch.device("cpu"))
        request = Request(PROMPT, params, StopParams(max_new_tokens=5), frozenset(), record=False)
        drafter = kind(other, draft, VOCAB, params, penalties, generator)
        verifier = Verifier(params, penalties, generator)
        decoding = Decoding(request, one, 64, drafter, verifier, policy, NoText())  # type: ignore[arg-type]
        for _ in decoding.steps():
            pass
        counts[tuple(decoding.output[:3])] += 1
        drafted.update(r.drafted for r in decoding.rounds)
    return counts, drafted


@pytest.mark.thorough
@pytest.mark.parametrize("policy", [Stopping(2), GoodputLength(CHEAP)], ids=["by-confidence", "goodput"])
def test_a_draft_that_ends_early_leaves_the_distribution_alone(
    models: tuple[TransformersEngine, TransformersEngine],  # noqa: F811
    policy: LengthPolicy,
) -> None:
    counts, drafted = run_loop(models, PARAMS[0], policy)
    assert p_value(counts, exact_distribution(models[0], PARAMS[0])) > 0.001
    if isinstance(policy, Stopping):
        assert all(drafted[k] > RUNS / 50 for k in (0, 1, 2)), f"drafts did not end early: {drafted}"
    assert sum(drafted[k] for k in drafted if k) > RUNS / 50, f"hardly anything was drafted: {drafted}"


@pytest.mark.thorough
def test_dropping_a_token_for_what_was_drawn_is_caught(
    models: tuple[TransformersEngine, TransformersEngine],  # noqa: F811
) -> None:
    counts, _ = run_loop(models, PARAMS[0], FixedLength(2), DropsTheUnlikely)
    assert p_value(counts, exact_distribution(models[0], PARAMS[0])) < 0.001


@pytest.mark.thorough(but="qwen2")
@pytest.mark.parametrize("source", ["bundled", "qwen2"])
def test_greedy_output_is_the_same_under_every_policy(
    source: str, prompts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folders = (BUNDLED / "target", BUNDLED / "draft")
    if source != "bundled":
        folders = save_random_pair(tmp_path_factory.mktemp(source), source)
    names = {"target": str(folders[0]), "draft": str(folders[1]), "dtype": "float32"}
    pair = load_pair(load_settings(names))
    policies = [
        GoodputLength(CHEAP),
        GoodputLength(None),
        GoodputLength(CHEAP, attentive=False),
        AdditiveLength(12),
        ThresholdLength(12),
        AverageLength(12),
        BanditLength(8),
    ]
    greedy, stop = SamplingParams(temperature=0.0), StopParams(max_new_tokens=50)
    plain = Assistant(pair, FixedLength(0), None)
    for prompt in prompts[:6:2]:
        expected = [s.token for s in plain.chat([Message("user", prompt)], greedy, stop)]
        for policy in policies:
            assistant = Assistant(pair, policy, None)
            assert [s.token for s in assistant.chat([Message("user", prompt)], greedy, stop)] == expected, policy.name
    assert policies[0].costs.table() != CHEAP, "the controller saw no round"


def test_what_was_learned_is_there_in_the_next_session(tmp_path: Path) -> None:
    policy = GoodputLength(CHEAP)
    for _ in range(50):
        policy.acceptance.observe([Round("model", 4, 2, 0.0, 0.0)])
        policy.calibration.observe([bin_of(0.9), bin_of(0.8), bin_of(0.3)], 3, 2)
    policy.calibration.calibrate()
    save(tmp_path / "controller.json", remembered(policy, "cpu", "here", 7.0, "0003"))
    again = load(tmp_path / "controller.json", "cpu")
    assert again.costs == CHEAP
    assert again.adapter == "0003"
    assert (again.machine, again.measured) == ("here", 7.0)
    assert again.acceptance.everything == policy.acceptance.everything
    assert again.calibration.table == policy.calibration.table
    assert load(tmp_path / "controller.json", "cuda").costs is None, "costs of another device are not costs of this one"


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}', '{"version": 99}', "[]", "null"])
def test_what_is_no_memory_is_an_empty_one(tmp_path: Path, text: str) -> None:
    file = tmp_path / "controller.json"
    file.write_text(text)
    assert load(file, "cpu").costs is None
    assert load(file, "cpu").policy(True).next_length(5) >= 0


@pytest.mark.parametrize(
    ("part", "value"),
    [
        (("costs", "verify_s"), [1.0]),
        (("costs", "verify_s"), [1.0] * 16 + [-1.0]),
        (("costs", "verify_s"), [1.0] * 16 + [float("nan")]),
        (("costs", "draft_s"), 0.0),
        (("costs", "plain_s"), "soon"),
        (("acceptance", "all"), {"accepted": [1.0], "rejected": [1.0]}),
        (("acceptance", "kinds"), []),
        (("calibration", "follow"), None),
        (("calibration",), {}),
    ],
)
def test_a_memory_with_damaged_numbers_is_an_empty_one(tmp_path: Path, part: tuple[str, ...], value: object) -> None:
    file = tmp_path / "controller.json"
    save(file, remembered(GoodputLength(CHEAP), "cpu", "here", 7.0, "0003"))
    content = json.loads(file.read_text(encoding="utf-8"))
    inner = content
    for name in part[:-1]:
        inner = inner[name]
    assert inner[part[-1]] != value
    inner[part[-1]] = value
    file.write_text(json.dumps(content))
    assert load(file, "cpu").costs is None
    assert load(file, "cpu").policy(True).next_length(5) >= 0
