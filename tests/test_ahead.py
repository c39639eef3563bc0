"""Drafting ahead, while the target verifies: a correct guess is used, and no text changes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from test_lossless_sampled import PARAMS, PROMPT, VOCAB, exact_distribution, models, p_value, run_loop

from adaptive.control.policy import Advice
from adaptive.drafting import outcomes
from adaptive.drafting.ahead import ChainAhead, GuessAhead, TreeAhead, Worker
from adaptive.drafting.proposal import Proposal
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.tree import TokenTree
from adaptive.sampling import LogitsProcessor
from adaptive.tokens import as_list
from adaptive.types import SamplingParams

assert models  # a fixture
GREEDY = SamplingParams(temperature=0.0)
KINDS: list[Any] = [ChainAhead, GuessAhead, TreeAhead]


class AllAhead:
    """Wraps a drafter: after each proposal it drafts ahead until nothing is left to draft."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.ready = drafter, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, committed: list[int], length: int, advise: Any = None) -> Proposal | None:
        before = Counting.passes
        proposal: Proposal | None = self.drafter.propose(committed, length)
        self.ready += Counting.passes == before
        while self.drafter.step():
            pass
        return proposal


class Counting:
    """Counts the passes of drafts."""

    passes = 0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from adaptive.engines.hf.engine import TransformersSequence

    extend, propose = TransformersSequence.extend, TransformersSequence.propose

    def extended(self: Any, *given: Any) -> Any:
        Counting.passes += 1
        return extend(self, *given)

    def proposed(self: Any, call: Any) -> Any:
        Counting.passes += 1
        return propose(self, call)

    monkeypatch.setattr(TransformersSequence, "extend", extended)
    monkeypatch.setattr(TransformersSequence, "propose", proposed)


def drafter_of(kind: Any, engine: TransformersEngine, params: SamplingParams, vocab: int) -> AllAhead:
    processor = LogitsProcessor(params, vocab, torch.device("cpu"))
    return AllAhead(kind(engine.sequence(), engine, vocab, params, processor, torch.Generator().manual_seed(5)))


def first_path(proposal: Proposal) -> list[int]:
    """The tokens from the first node to its first child, and so on; those of a chain."""
    tokens = as_list(proposal.tokens)
    if proposal.parents is None:
        return tokens
    path = [-1]
    while path[-1] in proposal.parents:
        path.append(proposal.parents.index(path[-1]))
    return [tokens[node] for node in path[1:]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.3, seed=4)], ids=["greedy", "seed"])
def test_a_proposal_that_was_ready_is_the_one_that_would_have_been_made(
    models: tuple[TransformersEngine, TransformersEngine], counted: None, kind: Any, params: SamplingParams
) -> None:
    """A chain drafted ahead equals a fresh one token for token. A tree drafted ahead may cover other nodes, so only its
    shape and its first token are checked."""
    draft = models[1]
    ahead = drafter_of(kind, draft, params, VOCAB)
    committed = list(PROMPT)
    for _ in range(5):
        proposal = ahead.propose(committed, 4)
        assert proposal is not None
        fresh = drafter_of(kind, draft, params, VOCAB).drafter.propose(list(committed), 4)
        assert fresh is not None
        if kind is not TreeAhead:
            assert proposal.tokens == fresh.tokens
        else:
            assert proposal.parents is not None
            TokenTree().grown(proposal.parents)
            assert len(proposal.tokens) == 4
            assert proposal.tokens[0] in fresh.tokens
        path = first_path(proposal)
        following = drafter_of(ChainAhead, draft, params, VOCAB).drafter.propose([*committed, *path], 1)
        committed += [*path, *following.tokens]
        ahead.rollback(len(committed) - 1)
    assert ahead.ready > 0
    if kind is not TreeAhead:
        assert ahead.ready == 4  # all but the first


@pytest.mark.parametrize("kind", [ChainAhead, GuessAhead])
def test_what_was_drafted_ahead_leaves_nothing_behind(
    models: tuple[TransformersEngine, TransformersEngine], kind: Any
) -> None:
    """When the text continues differently, or its end is rolled back, the draft's cache holds that text only."""
    draft = models[1]
    ahead = drafter_of(kind, draft, GREEDY, VOCAB)
    committed = list(PROMPT)
    for token in (0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 7):  # regardless of the draft's predictions
        proposal = ahead.propose(committed, 3)
        assert proposal is not None
        # The cache keeps all outcomes of a chain until the actual one is known. Here the last token is rolled back.
        held = len(committed) - 1
        committed.append(token)
        ahead.rollback(held if kind is ChainAhead else len(committed) - 1)
        known = ahead.drafter.sequence
        assert known.length <= held + (kind is GuessAhead)
        logits = known.extend(committed[known.length :], 1).clone()
        assert torch.allclose(logits, draft.sequence().extend(committed, 1), atol=1e-5)
        known.rollback(len(committed) - 1)


def guessed_rightly(draft: TransformersEngine) -> tuple[AllAhead, list[int]]:
    """A drafter whose guess of what follows its proposal has come true, and the text with that token."""
    ahead, committed = drafter_of(GuessAhead, draft, GREEDY, VOCAB), list(PROMPT)
    proposal = ahead.propose(committed, 3)
    assert proposal is not None
    committed += proposal.tokens
    committed.append(int(draft.sequence().extend(committed, 1).argmax()))  # what the draft guesses
    ahead.rollback(len(committed) - 1)
    return ahead, committed


@pytest.mark.parametrize("advise", [None, lambda position, confidence: Advice.MORE], ids=["alone", "advised"])
@pytest.mark.parametrize("others", [0, 1, 5])
def test_a_right_guess_leaves_nothing_behind_when_others_make_the_next_rounds(
    models: tuple[TransformersEngine, TransformersEngine], others: int, advise: Any
) -> None:
    """History, say, drafts them, or nobody: nothing is rolled back then."""
    draft = models[1]
    ahead, committed = guessed_rightly(draft)
    assert ahead.drafter.sequence.length > len(committed)
    committed += [6, 5, 4, 3, 2][:others]
    found = ahead.drafter.propose(committed, 3, advise)
    assert found is not None
    fresh = drafter_of(GuessAhead, draft, GREEDY, VOCAB).drafter.propose(committed, 3, advise)
    assert list(found.tokens) == list(fresh.tokens)


@pytest.mark.parametrize("advise", [None, lambda position, confidence: Advice.MORE], ids=["alone", "advised"])
def test_what_the_cache_holds_of_a_conversation_is_not_read_again(
    models: tuple[TransformersEngine, TransformersEngine], monkeypatch: pytest.MonkeyPatch, advise: Any
) -> None:
    """Neither at an answer's first proposal nor after tokens that were fed before one."""
    drafter: GuessAhead = drafter_of(GuessAhead, models[1], GREEDY, VOCAB).drafter
    sequence, committed, dropped = drafter.sequence, [*PROMPT, 1, 2, 3, 4, 5], []
    rollback = sequence.rollback
    monkeypatch.setattr(sequence, "rollback", lambda n: (dropped.append(sequence.length - n), rollback(n)))
    sequence.extend(committed[:-1], 0)  # as an earlier turn left it
    assert drafter.propose(committed, 2, advise) is not None
    assert not [count for count in dropped if count > 0]
    drafter.rollback(len(committed) - 1)
    dropped.clear()
    committed += [7, 6, 5, 4, 3, 2, 1]
    drafter.feed(committed, 4)
    assert drafter.propose(committed, 2, advise) is not None
    assert not [count for count in dropped if count > 0]


def test_fewer_tokens_may_be_asked_for_than_are_ready(models: tuple[TransformersEngine, TransformersEngine]) -> None:
    """Near the end of an answer, say. The draft goes on behind what was proposed, not behind all that was ready."""
    draft, committed = models[1], list(PROMPT)
    ahead = drafter_of(GuessAhead, draft, GREEDY, VOCAB)
    for length in (6, 2, 1, 3):
        proposal = ahead.propose(committed, length)
        assert proposal is not None
        fresh = drafter_of(GuessAhead, draft, GREEDY, VOCAB).drafter.propose(committed, length)
        assert list(proposal.tokens) == list(fresh.tokens)
        committed += proposal.tokens
        committed.append(int(draft.sequence().extend(committed, 1).argmax()))  # what the draft guesses
        ahead.rollback(len(committed) - 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.3, seed=4)], ids=["greedy", "seed"])
def test_whatever_the_target_says_the_next_proposal_is_the_same(
    models: tuple[TransformersEngine, TransformersEngine], counted: None, kind: Any, params: SamplingParams
) -> None:
    """None, some or all tokens of a chain are accepted, and any token follows. The next proposal equals the one made
    without drafting ahead. Where chains are drafted for every outcome, it is ready without a pass."""
    draft = models[1]
    ahead = drafter_of(kind, draft, params, VOCAB)
    committed = list(PROMPT)
    for round_, token in enumerate((0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 7)):
        proposal = ahead.propose(committed, 3)
        assert proposal is not None
        stands = [] if kind is TreeAhead else proposal.tokens[: round_ % 4]
        if kind is not TreeAhead:
            fresh = drafter_of(kind, draft, params, VOCAB).drafter.propose(list(committed), 3)
            assert proposal.tokens == fresh.tokens
        committed += [*stands, token]
        ahead.rollback(len(committed) - 1)
    if kind is ChainAhead:
        assert ahead.ready >= 8  # of 10; the rarest outcomes are left out


@pytest.mark.parametrize("kind", [ChainAhead, TreeAhead])
def test_what_follows_a_prompt_is_drafted_while_it_is_read(
    models: tuple[TransformersEngine, TransformersEngine], counted: None, kind: Any
) -> None:
    ahead = drafter_of(kind, models[1], GREEDY, VOCAB)
    ahead.drafter.expect(PROMPT, 4)
    while ahead.drafter.step():
        pass
    ahead.rollback(len(PROMPT))
    (token,) = drafter_of(ChainAhead, models[1], GREEDY, VOCAB).drafter.propose(list(PROMPT), 1).tokens
    proposal = ahead.propose([*PROMPT, token], 4)
    assert proposal is not None
    assert ahead.ready == 1
    if kind is ChainAhead:
        fresh = drafter_of(ChainAhead, models[1], GREEDY, VOCAB).drafter.propose([*PROMPT, token], 4)
        assert proposal.tokens == fresh.tokens


@pytest.mark.parametrize("kind", [ChainAhead, GuessAhead])
def test_of_a_distribution_drafted_ahead_only_possible_tokens_are_kept(
    models: tuple[TransformersEngine, TransformersEngine], kind: Any
) -> None:
    """Two of them take 24 bytes, all eight 32."""
    for top_k, size in ((2, 24), (0, 32)):
        ahead = drafter_of(kind, models[1], SamplingParams(temperature=1.3, top_k=top_k), VOCAB)
        assert ahead.propose(list(PROMPT), 3) is not None
        found = ahead.drafter
        kept = found._rows if kind is GuessAhead else [row for one in found._found.values() for row in one.rows]
        assert len(kept) > 2
        assert found.memory == size * len(kept)


def test_no_more_is_drafted_ahead_than_there_is_memory_for(
    models: tuple[TransformersEngine, TransformersEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted = []
    for most in (outcomes.MOST_BYTES, 1):
        monkeypatch.setattr(outcomes, "MOST_BYTES", most)
        ahead = drafter_of(ChainAhead, models[1], PARAMS[1], VOCAB)
        assert ahead.propose(list(PROMPT), 3) is not None
        drafted.append(sum(len(one.rows) for one in ahead.drafter._found.values()))
    assert drafted[0] > drafted[1] > 0
    assert drafted[1] <= outcomes.WIDTH


class Noting:
    """Forwards to another adviser and keeps the arguments."""

    def __init__(self, advise: Any) -> None:
        self.advise, self.asked = advise, list[tuple[int, float]]()

    def __call__(self, position: int, confidence: float) -> Advice:
        self.asked.append((position, round(confidence, 4)))
        return self.advise(position, confidence)  # type: ignore[no-any-return]


@pytest.mark.parametrize("steps", [0, 2, 3, 100])
def test_an_adviser_is_asked_the_same_of_what_was_drafted_ahead(
    models: tuple[TransformersEngine, TransformersEngine], steps: int
) -> None:
    """Independent of how many tokens were drafted ahead when the adviser is called."""
    drafter, committed = drafter_of(ChainAhead, models[1], GREEDY, VOCAB).drafter, list(PROMPT)

    def advise(position: int, confidence: float) -> Advice:
        return Advice.LAST if position == 4 else Advice.DROP if confidence < 0.15 else Advice.MORE

    for token in (3, 5, 1):
        seen, anew = Noting(advise), Noting(advise)
        fresh = drafter_of(ChainAhead, models[1], GREEDY, VOCAB).drafter.propose(list(committed), 6, anew)
        proposal = drafter.propose(committed, 6, seen)
        assert (proposal and proposal.tokens, seen.asked) == (fresh and fresh.tokens, anew.asked)
        for _ in range(steps):
            drafter.step()
        committed.append(token)
        drafter.rollback(len(committed) - 1)


@pytest.mark.parametrize("kind", [ChainAhead, GuessAhead])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.3, seed=4)], ids=["greedy", "seed"])
@pytest.mark.parametrize("last", [Advice.LAST, Advice.DROP])
def test_a_chain_drafted_ahead_ends_where_the_adviser_ends_it(
    models: tuple[TransformersEngine, TransformersEngine],
    counted: None,
    kind: Any,
    params: SamplingParams,
    last: Advice,
) -> None:
    """Where a fresh one would end, of the same confidences, and without a pass."""
    draft = models[1]
    for ended in (1, 2, 4):
        ahead, committed = drafter_of(kind, draft, params, VOCAB), list(PROMPT)
        proposal = ahead.propose(committed, 4)
        assert proposal is not None
        committed += proposal.tokens
        following = drafter_of(ChainAhead, draft, params, VOCAB).drafter.propose(list(committed), 1)
        committed += following.tokens
        ahead.rollback(len(committed) - 1)
        made, asked = [], []
        for drafter in (ahead.drafter, drafter_of(kind, draft, params, VOCAB).drafter):
            noting = Noting(lambda position, confidence, ended=ended: last if position == ended else Advice.MORE)
            before = Counting.passes
            chain = drafter.propose(list(committed), 4, noting)
            made.append(None if chain is None else as_list(chain.tokens))
            asked.append(noting.asked)
            assert (Counting.passes == before) is (drafter is ahead.drafter)
        assert (made[0], asked[0]) == (made[1], asked[1])
        assert len(made[0] or []) == ended - (last is Advice.DROP)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "runs"), [(ChainAhead, 3000), (TreeAhead, 400)], ids=["ChainAhead", "TreeAhead"])
@pytest.mark.parametrize("params", [PARAMS[1], PARAMS[2]], ids=["t1.3", "t0.7-top_p"])
def test_the_whole_loop_samples_from_the_target(
    models: tuple[TransformersEngine, TransformersEngine],
    kind: Any,
    runs: int,
    params: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outcomes, "NODES", 48)  # covers some outcomes and misses others
    drafter = drafter_of(kind, models[1], params, VOCAB)
    counts = run_loop(models, params, 1, runs, certain=drafter)  # type: ignore[arg-type]
    assert p_value(counts, exact_distribution(models[0], params)) > 0.001


def test_a_worker_does_nothing_once_it_is_stopped_and_outlives_a_failure() -> None:
    worker, steps = Worker(), list[int]()
    failed, stepped = threading.Event(), threading.Event()

    def step() -> bool:
        steps.append(1)
        stepped.set()
        return True

    def fails() -> bool:
        failed.set()
        raise RuntimeError("no")

    worker.go_on(fails)
    assert failed.wait(30)
    worker.go_on(step)
    assert stepped.wait(30)
    assert worker.stop()
    seen = len(steps)
    time.sleep(0.05)
    assert len(steps) == seen
    assert not worker.stop()
