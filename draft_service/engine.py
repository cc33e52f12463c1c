"""The engine of the draft service: applies advances, chooses what the next pass grows, and reports growths.

It handles the protocol (advances, budgets, superseding, draining); a Drafter proposes nodes. Imports no torch.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from draft_service.advance import Work
from draft_service.budgets import MAX_AHEAD_NODES, check_in_flight, granted
from draft_service.drafter import Drafter, DraftSequence
from specdec.core.errors import Draining, InvalidArgument, OutOfStep, Overloaded, SpecdecError
from specdec.core.limits import MAX_TREE_ROWS
from specdec.core.rounds import Advance, Budget, Growth, GrowthEnd, Load
from specdec.core.sequence import Priority, SequenceSpec
from specdec.core.tree import EMPTY_TREE
from specdec.server.model_pass import run_pass
from specdec.server.step_loop import Key, Results, noop
from specdec.server.turns import Turns, Wait
from specdec.speculation.acceptance import PRIOR, AcceptanceModel
from specdec.speculation.tree_growth import PASS_ROWS

_REPORTS_PER_PASS = 8
"""Growths ahead reported per pass, about: of n sequences each reports every n / 8 passes. With 32 sequences, reports
after every pass cost the orchestrator two thirds more time than after every fourth, at the same hit rate."""

_AGED_S = 0.1
"""After so long without requested nodes a batch request is as urgent as others: its target waits for them."""

_Outcome = TypeVar("_Outcome")


@dataclass(frozen=True, slots=True)
class DraftOpen:
    """A sequence as this service opens it."""

    spec: SequenceSpec
    budget: Budget


class DraftEngine:
    """See specdec.server.step_loop.Engine."""

    def __init__(
        self, drafter: Drafter, max_sequences: int = 1024, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._drafter = drafter
        self._clock = clock
        self._context_length = drafter.info.context_length
        self._max_sequences = max_sequences
        self._chances = AcceptanceModel()
        self._works: dict[Key, Work] = {}
        self._fresh: dict[Key, Work] = {}  # submitted since the last step
        self._batch: list[Key] = []
        self._paused: set[int] = set()  # streams under backpressure
        self._turns = Turns()
        self._passes = 0
        self._draining = False

    def open(self, key: Key, open_: DraftOpen) -> None:
        if self._draining:
            raise Draining("this draft is draining; open the sequence on another one")
        if len(self._works) >= self._max_sequences:
            raise Overloaded(f"{len(self._works)} sequences are open")
        budget = granted(open_.spec, open_.budget, self._drafter.info)
        if budget.max_nodes and not open_.spec.keyed_by_token:
            method = open_.spec.method.value
            raise InvalidArgument([("budget.max_nodes", f"must be 0 in an open with {method} verification")])
        ids = array("I", open_.spec.token_ids)
        sequence = DraftSequence(open_.spec, ids, state=self._drafter.open(open_.spec))
        self._begin(key, sequence, AcceptanceModel(self._chances), advance=0, budget=budget)

    def submit(self, key: Key, advance: Advance, arrived: float | None = None) -> None:
        work = self._works.get(key)
        if work is None:
            return
        sequence = work.sequence
        if advance.number != work.advance + 1:
            raise OutOfStep(f"advance {work.advance + 1} was expected, not {advance.number}")
        if advance.base != sequence.base + len(advance.token_ids):
            raise OutOfStep(f"base {sequence.base + len(advance.token_ids)} was expected, not {advance.base}")
        budget = granted(sequence.spec, advance.budget, self._drafter.info)
        check_in_flight(advance.in_flight, advance.base, self._drafter.info)
        superseded = list(work.superseded)
        if not work.answered:
            superseded.append(work.answer(GrowthEnd.SUPERSEDED))
        # Under token and block verification the draws depend on the base, so a new base starts an empty tree.
        keyed = sequence.spec.keyed_by_token
        reported = sequence.tree.prefix(work.num_reported).descend(advance.token_ids) if keyed else EMPTY_TREE
        sequence.tree = work.chances.descended(sequence.tree, advance.token_ids) if keyed else EMPTY_TREE
        sequence.ids.extend(advance.token_ids)
        in_flight = advance.in_flight if budget.max_ahead else EMPTY_TREE
        # Nodes in flight come first, then the nodes reported before, then the rest. Each group keeps its order.
        num_reported = len(in_flight.merge(reported))
        sequence.tree = in_flight.merge(sequence.tree).prefix(2 * MAX_AHEAD_NODES)
        if budget.max_nodes:
            sequence.tree = sequence.tree.trunk()
        work = self._begin(key, sequence, work.chances, advance=advance.number, budget=budget)
        # Growing feeds the committed ids. If nothing is to be grown, they are fed in a pass with spare time.
        work.learnt = bool(budget.max_nodes or budget.max_ahead)
        work.num_reported = min(num_reported, len(sequence.tree))
        work.superseded = superseded

    def _begin(
        self, key: Key, sequence: DraftSequence, chances: AcceptanceModel, *, advance: int, budget: Budget
    ) -> Work:
        sequence.num_siblings = budget.max_siblings
        sequence.num_candidates = max(1 + budget.max_siblings, len(PRIOR) if budget.max_ahead else 1)
        work = Work(
            sequence,
            chances,
            advance=advance,
            budget=budget,
            context_length=self._context_length,
            since=self._clock(),
        )
        self._works[key] = self._fresh[key] = work
        return work

    def close(self, key: Key) -> None:
        self._fresh.pop(key, None)
        if (work := self._works.pop(key, None)) is not None:
            self._lose(work.sequence)

    def pause(self, stream: int, paused: bool) -> None:
        (self._paused.add if paused else self._paused.discard)(stream)

    def drain(self) -> None:
        self._draining = True

    @property
    def batch_delay_s(self) -> float:
        return 0.0  # a step is short, and a sequence that returns joins the next one

    @property
    def idle(self) -> bool:
        if self._draining and self._works:
            return False
        return not any(self._grows(key, work) or not work.learnt for key, work in self._works.items())

    def request_yield(self, requested: bool) -> None:
        self._drafter.request_yield(requested)

    def working_on(self) -> Sequence[Key]:
        return self._batch

    @property
    def load(self) -> Load:
        works = list(self._works.values())
        used, total = self._drafter.cache_use()
        num_waiting = sum(not (work.answered and work.learnt) for work in works)
        return Load(len(works), num_waiting, kv_slots_used=used, kv_slots_total=total, passes=self._passes)

    def step(self, poll: Callable[[], None] = noop) -> Results:
        """One pass. It grows every requested tree by a level, or by several if the drafter can. If none is requested,
        it feeds committed ids; if all are fed, it grows ahead of the nodes in flight."""
        self._batch = []
        results: list[tuple[Key, Growth | SpecdecError]] = []
        for key, work in self._fresh.items():
            results.extend((key, growth) for growth in work.superseded)
            work.superseded.clear()
            results.extend((key, growth) for growth in work.ended())
        self._fresh.clear()
        if results:
            return results  # delivered before a pass that may fail; the remaining work waits for the next step
        growing, learning, ahead = self._choose(self._urgent()) or self._choose(self._works) or ({}, {}, {})
        self._batch = [*growing, *learning, *ahead]
        if growing:
            results.extend(self._grow(growing))
        if learning:
            results.extend(self._learn(learning))
        if ahead:
            results.extend(self._grow_ahead(ahead))
        if self._draining:
            # No caller waits for growth ahead, and every verdict brings more of it: it must not delay a drain.
            for key in [key for key, work in self._works.items() if work.answered or work.ahead]:
                self.close(key)
                results.append((key, Draining("this draft is draining; open the sequence on another one")))
        return results

    def _urgent(self) -> Mapping[Key, Work]:
        """All but batch requests, which have the passes that no other needs, and those of them that have waited."""
        works = self._works.values()
        if not any(work.sequence.spec.priority is Priority.BATCH for work in works):
            return self._works
        now = self._clock()
        return {
            key: work
            for key, work in self._works.items()
            if work.sequence.spec.priority is not Priority.BATCH
            or (now - work.since > _AGED_S and not (work.answered or work.ahead))
        }

    def _choose(self, works: Mapping[Key, Work]) -> tuple[dict[Key, Work], dict[Key, Work], dict[Key, Work]] | None:
        """The part of these works that a pass grows as requested, feeds, and grows ahead; of one kind. None: no work
        is left to do."""
        unanswered = {key: work for key, work in works.items() if self._grows(key, work)}
        growing = self._in_turn({key: 1 for key, work in unanswered.items() if not work.ahead})
        learning = {} if growing else {key: work for key, work in works.items() if not work.learnt}
        ahead = {} if growing or learning else self._ahead_in_turn(unanswered)
        return (growing, learning, ahead) if growing or learning or ahead else None

    def _grows(self, key: Key, work: Work) -> bool:
        paused = work.ahead and key.stream in self._paused and not self._draining
        return not (work.answered or paused)

    def _in_turn(self, num_rows: Mapping[Key, int]) -> dict[Key, Work]:
        """The part of these sequences that is in the next pass, which has at most MAX_TREE_ROWS rows."""
        waits = {key: Wait(rows, self._works[key].sequence.spec.priority) for key, rows in num_rows.items()}
        return {key: self._works[key] for key in self._turns.take(self._works, waits, MAX_TREE_ROWS)}

    def _ahead_in_turn(self, unanswered: Mapping[Key, Work]) -> dict[Key, Work]:
        # All sequences share the fixed time of a pass; the time of a row is charged to the sequence that adds it.
        pass_rows = PASS_ROWS / max(1, len(unanswered))
        return self._in_turn({key: max(1, len(work.choose_branches(pass_rows))) for key, work in unanswered.items()})

    def _grow(self, growing: dict[Key, Work]) -> list[tuple[Key, Growth | SpecdecError]]:
        for work in growing.values():
            work.sequence.num_wanted = work.num_wanted
        grown = self._run(self._drafter.grow, growing)
        results: list[tuple[Key, Growth | SpecdecError]] = []
        for (key, work), nodes in zip(growing.items(), grown, strict=True):
            if isinstance(nodes, SpecdecError):
                self.close(key)
                results.append((key, nodes))
            elif nodes is not None:
                results.extend((key, growth) for growth in work.grow(nodes))
        return results

    def _grow_ahead(self, ahead: dict[Key, Work]) -> list[tuple[Key, Growth | SpecdecError]]:
        results: list[tuple[Key, Growth | SpecdecError]] = []
        growing: dict[Key, Work] = {}
        for key, work in ahead.items():
            work.sequence.branches = work.branches
            if work.branches:
                growing[key] = work
            else:
                results.append((key, work.answer(GrowthEnd.BUDGET)))
        if not growing:
            return results
        grown = self._run(self._drafter.grow, growing)
        for (key, work), nodes in zip(growing.items(), grown, strict=True):
            work.sequence.branches = ()  # work.branches stays for the next pass if this one took in the text (None)
            if isinstance(nodes, Overloaded):
                results.append((key, work.answer(GrowthEnd.UNLIKELY)))  # no memory for nodes grown ahead
            elif isinstance(nodes, SpecdecError):
                self.close(key)
                results.append((key, nodes))
            elif nodes is not None:
                results.extend((key, growth) for growth in work.grow_ahead(nodes, len(growing) // _REPORTS_PER_PASS))
        return results

    def _learn(self, learning: dict[Key, Work]) -> list[tuple[Key, Growth | SpecdecError]]:
        learnt = self._run(self._drafter.learn, learning)
        results: list[tuple[Key, Growth | SpecdecError]] = []
        for (key, work), outcome in zip(learning.items(), learnt, strict=True):
            if isinstance(outcome, SpecdecError):
                self.close(key)
                results.append((key, outcome))
            else:
                work.learnt = outcome
        return results

    def _run(
        self, verb: Callable[[Sequence[DraftSequence]], Sequence[_Outcome]], works: Mapping[Key, Work]
    ) -> list[_Outcome | SpecdecError]:
        def compute(sequences: Sequence[DraftSequence]) -> Sequence[_Outcome]:
            for sequence in sequences:
                if sequence.state is None:  # lost, or the drafter needs none
                    sequence.state = self._drafter.open(sequence.spec)
            return verb(sequences)

        outcomes = run_pass(compute, [work.sequence for work in works.values()], self._lose)
        self._passes += 1
        return outcomes

    def _lose(self, sequence: DraftSequence) -> None:
        state, sequence.state = sequence.state, None
        if state is not None:
            self._drafter.close(state)
