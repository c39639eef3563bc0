"""``adaptive serve`` whose number of slots is another one from request to request, when a benchmark asks for it.

Two processes of the same program differ by up to a tenth in speed for as long as they live, by where their memory
lies. So what several slots bring is measured in one process. A request whose session is named ``slots-8/anything`` is
answered with 8 slots, as are those that come while it is under way; each number has a length policy of its own, and at
a change all caches are given back.

    python benchmarks/slotted_server.py serve --port 0 --slots 8 --target ... (as for ``adaptive``)
"""

from __future__ import annotations

import copy

from adaptive.assistant import Assistant
from adaptive.control.policy import LengthPolicy
from adaptive.service import server
from adaptive.service.engine import EngineThread, Work
from adaptive.service.jobs import Job

PREFIX = "slots-"


class SlottedEngine(EngineThread):
    """An engine thread with as many slots as the last request's session says, at most as many as it began with."""

    policies: dict[int, LengthPolicy]
    first: LengthPolicy

    def submit(self, job: Job) -> None:
        """Queue a job; a benchmark changes the number while nothing is under way."""
        session = job.ask.session or ""
        if session.startswith(PREFIX):
            wanted = int(session.removeprefix(PREFIX).split("/")[0])
            if wanted != self.slots:
                self.slots = wanted
                self.forget_conversations()
        super().submit(job)

    def _next(self, assistant: Assistant, work: Work) -> None:
        if not hasattr(self, "policies"):
            self.policies, self.first = {}, _copied(assistant.policy)
        if self.slots not in self.policies:
            self.policies[self.slots] = _copied(self.first)
        assistant.policy = self.policies[self.slots]
        super()._next(assistant, work)


def _copied(policy: LengthPolicy) -> LengthPolicy:
    """What it has learned, by the same clock."""
    return copy.deepcopy(policy, {id(policy.clock): policy.clock})


if __name__ == "__main__":
    server.EngineThread = SlottedEngine  # type: ignore[misc]
    from cli.main import run

    run()
