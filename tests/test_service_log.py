"""A server writes the log and reads it for the dashboard and the trainer while other processes read it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from records_factory import generation

from adaptive.records.log import Log
from adaptive.records.writer import LogWriter

READ = "import sys; from pathlib import Path; from adaptive.records.log import Log\n"
READ += "with Log(Path(sys.argv[1])) as log: print(log.count())"


def count_elsewhere(path: Path) -> int:
    read = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    return int(read.stdout)


def test_a_reader_in_the_writers_process_does_not_open_the_log_to_loss(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with LogWriter(path) as writer:
        for number in range(1, 4):
            with Log(path) as log:
                log.count()
            writer.write(generation(number))
            assert writer.flush()
            assert count_elsewhere(path) == number
