"""The log: records are read as they were written, old files are migrated, purged text is gone."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
from records_factory import generation, same, start

from adaptive.errors import AdaptiveError
from adaptive.records.export import export_jsonl, export_parquet
from adaptive.records.log import Log
from adaptive.records.retention import Keep
from adaptive.records.schema import MIGRATIONS, connect, create_tables
from adaptive.records.writer import LogWriter
from adaptive.types import Generation, Message


def filled(path: Path, generations: list[Generation]) -> Path:
    with LogWriter(path) as writer:
        for g in generations:
            writer.write(g)
        assert writer.flush()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pair" / "records.db"


def test_a_generation_comes_back_bit_for_bit(path: Path) -> None:
    said = [
        generation(0, text="naïve 🙂\nline\x00nul", domain="code", adapter="0007"),
        generation(1, supervised=False, raw=True),
        generation(2, rounds=(), tokens=1),
    ]
    filled(path, said)
    back = list(Log(path).generations())
    assert [b.id for b in back] == [1, 2, 3]
    assert all(same(a, b.generation) for a, b in zip(said, back, strict=True))


def test_figures_are_written_by_the_names_of_their_columns(path: Path) -> None:
    connection = connect(path)
    (made,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'figures'").fetchone()
    connection.execute("DROP TABLE figures")
    connection.execute(made.replace(", own BLOB)", ")").replace("session TEXT", "own BLOB, session TEXT"))
    connection.close()
    filled(path, [generation(1)])
    assert len(Log(path).figures()) == 1


def test_text_that_utf8_cannot_hold_is_logged_with_a_mark(path: Path) -> None:
    filled(path, [generation(text="bad \udcff byte", asked="\ud800?")])
    (back,) = Log(path).generations()
    assert back.generation.text == "bad ? byte"
    assert back.generation.messages[0].content == "??"


def test_pages_give_every_generation_once(path: Path) -> None:
    filled(path, [generation(i, tokens=1) for i in range(150)])
    log = Log(path)
    assert [g.id for g in log.generations()] == list(range(1, 151))
    assert [g.id for g in log.generations(after_id=60, limit=70)] == list(range(61, 131))
    assert next(log.generations(with_supervision=False)).generation.supervision is None
    assert (log.count(), log.last_id()) == (150, 150)


def test_a_log_that_does_not_exist_is_empty_and_stays_away(path: Path) -> None:
    log = Log(path)
    assert (log.count(), list(log.generations()), log.sessions(), log.figures()) == (0, [], (), ())
    assert log.stats().generations == 0
    assert log.purge(everything=True) == 0
    assert not path.exists()
    filled(path, [generation()])
    assert log.count() == 1  # the log is found once it exists


def test_a_session_resumes_from_its_latest_answer(path: Path) -> None:
    filled(
        path,
        [
            generation(0, session="a", asked="one", text="1"),
            generation(1, session="a", asked="two", text="2"),
            generation(2, session="b"),
            generation(3, session="a", raw=True),
        ],
    )
    log = Log(path)
    assert log.session_messages("a") == (Message("user", "two"), Message("assistant", "2"))
    assert log.session_messages("nobody") == ()
    assert [(s.id, s.generations, s.opening) for s in log.sessions()] == [("a", 3, "one"), ("b", 1, "a question")]


def test_stats_count_what_the_log_holds(path: Path) -> None:
    filled(
        path,
        [
            generation(0, domain="code", tokens=4),
            generation(1, domain="code", adapter="0001", tokens=3, supervised=False),
            generation(2, tokens=2, session="t"),
        ],
    )
    stats = Log(path).stats()
    assert (stats.generations, stats.sessions, stats.tokens, stats.positions) == (3, 2, 9, 6)
    assert (stats.first, stats.last) == (1_700_000_000.0, 1_700_000_002.0)
    assert [(s.name, s.generations, s.tokens) for s in stats.by_domain] == [("code", 2, 7), (None, 1, 2)]
    assert [(s.name, s.generations) for s in stats.by_adapter] == [(None, 2), ("0001", 1)]
    assert stats.size >= path.stat().st_size > 0


@pytest.mark.skipif(os.name != "posix", reason="file modes of POSIX")
def test_files_and_folders_are_private(path: Path) -> None:
    before = os.umask(0)
    try:
        with LogWriter(path) as writer:
            writer.write(generation())
            writer.flush()
            files = list(path.parent.iterdir())
            assert {f.name for f in files} == {"records.db", "records.db-wal", "records.db-shm"}
            assert {stat.S_IMODE(f.stat().st_mode) for f in files} == {0o600}
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        path.chmod(0o644)  # a copy restored by other means is made private again
        Log(path).count()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_version_1_file_is_migrated_with_its_records(path: Path) -> None:
    path.parent.mkdir()
    old = sqlite3.connect(path, isolation_level=None)
    create_tables(old)
    old.execute("PRAGMA user_version=1")
    old.execute(
        """INSERT INTO generations VALUES (5, 's', 1.0, NULL, 'e', NULL, 'stop', 0.0, '{}', 1, 0, 0.1, 1, 0.1, 0, 0, 0,
        '[]', 'p', 't', x'01000000', x'02000000', NULL)"""
    )
    old.close()
    (logged,) = Log(path).generations()
    assert (logged.id, logged.generation.text, logged.generation.output.tolist()) == (5, "t", [2])
    connection = connect(path)
    assert connection.execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS)
    plan = str(connection.execute("EXPLAIN QUERY PLAN SELECT * FROM generations WHERE session = 's'").fetchall())
    assert "generations_by_session" in plan


def test_a_log_of_a_newer_version_is_refused(path: Path) -> None:
    filled(path, [generation()])
    newer = connect(path)  # with changed tables: a newer number alone would count as damage
    newer.execute("ALTER TABLE generations ADD COLUMN mood TEXT")
    newer.execute("PRAGMA user_version=99")
    with pytest.raises(AdaptiveError, match="newer adaptive"):
        Log(path).count()


def test_many_processes_may_create_the_same_log_at_once(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from records_factory import generation;"
        "from adaptive.records.writer import LogWriter\n"
        "with LogWriter(Path(sys.argv[1])) as w:\n"
        "    for i in range(20): w.write(generation(i))\n"
        "    sys.exit(0 if w.flush() else w.problem)"
    )
    writers = [start(code, path) for _ in range(4)]
    assert [w.communicate()[1] for w in writers] == [""] * 4
    assert Log(path).count() == 80


@pytest.mark.parametrize(
    "content", [b"this is not a database, but it is long enough to look like one" * 40, b"\0" * 8192]
)
def test_a_file_that_is_no_log_is_refused_in_one_line_and_set_aside_by_who_writes(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(AdaptiveError, match=r"^log .*records.db is damaged .*check --repair") as caught:
        Log(path).count()
    assert "\n" not in str(caught.value)
    with LogWriter(path) as writer:  # an assistant that starts sets the file aside
        writer.write(generation())
    assert Log(path).count() == 1
    assert path.with_name("records.db.damaged").read_bytes() == content


def test_a_page_that_is_damaged_inside_is_reported_in_one_line(path: Path) -> None:
    filled(path, [generation(i, tokens=200) for i in range(20)])
    content = bytearray(path.read_bytes())
    content[4096 : 4096 * 30] = os.urandom(4096 * 29)
    path.write_bytes(content)
    with pytest.raises(AdaptiveError, match="damaged"):
        list(Log(path).generations())


def bytes_on_disk(folder: Path) -> bytes:
    return b"".join(f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file())


@pytest.mark.parametrize("while_a_writer_is_open", [False, True])
def test_purge_erases_the_bytes_and_shrinks_the_file(path: Path, while_a_writer_is_open: bool) -> None:
    secret, kept = "the-secret-of-this-test", "what-is-kept"
    said = [generation(i, session="x" if i % 2 else "y", text=(secret if i % 2 else kept) * 99) for i in range(60)]
    writer = LogWriter(path)
    for g in said:
        writer.write(g)
    assert writer.flush()
    if not while_a_writer_is_open:
        writer.close()
    log = Log(path)
    before = log.stats().size
    assert secret.encode() in bytes_on_disk(path.parent)
    assert log.purge(session="x") == 30
    on_disk = bytes_on_disk(path.parent)
    assert secret.encode() not in on_disk
    assert kept.encode() in on_disk
    assert log.stats().size < before * 0.7
    assert [g.id for g in log.generations()] == list(range(1, 61, 2))
    writer.write(generation()) if while_a_writer_is_open else None
    writer.close()
    assert connect(path).execute("SELECT count(*) FROM rounds").fetchone()[0] == 2 * Log(path).count()


def test_purge_by_age_keeps_the_younger_and_never_reuses_an_id(path: Path) -> None:
    now = time.time()
    filled(path, [generation(created=now - 100), generation(created=now - 50), generation(created=now)])
    with Log(path) as log:
        assert log.count(older_than_s=75) == log.purge(older_than_s=75) == 1
        assert [g.id for g in log.generations()] == [2, 3]
        assert log.purge(everything=True) == 2
        assert log.count() == 0
    filled(path, [generation()])
    assert Log(path).last_id() == 4


def test_an_answer_is_deleted_with_the_later_chats_that_hold_it(path: Path) -> None:
    def asked(text: str) -> Message:
        return Message("user", text)

    first = (asked('say "a, b"'),)
    second = (*first, Message("assistant", 'a, "b" \u2026 ü'), asked("and c?"))
    chats = (
        (first, 'a, "b" \u2026 ü'),
        (second, "c"),
        (first, "another answer to it"),
        ((*second, Message("assistant", "c"), asked("d?")), "d"),
        ((*first, Message("assistant", "another answer to it"), asked("and c?")), "c"),
    )
    said = [replace(generation(text=text), messages=messages) for messages, text in chats]
    filled(path, [*said, generation(raw=True, text="c")])
    with Log(path) as log:
        assert log.holders([1]) == log.holders([1, 3, 5]) == (2, 4)
        assert log.holders([2]) == (4,)
        assert log.holders([6]) == log.holders([99]) == log.holders([]) == ()
        assert log.purge(ids={1, *log.holders([1])}) == 3
        assert [one.id for one in log.generations()] == [3, 5, 6]
        assert log.purge(ids=()) == 0


def test_an_answer_that_was_continued_is_one_message_of_the_chat_and_is_deleted_with_its_continuations(
    path: Path,
) -> None:
    def chat(*said: str) -> tuple[Message, ...]:
        return tuple(Message(("user", "assistant")[n % 2], text) for n, text in enumerate(said))

    chats = (
        (chat("what?"), "A"),  # cut
        (chat("what?", "A"), "B"),  # continued, and cut again
        (chat("what?", "AB"), "C"),
        (chat("what?", "ABC", "and?"), "D"),
        (chat("what?"), "A bit."),  # another answer
        (chat("what?", "A bit.", "and?"), "E"),
    )
    filled(path, [replace(generation(session="s", text=text), messages=messages) for messages, text in chats])
    with Log(path) as log:
        assert [log.holders([number]) for number in (1, 2, 3, 4, 5)] == [(2, 3, 4), (3, 4), (4,), (), (6,)]
        assert log.purge(ids={4, 5, 6}) == 3
        assert log.session_messages("s") == chat("what?", "ABC")
        export_jsonl(log, path.parent / "log.jsonl")
    last = json.loads((path.parent / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert [m["content"] for m in last["messages"]] == ["what?", "ABC"]


def test_purge_needs_a_choice(path: Path) -> None:
    with pytest.raises(ValueError, match="purge needs"):
        Log(path).purge()


def test_purge_says_so_when_a_reader_keeps_the_old_bytes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaptive.records.schema.BUSY_S", 0.1)
    filled(path, [generation(i) for i in range(5)])
    reader = connect(path)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM generations").fetchone()
    log = Log(path)
    with pytest.raises(AdaptiveError, match="purge again"):
        log.purge(everything=True)
    reader.execute("COMMIT")
    assert log.purge(everything=True) == 0  # the first purge deleted the records; this one removes their traces
    assert path.with_name("records.db-wal").stat().st_size == 0


def test_exported_chat_messages_hold_the_answer(path: Path, tmp_path: Path) -> None:
    filled(path, [generation(0, asked="Grüße", text="hello"), generation(1, raw=True, asked="Once", text=" upon")])
    file = tmp_path / "out.jsonl"
    assert export_jsonl(Log(path), file) == 2
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert lines[0]["messages"] == [{"role": "user", "content": "Grüße"}, {"role": "assistant", "content": "hello"}]
    assert lines[1]["messages"] == [{"role": "user", "content": "Once"}, {"role": "assistant", "content": " upon"}]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_exported_parquet_reads_back_through_datasets(path: Path, tmp_path: Path) -> None:
    import datasets

    said = [generation(0, domain="code"), generation(1, supervised=False)]
    filled(path, said)
    folder = tmp_path / "exports"
    folder.mkdir()
    assert export_parquet(Log(path), folder / "log.parquet", with_supervision=True) == 2
    assert [f.name for f in folder.iterdir()] == ["log.parquet"]  # no cache is left behind
    table = datasets.Dataset.from_parquet(str(folder / "log.parquet"), cache_dir=str(tmp_path / "cache"))
    first = table[0]
    assert first["messages"][-1] == {"role": "assistant", "content": "an answer"}
    assert (first["output"], first["domain"], first["draft_n_accepted"]) == (said[0].output.tolist(), "code", 2)
    assert said[0].supervision is not None
    assert first["top_logprobs"] == said[0].supervision.logprobs.tolist()
    assert table[1]["top_ids"] is None
    assert export_parquet(Log(tmp_path / "none.db"), folder / "empty.parquet") == 0


def test_an_export_that_fails_leaves_nothing(path: Path, tmp_path: Path) -> None:
    filled(path, [generation()])
    with pytest.raises(AdaptiveError, match="does not exist"):
        export_jsonl(Log(path), tmp_path / "nowhere" / "out.jsonl")
    (tmp_path / "taken").mkdir()
    with pytest.raises(AdaptiveError, match="cannot export"):
        export_jsonl(Log(path), tmp_path / "taken")
    assert [f.name for f in tmp_path.iterdir() if f.is_file()] == []


@pytest.mark.thorough
def test_old_records_and_those_beyond_a_size_are_deleted_only_where_that_is_asked_for(path: Path) -> None:
    now = time.time()
    said = [generation(n, created=now - 86400 * (200 - n), tokens=60) for n in range(200)]
    filled(path, said)
    assert Log(path).count() == 200
    with LogWriter(path, keep=Keep(days=99.5)) as writer:
        writer.write(generation(200, created=now))
        assert writer.flush()
    with Log(path) as log:
        assert [entry.id for entry in log.generations()] == list(range(102, 202))
        whole = path.stat().st_size
    with LogWriter(path, keep=Keep(gigabytes=whole / 4 / 1e9)) as writer:
        writer.write(generation(201, created=now))
        assert writer.flush()
    with Log(path) as log:
        kept = [entry.id for entry in log.generations()]
        assert 0 < len(kept) < 60
        assert kept[-1] == 202
        assert len(log.figures()) == len(kept)
    for number in range(100):  # freed space is reused
        with LogWriter(path, keep=Keep(gigabytes=whole / 4 / 1e9)) as writer:
            writer.write(generation(number, created=now, tokens=60))
    assert path.stat().st_size < 1.2 * whole
