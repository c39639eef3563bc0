"""How an answer of the server ends: its caches, its line in the server's log, and the event of one that failed."""

from __future__ import annotations

import logging

from adaptive.answering import Answering
from adaptive.assistant import Assistant
from adaptive.decoding.loop import Decoding
from adaptive.errors import AdaptiveError, ContextFullError, first_line, out_of_memory
from adaptive.grammar import GrammarError
from adaptive.printable import counted, per_second
from adaptive.records.stats import count_rounds, in_words
from adaptive.service.jobs import Failed
from adaptive.speculation import Speculation

logger = logging.getLogger("adaptive.service")


def end(assistant: Assistant, answering: Answering) -> None:
    """End an answer. If that fails, as rolling back its caches may where a GPU's memory is full, the other answers go
    on, and this one is sent all the same."""
    try:
        answering.decoding.end()
    except Exception as error:
        logger.error("the caches of an answer are dropped: they could not be rolled back (%s)", first_line(error))
        answering.conversation.forget()
    try:
        assistant.end(answering)
    except Exception as error:
        logger.error("an answer is not logged", exc_info=error)


def failure(error: Exception) -> Failed:
    """The event for a request that failed with ``error``."""
    from adaptive.engines.streamed.packed import unreadable

    if isinstance(error, ContextFullError | GrammarError):
        return Failed(400, str(error))
    if isinstance(error, AdaptiveError) or unreadable(error):  # not because of the request: a failed pass, no memory
        logger.error("%s", error)
        return Failed(503, str(error))
    if out_of_memory(error):
        logger.error("memory has run out: %s", first_line(error))
        return Failed(503, "memory has run out; ask again, or shorten the text")
    logger.error("a request failed", exc_info=error)
    return Failed(500, "the server failed on this request; its log says why")


def line(done: Decoding, how: Speculation) -> str:
    """The line about one answer in the server's log: figures only, no text."""
    timings = done.timings
    read, said = counted(timings.prompt_n, "prompt token"), counted(timings.predicted_n, "token")
    return (
        f"{read} and {timings.cached_n} cached, {said} at {per_second(timings.per_second)}/s, {done.finish_reason}; "
        f"{how.sentence}; {in_words(count_rounds(done.rounds))}"
    )
