"""Replays of an interrupted training run, kept so that the run that continues it does not repeat them.

In: examples and the student that replays them. Out: their replays, in order. With a large draft on a processor the
replays before and after training take minutes, which a short session may not have at once. One file beside that of the
run's weights; without it, or if it is damaged or of another run, everything is replayed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from checkpoints import files
from trainers.dataset import Example
from trainers.replay import Replay
from trainers.resume import TrainingState
from trainers.students import Student

# Examples that are replayed between two writes. Too low: small passes. Too high: a stopped run repeats many.
AT_ONCE = 32
# How the names begin under which the draft in use is replayed.
IN_USE = "in use"


class KeptReplays:
    """The replays of one run by name: of which draft, on which examples."""

    def __init__(self, state: TrainingState | None) -> None:
        """``state`` None keeps nothing."""
        self._state = state
        self._known: dict[str, list[Any]] = self._read()

    def replay(
        self, name: str, student: Student, examples: Sequence[Example], should_stop: Callable[[], bool] | None
    ) -> list[Replay]:
        """The replays of ``examples`` by ``student``, those that are known included. Raises Stopped."""
        if self._state is None:
            return student.replay(examples, should_stop)
        done = self._done(name, examples)
        while len(done) < len(examples):
            done += student.replay(examples[len(done) : len(done) + AT_ONCE], should_stop)
            # Of the draft in training, only the latest state is asked for again.
            self._known = {known: one for known, one in self._known.items() if known.startswith(IN_USE)}
            self._known[name] = [[one.id, one.acceptance.tolist()] for one in done]
            self._write()
        return done

    def _done(self, name: str, examples: Sequence[Example]) -> list[Replay]:
        """What is known of ``examples``, from the first on; nothing if it is of others."""
        known = self._known.get(name, [])
        try:
            found = [
                Replay.of(example, np.array(acceptance, np.float32))
                for example, (number, acceptance) in zip(examples, known, strict=False)
                if number == example.id and np.shape(acceptance)[1] == len(example.output) - 1
            ]
        except (ValueError, TypeError, IndexError):
            return []
        return found if len(found) == len(known) else []

    def _read(self) -> dict[str, list[Any]]:
        if self._state is None:
            return {}
        try:
            said = json.loads(self._state.replays.read_bytes())
            return dict(said["replays"]) if said["key"] == self._state.key else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _write(self) -> None:
        assert self._state is not None
        said = json.dumps({"key": self._state.key, "replays": self._known})
        try:
            files.replace_text(self._state.replays.parent, self._state.replays, said)
        except OSError:  # training itself needs no file
            return
