"""Combines the draft model and history in one proposal: either of them alone, or one behind the other.

The policy decides twice. Before the model's first pass, given what history has found, it chooses which of the two comes
first. If the model came first, it decides after the model's draft whether the tokens that history finds behind it are
worth verifying too. Every token keeps the distribution it was drawn from, so verification does not depend on the
drafter. Whether a token is proposed may depend on the tokens before it, never on the token drawn in its own place
(``protocol.py``).
"""

from __future__ import annotations

from adaptive.control.matches import ANEW_EVERY
from adaptive.control.policy import Adviser, GraftingPolicy, Lead
from adaptive.drafting.history import HistoryDrafter
from adaptive.drafting.proposal import Proposal, grafted
from adaptive.drafting.protocol import Drafter, GoesOn, Proposing, proposes_with_others
from adaptive.tokens import as_list
from adaptive.types import HISTORY, MODEL


class Grafting:
    """The drafter of one answer that uses the ``model`` (if there is one) and ``history`` as the ``policy`` decides."""

    name = HISTORY

    def __init__(self, model: Drafter | None, history: HistoryDrafter, policy: GraftingPolicy) -> None:
        self.model = model
        self.history = history
        self.policy = policy
        self._goes_on = model if isinstance(model, GoesOn) else None
        self._singly = model is not None and model.name != MODEL  # a head
        self._lead, self._reach, self._limit = Lead(0, 0), list[float](), 0
        self._rests = 0  # rounds left without a lookup
        self._learning_s = 0.0  # of learning from rounds, since the last lookup

    def plan(self, committed: list[int], length: int, limit: int, passed: int = 0) -> int | None:
        """Look up what may follow ``committed`` and decide what the next round proposes: the policy chose ``length``
        tokens of the model, ``passed`` rounds ago, and at most ``limit`` may be proposed. Returns how many tokens to
        ask for, 0 for plain decoding. None: a lookup is not worth its time, and the model drafts as if there were no
        history."""
        if self._rests:
            self._rests -= 1
            return None
        policy, history, self._limit = self.policy, self.history, limit
        if policy.worth_looking():
            began = policy.clock()
            self._reach = history.look(committed)
            lead = policy.lead(self._reach, length, limit, self._singly, passed)
            policy.look_took(policy.clock() - began + self._learning_s)
            self._learning_s = 0.0
        elif length and policy.worth_looking(behind=True):
            self._reach = history.look_away()
            lead = policy.lead(self._reach, length, limit, self._singly, passed)
        else:
            self._rests = policy.rests(length > 0)
            return None
        if lead.history and lead.model:
            room = 0 if self._goes_on is None else self._goes_on.limit(len(committed) + lead.history)
            lead = Lead(lead.history, min(lead.model, room))
        elif lead.model > length:  # the model instead of history; the policy knows its room only of some rounds ago
            lead = Lead(0, min(lead.model, 0 if self.model is None else self.model.limit(len(committed))))
        self._lead = lead
        return lead.history + lead.model

    def propose(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposal | None:
        """The planned proposal; ``advise`` may end the model's part early."""
        lead = self._lead
        if not lead.history:
            draft = None if self.model is None else self.model.propose(committed, lead.model, advise)
            return self._with_tail(committed, draft)
        return self._with_front(committed)

    def proposing(self, committed: list[int], length: int, advise: Adviser | None = None) -> Proposing:
        """``propose``, with the model's draft made in one call with other answers' drafts, unless history comes
        first."""
        lead = self._lead
        if lead.history:
            return self._with_front(committed)
        if not proposes_with_others(self.model):
            return self.propose(committed, length, advise)
        return self._with_tail(committed, (yield from self.model.proposing(committed, lead.model, advise)))

    def _with_front(self, committed: list[int]) -> Proposal | None:
        """History's tokens, followed by the model's draft if that was planned."""
        lead = self._lead
        front = self.history.propose(committed, lead.history)
        if front is None or not lead.model or self._goes_on is None:
            return front
        adviser = self.policy.adviser_behind(lead.history, self._reach[lead.history - 1])
        back = _closed(self._goes_on.go_on(committed, as_list(front.tokens), lead.model, adviser))
        return front if back is None else grafted(front, back)

    def _with_tail(self, committed: list[int], draft: Proposal | None) -> Proposal | None:
        """The model's draft, followed by history's tokens if the policy finds them worth it."""
        drafted = 0 if draft is None else len(draft.tokens)
        policy, room = self.policy, self._limit - drafted
        tree = draft is not None and draft.parents is not None
        if room <= 0 or tree or not policy.worth_looking(behind=True):
            return draft
        if not policy.tail_may_pay(drafted, 1.0):
            policy.look_skipped()
            return draft
        draft = _closed(draft)  # the lookup needs its tokens
        drafted = 0 if draft is None else len(draft.tokens)
        room = self._limit - drafted
        if draft is None:  # ``plan`` has looked up this place already
            most = policy.tail(0, 1.0, self._reach, room)
            return self.history.propose(committed, most) if most else None
        began, tokens = policy.clock(), as_list(draft.tokens)
        sure = policy.sure_of_draft(drafted, self.history.agreed(tokens))
        most = 0
        if policy.tail_may_pay(drafted, sure):
            most = policy.tail(drafted, sure, self.history.look_behind(committed, tokens), room)
        policy.look_took(policy.clock() - began, behind=True)
        return grafted(draft, self.history.propose_behind(most)) if most else draft

    def observe(self, said: list[int]) -> None:
        """Take in the tokens ``said`` that a round committed. Rounds are learned from in batches, whose time counts as
        part of the next lookup's."""
        history = self.history
        history.observe(said)
        if history.unlearned >= ANEW_EVERY:
            began = self.policy.clock()
            history.settle()
            self._learning_s += self.policy.clock() - began

    def rollback(self, length: int) -> None:
        """As of the model; history takes in nothing before it is committed."""
        if self.model is not None and self._lead.model:
            self.model.rollback(length)


def _closed(draft: Proposal | None) -> Proposal | None:
    """The draft with its final number of tokens."""
    return None if draft is None else draft.closed()
