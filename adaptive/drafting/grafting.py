"""The model and history together: one of them proposes a round, or one behind the other, as the policy finds worth it.

The policy is asked twice: before the model's first pass, with what history has found, who begins; and where the model
began, once its draft has ended, whether what history finds behind that is worth verifying too. Every token keeps what
it was drawn from, so that verification need not know who proposed it. Which tokens there are may depend on those before
them, never on what is drawn in their own place (``protocol.py``).
"""

from __future__ import annotations

from adaptive.control.policy import Adviser, Beside, Lead, LengthPolicy
from adaptive.drafting.history import HistoryDrafter
from adaptive.drafting.proposal import Proposal, grafted
from adaptive.drafting.protocol import Drafter, GoesOn, Making, made_together
from adaptive.tokens import as_list
from adaptive.types import HISTORY, MODEL, Round


class Grafting:
    """Proposes for one answer what a ``policy`` decides of the ``model``'s draft, if there is one, and ``history``."""

    name = HISTORY

    def __init__(self, model: Drafter | None, history: HistoryDrafter, policy: LengthPolicy | Beside) -> None:
        self.model = model
        self.history = history
        self.policy = policy
        self._goes_on = model if isinstance(model, GoesOn) else None
        self._singly = model is not None and model.name != MODEL  # a head
        self._lead, self._reach, self._limit = Lead(0, 0), list[float](), 0
        self._rests = 0  # rounds for which nothing is to be looked for
        # Seconds that the looks for this round took, before it and behind its draft.
        self._look_s: float | None = None
        self._look_behind_s: float | None = None

    def plan(self, committed: list[int], length: int, limit: int) -> int | None:
        """Look for what may follow ``committed``, and decide who begins the next round, where the draft was to have
        ``length`` tokens and at most ``limit`` may be proposed. How many are asked for, 0 for plain decoding; None
        where looking is not worth its time: then the model drafts as if there were no history."""
        policy, history, self._limit = self.policy, self.history, limit
        if self._rests:
            self._rests -= 1
            policy.leave_alone()
            return None
        if policy.worth_looking():
            began = policy.clock()
            self._reach = history.look(committed)
            lead = policy.lead(self._reach, length, limit, self._singly)
            self._look_s = policy.clock() - began
        elif length and policy.worth_looking(behind=True):
            self._reach = history.look_away()
            lead = policy.lead(self._reach, length, limit, self._singly)
        else:
            policy.leave_alone()
            self._rests = policy.rests(length > 0)
            return None
        if lead.history and lead.model:
            room = 0 if self._goes_on is None else self._goes_on.limit(len(committed) + lead.history)
            lead = Lead(lead.history, min(lead.model, room))
        self._lead = lead
        return lead.history + lead.model

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """What was planned; of the model's draft at most ``length`` tokens, and fewer where ``advise`` says so."""
        lead = self._lead
        if not lead.history:
            draft = None if self.model is None else self.model.propose(committed, lead.model, advise)
            return self._with_tail(committed, draft)
        return self._with_front(committed)

    def making(self, committed: list[int], length: int, advise: Adviser | None = None) -> Making:
        """The same, the model's draft together with others'. Where history leads, it goes on by itself."""
        lead = self._lead
        if lead.history:
            return self._with_front(committed)
        if not made_together(self.model):
            return self.propose(committed, length, advise)
        return self._with_tail(committed, (yield from self.model.making(committed, lead.model, advise)))

    def _with_front(self, committed: list[int]) -> Proposal | None:
        """History's tokens, and the model's draft behind them where that was planned."""
        lead = self._lead
        front = self.history.propose(committed, lead.history)
        if front is None or not lead.model or self._goes_on is None:
            return front
        adviser = self.policy.adviser_behind(lead.history, self._reach[lead.history - 1])
        back = _closed(self._goes_on.go_on(committed, as_list(front.tokens), lead.model, adviser))
        return front if back is None else grafted(front, back)

    def _with_tail(self, committed: list[int], draft: Proposal | None) -> Proposal | None:
        """The model's draft, and history's tokens behind it where these are worth it."""
        drafted = 0 if draft is None else len(draft.tokens)
        policy, room = self.policy, self._limit - drafted
        tree = draft is not None and draft.parents is not None
        if room <= 0 or tree or not policy.worth_looking(behind=True) or not policy.tail_may_pay(drafted, 1.0):
            return draft
        draft = _closed(draft)  # what is looked up behind it has to be known
        drafted = 0 if draft is None else len(draft.tokens)
        room = self._limit - drafted
        if draft is None:  # there it was looked already
            most = policy.tail(0, 1.0, self._reach, room)
            return self.history.propose(committed, most) if most else None
        began, tokens = policy.clock(), as_list(draft.tokens)
        sure = policy.sure_of_draft(drafted, self.history.agreed(tokens))
        if not policy.tail_may_pay(drafted, sure):
            return draft
        most = policy.tail(drafted, sure, self.history.look_behind(committed, tokens), room)
        self._look_behind_s = policy.clock() - began
        return grafted(draft, self.history.propose_behind(most)) if most else draft

    def observe(self, outcome: Round, said: list[int]) -> None:
        """The round has ended, and committed the tokens ``said``. To learn from what was found is a part of what its
        look takes."""
        policy, before_s, behind_s = self.policy, self._look_s, self._look_behind_s
        if before_s is None and behind_s is None:
            self.history.observe(said)
            return
        self._look_s = self._look_behind_s = None
        began = policy.clock()
        self.history.observe(said)
        learned_s = policy.clock() - began
        if before_s is not None:
            policy.look_took(before_s + learned_s)
            learned_s = 0.0
        if behind_s is not None:
            policy.look_took(behind_s + learned_s, behind=True)

    def limit(self, committed: int) -> int:
        """As of the model."""
        return 0 if self.model is None else self.model.limit(committed)

    def catch_up(self, committed: int) -> int:
        """As of the model."""
        return 0 if self.model is None else self.model.catch_up(committed)

    def feed(self, committed: list[int], most: int) -> None:
        """As of the model."""
        if self.model is not None:
            self.model.feed(committed, most)

    def reserve(self, length: int) -> None:
        """As of the model."""
        if self.model is not None:
            self.model.reserve(length)

    def rollback(self, length: int) -> None:
        """As of the model; history takes in nothing before it is committed."""
        if self.model is not None and self._lead.model:
            self.model.rollback(length)


def _closed(draft: Proposal | None) -> Proposal | None:
    """A draft whose end is known."""
    return None if draft is None else draft.closed()
