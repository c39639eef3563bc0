"""Training a head from the log and the spool: the first is judged against plain decoding, later ones continue from the
head in use."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_trainer import BASE, speak, target
from transformers import DynamicCache, SeedOssConfig, SeedOssForCausalLM

from adaptive.engines.head.module import Head
from adaptive.engines.head.parts import decoder_of, parts_of_folder
from adaptive.errors import AdaptiveError
from adaptive.records.features import LONGEST, LONGEST_ANSWER, Features, FeatureSpool, kept
from adaptive.records.writer import LogWriter
from adaptive.sampling import transform_logits
from adaptive.types import Generation, SamplingParams
from checkpoints.store import AdapterStore
from trainers.batches import PASS_LOGITS, longest_output, longest_text
from trainers.dataset import Stopped, TooLittleError, examples, held, read_log, split
from trainers.fit import fit
from trainers.heads import head_losses, replay_head
from trainers.recipe import Recipe
from trainers.replay import acceptance_rate, mean_acceptance_length
from trainers.run import distill
from trainers.sets import gather
from trainers.start import start_from
from trainers.students import AdaptedHead, HeadStudent, Student

SHORT = Recipe(epochs=6, evaluations=4, learning_rate=1e-2, batch=16)


def hidden_states(said: Generation) -> np.ndarray:
    """The target's hidden states of all tokens but the last, as an engine returns them."""
    model, seen = target(), []
    handle = decoder_of(model).norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    with torch.no_grad():
        model(input_ids=torch.from_numpy(np.concatenate([said.prompt, said.output[:-1]])).long()[None])
    handle.remove()
    return seen[0].numpy()


def keep(folder: Path, said: list[Generation], first: int = 0) -> FeatureSpool:
    """Write a log of ``said``, with features from generation ``first`` on. Returns the spool."""
    spool = FeatureSpool(folder / "features", 10**9)
    with LogWriter(folder / "records.db", spool=spool) as writer:
        for number, one in enumerate(said):
            writer.write(one, Features.of(hidden_states(one)) if number >= first else None)
        assert writer.flush()
    return spool


def new_head(folder: Path) -> Head:
    """A new head made from the target's folder, as in a training run."""
    target().save_pretrained(folder / "target")
    return Head(parts_of_folder(folder / "target"), torch.float32)


@pytest.fixture(scope="module")
def spoken() -> list[Generation]:
    return speak(target(), 100, SamplingParams(temperature=0.7))


def test_a_head_grows_from_nothing_is_promoted_and_goes_on(tmp_path: Path, spoken: list[Generation]) -> None:
    spool, head, store = keep(tmp_path, spoken), new_head(tmp_path), AdapterStore(tmp_path / "adapters")
    log = tmp_path / "records.db"
    first = distill(log, store, BASE, head, SHORT, spool=spool)
    assert first.manifest is not None
    assert first.manifest.status == "promoted", first.message
    assert first.manifest.kind == "head"
    assert first.manifest.recent is not None
    assert first.manifest.recent.mean_acceptance_length_before.mean == 1.0  # plain decoding
    folder = store.path(first.manifest.id)
    again = Head.read(folder, parts_of_folder(tmp_path / "target"), torch.float32)
    gate = [e for e in examples(split(read_log(log, 1000), first=True).gate, 64, spool) if e.replayable]
    replays = replay_head(again, gate, SHORT.draft_length)
    assert mean_acceptance_length(replays, 4) == pytest.approx(
        first.manifest.recent.mean_acceptance_length_after.mean, rel=1e-5
    )
    assert acceptance_rate(replays) > 0.2
    # The next run starts from the head in use, so a few tiny steps keep the first run's acceptance.
    second = distill(log, store, BASE, head, Recipe(epochs=0.05, evaluations=1, learning_rate=1e-5), spool=spool)
    assert second.manifest is not None
    assert second.manifest.parent == first.manifest.id
    assert second.manifest.recent is not None
    assert second.manifest.recent.acceptance_after.mean == pytest.approx(acceptance_rate(replays), abs=0.02)


@pytest.mark.thorough
def test_a_head_that_was_given_is_what_is_judged_against_and_gone_on_from(
    tmp_path: Path, spoken: list[Generation]
) -> None:
    spool, given = keep(tmp_path, spoken), new_head(tmp_path)
    (tmp_path / "given").mkdir()
    given.write(tmp_path / "given")  # untrained, but accepted now and then
    again = Head.read(tmp_path / "given", parts_of_folder(tmp_path / "target"), torch.float32)
    short = Recipe(epochs=0.05, evaluations=1, learning_rate=1e-5)
    store = AdapterStore(tmp_path / "adapters")
    outcome = distill(tmp_path / "records.db", store, BASE, again, short, spool=spool, promotion="never")
    assert outcome.manifest is not None
    assert outcome.manifest.recent is not None
    before, after = outcome.manifest.recent.acceptance_before.mean, outcome.manifest.recent.acceptance_after.mean
    assert before > 0.01
    assert after == pytest.approx(before, abs=0.02)


@pytest.mark.thorough(but="64")
@pytest.mark.parametrize("longest", [64, 20])
def test_before_its_first_step_a_head_says_what_follows_from_token_and_state(
    tmp_path: Path, spoken: list[Generation], longest: int
) -> None:
    """Also from answers whose end is cut off, so that there are more states than tokens."""
    spool, head = keep(tmp_path, spoken), new_head(tmp_path)
    known = [e for e in examples(read_log(tmp_path / "records.db", 1000), longest, spool) if e.replayable]
    assert any(len(one.output) < len(whole.output) for one, whole in zip(known, spoken, strict=False)) == (longest < 64)
    said, others = known[:70], known[70:]
    before = acceptance_rate(replay_head(head, others, 4))
    start_from(head, said)
    by_step = np.concatenate([one.acceptance for one in replay_head(head, others, 4)], axis=1).mean(1)
    assert by_step.min() > before + 0.1, "it drafts at every step what it did not know"
    assert not head.fresh
    started = head.own()["fuse.weight"].clone()
    result = fit(head, said, lambda step: 1.0, Recipe(epochs=0.01, evaluations=1, learning_rate=1e-9))
    assert result.steps == 1
    torch.testing.assert_close(head.own()["fuse.weight"], started, msg="what has started does not start again")


@pytest.mark.thorough
def test_an_interrupted_run_is_gone_on_with(tmp_path: Path, spoken: list[Generation]) -> None:
    spool, head, store = keep(tmp_path, spoken), new_head(tmp_path), AdapterStore(tmp_path / "adapters")
    log, state, seen, short = tmp_path / "records.db", tmp_path / "state", [0], replace(SHORT, epochs=2, evaluations=8)

    def stopped_after_six() -> bool:
        return seen[-1] >= 6

    first = distill(
        log, store, BASE, head, short, lambda at: seen.append(at.step), stopped_after_six, spool=spool, state=state
    )
    assert first.stopped
    for number in (1, 2):
        (spool.folder / f"{number}.safetensors").unlink()  # the spool's limit, reached meanwhile
    steps: list[int] = []
    again = distill(
        log, store, BASE, new_head(tmp_path), short, lambda at: steps.append(at.step), spool=spool, state=state
    )
    assert steps[0] > 1
    assert any("going on with the run that was interrupted" in note for note in again.notes)
    assert not again.stopped


@pytest.mark.thorough
@pytest.mark.parametrize("more", [False, True])
def test_an_interrupted_run_whose_hidden_states_are_gone_is_given_up(
    tmp_path: Path, spoken: list[Generation], more: bool
) -> None:
    """If enough was said since, a new run begins with that."""
    spool, head, store = keep(tmp_path, spoken), new_head(tmp_path), AdapterStore(tmp_path / "adapters")
    log, state, seen, short = tmp_path / "records.db", tmp_path / "state", [0], replace(SHORT, epochs=2, evaluations=8)
    first = distill(
        log, store, BASE, head, short, lambda at: seen.append(at.step), lambda: seen[-1] >= 2, spool=spool, state=state
    )
    assert first.stopped
    assert state.exists()
    for number in range(1, 95):
        (spool.folder / f"{number}.safetensors").unlink()
    if not more:
        with pytest.raises(TooLittleError, match="where hidden states were kept, has 6 usable answers"):
            distill(log, store, BASE, new_head(tmp_path), short, spool=spool, state=state)
        assert not state.exists()
        return
    keep(tmp_path, speak(target(), 100, SamplingParams(temperature=0.7), seed=1))
    steps: list[int] = []
    again = distill(
        log, store, BASE, new_head(tmp_path), short, lambda at: steps.append(at.step), spool=spool, state=state
    )
    assert steps[0] == 1
    assert not again.notes
    assert again.until == 200
    assert again.verdict is not None


@pytest.mark.thorough
def test_reading_hidden_states_stops_between_two_answers(tmp_path: Path, spoken: list[Generation]) -> None:
    spool, asked = keep(tmp_path, spoken), [0]

    def stop_after(number: int) -> bool:
        asked[0] += 1
        return asked[0] > number

    def read(stop: int) -> int:
        asked[0] = 0
        sets, _ = gather(
            tmp_path / "records.db", None, None, SHORT, BASE, 64, None, spool, should_stop=lambda: stop_after(stop)
        )
        return len(sets.validation) + len(sets.gate)

    answers = read(stop=1000)
    assert asked[0] >= answers > 10
    with pytest.raises(Stopped):
        read(stop=asked[0] - 1)


def test_chat_messages_teach_no_head(tmp_path: Path, spoken: list[Generation]) -> None:
    spool, head = keep(tmp_path, spoken[:2]), new_head(tmp_path)
    extra = read_log(tmp_path / "records.db", 10)
    with pytest.raises(AdaptiveError, match="hidden states, which a file of chat messages does not hold"):
        distill(None, AdapterStore(tmp_path / "adapters"), BASE, head, SHORT, extra=extra, spool=spool)


def test_only_records_with_features_are_learned_from(tmp_path: Path, spoken: list[Generation]) -> None:
    spool, head = keep(tmp_path, spoken, first=85), new_head(tmp_path)
    with pytest.raises(AdaptiveError, match="15 usable answers"):
        distill(tmp_path / "records.db", AdapterStore(tmp_path / "adapters"), BASE, head, SHORT, spool=spool)


@pytest.mark.thorough
def test_features_that_go_meanwhile_stop_nobody(tmp_path: Path, spoken: list[Generation]) -> None:
    spool, head = keep(tmp_path, spoken), new_head(tmp_path)

    def gone_after_a_while(progress: object) -> None:
        for number in spool.ids()[:60]:
            (spool.folder / f"{number}.safetensors").unlink()

    outcome = distill(
        tmp_path / "records.db",
        AdapterStore(tmp_path / "adapters"),
        BASE,
        head,
        SHORT,
        on_progress=gone_after_a_while,
        spool=spool,
    )
    assert outcome.verdict is not None


def test_replay_is_the_acceptance_of_the_heads_own_drafts(tmp_path: Path, spoken: list[Generation]) -> None:
    """By step and position, compared with a head that reads one row at a time with a cache."""
    spool, head = keep(tmp_path, spoken[:2]), new_head(tmp_path)
    said = examples(read_log(tmp_path / "records.db", 10), 64, spool)
    for example, found in zip(said, replay_head(head, said, 3), strict=True):
        assert found.acceptance.shape == (3, len(example.output) - 1)
        assert example.features is not None
        kept = example.states()
        assert kept is not None
        states = torch.from_numpy(kept.states())
        text = torch.from_numpy(np.concatenate([example.prompt, example.output])).long()
        for start in (len(example.prompt), len(example.prompt) + 9):
            cache, made = DynamicCache(), torch.zeros(1, 1, head.width)
            for row in range(start + 3):
                feature = states[row - 1] if 0 < row <= start else made[0, 0]
                with torch.no_grad():
                    made = head(text[row][None, None], feature[None, None], torch.tensor([[row]]), None, cache)
                    q = transform_logits(head.logits(made[0]), example.sampling).softmax(-1)[0, text[row + 1]]
                if row >= start:
                    assert example.supervision is not None
                    p = np.exp(np.float32(example.supervision.chosen[row + 1 - len(example.prompt)]))
                    place = row - len(example.prompt)
                    assert found.acceptance[row - start, place] == pytest.approx(min(1.0, float(q) / p), abs=1e-3)


def test_replay_is_without_dropout_also_between_two_steps_of_training(tmp_path: Path, spoken: list[Generation]) -> None:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    config = SeedOssConfig(vocab_size=48, hidden_size=32, intermediate_size=64, attention_dropout=0.5, **sizes)
    head = Head.from_target(SeedOssForCausalLM(config))
    spool = keep(tmp_path, spoken[:4])
    said = held(examples(read_log(tmp_path / "records.db", 10), 64, spool))
    student = HeadStudent(head, Recipe(draft_length=2))
    student.module.train()  # as a step of training does
    assert not torch.equal(student.losses(said, Recipe()), student.losses(said, Recipe()))
    once, again = (np.concatenate([one.acceptance for one in student.replay(said)], axis=1) for _ in range(2))
    np.testing.assert_array_equal(once, again)


def test_every_step_of_a_draft_learns(tmp_path: Path, spoken: list[Generation]) -> None:
    spool, head = keep(tmp_path, spoken[:4]), new_head(tmp_path)
    said = examples(read_log(tmp_path / "records.db", 10), 64, spool)
    losses = head_losses(head, said, "auto", 3)
    assert losses.shape == (sum(len(e.output) for e in said),)
    losses.sum().backward()
    learning = {name for name, p in head.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert len(learning) == len(head.own()) - 1  # not the token's norm while ``fuse`` ignores the token
    assert not any("embed_tokens" in name or "lm_head" in name for name in learning)


@pytest.mark.parametrize("student", [HeadStudent, lambda head, recipe: AdaptedHead(head, head, recipe)])
def test_passes_have_room_for_the_steps_that_are_learned(
    tmp_path: Path, spoken: list[Generation], student: Callable[[Head, Recipe], Student]
) -> None:
    _, head = keep(tmp_path, spoken[:4]), new_head(tmp_path)
    said = examples(read_log(tmp_path / "records.db", 10), 64)
    many = PASS_LOGITS // head.vocab_size // max(len(example.output) for example in said)
    assert len(list(student(head, Recipe(draft_length=many, unroll=1)).passes(said))) == 1
    assert len(list(student(head, Recipe(draft_length=1, unroll=many)).passes(said))) == len(said)


def test_a_long_prompt_is_cut_from_the_left_with_its_features(tmp_path: Path, spoken: list[Generation]) -> None:
    """A text longer than the limit is treated as if it began later, except that its first row still reads a feature."""
    spool, head = keep(tmp_path, spoken[:1]), new_head(tmp_path)
    (whole,) = examples(read_log(tmp_path / "records.db", 10), 64, spool)
    head.config.max_position_embeddings = 43  # of 45 rows
    (cut,) = replay_head(head, [whole], 2)
    head.config.max_position_embeddings = 128
    (all_of_it,) = replay_head(head, [whole], 2)
    assert cut.acceptance.shape == all_of_it.acceptance.shape
    assert np.abs(cut.acceptance - all_of_it.acceptance).mean() < 0.05


def test_the_features_that_are_kept_are_those_that_training_reads(tmp_path: Path) -> None:
    head = new_head(tmp_path)
    head.config.max_position_embeddings = 32_768
    for prompt, said in itertools.product([1, 2, 100, 1500, 3000, 9000], [1, 900, 1200, 3500, 20_000]):
        known = prompt + said - 1  # the last token of an answer is not fed
        first, end = kept(prompt, known)
        assert end - first == min(known, LONGEST, prompt + LONGEST_ANSWER)
        used = min(said, longest_output(head))
        rows = min(prompt + used - 1, longest_text(head))
        assert first <= max(
            0, prompt - 2
        )  # the first output token is drafted from the feature of the last token but one
        assert first <= max(0, prompt + used - rows + 1)  # at most the first two rows of the prompt have none
        assert end >= prompt + used - 2


def test_features_that_begin_within_an_answer_are_not_learned_from(tmp_path: Path, spoken: list[Generation]) -> None:
    """Earlier versions kept the last hidden states of a long answer, of which training reads the beginning."""
    _, head = keep(tmp_path, spoken[:2]), new_head(tmp_path)
    whole, late = examples(read_log(tmp_path / "records.db", 10), 64, FeatureSpool(tmp_path / "features", 10**9))
    assert late.features is not None
    states = late.states()
    assert states is not None
    begins = len(late.prompt) + 1
    for part in (slice(begins, None), slice(0, -4)):  # of a text whose end was rolled back
        gone = Features(part.start, states.values[part], states.scales[part])
        late = replace(late, features=gone)
        assert [example.id for example in held([whole, late])] == [whole.id]
        with pytest.raises(LookupError, match="do not cover its output"):
            head_losses(head, [late], "auto", 1)
    student = HeadStudent(head, Recipe(unroll=1))
    assert len(student.losses([whole, late], Recipe(unroll=1))) == len(whole.output)
