"""The generations that wait in memory until the log takes them, within a limit of bytes."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass

from adaptive.records.features import Features
from adaptive.types import Generation

# Bytes that a generation takes besides its arrays and texts: objects, and a tuple for each round.
OBJECTS_BYTES, ROUND_BYTES = 2048, 200


@dataclass(frozen=True)
class Waiting:
    """A generation that is not in the log yet, and the target's features of it if they are to be kept."""

    generation: Generation
    features: Features | None = None

    @property
    def nbytes(self) -> int:
        """Approximate bytes of memory of both."""
        return size_of(self.generation) + (0 if self.features is None else self.features.nbytes)


class Pending:
    """Waiting generations, the oldest first, of ``most`` bytes in all after ``shrink``. Not thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0  # bytes of the generations
        self._waiting: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def fits(self, waiting: Waiting) -> bool:
        """Whether there is room for one more. A first one always fits."""
        return not self._waiting or self._held + waiting.nbytes <= self._most

    def add(self, waiting: Waiting) -> None:
        """Add the newest."""
        self._waiting.append(waiting)
        self._held += waiting.nbytes

    def take(self) -> Waiting:
        """Remove the oldest and return it."""
        waiting = self._waiting.popleft()
        self._held -= waiting.nbytes
        return waiting

    def put_back(self, waiting: Waiting) -> None:
        """Add one that was taken as the oldest again, so that ids follow time."""
        self._waiting.appendleft(waiting)
        self._held += waiting.nbytes

    def shrink(self) -> tuple[int, int]:
        """If they exceed the limit, drop features and supervision before text, the oldest first. Returns how many
        generations lost their supervision, and how many were dropped."""
        stripped = dropped = 0
        for place, waiting in enumerate(self._waiting):
            if self._held <= self._most:
                break
            if waiting.generation.supervision is not None or waiting.features is not None:
                self._waiting[place] = Waiting(dataclasses.replace(waiting.generation, supervision=None))
                self._held += self._waiting[place].nbytes - waiting.nbytes
                stripped += waiting.generation.supervision is not None
        while self._held > self._most and len(self._waiting) > 1:
            self.take()
            dropped += 1
        return stripped, dropped


def size_of(generation: Generation) -> int:
    """Approximate bytes of memory of a generation."""
    made = generation.supervision
    arrays = 0 if made is None else made.ids.nbytes + made.logprobs.nbytes
    texts = [generation.text, generation.prompt_text, *(message.content for message in generation.messages)]
    arrays += generation.prompt.nbytes + generation.output.nbytes
    return OBJECTS_BYTES + arrays + sum(map(len, texts)) + ROUND_BYTES * len(generation.rounds)
