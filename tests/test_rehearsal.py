"""A draft writes chats of its own, and training on them keeps what it knows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from test_trainer import BASE, SHORT, small_draft, speak, target, write_log
from test_trainer_command import TEMPLATE, tokenizer

from adaptive.types import SamplingParams
from checkpoints.store import AdapterStore
from trainers import lora
from trainers.dataset import Example, Stopped
from trainers.fit import Progress, fit
from trainers.recipe import Recipe
from trainers.rehearsal import (
    ANSWER,
    LEAST,
    MARK,
    MOST,
    QUESTION,
    SHORTEST,
    Frame,
    Rehearsal,
    draw,
    rehearsal_of,
    sample,
)
from trainers.replay import acceptance_rate, replay
from trainers.run import distill

COUNT = 24
RECORDS = 130


def never() -> bool:
    return False


def quiet(written: int, texts: int) -> None:
    pass


def frame() -> Frame:
    found = Frame.of(tokenizer())
    assert found is not None
    return found


def texts(count: int = COUNT, seed: int = 0) -> list[Example]:
    return [text for group in range(2) for text in sample(small_draft(), frame(), never, seed=seed + group)][:count]


def test_the_format_is_that_of_the_chat_template() -> None:
    words = tokenizer()
    spoken = words.apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, return_dict=False
    )
    found = frame()
    assert [*found.before, *words.encode("x", add_special_tokens=False), *found.after] == spoken
    assert words.eos_token_id in found.ends
    assert found.after[0] in found.ends


def test_without_a_template_a_text_begins_with_the_first_token_there_is() -> None:
    words = tokenizer()
    words.chat_template = None
    assert Frame.of(words) == Frame((words.eos_token_id,), (), frozenset({words.eos_token_id}))
    words.bos_token = "x"
    assert Frame.of(words) == Frame((words.bos_token_id,), (), frozenset({words.eos_token_id}))
    words.bos_token = words.eos_token = None
    assert Frame.of(words) is None


def test_a_template_that_changes_what_users_write_gives_no_chat_format() -> None:
    words = tokenizer()
    words.chat_template = TEMPLATE.replace("m['content']", "m['content'] | lower")
    assert words.chat_template != TEMPLATE
    found = Frame.of(words)
    assert found is not None
    assert not found.after


def test_a_template_that_has_the_mark_elsewhere_gives_no_chat_format() -> None:
    words = tokenizer()
    words.chat_template = f"x {MARK} y {TEMPLATE}"
    found = Frame.of(words)
    assert found is not None
    assert not found.after


def test_texts_are_chats_in_the_draft_s_own_words() -> None:
    before, after, ends = frame().before, frame().after, frame().ends
    made = texts()
    assert len(made) == COUNT
    assert len({one.output.tobytes() for one in made}) > COUNT // 2
    for one in made:
        prompt, output = one.prompt.tolist(), one.output.tolist()
        assert tuple(prompt[: len(before)]) == before
        assert tuple(prompt[-len(after) :]) == after
        assert not ends & set(prompt[len(before) : -len(after)])
        assert len(prompt) <= len(before) + QUESTION + len(after)
        assert SHORTEST <= len(output) <= ANSWER
        assert not ends & set(output[:-1])
        assert (output[-1] in ends) is not one.limited


def test_their_supervision_is_the_draft_s_own_distribution() -> None:
    draft, made = small_draft(), texts()
    for one in made[:4]:
        law = draft(torch.from_numpy(np.concatenate([one.prompt, one.output]))[None].long()).logits[0].log_softmax(-1)
        law = law[len(one.prompt) - 1 : -1]
        assert one.supervision is not None
        chosen = law.gather(-1, torch.from_numpy(one.output).long()[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(one.supervision.chosen).float(), chosen, atol=0.01, rtol=0.01)
        listed = torch.from_numpy(one.supervision.logprobs).float().exp().sum(-1)
        rest = torch.from_numpy(one.supervision.rest).float().exp()
        torch.testing.assert_close(listed + rest, torch.ones_like(rest), atol=0.01, rtol=0)
    assert acceptance_rate(replay(draft, made)) == pytest.approx(1, abs=0.01)


def test_without_a_chat_format_all_of_a_text_is_the_answer() -> None:
    made = sample(small_draft(), Frame((1,), (), frozenset({1})), never)
    assert all(one.prompt.tolist() == [1] for one in made)
    assert max(len(one.output) for one in made) > SHORTEST


def test_tokens_are_drawn_by_their_probabilities() -> None:
    laws = torch.tensor([[0.1, 0.0, 0.3, 0.6, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0]])
    random, rows = torch.Generator().manual_seed(0), 50_000
    drawn = draw(laws.log().repeat(rows, 1), random).view(rows, 2)
    counts = torch.bincount(drawn[:, 0], minlength=5)
    assert counts[[1, 4]].tolist() == [0, 0]
    assert chisquare(counts[[0, 2, 3]].numpy(), [0.1 * rows, 0.3 * rows, 0.6 * rows]).pvalue > 0.001
    assert drawn[:, 1].unique().tolist() == [2]


@pytest.mark.thorough
def test_texts_are_written_once_for_each_draft(tmp_path: Path) -> None:
    said: list[tuple[int, int]] = []
    own = rehearsal_of(tokenizer(), tmp_path / "own.safetensors", "0123")
    assert own is not None
    made = own.texts(small_draft(), RECORDS, never, lambda written, texts: said.append((written, texts)))
    assert [one.id for one in made] == [-1 - number for number in range(RECORDS)]
    assert said[0] == (0, RECORDS)
    assert said == sorted(said)
    assert (tmp_path / "own.safetensors").stat().st_mode & 0o777 == 0o600

    def fail(*given: object) -> bool:
        raise AssertionError("they are sampled again")

    again = own.texts(small_draft(), RECORDS, fail, fail)
    for one, other in zip(made, again, strict=True):
        assert vars(one).keys() == vars(other).keys()
        assert (one.id, one.limited, one.sampling) == (other.id, other.limited, other.sampling)
        assert one.prompt.tolist() == other.prompt.tolist()
        assert one.output.tolist() == other.output.tolist()
        assert one.supervision is not None
        assert other.supervision is not None
        for name in ("ids", "logprobs", "rest", "chosen"):
            np.testing.assert_array_equal(getattr(one.supervision, name), getattr(other.supervision, name))
    with pytest.raises(AssertionError, match="sampled again"):
        replace(own, weights="another draft").texts(small_draft(), RECORDS, fail, fail)
    own.file.write_bytes(own.file.read_bytes()[:-100])
    with pytest.raises(AssertionError, match="sampled again"):
        own.texts(small_draft(), RECORDS, fail, fail)


@pytest.mark.thorough
def test_a_run_that_is_stopped_again_and_again_comes_to_the_same_texts(tmp_path: Path) -> None:
    whole = Rehearsal(frame(), tmp_path / "whole.safetensors", "0123").texts(small_draft(), RECORDS, never, quiet)
    own, began, stops = Rehearsal(frame(), tmp_path / "own.safetensors", "0123"), list[int](), 0
    made: list[Example] = []
    while not made:
        latest: list[int] = []
        try:
            made = own.texts(small_draft(), RECORDS, partial(more_than_one, latest), partial(note, latest))
        except Stopped:
            stops += 1
        began += latest
    assert stops > 2
    assert began == sorted(began)
    assert len(set(began)) == stops + 1  # each run added a group to those that were there
    for one, other in zip(made, whole, strict=True):
        assert (one.id, one.output.tolist()) == (other.id, other.output.tolist())


def note(found: list[int], written: int, texts: int) -> None:
    found.append(written)


def more_than_one(found: list[int]) -> bool:
    return len(found) > 1


@pytest.mark.thorough
def test_texts_that_cannot_be_kept_are_used_all_the_same(tmp_path: Path) -> None:
    own = Rehearsal(frame(), tmp_path / "nowhere" / "own.safetensors", "0123")
    assert len(own.texts(small_draft(), RECORDS, never, quiet)) == RECORDS


@pytest.mark.thorough
def test_there_are_as_many_texts_as_records_and_a_larger_run_adds_to_them(tmp_path: Path) -> None:
    own, draft = Rehearsal(frame(), tmp_path / "own.safetensors", "0123"), small_draft()
    counts = [len(own.texts(draft, records, never, quiet)) for records in (1, 50, 10_000, 50)]
    assert counts == [LEAST, 50, MOST, 50]
    few, many = (own.texts(draft, records, never, quiet) for records in (50, 90))
    assert [one.output.tolist() for one in few] == [one.output.tolist() for one in many[:50]]


def test_writing_stops_when_asked() -> None:
    asked: list[int] = []

    def stop() -> bool:
        asked.append(0)
        return len(asked) > 10

    with pytest.raises(Stopped):
        sample(small_draft(), frame(), stop)
    assert len(asked) == 11


def test_a_run_that_is_stopped_while_the_draft_writes_leaves_no_adapter(tmp_path: Path) -> None:
    log = write_log(tmp_path / "records.db", speak(target(), 120, SamplingParams(temperature=0.7)))
    own = Rehearsal(frame(), tmp_path / "own.safetensors", "0123")
    told: list[Progress] = []
    store = AdapterStore(tmp_path / "adapters")
    outcome = distill(log, store, BASE, small_draft(), SHORT, told.append, lambda: len(told) > 1, rehearsal=own)
    assert outcome.stopped
    assert all(one.counted == "texts to keep" for one in told)
    assert not store.list()
    assert own.file.exists()


@pytest.mark.thorough
def test_training_keeps_what_the_draft_knows(tmp_path: Path) -> None:
    log = write_log(tmp_path / "records.db", speak(target(), 100, SamplingParams(temperature=0.7)))
    unseen, figures = texts(64, seed=1), {}
    for rehearsed in (0, 2):
        store = AdapterStore(tmp_path / f"adapters-{rehearsed}")
        own = Rehearsal(frame(), tmp_path / "own.safetensors", "0123")
        outcome = distill(log, store, BASE, small_draft(), replace(SHORT, rehearsed=rehearsed), rehearsal=own)
        assert own.file.exists() is bool(rehearsed)
        assert outcome.manifest is not None
        assert outcome.manifest.recent is not None
        kept = acceptance_rate(replay(lora.load(small_draft(), store.path(outcome.manifest.id)), unseen))
        figures[rehearsed] = (kept, outcome.manifest.recent.gain.mean)

    assert figures[2][0] > figures[0][0] + 0.1
    assert figures[2][1] > 0.7 * figures[0][1]


@pytest.mark.thorough
def test_own_text_does_not_count_in_the_loss_that_is_shown() -> None:
    """And of records alone, the same weights are trained with and without the option."""
    said = [replace(one, id=number) for number, one in enumerate(texts(16, seed=3), 1)]
    shown: list[float] = []
    for own in ([], texts(8)):
        model = lora.attach(small_draft(), SHORT)
        fit(model, said, lambda step: 1.0, replace(SHORT, epochs=0.5), lambda at: shown.append(at.loss), own=own)
    assert shown[0] == pytest.approx(shown[1], abs=1e-6)


def test_a_recipe_refuses_fewer_than_no_texts() -> None:
    with pytest.raises(Exception, match="rehearsed is -1"):
        Recipe(rehearsed=-1)


@pytest.mark.thorough
def test_texts_are_kept_for_another_day(tmp_path: Path) -> None:
    """Some chat templates write today's date before the question."""
    draft, here = small_draft(), Rehearsal(frame(), tmp_path / "texts", "these")
    first = here.texts(draft, RECORDS, never, quiet)
    written: list[int] = []
    tomorrow = replace(here, frame=replace(here.frame, before=(*here.frame.before, 5)))
    again = tomorrow.texts(draft, RECORDS, never, lambda count, all_: written.append(count))
    assert not written
    assert [text.output.tolist() for text in again] == [text.output.tolist() for text in first]
