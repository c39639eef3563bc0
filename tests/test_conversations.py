"""Chats with the same beginning stay separate, share the computed prefix, and a repeated request finds its cache."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import BUNDLED, save_random_pair
from rich.console import Console
from transformers import AutoModelForCausalLM

from adaptive.answering import Question
from adaptive.caches import Conversation, Conversations
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.protocol import Engine
from adaptive.opened import OpenedPair
from adaptive.records.log import Log
from adaptive.settings import load_settings
from adaptive.types import Message, SamplingParams, StopParams
from cli.opened import open_pair

GREEDY = SamplingParams(temperature=0.0, seed=1)
SYSTEM = Message("system", "You are a patient teacher of small children, and you answer in short sentences. " * 6)
SHORT, LONG = StopParams(12, ignore_eos=True), StopParams(80, ignore_eos=True)


@pytest.fixture
def session(own_home: Path) -> Iterator[OpenedPair]:
    settings = load_settings({"dtype": "float32", "draft_length": "3"})
    with open_pair(settings, Console(file=io.StringIO()), cache_bytes=200_000_000) as opened:
        yield opened


def ask(
    session: OpenedPair, *messages: Message, stop: StopParams = SHORT, client: str = "me", name: str | None = None
) -> tuple[str, int, int]:
    """The answer's text, the number of prompt tokens found in a cache, and the prompt's length in tokens."""
    assistant = session.assistant
    chat = [{"role": m.role, "content": m.content} for m in messages]
    text = str(session.pair.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    prompt = session.pair.tokenizer.encode(text, add_special_tokens=False)
    for _ in assistant.answer(Question(prompt, messages, "", GREEDY, stop, name, client=client)):
        pass
    assert assistant.last is not None
    return assistant.last.text, assistant.last.timings.cached_n, len(prompt)


def sessions(session: OpenedPair) -> list[int]:
    """The number of answers in each session of the log, the latest session first."""
    assert session.assistant.log is not None
    session.assistant.log.flush()
    with Log(session.state.records) as log:
        return [found.generations for found in log.sessions()]


def test_chats_that_share_a_long_system_message_are_two_and_compute_it_once(session: OpenedPair) -> None:
    one, other = Message("user", "What is a boat?"), Message("user", "Why is the sky blue?")
    first, cached, read = ask(session, SYSTEM, one)
    assert cached == 0
    second, cached, whole = ask(session, SYSTEM, other)
    assert cached > 0.8 * read  # the system message
    for said, question in ((first, one), (second, other), (first, one)):
        again = (SYSTEM, question, Message("assistant", said), Message("user", "And then?"))
        _, cached, _ = ask(session, *again)
        assert cached >= whole - 10  # everything before the new question
    assert sessions(session) == [3, 2]
    with Log(session.state.records) as log:
        log.purge(session=log.sessions()[0].id)
        assert log.count() == 2


def test_what_is_shared_with_a_chat_whose_draft_was_never_asked_is_computed_once(session: OpenedPair) -> None:
    one, other = Message("user", "What is a boat?"), Message("user", "Why is the sky blue?")
    ask(session, SYSTEM, one, stop=StopParams(1))  # which drafts nothing
    text, cached, read = ask(session, SYSTEM, other)
    assert cached > 0.8 * read
    session.assistant.conversations.forget_drafts()  # as a swap does
    assert ask(session, SYSTEM, other, client="another")[0] == text


def test_asking_the_same_again_finds_its_cache_and_is_one_session(session: OpenedPair) -> None:
    question = Message("user", "Tell me a long story, please.")
    texts = set()
    for number in range(4):
        text, cached, read = ask(session, question, stop=LONG)
        texts.add(text)
        assert cached == (read - 1 if number else 0)
    assert len(texts) == 1
    assert sessions(session) == [4]


def test_a_title_asked_for_under_the_name_of_a_session_leaves_its_cache_alone(session: OpenedPair) -> None:
    """As opencode does, which names its session in each request."""
    question = Message("user", "What is a boat?")
    said, _, read = ask(session, SYSTEM, question, name="agent")
    title = Message("system", "A title of three words."), question
    for more in ("And then?", "Why?"):
        ask(session, *title, name="agent")
        talk = (SYSTEM, question, Message("assistant", said), Message("user", more))
        assert ask(session, *talk, name="agent")[1] >= read - 10
    assert sessions(session) == [5]


def test_examples_before_a_question_and_other_clients_make_no_common_session(session: OpenedPair) -> None:
    examples = (SYSTEM, Message("user", "1 + 1"), Message("assistant", "2"))
    ask(session, *examples, Message("user", "2 + 2"))
    ask(session, *examples, Message("user", "3 + 3"))
    ask(session, *examples, Message("user", "3 + 3"), client="another")
    ask(session, SYSTEM)  # as some clients do to warm the cache
    ask(session, *examples, Message("user", "4 + 4"))
    assert sessions(session) == [1, 1, 1, 1, 1]


@pytest.mark.thorough
def test_text_is_the_targets_own_whatever_was_copied(session: OpenedPair) -> None:
    chats = [(SYSTEM, Message("user", f"Question {n}: what floats?")) for n in range(3)]
    copied = [ask(session, *chat, stop=LONG)[0] for chat in chats]
    alone = []
    for chat in chats:
        session.assistant.conversations = Conversations(session.pair.target, session.pair.draft, 1)
        alone.append(ask(session, *chat, stop=LONG)[0])
    assert copied == alone


def test_caches_stay_within_their_limit_and_a_conversation_keeps_its_session(session: OpenedPair) -> None:
    questions = [Message("user", f"Question {n}: what floats?") for n in range(4)]
    ask(session, SYSTEM, questions[0])
    conversations = session.assistant.conversations
    conversations.limit = conversations.nbytes  # one conversation
    for question in questions[1:]:
        _, cached, read = ask(session, SYSTEM, question)
        assert cached > 0.8 * read  # taken over, not copied
        assert len(conversations) == 1
    ask(session, SYSTEM, questions[0])
    assert sessions(session) == [2, 1, 1, 1]


def test_a_chat_that_rests_holds_nothing_but_its_cache(session: OpenedPair) -> None:
    """The logits of a round are megabytes if a vocabulary is large, and no limit counts them."""
    if session.pair.target.sequence().fused is None:
        pytest.skip("needs the kernels, which write logits into a buffer of the sequence")

    def beside() -> list[int]:
        """Bytes of logits and probabilities in each conversation, the last used one at the end."""
        texts = [[c.target.sequence, c.draft.sequence] for c in session.assistant.conversations._kept if c.draft]
        return [sum(rows._buffer.nbytes for one in two for rows in (one._logits, one._probs)) for two in texts]  # type: ignore[attr-defined]

    boat, sky = Message("user", "What is a boat?"), Message("user", "Why is the sky blue?")
    said, *_ = ask(session, boat)
    alone = beside()
    ask(session, sky)
    ask(session, Message("user", "Who was Ada?"))
    held = beside()
    assert (held[:-1], held[-1] > 0, alone[0] > 0) == ([0, 0], True, True)
    _, cached, _ = ask(session, boat, Message("assistant", said), sky)
    assert cached > 0
    assert [one > 0 for one in beside()] == [False, False, True]


def test_without_memory_for_caches_the_chats_of_clients_are_still_sessions(session: OpenedPair) -> None:
    session.assistant.conversations.limit = 0
    one, other = Message("user", "What is a boat?"), Message("user", "Why is the sky blue?")
    said, _, _ = ask(session, SYSTEM, one)
    ask(session, SYSTEM, other)
    ask(session, SYSTEM, one, Message("assistant", said), Message("user", "And then?"))
    ask(session, SYSTEM, one, client="another")
    assert sessions(session) == [1, 2, 1]
    assert len(session.assistant.conversations) == 1  # has a cache


@pytest.mark.parametrize("name", [None, "chat"])
def test_a_chat_that_once_had_two_requests_at_a_time_goes_on_in_one_of_its_caches(
    session: OpenedPair, name: str | None
) -> None:
    conversations = Conversations(session.pair.target, session.pair.draft, 200_000_000)
    prompt, talk = list(range(1000, 1300)), (Message("user", "What is a boat?"),)

    def take(more: int) -> Conversation:
        """The conversation of the chat with ``more`` tokens, while it is answered."""
        whole, said = [*prompt, *range(more)], (*talk, *[Message("assistant", "A ship.")] * more)
        found = conversations.take(whole, said, "me", name)
        found.target.keep_prefix_of([*whole, 0])
        found.target.sequence.extend(whole[found.target.sequence.length :], 0)
        found.target.tokens = whole
        found.under_way = True
        return found

    both = take(0), take(0)
    assert both[0] is not both[1]
    both[0].under_way = False
    assert take(1) is both[0], "the other one is in use"
    both[0].under_way = both[1].under_way = False
    for more in (2, 3, 4):
        found = take(more)
        found.under_way = False
        assert found is both[0]


@pytest.mark.parametrize(("raw", "most"), [(False, 1), (True, 5)])
def test_of_an_old_conversation_no_more_is_remembered_than_identifies_it(
    session: OpenedPair, raw: bool, most: int
) -> None:
    """``most``: bytes for each token of its first prompt."""
    conversations = Conversations(session.pair.target, session.pair.draft, 1)
    length, count = 20_000, 20

    def take(number: int, more: int = 0) -> str:
        prompt = [number, *range(1000, 1000 + length + more)]
        return conversations.take(prompt, () if raw else (Message("user", str(number)),)).name

    tracemalloc.start()
    names = [take(number) for number in range(count)]
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held / count / length < most
    assert [take(number, more=3) for number in range(count)] == names


@pytest.fixture(scope="module", params=["llama", "gpt_neox"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "llama":
        return BUNDLED / "target"
    return save_random_pair(tmp_path_factory.mktemp("neox"), "gpt_neox")[0]


@pytest.mark.thorough(but="llama-ours-dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copied_prefix_is_continued_as_the_text_it_came_from(
    folder: Path, dtype: torch.dtype, linear_layers: str
) -> None:
    check_copies(TransformersEngine(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)))


def check_copies(engine: Engine) -> None:
    """Copy prefixes of several lengths into an empty sequence and over another text."""
    tokens = [5 + 7 * n % 1000 for n in range(700)]
    one, other = engine.sequence(), engine.sequence()
    one.extend(tokens, 1)
    for length in (650, 513, 512, 37, 0):
        other.copy_prefix(one, length)
        assert other.length == length
        expected = engine.sequence()
        if length:
            expected.extend(tokens[:length], 1)
        assert torch.allclose(
            other.extend(tokens[length : length + 3], 3).float(),
            expected.extend(tokens[length : length + 3], 3).float(),
            atol=0.15,
            rtol=0.02,
        )
    assert one.length == 700
    again = one.extend([3], 1).clone()
    one.rollback(700)
    assert torch.equal(one.extend([3], 1), again)
