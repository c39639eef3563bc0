"""A proposal whose tokens and length are chosen on a device equals that of a loop that reads every step. Both run on
the processor here, by the operations that a GPU runs."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from test_control_lossless import CHEAP, run_loop
from test_fused import PROMPT, VOCAB, drafter, engine  # noqa: F401
from test_head_engine import bound, engines, text
from test_lossless_sampled import PARAMS as SAMPLED
from test_lossless_sampled import exact_distribution, models, p_value  # noqa: F401
from tiny_models import prompt_of, tiny_model

from adaptive.control.confidence import CENTRES, bin_of
from adaptive.control.costs import LONGEST
from adaptive.control.goodput import GoodputLength
from adaptive.control.policy import FixedLength
from adaptive.control.stopping import Stopping
from adaptive.decoding.loop import round_of, speculative_round
from adaptive.decoding.verifier import Verifier
from adaptive.decoding.verify import verify_on_device
from adaptive.drafting.model import ModelDrafter
from adaptive.drafting.proposal import Proposal
from adaptive.drafting.queued import Choice, Queued, kind_of
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.sampling import LogitsProcessor, Uniform
from adaptive.types import SamplingParams

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=0.9, repetition_penalty=1.2, presence_penalty=0.3),
]
IDS = ["greedy", "sampled", "cut", "seeded", "penalties"]


class QueuedDrafter(ModelDrafter):
    """A drafter that queues its steps as on a GPU, whatever its device."""

    def __init__(self, *args: object, **named: object) -> None:
        super().__init__(*args, **named)  # type: ignore[arg-type]
        self._fused, self.queues = None, True


def both(engine: TransformersEngine, params: SamplingParams, target_vocab: int) -> tuple[ModelDrafter, ModelDrafter]:  # noqa: F811
    """Two drafters with the same random numbers: the first queues its steps, the second reads each one."""
    made = drafter(engine, params, target_vocab), drafter(engine, params, target_vocab)
    for one in made:
        one._fused = None
    made[0].queues = True
    return made


def thresholds(turn: int) -> tuple[Stopping, Stopping]:
    """Two equal thresholds, under which proposals end at once, later, or not at all."""
    chance = random.Random(turn)
    drop, last = ([chance.choice([0.0, 0.2, 0.5, 0.8]) * scale for _ in range(LONGEST)] for scale in (0.5, 0.3))
    found = Stopping(LONGEST, 2), Stopping(LONGEST, 2)
    for one in found:
        one.decide(CENTRES, [0.9 * c for c in CENTRES], drop, last[:-1])
    return found


def same(mine: Proposal | None, theirs: Proposal | None) -> int:
    """Check that both proposals are equal; returns their number of tokens."""
    mine = None if mine is None else mine.closed()
    assert (mine is None) == (theirs is None)
    if mine is None or theirs is None:
        return 0
    assert mine.tokens == theirs.tokens
    assert (mine.probs is None) == (theirs.probs is None)
    for p, q in zip(mine.probs if mine.probs is not None else (), theirs.probs or (), strict=True):
        torch.testing.assert_close(torch.as_tensor(p), torch.as_tensor(q), rtol=0, atol=1e-5)
    return len(mine.tokens)


@pytest.mark.parametrize("params", PARAMS, ids=IDS)
@pytest.mark.parametrize("target_vocab", [VOCAB, VOCAB - 60])
def test_a_queued_proposal_is_the_one_made_by_reading_every_step(
    engine: TransformersEngine,  # noqa: F811
    params: SamplingParams,
    target_vocab: int,
) -> None:
    pair = both(engine, params, target_vocab)
    committed, lengths = list(PROMPT), Counter[int]()
    for turn in range(60):
        stopping = thresholds(turn) if turn % 5 else (None, None)
        one, other = (d.propose(committed, 1 + turn % 7, s) for d, s in zip(pair, stopping, strict=True))
        count = same(one, other)
        if stopping[0] is not None and stopping[1] is not None:
            for known in ("drafts", "asked", "bins", "reach"):
                assert getattr(stopping[0], known) == getattr(stopping[1], known), known
        lengths[count] += 1
        if one is not None:
            committed += one.tokens[: turn % (count + 1)].tolist()  # type: ignore[union-attr]
        committed.append(turn % target_vocab)
        for made in pair:
            made.rollback(len(committed) - 1)
    assert len(lengths) > 3, f"proposals hardly differed in length: {lengths}"


@pytest.mark.parametrize("params", [PARAMS[0], PARAMS[1], PARAMS[3]], ids=["greedy", "sampled", "seeded"])
def test_a_heads_queued_proposal_is_the_one_made_by_reading_every_step(params: SamplingParams) -> None:
    target, head = engines("qwen3", ours=False)
    pair = []
    for queues in (True, False):
        held, draft = bound(target, head)
        processor = LogitsProcessor(params, target.vocab_size, torch.device("cpu"))
        made = ModelDrafter(draft, head, target.vocab_size, params, processor, torch.Generator().manual_seed(7))
        made.queues = queues
        pair.append((held, made))
    committed, lengths = text(40).tolist(), Counter[int]()
    for turn in range(15):
        stopping = thresholds(turn)
        found = []
        for (held, made), advise in zip(pair, stopping, strict=True):
            held.extend(committed[held.length : -1], 1)
            found.append(made.propose(committed, 1 + turn % 5, advise))
        count = same(*found)
        lengths[count] += 1
        for _, made in pair:
            made.rollback(len(committed) + count // 2)
        committed += ([] if found[1] is None else found[1].tokens[: count // 2]) + [turn]  # type: ignore[operator]
    assert len(lengths) > 2


@pytest.mark.parametrize("kind", ["mamba2", "falcon_h1"])
def test_a_step_behind_the_end_is_taken_back_from_a_recurrent_state_too(kind: str) -> None:
    found = []
    for queues in (True, False):
        made_of = TransformersEngine(tiny_model(kind))
        assert made_of.recurrent
        assert made_of.cpu_forward is None
        one = drafter(made_of, PARAMS[0], made_of.vocab_size)
        one.queues, said, committed = queues, [], prompt_of(9)
        for turn in range(12):
            proposal = one.propose(committed, 1 + turn % 5, thresholds(turn)[0])
            proposal = None if proposal is None else proposal.closed()
            tokens = [] if proposal is None else proposal.tokens
            said.append(tokens)
            one.rollback(len(committed) + len(tokens) // 2)
            committed += [*tokens[: len(tokens) // 2], turn]  # type: ignore[list-item]
        found.append(said)
    assert found[0] == found[1]
    assert len({len(tokens) for tokens in found[0]}) > 2


@pytest.mark.parametrize("params", PARAMS, ids=IDS)
def test_rounds_of_queued_proposals_say_the_same(
    engine: TransformersEngine,  # noqa: F811
    params: SamplingParams,
) -> None:
    """Greedy and under a seed the rounds are equal. Sampled rounds differ, since another rule draws other random
    numbers; the chi-square test below checks their distribution."""
    found = []
    for queues in (True, False):
        processor = LogitsProcessor(params, VOCAB, torch.device("cpu"))
        processor.start(torch.tensor(PROMPT))
        made = ModelDrafter(engine.sequence(), engine, VOCAB, params, processor, torch.Generator().manual_seed(3))
        made._fused, made.queues = None, queues
        verifier, target = Verifier(params, processor, torch.Generator().manual_seed(4)), engine.sequence()
        committed, rounds, stopping = list(PROMPT), [], thresholds(3)[0]
        while len(committed) < 60:
            outcome = speculative_round(target, made, verifier, committed, 1 + len(rounds) % 6, stopping)[0]
            rounds.append((outcome.drafter, outcome.drafted, outcome.accepted))
        found.append((committed, rounds))
    if params.greedy or params.seeded:
        assert found[0] == found[1]
    for committed, rounds in found:
        assert len(committed) == len(PROMPT) + sum(1 + accepted for _, _, accepted in rounds)
        assert all(accepted <= drafted for _, drafted, accepted in rounds)
    assert len({drafted for _, drafted, _ in found[0][1]}) > 1


class DropsAfterDrawing(QueuedDrafter):
    """Deliberately broken: drops unlikely tokens after they have been drawn."""

    def propose(self, *args: object, **named: object) -> Proposal | None:
        proposal = super().propose(*args, **named)  # type: ignore[arg-type]
        if proposal is not None and proposal.queued is not None and proposal.queued.count is not None:
            assert isinstance(proposal.probs, torch.Tensor)
            likely = proposal.probs.gather(1, proposal.tokens[:, None])[:, 0] > 0.2  # type: ignore[call-overload]
            proposal.queued.count = likely.int().cumprod(0).sum().long()
            proposal.queued._drafted = int(proposal.queued.count)
        return proposal


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("policy", "kind", "right"),
    [
        (GoodputLength(CHEAP), QueuedDrafter, True),
        (FixedLength(2), QueuedDrafter, True),
        (FixedLength(2), DropsAfterDrawing, False),
    ],
    ids=["goodput", "fixed", "dropped-after-drawing"],
)
def test_queued_proposals_leave_the_distribution_alone(
    models: tuple[TransformersEngine, TransformersEngine],  # noqa: F811
    policy: GoodputLength | FixedLength,
    kind: type[QueuedDrafter],
    right: bool,
) -> None:
    counts, drafted = run_loop(models, SAMPLED[0], policy, kind, 2500)
    assert (p_value(counts, exact_distribution(models[0], SAMPLED[0])) > 0.001) is right
    assert sum(drafted[k] for k in drafted if k) > 50, f"hardly anything was drafted: {drafted}"


def test_the_rule_for_tokens_of_which_not_all_count_is_the_rule_for_those_that_do() -> None:
    chance = torch.Generator().manual_seed(1)
    for count in (0, 1, 2, 3):
        for turn in range(40):
            p, q = (torch.rand(n, 9, generator=chance).softmax(-1) for n in (4, 3))
            tokens = torch.randint(0, 9, (3,), generator=chance)
            queued = queued_of(count)
            sides = [Uniform(torch.Generator().manual_seed(turn)) for _ in range(2)]
            mine = verify_on_device(p, tokens, q, sides[0], queued)
            theirs = verify_on_device(p[: count + 1], tokens[:count], q[:count], sides[1])
            assert (mine.accepted, mine.tokens) == (theirs.accepted, theirs.tokens)
            assert torch.equal(torch.as_tensor(mine.chosen), torch.as_tensor(theirs.chosen))
            assert torch.equal(sides[0].column(5), sides[1].column(5)), "they took other numbers of random numbers"
            outcome = round_of(Proposal("model", tokens, q, queued=queued), mine, 1.0, 2.0)
            assert (outcome.drafted, outcome.drafter) == (count, "model" if count else "none")


def queued_of(count: int) -> Queued:
    """A proposal of which the first ``count`` tokens count."""
    choice = Choice(kind_of(PARAMS[0], 9, 3, None), PARAMS[0], torch.device("cpu"))
    queued = Queued(choice, None, Uniform(torch.Generator()))
    for step in range(count):
        choice(torch.eye(9)[step : step + 1])
        queued.stepped()
    assert queued.close() == count
    return queued


def test_not_more_than_one_step_is_computed_behind_the_end() -> None:
    params, device = PARAMS[0], torch.device("cpu")
    stopping = Stopping(LONGEST)
    stopping.decide(CENTRES, CENTRES, [0.6] * LONGEST, [0.0] * (LONGEST - 1))
    choice = Choice(kind_of(params, 9, 8, stopping), params, device)
    choice.begin(stopping)
    queued, steps = Queued(choice, stopping, Uniform(torch.Generator())), 0
    for sure in (9.0, 9.0, 0.0, 9.0, 9.0, 9.0):
        choice(sure * torch.eye(9)[:1])
        queued.stepped()
        steps += 1
        if not queued.goes_on():
            break
    assert (steps, queued.close(), queued.drafted) == (4, 2, 2)
    assert stopping.bins_of() == [len(CENTRES) - 1, len(CENTRES) - 1, bin_of(1 / 9)]
