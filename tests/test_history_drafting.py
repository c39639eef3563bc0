"""History drafting: the output is exact whatever history proposes, and proposals come only from the same owner's
records that are not deleted."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BUNDLED, Command
from records_factory import generation as make_generation
from test_lossless_sampled import PARAMS, PROMPT, RUNS, VOCAB, NoText, exact_distribution, models, p_value  # noqa: F401

from adaptive.assistant import Assistant
from adaptive.control.matches import Matches
from adaptive.control.policy import FixedLength
from adaptive.decoding.loop import Decoding, Request
from adaptive.decoding.verifier import Verifier
from adaptive.drafting.archive import PAGE, Archive, History, owner_name
from adaptive.drafting.history import HISTORY, HistoryDrafter, RunningText
from adaptive.drafting.suffixes import Continuation, Expected, Suffixes, compiled, suffixes
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.pair import Pair, load_pair
from adaptive.records.log import Log
from adaptive.records.writer import LogWriter
from adaptive.sampling import LogitsProcessor
from adaptive.settings import load_settings
from adaptive.types import Message, Round, SamplingParams, StopParams

GREEDY = SamplingParams(temperature=0.0)
TOKENS = 200
needs_compiled = pytest.mark.skipif(compiled() is None, reason="built without a C++ compiler")


@pytest.fixture(scope="module")
def pair() -> Pair:
    names = {"target": str(BUNDLED / "target"), "draft": str(BUNDLED / "draft"), "dtype": "float32"}
    return load_pair(load_settings(names))


def log_of(folder: Path, texts: dict[str, list[int]], owner: str = "") -> Path:
    """A log with one record for each text, by session."""
    path = folder / "records.db"
    with LogWriter(path) as log:
        for session, tokens in texts.items():
            half = len(tokens) // 2
            log.write(
                dataclasses.replace(
                    make_generation(session=session),
                    prompt=np.array(tokens[:half], np.int32),
                    output=np.array(tokens[half:], np.int32),
                    supervision=None,
                    owner=owner,
                )
            )
    return path


ENDS_WHILE_READING = """
import sys
from pathlib import Path
from adaptive.drafting.archive import Archive
archive = Archive(Path(sys.argv[1]), 1 << 20, most=10**8)
archive.start()
while not archive.tokens:
    pass
"""


@pytest.mark.thorough
@needs_compiled
def test_a_program_may_end_while_its_log_is_read(tmp_path: Path) -> None:
    """The thread that reads is in compiled code nearly all the time."""
    rng = np.random.default_rng(0)
    path = log_of(tmp_path, {str(number): rng.integers(0, 50, 20_000).tolist() for number in range(PAGE)})
    command = [sys.executable, "-c", ENDS_WHILE_READING, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def caught_up(path: Path, vocab: int = 1 << 20) -> Archive:
    archive = Archive(path, vocab)
    archive.catch_up()
    return archive


def proposed(archive: Archive, context: list[int], owner: str = "") -> list[int]:
    """The proposal of a history drafter of ``owner``."""
    history = History(archive).drafter(owner, 0.0)
    history.look(context)
    proposal = history.propose(context, 16)
    assert proposal is not None
    assert isinstance(proposal.tokens, list)
    return proposal.tokens


@pytest.fixture(scope="module")
def alone(pair: Pair, prompts: list[str]) -> list[list[int]]:
    """The target's output for each prompt, without any draft."""
    plain, stop = Assistant(pair, FixedLength(0), None), StopParams(max_new_tokens=TOKENS)
    return [[step.token for step in plain.chat([Message("user", prompt)], GREEDY, stop)] for prompt in prompts]


@pytest.mark.thorough
@pytest.mark.xdist_group("history-greedy")
@pytest.mark.parametrize("length", [1, 4, 16])
def test_greedy_output_equals_that_without_history(
    pair: Pair, prompts: list[str], alone: list[list[int]], length: int, tmp_path: Path
) -> None:
    stop = StopParams(max_new_tokens=TOKENS)
    with LogWriter(tmp_path / "records.db") as log:
        archive = Archive(tmp_path / "records.db", pair.target.vocab_size)
        assistant = Assistant(pair, FixedLength(length), log, history=History(archive))
        drafted: Counter[str] = Counter()
        for repeat in range(2):
            for prompt, expected in list(zip(prompts, alone, strict=True))[:: 1 + repeat]:
                said = [Message("user", prompt)]
                assert [step.token for step in assistant.chat(said, GREEDY, stop)] == expected
                assert assistant.last is not None
                for outcome in assistant.last.rounds:
                    assert outcome.accepted <= outcome.drafted <= max(length, 0)
                    if repeat:
                        drafted[outcome.drafter] += outcome.accepted
            log.flush()
            archive.catch_up()
        archive.close()
    assert drafted[HISTORY] > 0.5 * sum(drafted.values()), "history was hardly used: this would not test it"


def test_an_answer_that_is_known_is_drafted_by_history_alone(pair: Pair, prompts: list[str], tmp_path: Path) -> None:
    """A second answer takes a fraction of the rounds of the first on a target without a draft."""
    alone = dataclasses.replace(pair, draft=None)
    with LogWriter(tmp_path / "records.db") as log:
        archive = Archive(tmp_path / "records.db", pair.target.vocab_size)
        assistant = Assistant(alone, FixedLength(8), log, history=History(archive))
        rounds = []
        for _ in range(2):
            steps = list(assistant.chat([Message("user", prompts[0])], GREEDY, StopParams(max_new_tokens=100)))
            assert assistant.last is not None
            rounds.append(len(assistant.last.rounds))
            log.flush()
            archive.catch_up()
        archive.close()
    assert len(steps) > 50
    assert rounds[1] < 0.25 * len(steps)


def test_history_of_one_session_looks_at_the_running_text_only(pair: Pair, prompts: list[str]) -> None:
    assistant = Assistant(pair, FixedLength(4), None, history=History(None))
    said = [Message("user", prompts[0])]
    first = list(assistant.chat(said, GREEDY, StopParams(max_new_tokens=60, ignore_eos=True)))
    again = list(assistant.chat(said, GREEDY, StopParams(max_new_tokens=60, ignore_eos=True)))
    assert [s.token for s in first] == [s.token for s in again]
    assert assistant.last is not None
    (text,) = assistant.history._texts  # type: ignore[union-attr]
    index = text.tokens
    assert index[: len(assistant.last.request.prompt)] == assistant.last.request.prompt


class Liar:
    """A source that always proposes the same tokens after a context, likely or not."""

    def follow(self, context: list[int], grows: bool = False) -> Continuation:
        return Continuation([(context[-1] * 3 + place) % VOCAB for place in range(2)], [39, 39])

    def follow_end(self, of: Suffixes, table: array[float]) -> Expected:
        return Expected([3, 4], [39, 39], [table[39], table[39] ** 2])


@pytest.mark.thorough
@pytest.mark.parametrize("params", [PARAMS[1], PARAMS[2], PARAMS[4]])
def test_sampled_text_has_the_targets_distribution(
    models: tuple[TransformersEngine, TransformersEngine],  # noqa: F811
    params: SamplingParams,
) -> None:
    target = models[0]
    one = target.sequence()
    generator = torch.Generator().manual_seed(12)
    counts: Counter[tuple[int, ...]] = Counter()
    drafters: Counter[str] = Counter()
    source: Any = Liar()
    for _ in range(RUNS):
        one.rollback(len(PROMPT) - 1)
        request = Request(PROMPT, params, StopParams(max_new_tokens=4), frozenset(), record=False)
        penalties = LogitsProcessor(params, VOCAB, torch.device("cpu"))
        history = HistoryDrafter(RunningText(), source, Matches(), params.temperature)
        verifier = Verifier(params, penalties, generator)
        text: Any = NoText()
        decoding = Decoding(request, one, 64, None, verifier, FixedLength(2), text, history=history)
        for _ in decoding.steps():
            pass
        counts[tuple(decoding.output[:3])] += 1
        drafters.update(outcome.drafter for outcome in decoding.rounds)
    assert drafters[HISTORY] > RUNS
    assert p_value(counts, exact_distribution(target, params)) > 0.001


def test_records_are_found_and_those_of_another_owner_are_not(tmp_path: Path) -> None:
    path = log_of(tmp_path, {"a": list(range(100, 160))})
    log_of(tmp_path, {"b": list(range(300, 360))}, owner_name("kim"))
    archive = caught_up(path)
    assert proposed(archive, list(range(100, 130))) == list(range(130, 146))
    assert proposed(archive, list(range(100, 130)), owner_name("kim")) == []
    assert proposed(archive, list(range(300, 330)), owner_name("kim")) == list(range(330, 346))
    assert proposed(archive, list(range(300, 330))) == []
    assert proposed(archive, list(range(300, 330)), owner_name("lee")) == []
    archive.close()
    with Log(path) as log:
        assert [one.generation.owner for one in log.generations()] == ["", owner_name("kim")]
        assert b"kim" not in path.read_bytes()


def test_records_with_tokens_that_the_target_does_not_know_are_left_out(tmp_path: Path) -> None:
    path = log_of(tmp_path, {"a": [*range(100, 150), 5000, *range(200, 220)]})
    archive = caught_up(path, vocab=5000)
    assert proposed(archive, list(range(100, 130))) == []
    archive.close()


def test_a_chat_that_grows_is_held_once(tmp_path: Path) -> None:
    chat = np.random.default_rng(0).integers(0, 30_000, 4000).tolist()
    path = tmp_path / "records.db"
    with LogWriter(path) as log:
        for end in range(400, 4001, 400):
            log.write(
                dataclasses.replace(
                    make_generation(session="one"),
                    prompt=np.array(chat[: end - 100], np.int32),
                    output=np.array(chat[end - 100 : end], np.int32),
                    supervision=None,
                )
            )
    archive = caught_up(path)
    assert 4000 <= archive.tokens <= 4000 + 10 * 32
    for at in (399, 400, 401, 3000):  # also across the border of two records
        assert proposed(archive, chat[at - 30 : at]) == chat[at : at + 16]
    archive.close()


def test_the_newest_records_are_kept_where_there_are_too_many(tmp_path: Path) -> None:
    chance = np.random.default_rng(1)
    texts = {f"s{i}": chance.integers(0, 30_000, 1000).tolist() for i in range(20)}
    archive = Archive(log_of(tmp_path, texts), 30_000, most=5000)
    archive.catch_up()
    assert archive.tokens <= 5000
    assert proposed(archive, texts["s19"][100:130]) == texts["s19"][130:146]
    assert proposed(archive, texts["s3"][100:130]) == []
    archive.close()


def test_all_owners_together_take_no_more_memory_than_one_may(tmp_path: Path) -> None:
    chance = np.random.default_rng(2)
    texts = [chance.integers(0, 30_000, 1000).tolist() for _ in range(12)]
    for number, text in enumerate(texts):
        path = log_of(tmp_path, {"s": text}, owner_name(f"user {number}"))
    by_tokens, by_bytes = Archive(path, 30_000, most=5000), Archive(path, 30_000, most_bytes=5 << 18)
    for archive in (by_tokens, by_bytes):
        archive.catch_up()
        assert 1000 <= archive.tokens <= 8000
        assert proposed(archive, texts[11][100:130], owner_name("user 11")) == texts[11][130:146]
        assert proposed(archive, texts[0][100:130], owner_name("user 0")) == []
        archive.close()
    assert by_tokens.tokens <= 5000
    assert by_bytes.nbytes <= 5 << 18


def test_what_another_process_purges_is_proposed_by_nobody(tmp_path: Path) -> None:
    """The archive and its thread are open, as in a server; another process purges with ``Log.purge``."""
    texts = {"secret": list(range(100, 200)), "other": list(range(500, 600))}
    path = log_of(tmp_path, texts)
    archive = Archive(path, 1 << 20)
    archive.start()
    assert archive.loaded.wait(30)
    assert proposed(archive, texts["secret"][:30]) == texts["secret"][30:46]
    code = (
        "import sys; from pathlib import Path; from adaptive.records.log import Log\n"
        "with Log(Path(sys.argv[1])) as log: print(log.purge(session='secret'))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
    for start in range(0, 60, 7):
        assert proposed(archive, texts["secret"][start : start + 30]) == []
    assert proposed(archive, texts["other"][:30]) == texts["other"][30:46]
    archive.close()


def test_records_that_are_written_while_it_runs_are_found(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    log_of(tmp_path, {"first": list(range(50))})
    archive = Archive(path, 1 << 20)
    archive.start()
    assert archive.loaded.wait(30)
    stored = threading.Event()
    with LogWriter(path) as log:
        log.on_stored = lambda: (archive.poke(), stored.set())[0]  # type: ignore[assignment, func-returns-value]
        log.write(dataclasses.replace(make_generation(session="x"), prompt=np.arange(900, 960, dtype=np.int32)))
        assert log.flush()
    assert stored.wait(10)
    archive.catch_up()
    assert proposed(archive, list(range(900, 930))) == list(range(930, 946))
    archive.close()


@pytest.mark.thorough
def test_an_answer_waits_for_one_page_while_a_long_log_is_read(tmp_path: Path) -> None:
    each, pages = 20, 200
    path = log_of(tmp_path, {str(n): list(range(n, n + each)) for n in range(pages * PAGE)})
    waits = []
    for pause in (0.0, 0.0005, 0.001, 0.002):
        archive = Archive(path, 1 << 20, most=10**9)
        archive.start()
        while not archive.loaded.is_set():
            before = archive.tokens
            archive.index("")
            waits.append((archive.tokens - before) / each / PAGE)
            time.sleep(pause)
        archive.close()
        assert archive.tokens == pages * PAGE * each
    assert max(waits) <= 2


def test_a_log_that_is_gone_leaves_nothing_to_propose(tmp_path: Path) -> None:
    path = log_of(tmp_path, {"a": list(range(100, 160))})
    archive = caught_up(path)
    for file in tmp_path.glob("records.db*"):
        file.unlink()
    assert proposed(archive, list(range(100, 130))) == []
    archive.close()


def test_the_running_text_follows_whatever_comes() -> None:
    text = RunningText()
    chance = np.random.default_rng(2)
    held = chance.integers(0, 5, 300).tolist()
    for _ in range(40):
        cut = int(chance.integers(0, len(held)))
        held = held[:cut] + chance.integers(0, 5, int(chance.integers(1, 80))).tolist()
        text.follow(held)
        fresh = suffixes()
        fresh.begin(0)
        fresh.append(held)
        assert tuple(text.index.follow(held[-32:], True)) == tuple(fresh.follow(held[-32:], True))
        assert text.tokens == held


def test_plain_decoding_looks_for_nothing() -> None:
    assert FixedLength(4).worth_looking()
    assert not FixedLength(0).worth_looking()


def test_rounds_of_history_say_nothing_of_an_adapter(pair: Pair, prompts: list[str]) -> None:
    assistant = Assistant(pair, FixedLength(4), None, history=History(None))
    list(assistant.chat([Message("user", prompts[0])], GREEDY, StopParams(max_new_tokens=20)))
    assert assistant.last is not None
    assistant.last.rounds = [
        Round(HISTORY, 4, 4, 0.0, 0.0),
        Round("model", 4, 1, 0.0, 0.0),
        Round("none", 0, 0, 0.0, 0.0),
    ]
    assert [r.drafter for _, rounds in assistant.rounds_by_adapter for r in rounds] == ["model", "none"]


ONCE, REPEATED = "Say hello.", "Repeat after me: red green blue, red green blue, red green blue, red green"


@pytest.mark.parametrize(
    ("history", "prompt", "drafts"),
    [("auto", ONCE, True), ("session", ONCE, False), ("session", REPEATED, True), ("off", REPEATED, False)],
)
def test_generate_names_who_drafted(history: str, prompt: str, drafts: bool, tmp_path: Path, adaptive: Command) -> None:
    """The answer to REPEATED repeats itself. That to ONCE is a short sentence, which only the log holds."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": prompt}) + "\n")
    command = ("generate", "--prompts", str(file), "--json", "--history", history, "--draft-length", "4")
    command += ("--temperature", "0", "--dtype", "float32", "--max-new-tokens", "60")
    drafters: list[dict[str, Any]] = []
    accepted = 0
    # The log is read in the background, and a short answer may end before that.
    while len(drafters) < 2 or (drafts and not accepted and len(drafters) < 6):
        code, out, err = adaptive(*command, "--state-dir", str(tmp_path / "state"))
        assert code == 0, err
        drafters.append(json.loads(out)["drafters"])
        accepted = drafters[-1].get(HISTORY, {"accepted": 0})["accepted"]
    assert bool(accepted) is drafts
    assert history != "off" or all(HISTORY not in found for found in drafters)
    assert all(set(one) == {"rounds", "drafted", "accepted"} for found in drafters for one in found.values())
