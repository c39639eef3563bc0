"""``adaptive serve`` that, for a benchmark, changes its number of slots from request to request.

Two processes of the same program differ in speed by up to a tenth for their whole life, depending on their memory
layout. So different numbers of slots are compared in one process. From a request whose session is named
``slots-8/anything`` on, the server answers with 8 slots, until a request names another number. Each number has a length
policy of its own, and a change frees all caches.

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
    """An engine thread with the number of slots that the last such session names, at most the number at the start."""

    policies: dict[int, LengthPolicy]
    first: LengthPolicy

    def submit(self, job: Job) -> None:
        """Queue a job. The benchmark changes the number of slots only while no answer is in progress."""
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
    """A copy of the policy with all it has learned; the clock is shared."""
    return copy.deepcopy(policy, {id(policy.clock): policy.clock})


if __name__ == "__main__":
    server.EngineThread = SlottedEngine  # type: ignore[misc]
    from cli.main import run

    run()
