"""Adds a request for log-probabilities to a client's request, unless the client asked for them itself.

The fields are added at the end of the body, so that the client's own bytes reach the server unchanged. If a field
occurs twice, the JSON parsers of all these servers use the last one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adaptive.upstream.kinds import LLAMA_SERVER, Kind

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# Paths of answers, and whether they are chats; also one without a version, as llama.cpp's server and others have it.
PATHS = {CHAT: True, COMPLETION: False, "/chat/completions": True}


@dataclass(frozen=True)
class Asked:
    """A request for an answer. ``body`` is the body for the server, ``added`` whether fields were added to it.

    ``said`` is the client's own request, ``chat`` whether it is a chat.
    """

    body: bytes
    said: Mapping[str, Any]
    chat: bool
    added: bool

    @property
    def streamed(self) -> bool:
        """Whether the client requests a stream of events."""
        return bool(self.said.get("stream"))


def read(body: bytes, chat: bool) -> Asked | None:
    """The client's request; None if it is not a JSON object."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return Asked(body, said, chat, added=False) if isinstance(said, dict) else None


def unlogged(said: Mapping[str, Any]) -> str | None:
    """Why answers to the request ``said`` are not logged: if what is shown is not what the model wrote behind the
    prompt, or not as it was drawn. None if they are."""
    if said.get("echo"):
        return "it repeats its prompt (echo)"
    if (said.get("best_of") or 1) != 1:
        return "it was chosen among several (best_of)"
    if said.get("use_beam_search"):
        return "it was chosen among several (use_beam_search)"
    if said.get("continue_final_message"):
        return "it continues a message (continue_final_message)"
    return None


def with_logprobs(asked: Asked, kind: Kind, alternatives: int) -> Asked:
    """The request with log-probabilities added; unchanged if it has them already or the server cannot give them."""
    said = asked.said
    own, top = said.get("logprobs"), said.get("top_logprobs")
    if alternatives < 1 or not (own is None or own is False) or top is not None:
        return asked
    if kind is LLAMA_SERVER and said.get("n_probs"):
        return asked  # llama.cpp's own field for them
    if unlogged(said) is not None or (not asked.chat and said.get("suffix")):
        return asked
    if kind is LLAMA_SERVER and asked.streamed and said.get("tools"):
        return asked  # the server refuses that
    wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": alternatives}
    if not asked.chat:
        wanted = {"logprobs": alternatives}
    more = json.dumps({**wanted, **kind.numbers}).encode()[1:-1]
    opened = asked.body.rstrip()[:-1]  # without the closing brace
    between = b"" if opened.rstrip().endswith(b"{") else b","
    return Asked(opened + between + more + b"}", said, asked.chat, added=True)
