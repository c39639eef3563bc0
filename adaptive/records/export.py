"""Exports the log for other programs: JSON lines of chat messages, and Parquet through ``datasets``.

A file appears complete (0600) or not at all; nothing is left in a cache of ``datasets``. What a killed export leaves
beside its file is removed by the next export into the same folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from adaptive.errors import AdaptiveError
from adaptive.records.log import Log
from adaptive.records.logged import LoggedGeneration
from adaptive.records.rows import answered
from adaptive.types import Message

# Beginning of the name of the private folder that holds the unfinished files of an export.
UNFINISHED = ".adaptive-export-"


def export_jsonl(log: Log, file: Path | IO[str]) -> int:
    """Write one JSON object a record: ``messages`` with the answer last, and its id, session, time, domain, adapter
    and finish reason.

    A raw text prompt becomes a user message. Returns the number of lines. Raises AdaptiveError if
    ``file`` cannot be written.
    """
    if not isinstance(file, Path):
        return _write_lines(log, file)
    with _appearing_whole(file) as part, part.open("w", encoding="utf-8") as lines:
        return _write_lines(log, lines)


def export_parquet(log: Log, file: Path, with_supervision: bool = False) -> int:
    """Write one row a record with the columns of the log, token ids as lists; rounds are summed up.

    ``with_supervision`` adds the supervision (about 100 bytes a token) as lists of float32, which hold
    float16 exactly. Returns the number of rows. Raises AdaptiveError if ``file`` cannot be written.
    """
    import datasets

    features = _features(with_supervision)
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        # from_generator first writes an Arrow file. It holds private text, so it goes into the private folder of this
        # export, which is deleted, and not into the shared cache.
        with _appearing_whole(file) as part:
            if log.count() == 0:  # from_generator refuses a generator without rows
                table = datasets.Dataset.from_dict({name: [] for name in features}, features=features)
            else:
                source = {"path": str(log.path), "with_supervision": with_supervision}
                table = datasets.Dataset.from_generator(
                    _rows, features=features, cache_dir=str(part.parent), gen_kwargs=source
                )
            rows = len(table)
            table.to_parquet(str(part))
            del table  # releases the memory-mapped file before its folder is deleted
    finally:
        if bars:
            datasets.enable_progress_bars()
    return rows


@contextmanager
def _appearing_whole(file: Path) -> Iterator[Path]:
    """A file (0600) in a private folder beside ``file``, which is renamed to ``file`` when the block succeeds."""
    if not file.parent.is_dir():
        raise AdaptiveError(f"cannot export to {file}: folder {file.parent} does not exist")
    try:
        with _private_folder(file.parent) as folder:
            part = folder / "part"
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
            yield part
            os.replace(part, file)
    except OSError as error:
        raise AdaptiveError(f"cannot export to {file} ({error.strerror or error})") from error


@contextmanager
def _private_folder(parent: Path) -> Iterator[Path]:
    """A folder (0700) in ``parent`` that is removed in the end, and those of killed exports before. A lock in it, which
    its process holds, shows that the export is running."""
    from filelock import FileLock, Timeout

    _sweep(parent)
    while True:
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=UNFINISHED))
        lock = FileLock(folder / "lock", timeout=0, mode=0o600)
        with contextlib.suppress(Timeout):
            lock.acquire()
            if os.path.exists(lock.lock_file):
                break
            lock.release()  # removed by ``_sweep`` of another process between its creation and its locking
    try:
        yield folder
    finally:
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove the private folders of killed exports in ``parent``."""
    from filelock import FileLock, Timeout

    for file in parent.glob(f"{UNFINISHED}*/lock"):
        with contextlib.suppress(Timeout, OSError), FileLock(file, timeout=0, mode=0o600):
            shutil.rmtree(file.parent, ignore_errors=True)


def _write_lines(log: Log, lines: IO[str]) -> int:
    written = 0
    for logged in log.generations(with_supervision=False):
        generation = logged.generation
        value = {
            "messages": _conversation(logged),
            "id": logged.id,
            "session": generation.session,
            "created": generation.created,
            "domain": generation.domain,
            "adapter": generation.adapter,
            "finish_reason": generation.finish_reason,
        }
        lines.write(json.dumps(value, ensure_ascii=False) + "\n")
        written += 1
    return written


def _conversation(logged: LoggedGeneration) -> list[dict[str, str]]:
    generation = logged.generation
    asked = generation.messages or (Message("user", generation.prompt_text),)
    return [asdict(message) for message in answered(asked, generation.text)]


def _rows(path: str, with_supervision: bool) -> Iterator[dict[str, Any]]:
    with Log(Path(path)) as log:
        for logged in log.generations(with_supervision=with_supervision):
            g = logged.generation
            row: dict[str, Any] = {
                "id": logged.id,
                "session": g.session,
                "created": g.created,
                "messages": _conversation(logged),
                "prompt_text": g.prompt_text,
                "text": g.text,
                "prompt": g.prompt,
                "output": g.output,
                "sampling": g.sampling.to_json(),
                "temperature": g.sampling.temperature,
                "adapter": g.adapter,
                "engine": g.engine,
                "domain": g.domain,
                "finish_reason": g.finish_reason,
                **asdict(g.timings),
                "rounds_n": len(g.rounds),
                "draft_n": sum(r.drafted for r in g.rounds),
                "draft_n_accepted": sum(r.accepted for r in g.rounds),
            }
            if with_supervision:
                s = g.supervision
                row |= {
                    "top_ids": None if s is None else s.ids.tolist(),
                    "top_logprobs": None if s is None else s.logprobs.tolist(),
                    "rest_logprob": None if s is None else s.rest.tolist(),
                    "chosen_logprob": None if s is None else s.chosen.tolist(),
                }
            yield row


def _features(with_supervision: bool) -> Any:
    from datasets import Features, List, Value

    text, number, whole = Value("string"), Value("float64"), Value("int64")
    features: dict[str, Any] = {
        "id": whole,
        "session": text,
        "created": number,
        "messages": List({"role": text, "content": text}),
        "prompt_text": text,
        "text": text,
        "prompt": List(Value("int32")),
        "output": List(Value("int32")),
        "sampling": text,
        "temperature": number,
        "adapter": text,
        "engine": text,
        "domain": text,
        "finish_reason": text,
        "prompt_n": whole,
        "cached_n": whole,
        "prompt_s": number,
        "predicted_n": whole,
        "predicted_s": number,
        "expected_s": number,
        "rounds_n": whole,
        "draft_n": whole,
        "draft_n_accepted": whole,
    }
    if with_supervision:
        features |= {
            "top_ids": List(List(Value("int32"))),
            "top_logprobs": List(List(Value("float32"))),
            "rest_logprob": List(Value("float32")),
            "chosen_logprob": List(Value("float32")),
        }
    return Features(features)
