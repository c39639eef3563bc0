"""Answers decoded in a batch equal those decoded alone, and reading a prompt does not stall the other answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import BUNDLED, save_head, save_random_pair
from test_grammar import PERSON
from test_lossless_sampled import models as models

from adaptive.answering import Answering, Question
from adaptive.assistant import Assistant, encode_chat
from adaptive.caches import Conversations
from adaptive.control.confidence import CENTRES
from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import FixedLength, LengthPolicy
from adaptive.control.sources import GoodputWithHistory
from adaptive.decoding import batch as batches
from adaptive.decoding.batch import PASS, Batch
from adaptive.drafting.archive import History
from adaptive.engines.cpu import kernels
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.protocol import Engine, ExtendCall
from adaptive.errors import AdaptiveError
from adaptive.pair import Pair, load_pair
from adaptive.settings import load_settings
from adaptive.types import Message, SamplingParams, StopParams

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, seed=5)
# Parameters of eight answers: greedy, seeded, with penalties, stop strings and grammars, of several lengths.
ASKED: list[tuple[SamplingParams, StopParams, dict[str, Any]]] = [
    (GREEDY, StopParams(40), {}),
    (SEEDED, StopParams(24, ignore_eos=True), {}),
    (GREEDY, StopParams(1), {}),
    (SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.1), StopParams(30), {}),
    (SamplingParams(temperature=0.9, top_p=0.9, seed=6), StopParams(33, ignore_eos=True), {}),
    (GREEDY, StopParams(60, ("e",)), {}),
    (GREEDY, StopParams(30), {"grammar": PERSON}),
    (SamplingParams(temperature=0.8, seed=9), StopParams(30), {"grammar": PERSON}),
]
native = pytest.mark.skipif(kernels.library() is None, reason="the kernels are not built, or not for this processor")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """The bundled pair in two dtypes and with a head, and one on transformers' own forward."""
    neox = save_random_pair(tmp_path_factory.mktemp("neox"), "gpt_neox")
    head = save_head(BUNDLED / "target", tmp_path_factory.mktemp("head") / "head")
    bundled = {"target": str(BUNDLED / "target"), "draft": str(BUNDLED / "draft")}
    options = {
        "float32": {**bundled, "dtype": "float32"},
        "bfloat16": {**bundled, "dtype": "bfloat16"},
        "head": {**bundled, "draft": str(head), "dtype": "float32"},
        "gpt_neox": {"target": str(neox[0]), "draft": str(neox[1]), "dtype": "float32"},
    }
    return {name: load_pair(load_settings(given)) for name, given in options.items()}


def assistant_of(pair: Pair, policy: LengthPolicy, history: bool = False) -> Assistant:
    return Assistant(pair, policy, None, 200_000_000, History(None) if history else None)


def questions(assistant: Assistant, prompts: Sequence[str]) -> list[Question]:
    """A question for each entry of ``ASKED``."""
    found = []
    for number, (sampling, stop, more) in enumerate(ASKED):
        messages = (Message("user", prompts[number]),)
        prompt = encode_chat(assistant.pair, messages)
        found.append(Question(prompt, messages, "", sampling, stop, client=f"client {number}", **more))
    return found


def alone(assistant: Assistant, asked: Sequence[Question]) -> list[list[int]]:
    """The tokens of the answers decoded one after another, each in caches of its own."""
    said = []
    for question in asked:
        assistant.conversations = Conversations(assistant.pair.target, assistant.pair.draft, 1)
        answering = assistant.begin(question)
        said.append([step.token for step in answering.decoding.steps()])
        assistant.end(answering)
    return said


def together(
    assistant: Assistant, asked: Sequence[Question], late: Sequence[int] = (), engine: Engine | None = None
) -> list[list[int]]:
    """The tokens of the answers decoded in a batch. Question ``late[i]`` joins after 3 * (i + 1) bursts, the others at
    once."""
    batch = Batch(engine or assistant.pair.target, lambda: True)
    joins = {number: 3 * (late.index(number) + 1) if number in late else 0 for number in range(len(asked))}
    said: list[list[int]] = [[] for _ in asked]
    under_way: dict[int, Answering] = {}
    bursts = 0
    while joins or under_way:
        for number in [number for number, when in joins.items() if when <= bursts or not under_way]:
            del joins[number]
            under_way[number] = assistant.begin(asked[number])
            under_way[number].decoding.begin()
            batch.join(under_way[number].decoding)
        bursts += 1
        assert not batch.step()
        for number, answering in list(under_way.items()):
            said[number] += [step.token for step in answering.decoding.show()]
            if answering.decoding.finish_reason is not None:
                batch.leave(answering.decoding)
                answering.decoding.end()
                assistant.end(answering)
                del under_way[number]
    return said


def counting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Record every pass over several sequences as the list of its token counts, one for each sequence."""
    passes: list[list[int]] = []
    usual = engine.extend_together

    def counted(calls: Sequence[ExtendCall]) -> list[torch.Tensor]:
        passes.append([len(call.tokens) for call in calls])
        return usual(calls)

    monkeypatch.setattr(engine, "extend_together", counted)
    return passes


@pytest.fixture(autouse=True)
def a_round_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BURST_S", 0.0)


@pytest.mark.thorough(but="fixed-float32")
@pytest.mark.parametrize("name", ["float32", pytest.param("bfloat16", marks=native), "head", "gpt_neox"])
@pytest.mark.parametrize("policy", ["fixed", "auto"])
def test_eight_answers_at_once_are_those_of_eight_alone(
    pairs: dict[str, Pair], name: str, policy: str, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pairs[name]
    lengths = FixedLength(3) if policy == "fixed" else GoodputWithHistory()
    assistant = assistant_of(pair, lengths, history=True)
    asked = questions(assistant, prompts)
    wanted = alone(assistant, asked)
    assistant.conversations = Conversations(pair.target, pair.draft, 200_000_000)
    passes = counting(pair.target, monkeypatch)
    assert together(assistant, asked, late=(1, 4, 7)) == wanted
    assert max(map(len, passes)) >= 5
    assert sum(len(one) > 1 for one in passes) >= 10


@pytest.mark.thorough
def test_answers_that_are_given_each_others_logits_fail_the_same_test(
    pairs: dict[str, Pair], prompts: list[str]
) -> None:
    pair = pairs["float32"]
    assistant = assistant_of(pair, FixedLength(0))
    asked = [q for q in questions(assistant, prompts) if q.grammar is None and not q.stop.stop]
    wanted = alone(assistant, asked)

    class Crossed:
        def extend_together(self, calls: Sequence[ExtendCall]) -> list[torch.Tensor]:
            found = pair.target.extend_together(calls)
            return found[::-1] if all(len(logits) == 1 for logits in found) else found

    said = together(assistant_of(pair, FixedLength(0)), asked[:2], engine=Crossed())  # type: ignore[arg-type]
    assert said != wanted[:2]


def test_one_alone_is_decoded_by_the_calls_of_one(
    pairs: dict[str, Pair], prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While only one answer is under way, no pass goes through the call for several sequences."""
    assistant = assistant_of(pairs["float32"], FixedLength(3))
    asked = questions(assistant, prompts)[:2]
    passes = counting(pairs["float32"].target, monkeypatch)
    together(assistant, asked[:1])
    assert not passes
    together(assistant, asked, late=(1,))
    assert passes
    assert all(len(one) == 2 for one in passes)


def test_the_time_of_drafts_is_learned_also_if_all_their_tokens_are_dropped(
    pairs: dict[str, Pair], prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, learned = GoodputLength(), []
    policy.calibration.rejected = [1e6] * len(CENTRES)  # no confidence is worth anything
    monkeypatch.setattr(policy, "drafted", lambda *made: learned.append(made))
    assistant = assistant_of(pairs["float32"], policy)
    asked = [replace(one, stop=StopParams(20, ignore_eos=True)) for one in questions(assistant, prompts)[:2]]
    together(assistant, asked)
    assert len(learned) >= 3
    assert {made[:2] for made in learned[:3]} == {(2, 2)}  # one token of each
    assert all(seconds > 0 for *_, seconds in learned)


@pytest.mark.thorough
def test_a_long_prompt_is_read_beside_the_others_in_slices(
    pairs: dict[str, Pair], prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assistant = assistant_of(pairs["float32"], FixedLength(2))
    target = assistant.pair.target
    first, short = questions(assistant, prompts)[:2]
    text = [token for question in questions(assistant, prompts * 2) for token in question.prompt] * 4
    long = Question(text[:1200], (), "long", GREEDY, StopParams(8, ignore_eos=True), client="long")
    asked = [Question(first.prompt, first.messages, "", GREEDY, StopParams(60, ignore_eos=True)), long, short]
    wanted = alone(assistant, asked)
    assistant.conversations = Conversations(target, assistant.pair.draft, 200_000_000)
    passes = counting(target, monkeypatch)
    batch = Batch(target, lambda: True)
    answerings = [assistant.begin(question) for question in asked]
    said: list[list[int]] = [[], [], []]

    def burst() -> None:
        assert not batch.step()
        for number, answering in enumerate(answerings):
            if answering.decoding in batch.under_way:
                said[number] += [step.token for step in answering.decoding.show()]
                if answering.decoding.finish_reason is not None:
                    batch.leave(answering.decoding)
                    answering.decoding.end()

    for answering in answerings[:2]:
        answering.decoding.begin()
        batch.join(answering.decoding)
        burst()
    before = len(said[0])
    assert answerings[1].decoding.unread > 1000
    answerings[2].decoding.begin()
    batch.join(answerings[2].decoding)
    while answerings[1].decoding.unread:
        burst()
    assert len(said[0]) >= before + 8, "who was there got no token while the long prompt was read"
    assert said[2], "the short prompt waited for the long one"
    assert all(sum(one) <= PASS + 8 for one in passes)
    while batch.under_way:
        burst()
    assert said == wanted


class Burst:
    """Greedy answers that share rounds, to prompts of given lengths."""

    def __init__(self, assistant: Assistant, prompts: Sequence[str]) -> None:
        self.assistant, self.batch = assistant, Batch(assistant.pair.target, lambda: True)
        self.text = [token for question in questions(assistant, prompts * 2) for token in question.prompt] * 8
        self.answerings: list[Answering] = []

    def join(self, length: int, tokens: int = 60) -> Answering:
        """Begin an answer of ``tokens`` tokens to a prompt of ``length`` tokens with no prefix of another prompt."""
        prompt, stop = self.text[len(self.answerings) :][:length], StopParams(tokens, ignore_eos=True)
        self.answerings.append(self.assistant.begin(Question(prompt, (), "x", GREEDY, stop)))
        self.answerings[-1].decoding.begin()
        self.batch.join(self.answerings[-1].decoding)
        return self.answerings[-1]

    def step(self) -> None:
        assert not self.batch.step()
        for decoding in list(self.batch.under_way):
            list(decoding.show())
            if decoding.finish_reason is not None:
                self.batch.leave(decoding)


def test_first_tokens_come_as_soon_as_prompts_are_read_the_shortest_first(
    pairs: dict[str, Pair], prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that completes a prompt is not filled up with tokens of other prompts, and drafts read their prompts only
    when all first tokens are out."""
    burst = Burst(assistant_of(pairs["float32"], FixedLength(2)), prompts)
    passes, lengths = counting(burst.assistant.pair.target, monkeypatch), [110, 70, 40, 90, 80]
    answerings = [burst.join(length) for length in lengths]
    first: list[int] = []
    while len(first) < len(lengths):
        waited = [number for number in range(len(lengths)) if number not in first]
        burst.step()
        drafts = [answering.conversation.draft for answering in answerings]
        first += sorted((n for n in waited if answerings[n].decoding.output), key=lambda number: lengths[number])
        if len(first) < len(lengths):
            assert all(draft is not None and not draft.sequence.length for draft in drafts)
    assert [lengths[number] for number in first] == sorted(lengths)
    assert len(passes) == 5
    assert max(map(sum, passes)) <= 110 + 4
    burst.step()
    assert all(answering.decoding.drafted for answering in answerings)


@pytest.mark.thorough
@native
def test_a_streamed_target_reads_two_prompts_in_as_few_passes_as_one_after_the_other(
    prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled = {"target": str(BUNDLED / "target"), "draft": str(BUNDLED / "draft")}
    pair = load_pair(load_settings({**bundled, "dtype": "float32", "memory": "20MB"}))
    assistant = assistant_of(pair, FixedLength(2))
    text = [token for question in questions(assistant, prompts * 2) for token in question.prompt] * 4
    stop = StopParams(8, ignore_eos=True)
    asked = [Question(text[n:][:length], (), str(n), GREEDY, stop) for n, length in enumerate((1000, 900))]
    assert isinstance(pair.target, TransformersEngine)
    forward, passes = pair.target.cpu_forward, list[int]()
    assert forward is not None
    took = forward.took

    def counted(count: int, seconds: float) -> None:
        passes.append(count)
        took(count, seconds)

    monkeypatch.setattr(forward, "took", counted)
    wanted, alone_in = alone(assistant, asked), sum(count > 16 for count in passes)
    passes.clear()
    assert together(assistant_of(pair, FixedLength(2)), asked) == wanted
    assert sum(count > 16 for count in passes) == alone_in == 4


def test_rounds_know_with_how_many_answers_they_shared_their_pass(pairs: dict[str, Pair], prompts: list[str]) -> None:
    burst = Burst(assistant_of(pairs["float32"], FixedLength(2)), prompts)
    long = burst.join(40).decoding
    for _ in range(3):
        burst.step()
    alone = len(long.rounds)
    burst.join(40, 8), burst.join(200, 8)
    while len(burst.batch.under_way) > 1:
        burst.step()
    beside = len(long.rounds)
    burst.step()
    assert 0 < alone < beside < len(long.rounds)
    assert {r.shared for r in long.rounds[alone:beside]} == {1, 2}
    assert not any(r.shared for r in (*long.rounds[:alone], *long.rounds[beside:]))


@pytest.mark.thorough
def test_a_long_prompt_is_not_put_off_for_ever(pairs: dict[str, Pair], prompts: list[str]) -> None:
    """A long prompt is read even if a shorter one joins with every pass. An answer that joins meanwhile drafts."""
    burst = Burst(assistant_of(pairs["float32"], FixedLength(2)), prompts)
    long, short = burst.join(1500), burst.join(40)
    burst.step()
    burst.step()
    assert short.decoding.drafted
    while long.decoding.unread:
        burst.join(100, 1)
        burst.step()
    others = sum(100 - answering.decoding.unread for answering in burst.answerings[2:])
    assert 1000 < others <= 1500 + PASS


def test_an_answer_that_cannot_go_on_ends_alone(pairs: dict[str, Pair], prompts: list[str]) -> None:
    """A token outside the vocabulary fails the joint pass; the sequences are then passed one by one."""
    assistant = assistant_of(pairs["float32"], FixedLength(2))
    good = questions(assistant, prompts)[:2]
    wanted = alone(assistant, good)
    assistant.conversations = Conversations(assistant.pair.target, assistant.pair.draft, 200_000_000)
    bad = Question([5, 6, 10**6, 7], (), "bad", GREEDY, StopParams(8), client="bad")
    batch = Batch(assistant.pair.target, lambda: True)
    answerings = [assistant.begin(question) for question in (*good, bad)]
    said: list[list[int]] = [[], [], []]
    failed = []
    for answering in answerings:
        answering.decoding.begin()
        batch.join(answering.decoding)
    while batch.under_way:
        for decoding, error in batch.step():
            failed.append((decoding, error))
            batch.leave(decoding)
        for number, answering in enumerate(answerings):
            if answering.decoding in batch.under_way:
                said[number] += [step.token for step in answering.decoding.show()]
                if answering.decoding.finish_reason is not None:
                    batch.leave(answering.decoding)
    assert [decoding for decoding, _ in failed] == [answerings[2].decoding]
    assert isinstance(failed[0][1], IndexError)
    assert said[:2] == wanted


def test_the_same_conversation_asked_twice_at_once_has_two_caches_and_one_session(
    pairs: dict[str, Pair], prompts: list[str]
) -> None:
    assistant = assistant_of(pairs["float32"], FixedLength(2))
    (question, *_) = questions(assistant, prompts)
    one, other = assistant.begin(question), assistant.begin(question)
    assert one.conversation is not other.conversation
    assert one.session == other.session
    one.decoding.begin()
    conversations = assistant.conversations
    conversations.limit = 1  # caches in use are kept although they exceed the limit
    third = assistant.begin(Question([9, 8, 7], (), "x", GREEDY, StopParams(4)))
    assert one.conversation.target.sequence is one.decoding.target
    assert not assistant.has_room(10)
    for answering in (one, other, third):
        assistant.end(answering)
    assert assistant.has_room(10**9)
    with pytest.raises(AdaptiveError, match="empty"):
        assistant.begin(Question([], (), "", GREEDY, StopParams(4)))
    assert not assistant.under_way
