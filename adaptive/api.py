"""For Python programs: a pair that answers and learns, in one object.

    from adaptive import Assistant

    with Assistant(target="models/big", draft="models/small") as assistant:
        print(assistant.ask("What is 17 * 23?"))
        for piece in assistant.stream("Name three large rivers."):
            print(piece, end="", flush=True)
        print(assistant.distil().message)
        print(assistant.stats().sentence)

It shares settings, log, adapters and the controller's memory with the command line. Like a pair, it is not thread-safe.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from adaptive.assistant import sampling_params
from adaptive.control.memory import current_costs
from adaptive.errors import AdaptiveError
from adaptive.grammar import Grammar
from adaptive.hub import resolved
from adaptive.installation import check_system
from adaptive.opened import opened
from adaptive.pair import load_pair
from adaptive.pipe import IDLE, LAST, Order, Report, start_worker
from adaptive.records.stats import count_rounds, stats_of_counts, tokens_per_round
from adaptive.remote import untrained
from adaptive.service.calls import thinking_marks
from adaptive.service.doubts import end_doubt
from adaptive.service.trainer import background
from adaptive.settings import load_settings
from adaptive.speculation import speculation
from adaptive.types import Message, SamplingParams, StopParams
from checkpoints.store import AdapterStore

# A question, or a conversation that ends with one: messages are ``{"role": ..., "content": ...}`` or ``Message``.
Asked: TypeAlias = str | Sequence[Message | Mapping[str, str]]


@dataclass(frozen=True)
class Stats:
    """How the last answer was decoded. ``tokens_per_round`` counts all rounds, ``acceptance`` only drafted tokens. Both
    are None before the first answer, and ``acceptance`` also if nothing was drafted. ``sentence`` describes how
    decoding worked and why; ``adapter`` is the id of the draft's adapter with which it began."""

    tokens: int
    tokens_per_second: float
    tokens_per_round: float | None
    acceptance: float | None
    adapter: str | None
    sentence: str


class Assistant:
    """A target and its draft, loaded. Close it, or use it as a context manager, to complete the log."""

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        learn: bool = False,
        config: str | Path | None = None,
        **settings: Any,
    ) -> None:
        """Load a pair: model folders, hub ids or GGUF files. Without either name the bundled pair is loaded; with only
        a target, a head is grown on it. ``settings`` as in docs/settings.md (``home``, ``dtype``, ``temperature``,
        ``record``, ...); ``config`` is a TOML file of them. With ``learn``, a background process trains the draft
        between answers, and better drafts come into use, as in ``adaptive chat``.

        Raises AdaptiveError if the pair cannot be loaded, and on Windows.
        """
        check_system()
        named = {"target": target, "draft": draft}
        given = {name: str(value) for name, value in named.items() if value is not None} | settings
        self.settings = load_settings(given, None if config is None else Path(config))
        with contextlib.ExitStack() as stack:
            self._opened = stack.enter_context(opened(self.settings, load_pair(self.settings)))
            self._assistant = self._opened.assistant
            self._assistant.between_rounds = self._opened.swapper.between_rounds
            self._sampling = sampling_params(self.settings, self._opened.pair)
            self._marks = thinking_marks(self._opened.pair.tokenizer)
            self._trainer = None
            if learn:
                self._trainer = stack.enter_context(background(self.settings, self._opened.state))
                self._trainer.costs = lambda: current_costs(self._assistant.policy, self._opened.state.controller)
                self._trainer.idle()
            self._closing = stack.pop_all()

    def ask(self, prompt: Asked, **options: Any) -> str:
        """The answer to a question or a conversation. ``options`` as in ``stream``."""
        return "".join(self.stream(prompt, **options))

    def stream(
        self,
        prompt: Asked,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        json_schema: Mapping[str, Any] | None = None,
        session: str | None = None,
        **sampling: Any,
    ) -> Iterator[str]:
        """The answer in pieces of text, as they are decoded. Closing the iterator ends the answer.

        ``sampling`` are fields of ``SamplingParams`` (``temperature``, ``top_p``, ``seed``, ...); the settings or the
        checkpoint give the defaults. With a ``json_schema`` the answer is JSON that matches it. ``session`` names the
        conversation in the log. Raises AdaptiveError for a request that cannot be answered.
        """
        params = _changed(self._sampling, sampling)
        limits = StopParams(max_new_tokens or self.settings.answer_tokens, tuple(stop))
        grammar = None if json_schema is None else Grammar("json_schema", json.dumps(json_schema))
        messages = _messages(prompt)
        answered = False
        if self._trainer is not None:
            self._trainer.busy()
        try:
            self._opened.swapper.between_rounds()  # a large adapter is read beside the answer
            steps = self._assistant.chat(messages, params, limits, session=session, grammar=grammar, marks=self._marks)
            with contextlib.closing(steps):  # type: ignore[type-var]
                for step in steps:
                    answered = True
                    if step.text:
                        yield step.text
        finally:
            if self._trainer is not None:
                for adapter, rounds in self._assistant.rounds_by_adapter if answered else ():
                    self._trainer.answered(adapter, rounds)
                self._trainer.idle()

    def stats(self) -> Stats:
        """How the last answer was decoded."""
        latest, last, said = self._assistant.latest, self._assistant.last, speculation(self._assistant)
        counts = () if last is None else count_rounds(last.rounds)
        figures = stats_of_counts(counts)
        return Stats(
            tokens=0 if last is None else len(last.output),
            tokens_per_second=0.0 if last is None else last.timings.per_second,
            tokens_per_round=tokens_per_round(counts),
            acceptance=figures.draft_acceptance_rate if figures.num_draft_tokens else None,
            adapter=None if latest is None else latest.adapter,
            sentence=said.sentence,
        )

    def distil(self, on_progress: Callable[[Report], None] = lambda report: None) -> Report:
        """Train the draft on the logged answers, in another process. A better draft is in use on return.

        The ``stage`` of the last report is ``done`` (``promoted`` or not), ``refused`` with the reason in ``message``
        (too few answers yet), ``failed`` with another reason (a full disk), ``taken`` if another process trains this
        pair, or ``memory`` if it ran short. Raises AdaptiveError if nothing is logged, or the training process fails.
        """
        elsewhere = untrained(self.settings)
        if elsewhere is not None:
            raise AdaptiveError(elsewhere)
        if self._assistant.log is None:
            raise AdaptiveError("nothing is logged (record is off), so that there is nothing to learn from")
        self._assistant.log.flush()
        state, report = self._opened.state, None
        order = Order(self.settings.for_worker(), str(state.root), False, models=resolved())
        with start_worker(state.root / "trainer.log") as worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            try:
                worker.stdin.write(f"{order.line()}{IDLE}\n")
                worker.stdin.flush()
                for line in worker.stdout:
                    try:
                        report = Report.of(line)
                    except (ValueError, TypeError):  # written by code that came with a checkpoint
                        continue
                    on_progress(report)
            finally:
                worker.stdin.close()  # ends the worker if this is interrupted
        if report is None or report.stage not in LAST:
            raise AdaptiveError(f"the training process failed; {state.root / 'trainer.log'} says why")
        if report.promoted:
            end_doubt(AdapterStore(state.adapters), state.doubts, logging.getLogger("adaptive.trainer").warning)
        self._opened.swapper.use_promoted()
        return report

    def close(self) -> None:
        """Write the rest of the log and the controller's memory. No answers are possible after that."""
        self._closing.close()

    def __enter__(self) -> Assistant:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _messages(prompt: Asked) -> list[Message]:
    if isinstance(prompt, str):
        return [Message("user", prompt)]
    try:
        return [m if isinstance(m, Message) else Message(m["role"], m["content"]) for m in prompt]
    except (KeyError, TypeError) as error:
        raise AdaptiveError("a message is a mapping with role and content") from error


def _changed(sampling: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    unknown = sorted(set(changes) - (set(SamplingParams.__dataclass_fields__) - {"constrained"}))
    if unknown:
        raise AdaptiveError(f"{unknown[0]} is no option of an answer")
    return replace(sampling, **changes)
