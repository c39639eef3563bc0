"""Grafting, rounds drafted by the model and history together: exact, chosen by expected tokens per second, and each
token credited to its drafter."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BUNDLED, save_head
from hypothesis import given
from hypothesis import strategies as st
from test_history_drafting import Liar
from test_lossless_sampled import PARAMS, PROMPT, RUNS, VOCAB, NoText, exact_distribution, models, p_value  # noqa: F401

from adaptive.assistant import Assistant
from adaptive.control.costs import LONGEST, CostTable
from adaptive.control.matches import Matches
from adaptive.control.policy import FixedLength, Lead, LengthPolicy, Scope
from adaptive.control.prices import best_tail
from adaptive.control.sources import GoodputWithHistory
from adaptive.decoding.loop import Decoding, Request
from adaptive.decoding.verifier import Verifier
from adaptive.drafting import grafting
from adaptive.drafting.archive import Archive, History
from adaptive.drafting.grafting import Grafting
from adaptive.drafting.history import AGREED, RUNNING, HistoryDrafter, RunningText
from adaptive.drafting.model import ModelDrafter
from adaptive.drafting.proposal import Proposal, grafted
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.pair import load_pair
from adaptive.records.writer import LogWriter
from adaptive.sampling import LogitsProcessor
from adaptive.settings import load_settings
from adaptive.tokens import as_list
from adaptive.types import FREE, Message, Part, Round, SamplingParams, StopParams

GREEDY = SamplingParams(temperature=0.0)
COSTS = CostTable(
    start_s=0.0001,
    draft_s=0.001,
    catch_up_s=0.0001,
    verify_s=tuple(0.01 + 0.0002 * k for k in range(LONGEST + 1)),
    overhead_s=0.0001,
    token_s=0.0001,
    context_s=0.0,
    context=0,
)


class Always(LengthPolicy):
    """Grafts whenever possible: the model after history (``front``), or history after the model."""

    name = "always"

    def __init__(self, front: bool, length: int = 3, other: int = 3) -> None:
        self.front, self.length, self.other = front, length, other

    def next_length(self, limit: int, waiting: int = 0, context: int = 0) -> int:
        return min(self.length, limit)

    def lead(self, reach: Sequence[float], length: int, limit: int, singly: bool = False, passed: int = 0) -> Lead:
        before = min(len(reach), self.other, limit - 1) if self.front and length else 0
        return Lead(before, min(length, limit - before)) if before > 0 else Lead(0, length)

    def sure_of_draft(self, drafted: int, agreed: Sequence[float]) -> float:
        return 1.0

    def tail_may_pay(self, drafted: int, sure: float) -> bool:
        return not self.front

    def tail(self, drafted: int, sure: float, reach: Sequence[float], limit: int) -> int:
        return min(len(reach), self.other, limit)

    def observe(self, outcome: Round) -> None:
        pass


@pytest.mark.thorough
@pytest.mark.parametrize("some", [pytest.param(1, marks=pytest.mark.long, id="twenty-prompts"), 4])
@pytest.mark.parametrize("policy", ["front", "behind", "chosen"])
@pytest.mark.parametrize("draft", ["model", "head"])
def test_greedy_output_is_the_targets_own(
    draft: str, policy: str, some: int, prompts: list[str], tmp_path: Path
) -> None:
    """In either order of grafting. With the model as draft, each forced order accepts tokens of both drafters."""
    target = BUNDLED / "target"
    folder = BUNDLED / "draft" if draft == "model" else save_head(target, tmp_path / "head")
    pair = load_pair(load_settings({"target": str(target), "draft": str(folder), "dtype": "float32"}))
    stop = StopParams(max_new_tokens=200 if draft == "model" else 60)
    asked = [[Message("user", prompt)] for prompt in prompts[::some]]
    plain = Assistant(dataclasses.replace(pair, draft=None), FixedLength(0), None)
    alone = [[step.token for step in plain.chat(said, GREEDY, stop)] for said in asked]
    kind: LengthPolicy = GoodputWithHistory(COSTS) if policy == "chosen" else Always(policy == "front")
    grafts: Counter[tuple[str, bool]] = Counter()
    with LogWriter(tmp_path / "records.db") as log:
        archive = Archive(tmp_path / "records.db", pair.target.vocab_size)
        assistant = Assistant(pair, kind, log, history=History(archive))
        for number, (said, right) in enumerate(zip(asked, alone, strict=True)):
            assert [step.token for step in assistant.chat(said, GREEDY, stop)] == right
            assert assistant.last is not None
            for outcome in assistant.last.rounds:
                if outcome.first:
                    assert outcome.accepted <= outcome.drafted
                    for part in outcome.parts:
                        grafts[outcome.drafter, part.drafter in FREE] += part.accepted
            if number == len(asked) // 2:
                log.flush()
                archive.catch_up()
        archive.close()
    seen = {name for name, _ in grafts}
    ways = {"front": {f"history+{draft}"}, "behind": {f"{draft}+history"}}
    assert seen == ways[policy] if policy in ways else seen & {f"history+{draft}", f"{draft}+history"}
    if draft == "model":  # the head was not trained
        # How often each order is chosen depends on the speed of rounds on this machine.
        assert all(grafts.values()) if policy in ways else any(grafts.values())


def counted(
    pair: tuple[TransformersEngine, TransformersEngine], params: SamplingParams, front: bool
) -> tuple[Counter[tuple[int, ...]], int]:
    """Counts of the first three tokens of answers whose rounds graft one token on one, and the count of such rounds."""
    target, draft = pair
    one, other = target.sequence(), draft.sequence()
    generator = torch.Generator().manual_seed(12)
    counts: Counter[tuple[int, ...]] = Counter()
    rounds, source = 0, Liar()
    for _ in range(RUNS):
        one.rollback(len(PROMPT) - 1)
        other.rollback(len(PROMPT) - 1)
        request = Request(PROMPT, params, StopParams(max_new_tokens=5), frozenset(), record=False)
        penalties = LogitsProcessor(params, VOCAB, torch.device("cpu"))
        drafter = ModelDrafter(other, draft, VOCAB, params, penalties, generator)
        liar: Any = source
        history = HistoryDrafter(RunningText(), liar, Matches(), params.temperature)
        verifier, text = Verifier(params, penalties, generator), NoText()
        shown: Any = text
        policy = Always(front, 1, 1)
        decoding = Decoding(request, one, 64, drafter, verifier, policy, shown, history=history)
        for _ in decoding.steps():
            pass
        counts[tuple(decoding.output[:3])] += 1
        rounds += sum(outcome.first > 0 for outcome in decoding.rounds)
    return counts, rounds


@pytest.mark.thorough
@pytest.mark.parametrize("front", [True, False], ids=["front", "behind"])
@pytest.mark.parametrize("params", [PARAMS[1], PARAMS[2], PARAMS[4]], ids=["t1.3", "top_p", "penalties"])
def test_sampled_text_has_the_targets_distribution(
    models: tuple[TransformersEngine, TransformersEngine],  # noqa: F811
    params: SamplingParams,
    front: bool,
) -> None:
    counts, rounds = counted(models, params, front)
    assert rounds > RUNS
    assert p_value(counts, exact_distribution(models[0], params)) > 0.001


@pytest.mark.parametrize("proposed", [[], [5], [5, 5, 7]])
def test_penalties_on_a_device_count_the_tokens_that_history_has_proposed(proposed: list[int]) -> None:
    """History's tokens are on the CPU. Torch's meta device has no numbers, but refuses a mixture as any other does."""
    params = SamplingParams(repetition_penalty=1.05, logit_bias={3: 1.0})
    penalties = LogitsProcessor(params, VOCAB, torch.device("meta"))
    for rows in (1, len(proposed) + 1):  # of a draft's step, and of a verification
        logits = penalties.apply(torch.zeros(rows, VOCAB, device="meta"), torch.tensor(proposed, dtype=torch.long))
        assert (logits.device.type, logits.shape) == ("meta", (rows, VOCAB))


def of_one_drafter(front: Proposal, back: Proposal) -> Proposal:
    """A wrong rule: treats all tokens as if drawn by the model."""
    right = grafted(front, back)
    drawn = front.probs if front.probs is not None else back.probs
    assert drawn is not None
    row = torch.as_tensor(drawn[0])
    return right._replace(probs=row.expand(len(as_list(right.tokens)), -1))


@pytest.mark.thorough
@pytest.mark.parametrize("front", [True, False], ids=["front", "behind"])
def test_verifying_historys_tokens_by_the_models_distribution_fails(
    models: tuple[TransformersEngine, TransformersEngine],  # noqa: F811
    front: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grafting, "grafted", of_one_drafter)
    counts, _ = counted(models, PARAMS[1], front)
    assert p_value(counts, exact_distribution(models[0], PARAMS[1])) < 1e-6


def test_every_token_keeps_what_it_was_drawn_from() -> None:
    drawn, named = torch.tensor([[0.25, 0.75], [0.5, 0.5]]), Proposal("history", [3], None)
    model = Proposal("model", [1, 0], drawn)
    found = grafted(model, named)
    assert (found.drafter, found.tokens, found.first) == ("model+history", [1, 0, 3], 2)
    assert torch.equal(
        torch.as_tensor(found.probs), torch.tensor([[0.25, 0.75, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0, 1.0]])
    )
    before = grafted(Proposal("history", [0], None), model)
    assert before.first == 1
    assert torch.equal(torch.as_tensor(before.probs), torch.cat([torch.tensor([[1.0, 0.0]]), drawn]))
    assert grafted(Proposal("model", [1], None), named).probs is None


@given(
    reach=st.lists(st.floats(0, 1), max_size=20).map(lambda found: sorted(found, reverse=True)),
    slope=st.floats(0, 0.2),
    rate=st.floats(0.5, 5),
    token_s=st.floats(0, 0.1),
    sure=st.floats(0, 1),
    before=st.integers(0, LONGEST),
)
def test_no_other_tail_promises_more(
    reach: list[float], slope: float, rate: float, token_s: float, sure: float, before: int
) -> None:
    seconds = [1.0 + slope * k for k in range(LONGEST + 1)]

    def gain(k: int) -> float:
        tokens = sure * sum(reach[:k])
        return tokens - rate * (seconds[before + k] - seconds[before] + token_s * tokens)

    best, gained = best_tail(reach, seconds, rate, token_s, sure, before)
    possible = [gain(k) for k in range(min(len(reach), LONGEST - before) + 1)]
    assert gained == pytest.approx(gain(best)) == pytest.approx(max(possible))
    assert (best > 0) == (max(possible) > 0) or max(possible) < 1e-9  # rounding


def ready(policy: GoodputWithHistory) -> GoodputWithHistory:
    """A policy that has seen half of the model's tokens accepted, and drafts."""
    policy.begin(Scope("s", 0.0))
    for number in range(120):
        length = policy.next_length(100, 0, 50)
        drafted, accepted = min(length, 4), number % 4
        for position in range(1, drafted + 1):
            policy.stopping(position, 0.8)
        draft_s = COSTS.start_s * bool(drafted) + COSTS.draft_s * drafted
        outcome = Round(
            "model" if drafted else "none", drafted, min(accepted, drafted), draft_s, COSTS.verify_s[drafted]
        )
        policy.observe(outcome)
    assert policy.speculating
    return policy


def test_the_model_goes_on_where_history_ends() -> None:
    policy = ready(GoodputWithHistory(COSTS))
    policy.next_length(100, 0, 50)
    lead = policy.lead([0.97, 0.95, 0.93, 0.02], 16, 100)
    assert lead.history == 3
    assert lead.model > 0
    assert policy.lead([0.05, 0.01], 16, 100) == Lead(0, 16)
    long = policy.lead([0.99**k for k in range(1, 17)], 16, 100)
    assert long.history >= 12


def test_the_draft_stops_sooner_behind_what_is_less_likely_to_stand() -> None:
    policy = ready(GoodputWithHistory(COSTS))
    policy.next_length(100, 0, 50)

    def length(sure: float) -> int:
        advise = policy.adviser_behind(3, sure)
        assert advise is not None
        return next((position for position in range(1, 14) if not advise(position, 0.85)), 14)

    assert length(1.0) > length(0.3) >= length(0.01)
    assert length(1e-9) == 1


def test_agreement_raises_what_is_believed_of_a_draft() -> None:
    policy = ready(GoodputWithHistory(COSTS))
    policy.next_length(100, 0, 50)
    for position in range(1, 4):
        policy.stopping(position, 0.5)
    alone = policy.sure_of_draft(3, [])
    assert alone < policy.sure_of_draft(3, [0.9]) < policy.sure_of_draft(3, [0.9, 0.9, 0.9])
    assert policy.sure_of_draft(3, [0.0, 0.0]) == alone
    more, less = (
        policy.tail(3, sure, [0.9, 0.8, 0.7, 0.6, 0.5], 10) for sure in (policy.sure_of_draft(3, [0.9] * 3), 0.02)
    )
    assert more > less


def test_history_is_credited_with_what_it_proposed_and_learns_from_what_was_said() -> None:
    text, matches = RunningText(), Matches()
    history = HistoryDrafter(text, None, matches, 0.0)
    said = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert history.look(said)
    before = list(text.tokens)
    assert history.agreed([4, 5, 77]) == [matches.of(AGREED, 0.0).table[b] for b in history._found.bins[:2]]
    assert history.look_behind(said, [4, 5])
    assert history.propose_behind(3).tokens == [6, 7, 8]
    assert text.tokens == before
    found, _ = text.index.follow(said[-32:], True)
    assert found[:3] == [4, 5, 6]
    history.observe([4, 5, 6, 99])
    history.settle()
    running, together = matches.of(RUNNING, 0.0), matches.of(AGREED, 0.0)
    assert (sum(together.accepted), sum(together.rejected)) == (2.0, 0.0)
    # Three accepted and one rejected by the chain from the beginning, one of each by the tail.
    assert sum(running.rejected) == pytest.approx(2.0, abs=0.1)
    assert sum(running.accepted) == pytest.approx(4.0, abs=0.2)


class Always123:
    """A drafter that proposes the same three tokens."""

    name = "model"

    def propose(self, committed: list[int], length: int, advise: object = None) -> Proposal:
        return Proposal(self.name, [1, 2, 3], None)


def test_a_lookup_behind_a_draft_that_no_result_could_make_pay_is_put_off() -> None:
    """Otherwise it stays due, and every round prepares for it."""
    steep = tuple(0.01 + 0.0002 * k + 0.05 * max(0, k - 3) for k in range(LONGEST + 1))
    policy = ready(GoodputWithHistory(COSTS))
    policy.remeasured(dataclasses.replace(COSTS, verify_s=steep), busy=False)
    for _ in range(100):
        policy.look_took(0.001, behind=True)
        policy.look_took(0.001)
    policy.behind.soon = True  # as at the beginning of an answer
    grafting = Grafting(Always123(), HistoryDrafter(RunningText(), None, Matches(), 0.0), policy)  # type: ignore[arg-type]
    policy.next_length(100, 0, 50)
    said = [5, 6, 7]
    assert policy.worth_looking(behind=True)
    assert grafting.plan(said, 3, 50) is not None
    draft = grafting.propose(said, 3)
    assert draft is not None
    assert as_list(draft.tokens) == [1, 2, 3]
    assert not policy.worth_looking(behind=True)


def test_a_round_is_divided_among_who_drafted_it() -> None:
    behind = Round("model+history", 7, 5, 0.1, 0.2, 3)
    assert behind.parts == (Part("model", 3, 3, True), Part("history", 4, 2, True))
    assert behind.learned == Round("model", 3, 3, 0.1, 0.2)
    assert behind.cut(5) == behind._replace(drafted=5, accepted=5)
    assert behind.cut(2) == Round("model", 2, 2, 0.1, 0.2)
    short = Round("history+model", 7, 2, 0.1, 0.2, 3)
    assert short.parts == (Part("history", 3, 2, True), Part("model", 4, 0, False))
    assert short.learned is None  # no token of the model was judged
    assert Round("history+head", 7, 4, 0.1, 0.2, 3).learned == Round("head", 4, 1, 0.1, 0.2)
    assert Round("history", 4, 1, 0.0, 0.0).learned is None
    assert Round("none", 0, 0, 0.0, 0.1).learned == Round("none", 0, 0, 0.0, 0.1)


def test_what_history_adds_says_nothing_of_the_draft() -> None:
    """History behind the draft, always right, leaves the estimates of the draft unchanged."""
    alone, together = (ready(GoodputWithHistory(COSTS)) for _ in range(2))
    for policy in (alone, together):
        policy.begin(Scope("t", 0.0))
        for _ in range(40):
            policy.next_length(100, 0, 50)
            policy.lead([], 16, 100)
            for position in range(1, 3):
                policy.stopping(position, 0.8)
            tail = 5 if policy is together else 0
            name = "model+history" if tail else "model"
            first, draft_s = 2 if tail else 0, COSTS.start_s + 2 * COSTS.draft_s
            policy.observe(Round(name, 2 + tail, 2 + tail, draft_s, COSTS.verify_s[2 + tail], first))
        policy.settle()
    assert together.acceptance.estimate() == alone.acceptance.estimate()
    assert together.calibration.table == alone.calibration.table
    assert together.recent.tokens == pytest.approx(alone.recent.tokens)
