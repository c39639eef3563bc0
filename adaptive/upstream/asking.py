"""What is added to a request: log-probabilities, where the client did not ask for them.

Added at the end of the body, so that every byte that the client wrote reaches the server as it was; a field that stands
twice counts as it stood last, with every JSON reader of these servers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adaptive.upstream.kinds import LLAMA_SERVER, Kind

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# The same without a version, as llama.cpp's server and some others have them.
PATHS = {CHAT: True, COMPLETION: False, "/chat/completions": True}


@dataclass(frozen=True)
class Asked:
    """A request for an answer. ``body`` is what goes to the server, ``added`` whether something was added to it.

    ``said`` is what the client asked for, ``chat`` whether it was a chat.
    """

    body: bytes
    said: Mapping[str, Any]
    chat: bool
    added: bool

    @property
    def streamed(self) -> bool:
        """Whether the answer comes in events."""
        return bool(self.said.get("stream"))


def read(body: bytes, chat: bool) -> Asked | None:
    """The request as it came, None where it is no JSON object."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return Asked(body, said, chat, added=False) if isinstance(said, dict) else None


def with_logprobs(asked: Asked, kind: Kind, alternatives: int) -> Asked:
    """The request with log-probabilities asked for; as it was where they are already, or cannot be had."""
    said = asked.said
    own, top = said.get("logprobs"), said.get("top_logprobs")
    if alternatives < 1 or not (own is None or own is False) or top is not None:
        return asked
    if kind is LLAMA_SERVER and said.get("n_probs"):
        return asked  # its own name for them
    if not asked.chat and (said.get("echo") or said.get("suffix") or (said.get("best_of") or 1) != 1):
        return asked
    if kind is LLAMA_SERVER and asked.streamed and said.get("tools"):
        return asked  # which it refuses
    wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": alternatives}
    if not asked.chat:
        wanted = {"logprobs": alternatives}
    more = json.dumps({**wanted, **kind.numbers}).encode()[1:-1]
    opened = asked.body.rstrip()[:-1]  # without its last brace
    between = b"" if opened.rstrip().endswith(b"{") else b","
    return Asked(opened + between + more + b"}", said, asked.chat, added=True)
