"""``adaptive history`` and ``adaptive records``, run as a user runs them."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import sqlite3
import stat
import time
from pathlib import Path

import pytest
from conftest import Command, save_random_pair
from records_factory import generation

from adaptive.pair import pair_identity
from adaptive.records.log import Log
from adaptive.records.stats import speculative_stats
from adaptive.records.writer import LogWriter
from adaptive.settings import load_settings
from adaptive.types import Round

SAID = [
    generation(
        number,
        session=f"[s]{number // 4}",
        created=time.time() - 1000 + number,
        adapter=None if number < 5 else "0001",
        rounds=tuple(Round("model", 4, (number + i) % 5, 0.01, 0.02) for i in range(6)),
        tokens=18,
        domain="code",
    )
    for number in range(12)
]
ROUNDS = [r for g in SAID for r in g.rounds]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ADAPTIVE_HOME", str(tmp_path / "home"))
    path = tmp_path / "home" / "big--small-1234" / "records.db"
    with LogWriter(path) as writer:
        for g in SAID:
            writer.write(g)
    return path


def test_json_figures_are_those_of_the_rounds(records: Path, adaptive: Command) -> None:
    status, out, err = adaptive("history", "--json")
    assert (status, "big--small-1234" in err) == (0, True)
    value = json.loads(out)
    stats = speculative_stats(ROUNDS)
    assert value["totals"]["speculative_decoding"] == {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "num_spec_steps": stats.num_spec_steps,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "acceptance_histogram": list(stats.acceptance_histogram),
    }
    assert [(row["key"], row["generations"]) for row in value["rows"]] == [("no adapter", 5), ("0001", 7)]
    assert [(s["generation"], s["after"]) for s in value["swaps"]] == [(6, "0001")]
    assert [p["position"] for p in value["positions"]] == [1, 2, 3, 4]
    assert len(value["series"]) == 12
    assert sum(value["lengths"]) == len(ROUNDS)
    assert [p["rounds"] for p in value["positions"]] == value["lengths"][1:]
    assert [p["mean_draft_length"] for p in value["series"]] == [4.0] * 12


@pytest.mark.parametrize("by", ["adapter", "day", "session", "position"])
def test_table_and_plot_fit_eighty_columns(records: Path, adaptive: Command, by: str) -> None:
    status, out, _ = adaptive("history", "--by", by)
    assert status == 0
    assert max(len(line) for line in out.splitlines()) <= 80
    assert ("tokens drafted a round" if by == "position" else "acceptance, %") in out
    assert "tokens per second" in out
    assert "\x1b" not in out  # no colours outside a terminal
    assert {"session": "[s]2", "adapter": "no adapter"}.get(by, "") in out


def test_who_drafted_is_said(records: Path, adaptive: Command) -> None:
    with LogWriter(records) as writer:
        writer.write(generation(20, rounds=(Round("head", 4, 3, 0.01, 0.02), Round("none", 0, 0, 0.0, 0.02))))
    value = json.loads(adaptive("history", "--json")[1])
    stats = speculative_stats(ROUNDS)
    assert value["drafters"] == {
        "model": {
            "rounds": len(ROUNDS),
            "drafted": stats.num_draft_tokens,
            "accepted": stats.num_accepted_draft_tokens,
        },
        "head": {"rounds": 1, "drafted": 4, "accepted": 3},
    }
    assert "head 4 tokens, 75% accepted" in adaptive("history")[1]


@pytest.mark.parametrize("by", ["adapter", "day", "session", "position"])
def test_a_log_without_drafts_is_shown(tmp_path: Path, adaptive: Command, by: str) -> None:
    path = tmp_path / "home" / "big--none-1234" / "records.db"
    with LogWriter(path) as writer:
        for number in range(12):
            plain = tuple(Round("none", 0, 0, 0.0, 0.02) for _ in range(17))
            writer.write(generation(number, rounds=plain, tokens=18))
    status, out, err = adaptive("history", "--by", by)
    assert status == 0, err
    assert "tokens per second" in out


def test_names_from_outside_stay_on_their_line_of_the_table(tmp_path: Path, adaptive: Command) -> None:
    path = tmp_path / "home" / "big--small-1234" / "records.db"
    with LogWriter(path) as writer:
        writer.write(generation(1, session="a\x1b]0;owned\x07\nb", domain="c\x1b[2Jd"))
    for command in (("history", "--by", "session"), ("records", "stats")):
        status, out, _ = adaptive(*command)
        assert status == 0
        assert "\x1b" not in out
        assert "\x07" not in out
    assert "c␛[2Jd" in out


def test_csv_has_a_line_for_every_row(records: Path, adaptive: Command) -> None:
    _, out, _ = adaptive("history", "--by", "session", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["session"] for row in rows] == ["[s]0", "[s]1", "[s]2"]
    assert int(rows[0]["num_spec_steps"]) == 24
    _, out, _ = adaptive("history", "--by", "position", "--csv")
    assert [row["position"] for row in csv.DictReader(io.StringIO(out))] == ["1", "2", "3", "4"]


def test_the_html_report_needs_no_network(records: Path, adaptive: Command, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    status, _, err = adaptive("history", "--html", str(report), "--by", "position")
    assert (status, f"wrote {report} (rows by adapter, and the positions below them)" in err) == (0, True)
    page = report.read_text(encoding="utf-8")
    assert "no adapter" in page
    assert len(page) < 200_000
    assert 'name="viewport"' in page
    assert not re.search(r"<(script|img|iframe|link[^>]*stylesheet)[^>]*(src|href)=", page)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    written = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    data = json.loads(written[0])
    assert data["history"]["totals"]["generations"] == len(SAID)
    assert data["storage"]["disk"][0]["bytes"] == sum(
        file.stat().st_size for file in records.parent.glob("records.db*")
    )
    assert stat.S_IMODE(report.stat().st_mode) == 0o600
    status, _, err = adaptive("history", "--html", str(tmp_path / "nowhere" / "r.html"))
    assert (status, len(err.strip().splitlines())) == (2, 2)  # the line that names the pair, and the error


def test_what_somebody_called_a_session_is_text_in_the_report(records: Path, adaptive: Command, tmp_path: Path) -> None:
    with LogWriter(records) as writer:
        writer.write(generation(1, session="</script><script>{pair}<b>"))
    assert adaptive("history", "--by", "session", "--html", str(tmp_path / "r.html"))[0] == 0
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert page.count("</script>") == page.count("<script") == 2
    assert "&lt;/script&gt;&lt;script&gt;{pair}&lt;b&gt;" in page


def test_an_empty_log_says_what_to_do(records: Path, adaptive: Command) -> None:
    assert adaptive("records", "purge", "--all", "--yes")[0] == 0
    for command in (("history",), ("records", "stats")):
        status, out, _ = adaptive(*command)
        assert (status, "adaptive chat" in out) == (0, True)
    assert json.loads(adaptive("history", "--json")[1])["totals"]["generations"] == 0


def test_without_any_state_history_says_what_to_do(adaptive: Command) -> None:
    status, _, err = adaptive("history")
    assert status == 2
    assert "adaptive chat" in err
    assert len(err.strip().splitlines()) == 1


def test_stats_in_json_count_the_log(records: Path, adaptive: Command) -> None:
    value = json.loads(adaptive("records", "stats", "--json")[1])
    assert (value["generations"], value["tokens"], value["positions"]) == (12, 12 * 18, 12 * 18)
    assert value["by_adapter"] == [
        {"name": "0001", "generations": 7, "tokens": 126},
        {"name": None, "generations": 5, "tokens": 90},
    ]


def test_export_names_its_format_by_the_file(records: Path, adaptive: Command, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("written by hand\n")
    status, _, err = adaptive("records", "export", str(file))
    assert (status, "--force to write over it" in err, file.read_text()) == (2, True, "written by hand\n")
    assert adaptive("records", "export", str(file), "--force")[0] == 0
    assert len(file.read_text().splitlines()) == 12
    assert len(adaptive("records", "export", "-")[1].splitlines()) == 12
    status, _, err = adaptive("records", "export", "a.txt")
    assert (status, "name it .jsonl or .parquet" in err) == (2, True)


def test_what_takes_long_is_shown_on_a_terminal_and_stays_out_of_the_output(
    records: Path, adaptive: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes every stream for a terminal
    monkeypatch.setenv("TERM", "xterm")
    for command, shown in (
        (("check",), "reading the log"),
        (("export", str(tmp_path / "a.jsonl")), "reading the log"),
        (("purge", "--older-than", "30d", "--yes"), "deleting"),
    ):
        status, out, err = adaptive("records", *command)
        assert (status, shown in err, shown in out) == (0, True, False)
    status, out, err = adaptive("records", "export", "-")
    assert len(out.splitlines()) == 12
    assert "\x1b" not in err


def test_purge_asks_first_and_deletes_what_was_named(
    records: Path, adaptive: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert adaptive("records", "purge", "--session", "[s]1")[0] == 1
    assert Log(records).count() == 12
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    status, out, _ = adaptive("records", "purge", "--session", "[s]1")
    assert (status, "deleted 4 records" in out) == (0, True)
    assert "deleted 0" in adaptive("records", "purge", "--older-than", "30d", "--yes")[1]
    assert Log(records).count() == 8


def test_purge_of_a_pair_that_nobody_named_says_which_it_is_and_asks(
    records: Path, adaptive: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = records.parent.parent / "other--pair-5678" / "records.db"
    with LogWriter(another) as writer:
        writer.write(SAID[0])
    os.utime(another.parent, (1e9, 1e9))  # this log is not the one used last
    status, _, err = adaptive("records", "purge", "--all", "--yes")
    assert (status, "big--small-1234 is only the one used last" in err) == (2, True), err
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    status, _, err = adaptive("records", "purge", "--all")
    assert (status, "12 of 12 records of big--small-1234" in err) == (1, True)
    assert (Log(records).count(), Log(another).count()) == (12, 1)
    shutil.rmtree(another.parent)
    assert adaptive("records", "purge", "--all", "--yes")[0] == 0  # the only log left, so no pair need be named


@pytest.mark.parametrize(
    "arguments",
    [(), ("--all", "--session", "x"), ("--older-than", "soon"), ("--older-than", "30")],
)
def test_purge_without_a_clear_choice_deletes_nothing(
    records: Path, adaptive: Command, arguments: tuple[str, ...]
) -> None:
    assert adaptive("records", "purge", "--yes", *arguments)[0] == 2
    assert Log(records).count() == 12


def test_a_damaged_log_is_one_line_and_status_2(records: Path, adaptive: Command) -> None:
    records.write_bytes(b"no database, whatever its name may say" * 50)
    for command in (("history",), ("records", "stats"), ("records", "purge", "--session", "s", "--yes")):
        status, out, err = adaptive(*command)
        assert (status, out) == (2, "")
        assert "is damaged" in err.splitlines()[-1]
    assert adaptive("records", "purge", "--all", "--yes")[0] == 0  # the log cannot be read, only deleted
    assert "is empty" in adaptive("records", "stats")[1]


def test_a_log_of_before_the_target_had_weights_is_named_until_it_is_taken_over(
    own_home: Path, adaptive: Command, tmp_path: Path
) -> None:
    target, draft = save_random_pair(tmp_path / "pair of [mine]", "qwen2")
    names = ("--target", str(target), "--draft", str(draft))
    earlier = own_home / pair_identity(load_settings({"target": names[1], "draft": names[3]}), thin=True).id
    with LogWriter(earlier / "records.db") as writer:
        writer.write(generation(text=""))
    take_over = f"adaptive records import {earlier / 'records.db'}"
    status, _, err = adaptive("records", "stats", *names)
    assert (status, take_over in err) == (2, True)
    assert adaptive(*take_over.split()[1:], *names)[0] == 0
    status, out, err = adaptive("records", "stats", *names)
    assert (status, "1 in 1 session" in out, take_over in err) == (0, True, False)


def test_the_queries_of_the_documentation_run(records: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "schema.md").read_text(encoding="utf-8")
    queries = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    connection = sqlite3.connect(records)
    found = [connection.execute(query.replace("%holiday%", "%question%")).fetchall() for query in queries]
    assert [len(rows) for rows in found] == [2, 1, 12]
    assert found[0][1][:2] == ("0001", 7)
    assert found[1][0][2] == round(speculative_stats(ROUNDS).mean_acceptance_length, 2)


def test_the_tables_of_the_documentation_are_those_of_the_log(records: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "schema.md").read_text(encoding="utf-8")
    told: dict[str, list[str]] = {}
    for section in page.split("\n## `")[1:]:
        cells = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)  # the first one of each row; it may name several
        told[section.partition("`")[0]] = sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell))
    del told["supervision"]  # no table, but the format of a column
    connection = sqlite3.connect(records)
    tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
    assert told == {
        table: sorted(row[1] for row in connection.execute(f"PRAGMA table_info({table})"))
        for (table,) in connection.execute(tables).fetchall()
    }
