"""The head of ``adaptive demo``: grown for the same target as if it had no draft, on the same answers.

It equals what ``--target`` alone grows over a hundred answers and some idle minutes: same log, training run, gate and
state folder. Only the hidden states, which a session stores while it answers, are computed afterwards, in one pass of
the target over each answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from adaptive.opened import OpenedPair
    from adaptive.pair import Pair
    from adaptive.records.features import Features
    from adaptive.settings import Settings
    from adaptive.types import Generation
    from trainers.recipe import Recipe
    from trainers.run import DistillOutcome


class HeadStep:
    """A head for the target of the opened pair ``beside``; ``settings`` are that pair's.

    Raises AdaptiveError if the target is not suitable for a head.
    """

    def __init__(self, settings: Settings, beside: OpenedPair) -> None:
        from adaptive.engines.load_head import load_head
        from adaptive.pair import GROW, pair_identity, sources
        from adaptive.state import open_state
        from checkpoints.store import AdapterStore

        alone = {"target": str(sources(settings)[0].folder), "draft": GROW, "draft_device": None}
        if settings.draft_quantize == "nf4":  # nf4 is for models only
            alone["draft_quantize"] = "auto"
        self.settings = settings.model_copy(update=alone)
        self.beside = beside
        self.engine = load_head(None, self.settings, beside.pair.target)
        self.identity = pair_identity(self.settings)
        self.state = open_state(self.settings.state_dir, self.identity.id)
        self.store = AdapterStore(self.state.adapters)

    def learn_from(self, after_id: int, on_progress: Callable[[int], None]) -> None:
        """Copy the answers after id ``after_id`` from the pair's log into the log of the target alone, with their
        hidden states.

        ``on_progress`` gets the number of copied answers. The head drafted none of them, so rounds are left out.
        """
        from adaptive.records.features import spool_of
        from adaptive.records.log import Log
        from adaptive.records.writer import LogWriter

        spool = spool_of(self.state, self.settings.feature_gb)
        with Log(self.beside.state.records) as log, LogWriter(self.state.records, spool=spool) as writer:
            for number, logged in enumerate(log.generations(after_id), 1):
                said = replace(logged.generation, rounds=(), adapter=None)
                writer.write(said, hidden_states(self.beside.pair, said))
                on_progress(number)

    def grow(self, recipe: Recipe, console: Console) -> DistillOutcome:
        """One training run, behind a progress bar. Raises AdaptiveError if there is too little to learn from."""
        from adaptive.pair import load_draft_for_training
        from adaptive.records.features import spool_of
        from cli.distill import progress_bar
        from trainers.run import distill

        head = load_draft_for_training(self.settings)
        spool = spool_of(self.state, self.settings.feature_gb)
        with progress_bar(console, "growing") as report:
            return distill(
                self.state.records, self.store, self.identity.base, head, recipe, on_progress=report, spool=spool
            )

    @contextlib.contextmanager
    def opened(self, measuring: AbstractContextManager[object]) -> Iterator[OpenedPair]:
        """Open the target with the promoted head as a new session would; the target's weights are the pair's.
        ``measuring`` as in ``adaptive.opened``."""
        from adaptive.opened import opened
        from adaptive.pair import Pair

        beside = self.beside.pair
        pair = Pair(self.identity, beside.target, self.engine, beside.tokenizer, ())
        with opened(self.settings, pair, measuring=measuring) as ready:
            yield ready


def hidden_states(pair: Pair, said: Generation) -> Features:
    """The target's hidden states of an answer and its prompt, from one pass; its last token is not fed."""
    from adaptive.records.features import Features, kept

    sequence = pair.target.sequence(features=True)
    tokens = [*said.prompt.tolist(), *said.output[:-1].tolist()]
    sequence.extend(tokens, 0)
    first, end = kept(len(said.prompt), sequence.length)
    return Features.of(sequence.features(first, end).float().cpu().numpy(), first)
