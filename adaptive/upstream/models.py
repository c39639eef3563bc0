"""Which of the models that a server lists is the target: several may answer at one address."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# In the names of models that answer no prompts, such as the one that LM Studio always lists.
EMBEDDING = "embed"


@dataclass(frozen=True)
class Served:
    """The target at a server. ``name``: its name in requests there, empty if the server has none. ``names``: all its
    names. ``alone``: the server lists one name only, and then every name is it, because most servers take any.
    ``others``: it lists other models, too. ``gone``: it lists the target no more, only other models."""

    name: str
    names: frozenset[str]
    alone: bool
    others: bool
    gone: bool = False

    def is_target(self, name: str) -> bool:
        """Whether a request that names the model ``name`` is answered by the target; one that names none is, unless
        the target is gone: many servers take any name for the model that they have."""
        return not self.gone and (self.alone or not name or name in self.names)


def served(listed: object, model: str | None = None, before: Served | None = None) -> Served:
    """The target by a server's response to ``GET /v1/models``: ``model``, or if that is None the one that it was
    ``before``, or else the first one listed that is not derived from another, as an adapter is. A server that lists
    another one in place of the target of before serves that one, whatever a request names."""
    data = listed.get("data") if isinstance(listed, dict) else None
    named = [one for one in data if isinstance(one, dict) and _name(one)] if isinstance(data, list) else []
    entries = [one for one in named if EMBEDDING not in _name(one).lower()] or named
    first = next((one for one in entries if not one.get("parent")), entries[0] if entries else {})
    known = {model} if model is not None else before.names if before is not None else frozenset()
    chosen = next((one for one in entries if known.intersection(_names(one))), {}) if known else first
    name = model or (before.name if before is not None else "") or _name(chosen)
    same = [one for one in entries if one is chosen or _same(one, chosen)]
    names = frozenset(name for one in same for name in _names(one)) | {name}
    gone = model is None and bool(known and entries) and not chosen
    return Served(name, names - {""}, len(entries) < 2, len(same) < len(entries), gone)


def model_of(said: Mapping[str, Any]) -> str:
    """The model that the request ``said`` names; empty if it names none."""
    name = said.get("model")
    return name if isinstance(name, str) else ""


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both are names of one model, of which vLLM lists each with the same ``root``."""
    root = one.get("root")  # of other servers an entry's own name, or nothing
    return bool(root) and root == other.get("root") and not one.get("parent") and not other.get("parent")


def _name(entry: dict[str, Any]) -> str:
    name = entry.get("id")
    return name if isinstance(name, str) else ""


def _names(entry: dict[str, Any]) -> list[str]:
    """The names that a request may give it; ``aliases`` are llama.cpp's."""
    others = entry.get("aliases")
    return [_name(entry), *(name for name in (others if isinstance(others, list) else ()) if isinstance(name, str))]
