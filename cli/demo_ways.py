"""A way of answering in ``adaptive demo``: an opened pair whose draft length and adapter are set for each answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adaptive.control.policy import LengthPolicy
    from adaptive.decoding.loop import Decoding
    from adaptive.opened import OpenedPair
    from adaptive.types import SamplingParams, StopParams
    from cli.prompts import PromptLine


@dataclass(frozen=True)
class Way:
    """An opened pair, and the policy that chooses draft lengths if none is fixed. ``domain`` labels the kind of text
    in the log."""

    opened: OpenedPair
    controller: LengthPolicy
    domain: str

    @classmethod
    def of(cls, opened: OpenedPair, domain: str) -> Way:
        """A way with the pair's current policy as the controller."""
        return cls(opened, opened.assistant.policy, domain)

    def use(self, adapter: str | None) -> None:
        """Draft with this adapter. The controller does not see the swap, which is the demo's own."""
        from adaptive.control.policy import FixedLength

        self.opened.assistant.policy = FixedLength(0)
        self.opened.assistant.use_adapter(adapter, self.opened.store.path(adapter) if adapter else None)

    def answer(
        self,
        prompt: PromptLine,
        draft_length: int | None,
        sampling: SamplingParams,
        stop: StopParams,
        record: bool = False,
    ) -> Decoding:
        """One answer, at this draft length or, for None, at the controller's."""
        from adaptive.control.policy import FixedLength

        assistant = self.opened.assistant
        assistant.policy = self.controller if draft_length is None else FixedLength(draft_length)
        for _ in assistant.chat(prompt.messages, sampling, stop, domain=self.domain, record=record):
            pass
        assert assistant.last is not None
        return assistant.last
