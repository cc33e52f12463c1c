"""The plan of a sequence's next round: a fixed number of draft tokens, or as many as the policy grants.

K is fixed before anything is drafted, by the past alone: never by what was proposed since.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Protocol

from orchestrator.control.cost_model import CostModel
from orchestrator.control.draft_length import LEAVE_PASSES, START_DEPTH, DraftLength, best_depth
from orchestrator.control.self_draft_length import SelfDraftLength
from orchestrator.rounds import Grant, RoundPlan, RoundRecord, Source
from orchestrator.sequence import Sequence
from specdec.core.tree import MAX_TREE_NODES
from specdec.speculation.acceptance import AcceptanceModel
from specdec.speculation.cost import chain_chances, expected_tokens, tree_chances

MAX_AUTONOMOUS = 32
"""Autonomous tokens of a plan: a slow client leaves so many in the target's stream at most. A target allows 64."""

NEXT_ROUND_AT = 0.9
"""Share of a pass after which the next round is sent: passes are not alike."""

LEAVE_LOSS, LOOKUP_ROUNDS = 8.0, 4
"""A text that lost LEAVE_LOSS tokens by lookups decodes autonomously for LEAVE_PASSES passes; soon after that half the
loss is enough. After a lookup LOOKUP_ROUNDS rounds are not autonomous: copied text continues after an edit."""


class Controller(Protocol):
    """Plans rounds, and is told what came of them."""

    def plan(self, sequence: Sequence) -> RoundPlan:
        """The next round."""

    def observe(self, record: RoundRecord) -> None:
        """The outcome of a round."""


class Lookup(Protocol):
    """A source of draft tokens that costs nothing, and can be asked before the plan is made."""

    def chances(self, ids: Seq[int]) -> list[float]:
        """The chances that the next 1, 2, ... tokens after ``ids`` are all proposed right; empty: no proposal."""

    @property
    def in_text(self) -> bool:
        """Whether the last ``chances`` are of what the text ``ids`` had before."""


class Fixed:
    """A chain of ``num_draft_tokens`` in every round, as long as it can be used."""

    def __init__(self, num_draft_tokens: int, costs: CostModel | None = None, self_drafts: bool = False) -> None:
        """``self_drafts``: the target drafts them itself, as trees."""
        self._num_draft_tokens, self._self_drafts = num_draft_tokens, self_drafts
        self._costs = costs or CostModel()

    def plan(self, sequence: Sequence) -> RoundPlan:
        num_tokens = min(self._num_draft_tokens, sequence.remaining - 1)
        if not self._num_draft_tokens or self._self_drafts:
            return RoundPlan(num_autonomous=_autonomous(sequence), self_draft_nodes=self._num_draft_tokens)
        grants = (Grant(Source.DRAFT, num_tokens, waits=True),) if num_tokens else ()
        deadline_s = self._costs.deadline_s(num_tokens)
        return RoundPlan(grants, deadline_s=deadline_s, next_round_after_s=_next_round_s(self._costs, num_tokens))

    def observe(self, record: RoundRecord) -> None:
        self._costs.observe(record)


class _Trust:
    """Whether a text still uses lookups."""

    def __init__(self) -> None:
        self._lost, self._max_lost, self._back = 0.0, LEAVE_LOSS, 0

    def holds(self, now: int) -> bool:
        return now >= self._back

    def book(self, num_lost: float, now: int) -> None:
        """``num_lost`` tokens, compared with autonomous decoding. The text may leave lookups for a while."""
        self._lost = max(0.0, self._lost + num_lost)
        self._max_lost += (LEAVE_LOSS - self._max_lost) / 16
        if self._lost > self._max_lost:
            self._lost, self._max_lost, self._back = 0.0, self._max_lost / 2, now + LEAVE_PASSES


class Adaptive:
    """Drafts when all sequences do (orchestrator/control/draft_length.py), and uses the text's own repetitions."""

    def __init__(
        self,
        policy: DraftLength,
        acceptance: AcceptanceModel,
        lookup: Lookup | None = None,
        num_siblings: int = 0,
        max_chain: int = 0,
        self_draft: SelfDraftLength | None = None,
        self_draft_nodes: int = 0,
        owner: bytes = b"",
    ) -> None:
        """``max_chain``: see specdec.core.rounds.ModelInfo. ``self_draft_nodes``: its fixed number of them.
        ``self_draft``: of a target that drafts by itself; where that pays, no draft is asked, but beside lookups of
        the target. ``owner``: of the text."""
        self._self_draft, self._self_draft_nodes = self_draft, self_draft_nodes
        self._self_draft_acceptance = (
            self_draft.acceptance.of_text(owner) if self_draft is not None else AcceptanceModel()
        )
        self._target_looks_up = self_draft is not None and self_draft.looks_up
        self._policy = policy
        self._acceptance = acceptance
        self._lookup = lookup
        self._num_siblings = num_siblings
        self._chains, self._most = bool(max_chain), max_chain or MAX_TREE_NODES
        self._pass = policy.now
        self._num_rounds = 0
        self._to_come = 0  # autonomous verdicts
        self._back = 0  # the pass from which on this text may draft
        self._trust = _Trust()
        # The source for which decoding is not autonomous, and the one to which the next round is charged.
        self._stopped_for: Source | None = None
        self._charged: Source | None = None
        self._drafted = False
        self._looked_up_at = -LOOKUP_ROUNDS

    def plan(self, sequence: Sequence) -> RoundPlan:
        policy, costs = self._policy, self._policy.costs
        self._num_rounds += 1
        of_ranks, most = self._acceptance.of_ranks, min(self._most, sequence.remaining - 1)
        expected = policy.considered(chain_chances(of_ranks, self._num_siblings), self._most)
        of_hit = (
            policy.considered(tree_chances(of_ranks), self._most) if policy.ahead and not self._chains else expected
        )
        self_draft_nodes, self_draft_rate = self._best_self_draft()
        may_draft = policy.now >= self._back and (self._target_looks_up or not self_draft_nodes)
        drafts = policy.drafts(expected, of_hit) and may_draft and (policy.on or self._num_rounds > 2)
        if drafts and policy.on and not policy.pays(expected, of_hit):
            drafts, self._back = False, policy.now + LEAVE_PASSES
            self._acceptance.restart()
        if self._drafted and not (drafts or policy.on):
            self._acceptance.forget()  # what was learnt will be out of date at the next probe
        self._drafted = policy.on
        draft = self._draft_grants(expected, of_hit, most) if drafts else []
        # What is in the text is left to a target that finds it without a trip between two passes.
        but_text = self._target_looks_up and self_draft_nodes > 0 and not policy.on
        checking = policy.checking and may_draft
        lookup = self._lookup_grants(sequence, most, but_text=but_text) if not checking else []
        lookup = [each for each in lookup if each[0] > self_draft_rate or self._target_looks_up]
        grants = tuple(grant for _, grant in sorted([*draft, *lookup], key=lambda each: -each[0]) if grant.num_tokens)
        again = self._num_rounds - self._looked_up_at <= LOOKUP_ROUNDS and costs.round_s(0) < 1.25 * costs.alone_s
        stops_for = grants[0].source if grants else Source.LOOKUP if again else None
        self._charged, self._stopped_for = stops_for or self._stopped_for, stops_for
        num_autonomous = 0 if grants or again or checking else _autonomous(sequence)
        if self._to_come:  # they come before anything is verified; meanwhile a draft may grow ahead
            grants = tuple(Grant(each.source, each.num_tokens) for _, each in draft[:1] if policy.ahead)
        num_asked = next((each.num_tokens for each in grants if each.waits), 0)
        depth = max((each.num_tokens for each in grants), default=0)
        return RoundPlan(
            grants,
            num_autonomous,
            [costs.round_s(k) for k in range(min(len(of_hit) - 1, most) + 1)] if policy.ahead and costs.known else (),
            costs.deadline_s(max(1, num_asked)),
            _next_round_s(costs, depth) if policy.ahead and depth and grants[0].source is Source.DRAFT else None,
            self_draft_nodes,
        )

    def _best_self_draft(self) -> tuple[int, float]:
        """Nodes that the target drafts itself, and their goodput."""
        if self._self_draft is None:
            return 0, 0.0
        chances = self._self_draft_chances()
        if only := self._self_draft_nodes:
            return self._self_draft.choose(expected_tokens(chances, only), only)
        return self._self_draft.choose(self._policy.considered(chances, min(self._self_draft.most, self._most)))

    def _self_draft_chances(self) -> Iterator[float]:
        chances = chain_chances if self._chains or self._target_looks_up else tree_chances
        return chances(self._self_draft_acceptance.of_ranks)

    def _draft_grants(self, expected: Seq[float], of_hit: Seq[float], most: int) -> list[tuple[float, Grant]]:
        """With their goodput: what has arrived, and what the round waits for."""
        policy, costs = self._policy, self._policy.costs
        grants, known = [], costs.known
        if policy.ahead:
            depth = best_depth(costs, of_hit) if known else START_DEPTH
            rate = of_hit[depth] / costs.round_s(depth) if policy.on and known else 1e9
            grants.append((rate, Grant(Source.DRAFT, min(depth, most))))
        if k := min(policy.num_tokens, len(expected) - 1, most):
            seconds = costs.draft_s(k) + costs.round_s(k)
            grants.append(
                (
                    expected[k] / seconds if policy.on and known else 1e9,
                    Grant(Source.DRAFT, k, waits=True),
                )
            )
        return grants

    def _lookup_grants(self, sequence: Sequence, most: int, but_text: bool) -> list[tuple[float, Grant]]:
        """With their goodput. ``but_text``: none from the text itself."""
        known = self._policy.costs.target_known and self._trust.holds(self._policy.now)
        if self._lookup is None or not known or not sequence.num_committed:
            return []
        chances = self._lookup.chances(sequence.ids)[:most]
        if but_text and self._lookup.in_text:
            return []
        num_tokens, goodput = self._policy.best_lookup(chances, self._to_come)
        if num_tokens and not self._to_come:
            self._looked_up_at = self._num_rounds
        return [(goodput, Grant(Source.LOOKUP, num_tokens))] if num_tokens else []

    def observe(self, record: RoundRecord) -> None:
        policy = self._policy
        self._pass = policy.passed(self._pass)
        self._to_come = record.num_autonomous_left
        policy.costs.observe(record)
        if not record.number:
            return
        if self._self_draft is not None:
            self._self_draft.observe(record, self._self_draft_chances())
        if record.source is Source.SELF_DRAFT:
            self._self_draft_acceptance.observe(record.verified_tree, record.accepted, ended=True)
            return
        if record.source is Source.DRAFT:
            self._acceptance.observe(record.verified_tree, record.accepted, ended=True)
            return
        if not record.exchange.round_trip_s or (record.source or self._charged) is not Source.LOOKUP:
            return
        # Autonomously it would make a token in each pass of the others.
        took_s = record.exchange.round_trip_s + (record.drafting.waited_s or 0.0)
        depth = max(record.verified_tree.depths, default=0)
        num_lost = took_s / max(policy.costs.alone_s, record.pass_s) - len(record.accepted) - 1
        # A long round that is all wrong is as likely as a short one, and loses more.
        self._trust.book(num_lost / max(1, depth / START_DEPTH), policy.now)


def _autonomous(sequence: Sequence) -> int:
    """Autonomous tokens after the next verdict, which gives a token at least."""
    return max(0, min(MAX_AUTONOMOUS, sequence.remaining - 1))


def _next_round_s(costs: CostModel, num_nodes: int) -> float:
    pass_s = costs.target_s(costs.num_live * (num_nodes + 1)) if costs.target_known else 0.0
    return NEXT_ROUND_AT * pass_s
