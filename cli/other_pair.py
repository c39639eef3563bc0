"""The pair's weights on another engine, compared with the pair in use: for ``bench`` and ``calibrate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from adaptive.errors import AdaptiveError
from cli.options import HELD, PAIR, as_typed, changed

if TYPE_CHECKING:
    from adaptive.opened import OpenedPair
    from adaptive.pair import Pair
    from adaptive.settings import Settings

OTHER = "Another engine"
OtherTarget = Annotated[
    Optional[str],
    typer.Option(help="Compare with this target: the same weights for another engine.", rich_help_panel=OTHER),
]
OtherDraft = Annotated[Optional[str], typer.Option(help="The draft beside that target.", rich_help_panel=OTHER)]


def other_settings(settings: Settings, target: str | None, draft: str | None) -> Settings | None:
    """The settings of the other pair, None if none is named.

    A GGUF draft there is taken as a copy of the checkpoint here, so that the adapter fits both. A GGUF file is as it is
    quantised; other weights are quantised as here.
    """
    from adaptive.engines.llamacpp.files import is_gguf_name

    if target is None:
        if draft is not None:
            raise AdaptiveError("--other-draft is given without --other-target; name both")
        return None
    checkpoint = None
    changes: dict[str, str | None] = {"target": target, "draft": draft or "none"}
    if is_gguf_name(target):
        changes["quantize"] = "none"
    if draft is not None and is_gguf_name(draft):
        changes["draft_quantize"] = "none"
        here = settings.draft_checkpoint or (settings.draft if settings.target is not None else _bundled_draft())
        checkpoint = here if here is not None and not is_gguf_name(here) else None
    return settings.model_copy(update={**changes, "draft_checkpoint": checkpoint})


def _bundled_draft() -> str:
    from adaptive.pair import BUNDLED

    return str(BUNDLED / "draft")


def load_other(settings: Settings, session: OpenedPair, console: Any) -> Pair:
    """The other pair, with the adapter in use here. Raises AdaptiveError if the adapter does not fit its draft."""
    from cli.opened import load_with_progress

    pair = load_with_progress(settings, console)
    adapter = session.assistant.adapter
    if pair.draft is not None and adapter is not None:
        if pair.identity.base.weights != session.pair.identity.base.weights:
            raise AdaptiveError(
                f"adapter {adapter} is in use and is for another draft than {settings.draft}; compare files of the "
                "same weights, or name the checkpoint they were made from with --draft-checkpoint"
            )
        pair.draft.apply_adapter(session.store.path(adapter))
    return pair


def engines(pair: Pair) -> str:
    """The engines of a pair: one name, or the target's and the draft's."""
    draft = pair.draft.name if pair.draft is not None else pair.target.name
    return pair.target.name if draft == pair.target.name else f"{pair.target.name} + {draft}"


def other_engines(other: Pair, pair: Pair) -> str:
    """The engines of the ``other`` pair, marked if its target runs on the same engine as that of ``pair``. Otherwise
    the figures of both, and of transformers' own generation, would have one name."""
    return engines(other) + (" (other)" if other.target.name == pair.target.name else "")


def advice(pair: Pair, here: tuple[float, Settings], other: Pair, there: tuple[float, Settings]) -> str:
    """Which of two pairs to use, named by their engines where these differ, given the best tokens per second of each
    and the settings that select it."""
    names = engines(pair), engines(other)
    if other.target.name == pair.target.name:
        names = "this pair", "the other pair"
    (slow, _, behind), (fast, chosen, best) = sorted(((*here, names[0]), (*there, names[1])), key=lambda one: one[0])
    typed = as_typed(chosen, *PAIR, *changed(chosen, *HELD))
    return f"{best} is {fast / slow:.2f} times as fast here as {behind}" + (f": use {typed}" if typed else "")
