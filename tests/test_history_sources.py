"""Which source drafts a round: history exactly where it promises more tokens per second than the model brings there."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
from conftest import BUNDLED
from test_control import slower

from adaptive.assistant import Assistant
from adaptive.control.costs import LONGEST, CostTable
from adaptive.control.goodput import GoodputLength
from adaptive.control.matches import ANEW_EVERY, Matches
from adaptive.control.memory import load, remembered, save
from adaptive.control.policy import FixedLength, Scope
from adaptive.control.sources import GoodputWithHistory
from adaptive.control.tries import ON_TRIAL, ON_TRIAL_HERE, RIVAL_ON_TRIAL, RIVAL_SHARE, Rival
from adaptive.drafting.archive import Archive, History
from adaptive.measure import where_it_runs
from adaptive.opened import opened
from adaptive.pair import load_pair
from adaptive.records.writer import LogWriter
from adaptive.settings import load_settings
from adaptive.types import GRAFT, HISTORY, MODEL, Message, Round, SamplingParams, StopParams

COSTS = CostTable(
    start_s=0.0001,
    draft_s=0.001,
    catch_up_s=0.0001,
    verify_s=tuple(0.01 + 0.0005 * k for k in range(LONGEST + 1)),
    overhead_s=0.0001,
    token_s=0.0001,
    context_s=0.0,
    context=0,
)
GREEDY = SamplingParams(temperature=0.0)


def run(
    policy: GoodputWithHistory,
    rounds: int,
    reach: list[float],
    by_history: int,
    by_model: int,
    elsewhere: int | None = None,
) -> list[str]:
    """Who drafted each of ``rounds``, where every lookup finds ``reach`` and ``by_history`` or ``by_model`` tokens are
    accepted. With ``elsewhere`` only every second lookup finds something; in the other rounds ``elsewhere`` tokens of
    the model are accepted."""
    policy.begin(Scope("s", 0.0))
    who: list[str] = []
    waiting = 0
    while len(who) < rounds:
        length = policy.next_length(1000, waiting, 100)
        for passed in range(policy.steady):
            found = elsewhere is None or len(who) % 2 == 0
            most, behind = policy.lead(reach if found else [], length, 1000, passed=passed)
            if most:
                accepted, name, draft_s, drafted = min(by_history, most), HISTORY, 0.0, 0
                if behind:
                    drafted, name = min(behind, by_model + 1), f"{HISTORY}{GRAFT}{MODEL}"
                    advise = policy.adviser_behind(most, reach[most - 1])
                    for position in range(1, drafted + 1) if advise else ():
                        advise(position, 0.95 if position <= by_model else 0.4)
                    draft_s = COSTS.start_s + COSTS.draft_s * drafted + COSTS.catch_up_s * (waiting + most)
                    accepted += min(by_model, drafted) if accepted == most else 0
                verify_s = COSTS.verify_s[most + drafted]
                outcome = Round(name, most + drafted, accepted, draft_s, verify_s, most if behind else 0)
                (policy.observe if behind else policy.observe_free)(outcome)
                who.append(name)
                waiting = max(0, accepted + 1 - most - drafted) if behind else waiting + 1 + accepted
                break
            asked, length = length, behind
            accepted = drafted = min(by_model if found or elsewhere is None else elsewhere, length)
            if length:
                drafted = min(length, accepted + 1) if policy.attentive else length
                for position in range(1, drafted + 1) if policy.attentive else ():  # confident of accepted tokens only
                    policy.stopping(position, 0.95 if position <= accepted else 0.4)
            draft_s = COSTS.start_s * (length > 0) + COSTS.draft_s * drafted + COSTS.catch_up_s * waiting * (length > 0)
            policy.observe(Round("model" if length else "none", drafted, accepted, draft_s, COSTS.verify_s[drafted]))
            who.append("model" if length else "none")
            waiting = 0 if length else waiting + 1
            if length > asked:
                break
    return who


def led(who: list[str]) -> int:
    """Number of rounds that history began."""
    return sum(name.startswith(HISTORY) for name in who)


def test_history_that_promises_more_than_the_model_brings_drafts_nearly_always() -> None:
    who = run(GoodputWithHistory(COSTS, attentive=False), 400, [0.97**i for i in range(1, 17)], 12, 1)
    assert led(who[200:]) > 0.9 * 200


def test_a_new_draft_is_judged_also_where_history_finds_everything() -> None:
    """A new draft is judged in each of its first answers, in fewer rounds than where history finds nothing, then no
    longer; time lost by that does not count against later tries."""
    policy = GoodputWithHistory(COSTS)
    run(policy, 400, [0.97**i for i in range(1, 9)], 6, 0)
    policy.swapped()
    owed = policy.rival.owed
    asked = [run(policy, 40, [0.97**i for i in range(1, 9)], 6, 0).count("model") for _ in range(40)]
    assert all(ON_TRIAL_HERE <= n <= 2 * ON_TRIAL_HERE for n in asked[: RIVAL_ON_TRIAL // ON_TRIAL_HERE])
    assert RIVAL_ON_TRIAL <= sum(asked[:10]) < ON_TRIAL
    assert sum(asked[10:]) < 0.02 * 40 * 30
    assert policy.rival.owed < owed + 10.0  # in plain rounds; charging for the trial would add some hundred


def test_rounds_on_trial_are_learned_from_together() -> None:
    policy = GoodputWithHistory(COSTS)
    run(policy, 400, [], 0, 0)
    assert not policy.speculating
    policy.swapped([0.0] * LONGEST)
    policy.begin(Scope("s", 0.0))
    assert policy.next_length(1000, 0, 100) > 0
    assert policy.steady == ON_TRIAL_HERE
    on_trial = policy.tries.on_trial
    run(policy, ON_TRIAL_HERE, [], 0, 0)
    assert policy.tries.on_trial == on_trial - ON_TRIAL_HERE
    assert policy.tries.on_trial_here == 0


def test_tries_in_historys_place_are_paid_for_when_they_are_made() -> None:
    """Many rounds are planned before the policy learns from the first of them."""
    rival = Rival()
    made = sum(rival.due(0.5, 1.0, 4.0) for _ in range(200))
    assert made <= 4.0 / 0.5 + 200 * RIVAL_SHARE / 0.5
    for _ in range(made):
        rival.tried(-0.2, 0.5)
    assert rival.owed == 0.0
    assert rival.due(0.5, 1.0, 4.0)  # with too little evidence, tries continue


def test_by_how_much_the_model_guesses_repeated_text_better_outlives_the_model() -> None:
    rival = Rival()
    assert rival.usual(0.5, 1.0) == pytest.approx((0.5, 1.0))
    for _ in range(100):
        rival.observe(1.0, 1.2, 0.5, 1.0)
    rival.swapped()
    accepted, seconds = rival.usual(0.8, 1.0)
    assert 1.4 < accepted < 1.6
    assert 1.15 < seconds < 1.2


def test_a_model_that_is_useless_elsewhere_is_known_by_what_it_does_in_historys_place() -> None:
    rival = Rival()
    for number in range(200):
        rival.observe(0.3, 1.0, -0.02 if number % 2 else 0.02, 1.0)  # estimates, some of them below zero
    for others in (-0.02, 0.0, 0.01):
        assert rival.usual(others, 1.0)[0] == pytest.approx(0.2, abs=0.11)


@pytest.mark.parametrize(("by_model", "drafts"), [(0, False), (3, True)])
def test_a_prompt_is_read_where_the_rest_of_the_answer_is_worth_it(by_model: int, drafts: bool) -> None:
    """History finds one token in every round. Reading 300 tokens takes the draft as long as three plain rounds, which
    no single round is worth."""
    policy = GoodputWithHistory(COSTS)
    who: list[str] = []
    for _ in range(12):
        policy.begin(Scope("s", 0.0))
        waiting, said = 300, 0
        while said < 120:
            length = policy.next_length(120 - said, waiting, 300 + said)
            lead = policy.lead([0.5], length, 120 - said)
            if lead.history:
                accepted = len(who) % 2
                policy.observe_free(Round(HISTORY, 1, accepted, 0.0, COSTS.verify_s[1]))
                who.append(HISTORY)
                waiting += 1 + accepted
            else:
                accepted = min(by_model, lead.model)
                drafted = min(lead.model, accepted + 1)
                for position in range(1, drafted + 1):
                    policy.stopping(position, 0.95 if position <= accepted else 0.2)
                draft_s = COSTS.draft_s * drafted + COSTS.catch_up_s * waiting if lead.model else 0.0
                policy.observe(
                    Round(MODEL if lead.model else "none", drafted, accepted, draft_s, COSTS.verify_s[drafted])
                )
                who.append(MODEL if lead.model else "none")
                waiting = 0 if lead.model else waiting + 1
            said += 1 + accepted
    late = who[len(who) // 2 :]
    assert (late.count(MODEL) > 0.8 * len(late)) is drafts


def test_what_history_says_has_to_be_fed_to_the_draft() -> None:
    """Every second round is history's, of nine tokens. The model's rounds in between are charged for reading these
    tokens, unless the model drafted behind history and has read them there."""
    for reads, fed in ((False, 9), (True, 0)):
        saved = []
        for catch_up_s in (1e-5, 1e-3):
            policy = GoodputWithHistory(dataclasses.replace(COSTS, catch_up_s=catch_up_s))
            for _ in range(400):
                policy.continuation.observe(True, [9], [0.014], False, not reads)
                policy.continuation.observe(False, [2], [0.012], True, False)
            saved.append(policy._saved())
        assert saved[0] - saved[1] == pytest.approx(fed * 0.99e-3, abs=0.9e-3)


def test_what_rounds_bring_is_said_of_all_of_them_whoever_drafts() -> None:
    """History brings three tokens in every second round for a tenth more time; the model brings none."""
    policy = GoodputWithHistory(COSTS)
    run(policy, 600, [0.9, 0.8, 0.7], 2, 0, 0)
    assert policy.expected_speed_up is not None
    assert policy.expected_speed_up < 1.0
    both_s = policy.costs.beside_drafting(3) + policy.plain_s
    assert policy.present_speed_up == pytest.approx(4 * policy.plain_s / both_s, rel=0.1)


def test_what_shared_rounds_bring_is_said_while_answers_share_them() -> None:
    policy = GoodputWithHistory(COSTS)
    run(policy, 100, [], 0, 0)  # plain decoding, alone
    alone = policy.present_speed_up
    assert alone is not None
    beside = policy.among(Scope("a", 0.0))
    for _ in range(200):
        length = beside.next_length(3, 2)
        policy.shared(8, COSTS.verify_s[7])
        beside.observe(Round(MODEL, length, length, 0.001, 0.006))
    together = policy.present_speed_up
    assert together is not None
    assert together > 1.5 * alone
    policy.next_length(16, context=100)
    assert policy.present_speed_up == pytest.approx(alone, rel=0.05)


@pytest.mark.parametrize("busy", [False, True])
def test_costs_in_which_every_second_is_three_change_nothing_that_history_was_seen_to_bring(busy: bool) -> None:
    policy = GoodputWithHistory(COSTS)
    run(policy, 600, [0.9, 0.8, 0.7], 2, 0, 0)
    before = policy.present_speed_up
    assert before is not None
    assert before > 1.2
    policy.remeasured(slower(COSTS, 3.0), busy)
    for is_busy in (busy, False):
        policy.machine(is_busy)
        policy.next_length(16, context=100)
        assert policy.present_speed_up == pytest.approx(before, rel=0.02)


def test_the_model_drafts_where_it_does_better_on_the_very_text_that_history_has_found() -> None:
    """In general the model brings less than history promises; ``better`` brings more where history finds something."""
    promised = [0.9, 0.8, 0.5]
    worse = run(GoodputWithHistory(COSTS), 800, promised, 2, 1, 1)
    better = run(GoodputWithHistory(COSTS), 800, promised, 2, 12, 1)
    assert led(worse[400:]) > 0.9 * 200
    assert led(better[400:]) < 0.3 * 200


def test_a_draft_that_beats_plain_decoding_is_given_up_where_history_says_its_tokens_anyway() -> None:
    """Where history finds nothing, the model's second token costs a third of a plain round; with history a dozen tokens
    cost less than two plain rounds."""
    alone = run(GoodputWithHistory(COSTS), 300, [], 0, 1)
    assert alone[-100:].count("model") > 90
    beside = run(GoodputWithHistory(COSTS), 600, [0.99**i for i in range(1, 17)], 12, 1, 1)
    assert led(beside[300:]) > 0.9 * 150
    assert beside[300:].count("model") < 0.2 * 150


def test_history_verifies_no_more_than_is_worth_its_time_at_the_rate_that_it_reaches_itself() -> None:
    """Six of eight tokens are accepted, and sure to be. Each of the last two costs less than it brings at the rate of
    plain decoding, and more than it brings at the rate that these rounds reach."""
    dear = dataclasses.replace(COSTS, verify_s=tuple(0.01 + 0.004 * k for k in range(LONGEST + 1)))
    promised = [1.0] * 6 + [0.6, 0.55]
    policy, lengths, rates = GoodputWithHistory(dear), [], []
    policy.begin(Scope("s", 0.0))
    for _ in range(100):
        policy.next_length(0, 0, 100)
        lengths.append(policy.lead(promised, 0, 100).history)
        rates.append(policy.rate)
        policy.observe_free(Round(HISTORY, lengths[-1], min(6, lengths[-1]), 0.0, dear.verify_s[lengths[-1]]))
    assert set(lengths) == {6}
    assert rates[0] * 0.008 < sum(promised[6:]) < rates[-1] * 0.008


def test_answers_that_share_rounds_verify_no_more_of_history_than_is_worth_it_at_that_rate_either() -> None:
    """As above, for two answers whose joint passes get as much slower with each token."""
    dear = dataclasses.replace(COSTS, verify_s=tuple(0.01 + 0.002 * k for k in range(LONGEST + 1)))
    promised = [1.0] * 6 + [0.6, 0.55]
    policy, lengths, rates = GoodputWithHistory(dear), [], []
    policy.begin(Scope("s", 0.0))
    answers = [policy.among(Scope(name, 0.0)) for name in ("a", "b")]
    for _ in range(60):
        for answer in answers:
            answer.next_length(0, 2)
            lengths.append(answer.lead(promised, 0, 100).history)
            answer.observe_free(Round(HISTORY, lengths[-1], min(6, lengths[-1]), 0.0, 0.01))
            rates.append(answer._rate_behind(True))
    assert set(lengths) == {6}
    assert rates[0] * 0.004 < sum(promised[6:]) < rates[-1] * 0.004


def looks(policy: GoodputWithHistory, rounds: int, reach: list[float], look_s: float, round_s: float) -> list[int]:
    """Indices of those of ``rounds`` plain rounds before which history was looked up, where every lookup finds
    ``reach`` and takes ``look_s``."""
    found = []
    for number in range(rounds):
        policy.next_length(0, 0, 100)
        looking = policy.worth_looking()
        lead = policy.lead(reach if looking else [], 0, 100)
        if looking:
            found.append(number)
            policy.look_took(look_s)
        if lead.history:
            policy.observe_free(Round(HISTORY, lead.history, lead.history, 0.0, round_s))
        else:
            policy.observe(Round("none", 0, 0, 0.0, round_s))
    return found


def test_looks_that_bring_nothing_take_a_small_share_of_the_time() -> None:
    policy = GoodputWithHistory(COSTS)
    policy.begin(Scope("s", 0.0))
    looks(policy, 100, [], 40e-6, 0.001)
    assert len(looks(policy, 1000, [], 40e-6, 0.001)) * 40e-6 <= 0.002 * 1.0 + 40e-6
    assert len(looks(policy, 100, [], 40e-6, 0.1)) >= 99, "beside a round of 100 ms a look is nothing"


def test_every_round_looks_once_something_was_found_and_the_first_of_an_answer() -> None:
    policy = GoodputWithHistory(COSTS)
    policy.begin(Scope("s", 0.0))
    looks(policy, 200, [], 40e-6, 0.001)
    first, *_ = then = looks(policy, 100, [0.95, 0.9, 0.85], 40e-6, 0.001)
    assert then == list(range(first, 100))
    looks(policy, 200, [], 40e-6, 0.001)
    policy.begin(Scope("t", 0.0))
    assert policy.worth_looking()


def test_history_drafts_where_the_draft_is_not_worth_its_time() -> None:
    policy = GoodputWithHistory(COSTS, attentive=False)
    run(policy, 300, [], 0, 0)
    assert not policy.speculating
    who = run(policy, 100, [0.9, 0.8, 0.7, 0.6], 3, 0)
    assert led(who) > 90


def test_what_is_hardly_accepted_is_left_alone() -> None:
    who = run(GoodputWithHistory(COSTS, attentive=False), 200, [0.1, 0.05], 0, 2)
    assert led(who) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("linear_layers", ["ours", "torch's"], indirect=True)
@pytest.mark.parametrize("draft", [True, False], ids=["pair", "target-alone"])
def test_greedy_output_is_the_targets_own_under_the_choice(
    linear_layers: str, draft: bool, prompts: list[str], tmp_path: Path
) -> None:
    names = {"target": str(BUNDLED / "target"), "dtype": "float32"}
    pair = load_pair(load_settings({**names, "draft": str(BUNDLED / "draft")} if draft else names))
    stop = StopParams(max_new_tokens=100)
    plain = Assistant(pair, FixedLength(0), None)
    drafted: Counter[str] = Counter()
    asked = [[Message("user", prompt)] for prompt in prompts[::4]]
    alone = [[step.token for step in plain.chat(said, GREEDY, stop)] for said in asked]
    with LogWriter(tmp_path / "records.db") as log:
        archive = Archive(tmp_path / "records.db", pair.target.vocab_size)
        assistant = Assistant(pair, GoodputWithHistory(COSTS), log, history=History(archive))
        for _ in range(2):
            for said, expected in zip(asked, alone, strict=True):
                assert [step.token for step in assistant.chat(said, GREEDY, stop)] == expected
                assert assistant.last is not None
                for outcome in assistant.last.rounds:
                    drafted[outcome.drafter] += outcome.accepted
            log.flush()
            archive.catch_up()
        archive.close()
    assert drafted[HISTORY] > 100


def test_without_a_draft_history_need_not_beat_one() -> None:
    policy = GoodputWithHistory(COSTS)
    policy.begin(Scope("s", 0.0))
    leads = []
    for _ in range(100):
        assert policy.next_length(0, 0, 100) == 0
        leads.append(policy.lead([0.2, 0.1], 0, 100))
        policy.observe_free(Round(HISTORY, leads[-1].history, 0, 0.0, COSTS.verify_s[leads[-1].history]))
    assert all(lead.history > 0 and not lead.model for lead in leads)
    policy.next_length(100, 0, 100)
    assert policy.lead([0.2, 0.1], 16, 100) == (0, 16)


@pytest.mark.thorough
def test_what_a_target_alone_has_learned_is_there_at_the_next_start(prompts: list[str]) -> None:
    settings = load_settings({"target": str(BUNDLED / "target"), "dtype": "float32", "history": "auto"})
    pair = dataclasses.replace(load_pair(settings), draft=None)
    with opened(settings, pair) as session:
        assert not session.upkeep.due
        for prompt in prompts[:2] * 2:
            list(session.assistant.chat([Message("user", prompt)], GREEDY, StopParams(max_new_tokens=60)))
        policy, history = session.assistant.policy, session.assistant.history
        assert isinstance(policy, GoodputWithHistory)
        assert history is not None
        believed = dict(history.matches.kinds)
    kept = load(session.state.controller, where_it_runs(pair))
    assert kept.costs is not None
    assert kept.costs.verify_s == pytest.approx(policy.quiet_costs.table().verify_s)
    assert {kind: (bins.accepted, bins.rejected) for kind, bins in kept.matches.kinds.items()} == {
        kind: (bins.accepted, bins.rejected) for kind, bins in believed.items()
    }
    assert sum(believed["text@0.0"].accepted) > 0
    with opened(settings, pair) as session:
        again = session.assistant.policy
        assert isinstance(again, GoodputWithHistory)
        assert again.costs.measured
        assert again.costs.table().verify_s == pytest.approx(kept.costs.verify_s)


def test_what_matches_were_worth_is_there_in_the_next_session(tmp_path: Path) -> None:
    matches = Matches()
    for _ in range(4 * ANEW_EVERY):  # so that everything was just recomputed when it is compared
        matches.of("records", 0.7).observe([20, 21, 22], 2)
    save(tmp_path / "controller.json", remembered(GoodputLength(COSTS), "cpu", "here", 7.0, None, matches))
    again = load(tmp_path / "controller.json", "cpu")
    assert list(again.matches.of("records", 0.7).table) == pytest.approx(list(matches.of("records", 0.7).table))
    assert isinstance(again.policy(True, history=True), GoodputWithHistory)
    assert not isinstance(again.policy(True), GoodputWithHistory)
