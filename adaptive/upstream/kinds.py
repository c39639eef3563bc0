"""The kinds of servers: how each is recognised, the meaning of its log-probabilities, and its order of sampling steps.

The facts are from the servers' public sources; ``docs/notes/2026-11-upstream.md`` gives the places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adaptive.types import UPSTREAM_PREFIX

# Alternatives per token to request: the limit of OpenAI's API, and of servers that follow it. More: the server takes
# longer over each token (a percent for 32, on llama-server). Fewer: more mass of unlisted tokens.
MOST = 20


@dataclass(frozen=True)
class Kind:
    """One kind of server.

    ``owner`` is its ``owned_by`` in ``/v1/models``; ``alternatives`` the number per token to request. ``tempered``: its
    log-probabilities are those after temperature (and penalties), else those of the model itself. ``heat_last``: it
    cuts (top-k, top-p, min-p) before it divides by the temperature, else after. ``absent``: a chat's choice without
    log-probabilities has no such key, else it is null. ``quiet_chat``, ``quiet_text``: without log-probabilities a chat
    (a text) has no event for a token that shows nothing. ``numbers`` are request fields that make it report token ids
    instead of texts.
    """

    name: str
    owner: str
    alternatives: int = MOST
    tempered: bool = False
    heat_last: bool = False
    absent: bool = False
    quiet_chat: bool = False
    quiet_text: bool = False
    numbers: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def engine(self) -> str:
        """The name of the engine in the log."""
        return UPSTREAM_PREFIX + self.name


LLAMA_SERVER = Kind("llama-server", "llamacpp", heat_last=True, absent=True)
VLLM = Kind("vllm", "vllm", quiet_chat=True, numbers={"return_tokens_as_token_ids": True})
SGLANG = Kind("sglang", "sglang", tempered=True)
LM_STUDIO = Kind("lm-studio", "organization_owner", alternatives=0)
ADAPTIVE = Kind("adaptive", "adaptive", quiet_chat=True, quiet_text=True)
UNKNOWN = Kind("unknown", "")

KINDS = {kind.name: kind for kind in (LLAMA_SERVER, VLLM, SGLANG, LM_STUDIO, ADAPTIVE, UNKNOWN)}


def kind_of(models: object) -> Kind:
    """The kind of a server, from its response to ``GET /v1/models``."""
    data = models.get("data") if isinstance(models, dict) else None
    first = data[0] if isinstance(data, list) and data else None
    owner = first.get("owned_by") if isinstance(first, dict) else None
    return next((kind for kind in KINDS.values() if kind.owner and kind.owner == owner), UNKNOWN)
