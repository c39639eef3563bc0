"""Measures the cost of opening the history of a long log: 20,000 answers of 50 rounds, read as by the dashboard.

    python benchmarks/history.py [--answers 20000] [--rounds 50] [--keep DIR]

Prints processor seconds (the best of five), which a busy machine does not change much.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from pathlib import Path

import numpy as np

from adaptive.records.history import By, history
from adaptive.records.log import Log
from adaptive.records.rows import insert
from adaptive.records.saved import time_saved
from adaptive.records.schema import connect, transaction
from adaptive.types import Generation, Message, Round, SamplingParams, Timings


def answer(number: int, rounds: int, chance: random.Random) -> Generation:
    """A made-up answer with rounds of several draft lengths."""
    taken = []
    for _ in range(rounds):
        drafted = chance.choice((0, 2, 4, 6, 6))
        taken.append(Round("model", drafted, chance.randint(0, drafted), 0.01, 0.02))
    tokens = rounds + sum(r.accepted for r in taken)
    return Generation(
        session=f"session {number // 4}",
        created=1.7e9 + 60 * number,
        messages=(Message("user", "a question " * 20),),
        prompt_text="",
        text="an answer " * 100,
        prompt=np.zeros(40, np.int32),
        output=np.zeros(tokens, np.int32),
        sampling=SamplingParams(),
        adapter=None if number < 3000 else f"{number // 3000:04d}",
        engine="transformers",
        domain=None,
        finish_reason="stop",
        rounds=tuple(taken),
        timings=Timings(40, 0, 0.1, tokens, 0.03 * rounds),
        supervision=None,
    )


def opened(path: Path, by: By) -> float:
    """Processor seconds of what a refresh of the dashboard reads and computes."""
    began = time.process_time()
    with Log(path) as log:
        history(log.figures(), by)
        time_saved(log.spent())
    return time.process_time() - began


def counted(path: Path) -> tuple[int, int]:
    """The number of answers and of rounds in a log."""
    with contextlib.closing(connect(path)) as connection:
        answers, rounds = (
            int(connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0]) for name in ("generations", "rounds")
        )
    return answers, rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = (args.keep or Path(folder)) / "records.db"
        if not path.exists():
            connection, chance = connect(path), random.Random(0)
            with transaction(connection):
                for number in range(args.answers):
                    insert(connection, answer(number, args.rounds, chance))
            connection.close()
        answers, rounds = counted(path)  # of a kept log, which may have been made with other arguments
        print(f"{answers} answers, {rounds} rounds, {path.stat().st_size / 1e6:.0f} MB")
        kinds: tuple[By, ...] = ("adapter", "day", "session")
        for by in kinds:
            print(f"by {by}: {min(opened(path, by) for _ in range(5)):.3f} s")


if __name__ == "__main__":
    main()
