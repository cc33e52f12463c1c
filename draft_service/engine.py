"""The draft's side: which sequences have budget left, what was committed, what has grown.

Knows the protocol (advances, budgets, superseding, draining); refuses to know how a node is proposed: a Drafter
does. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from draft_service.ahead import Spot, spots
from draft_service.budgets import MOST_NODES, check_in_flight, granted
from specdec.batching import Key, Results
from specdec.chances import Chances
from specdec.errors import Draining, InvalidArgument, OutOfStep, Overloaded, SpecdecError
from specdec.portions import MAX_TREE_ROWS, take_turns
from specdec.rounds import Advance, Budget, Growth, GrowthEnd, Load, ModelInfo
from specdec.sequence import SequenceSpec
from specdec.tree import EMPTY_TREE, SparseDistribution, TokenTree


@dataclass(frozen=True, slots=True)
class DraftOpen:
    """A sequence as this service opens it."""

    spec: SequenceSpec
    budget: Budget


@dataclass(frozen=True, slots=True)
class Node:
    """A proposal: the child ``token_id`` of node ``parent`` (-1: the root) of the sequence's tree."""

    parent: int
    token_id: int
    draft_probs: SparseDistribution | None = None


@dataclass(slots=True)
class DraftSequence:
    """What a drafter sees of a sequence: the committed ids and the tree grown below the last of them.

    ``spots`` is where a drafter with the capability "ahead" grows it in this pass, if not just at its last node: then
    the tree may branch. ``num_siblings`` runners-up are wanted beside the node below the last one.
    """

    spec: SequenceSpec
    ids: list[int]
    tree: TokenTree = EMPTY_TREE
    memory: Any = None  # the drafter's own
    spots: tuple[Spot, ...] = ()
    num_siblings: int = 0

    @property
    def base(self) -> int:
        return len(self.ids)


class Drafter(Protocol):
    """A method of proposing. Each has a file in draft_service/drafters/ and two verbs beside open and close."""

    info: ModelInfo

    def open(self, spec: SequenceSpec) -> Any:
        """The memory of a new sequence."""

    def close(self, memory: Any) -> None: ...

    def learn(self, sequences: Sequence[DraftSequence]) -> Sequence[SpecdecError | bool]:
        """Take in what was committed, for all of them in one pass. An error ends its sequence alone.

        False: a long prompt goes on in the next pass.
        """

    def grow(self, sequences: Sequence[DraftSequence]) -> Sequence[Sequence[Node] | SpecdecError | None]:
        """The next nodes of each tree, in one pass; none: there is nothing likely to propose.

        Takes in what was committed first where that was not done. None: that takes another pass. Without spots, one
        node below the last, and after it its siblings if they are wanted; with spots (all of them have some, or none
        has), the children that they lack.
        """

    def cache_use(self) -> tuple[int, int]:
        """KV slots taken and in total."""


@dataclass(slots=True)
class _Work:
    """A sequence and the advance it works on (the open is advance 0). A newer advance is new work."""

    sequence: DraftSequence
    chances: Chances  # of its guesses
    advance: int
    budget: Budget
    num_grown: int = 0
    num_ahead: int = 0
    ahead: bool = False  # what was asked for is there; now it grows below what is in flight
    siblings: list[Node] = field(default_factory=list)  # of what was grown; leaves, which the chain does without
    answered: bool = False
    learnt: bool = False
    superseded: list[Growth] = field(default_factory=list)


class DraftEngine:
    """See specdec.batching.Engine."""

    def __init__(self, drafter: Drafter, max_sequences: int = 1024) -> None:
        self._drafter = drafter
        self._max_sequences = max_sequences
        self._chances = Chances()
        self._works: dict[Key, _Work] = {}
        self._fresh: dict[Key, _Work] = {}  # have an advance that no step has seen yet
        self._batch: list[Key] = []
        self._held: set[int] = set()  # streams
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
        memory = self._drafter.open(open_.spec)
        ids = list(open_.spec.token_ids)
        sequence = DraftSequence(open_.spec, ids, memory=memory, num_siblings=budget.max_siblings)
        self._works[key] = self._fresh[key] = _Work(sequence, Chances(self._chances), 0, budget)

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
            superseded.append(Growth(work.advance, sequence.base, (), EMPTY_TREE, GrowthEnd.SUPERSEDED))
        # A chain that is verified against its distribution is drawn afresh for every base.
        keyed = sequence.spec.keyed_by_token
        sequence.tree = work.chances.descended(sequence.tree, advance.token_ids) if keyed else EMPTY_TREE
        sequence.ids.extend(advance.token_ids)
        in_flight = advance.in_flight if budget.max_ahead else EMPTY_TREE
        sequence.tree = in_flight.merge(sequence.tree).prefix(2 * MOST_NODES)
        if budget.max_nodes:
            sequence.tree = sequence.tree.trunk()
        sequence.num_siblings = budget.max_siblings
        self._works[key] = self._fresh[key] = _Work(
            sequence,
            work.chances,
            advance.number,
            budget,
            # Growing takes in what was committed; where nothing is to be grown, that is done when nobody waits.
            learnt=bool(budget.max_nodes or budget.max_ahead),
            superseded=superseded,
        )

    def close(self, key: Key) -> None:
        self._fresh.pop(key, None)
        if (work := self._works.pop(key, None)) is not None:
            self._drafter.close(work.sequence.memory)

    def hold(self, stream: int, held: bool) -> None:
        (self._held.add if held else self._held.discard)(stream)

    def drain(self) -> None:
        self._draining = True

    @property
    def rest_s(self) -> float:
        return 0.0  # a step is short, and whoever comes back joins the next one

    @property
    def idle(self) -> bool:
        if self._draining and self._works:
            return False
        return not any(self._grows(key, work) or not work.learnt for key, work in self._works.items())

    def working_on(self) -> Sequence[Key]:
        return self._batch

    @property
    def load(self) -> Load:
        works = list(self._works.values())
        used, total = self._drafter.cache_use()
        num_waiting = sum(not (work.answered and work.learnt) for work in works)
        return Load(len(works), num_waiting, used, total, self._passes)

    def step(self) -> Results:
        """One more level of every tree that somebody waits for. Else a pass for prompts that wait for none; and only
        when there are none of those, below what is in flight."""
        self._batch = []
        results: list[tuple[Key, Growth | SpecdecError]] = []
        for key, work in self._fresh.items():
            results.extend((key, growth) for growth in work.superseded)
            work.superseded.clear()
            results.extend((key, growth) for growth in self._ended(work))
        self._fresh.clear()
        if results:
            return results  # before a pass that may fail; what is left waits for the next step
        unanswered = {key: work for key, work in self._works.items() if self._grows(key, work)}
        growing = self._in_turn({key: 1 for key, work in unanswered.items() if not work.ahead})
        learning = {} if growing else {key: work for key, work in self._works.items() if not work.learnt}
        num_rows = {key: 1 + len(work.sequence.tree) for key, work in unanswered.items()}
        ahead = {} if growing or learning else self._in_turn(num_rows)
        self._batch = [*growing, *learning, *ahead]
        if growing:
            results.extend(self._grow(growing))
        if learning:
            results.extend(self._learn(learning))
        if ahead:
            results.extend(self._grow_ahead(ahead))
        if self._draining:
            for key in [key for key, work in self._works.items() if work.answered]:
                self.close(key)
                results.append((key, Draining("this draft is draining; open the sequence on another one")))
        return results

    def _grows(self, key: Key, work: _Work) -> bool:
        held = work.ahead and key.stream in self._held and not self._draining
        return not (work.answered or held)

    def _in_turn(self, num_rows: Mapping[Key, int]) -> dict[Key, _Work]:
        """Of these those who are in the next pass, which has no more than so many rows."""
        return {key: self._works[key] for key in take_turns(self._works, num_rows, MAX_TREE_ROWS)}

    def _end(self, work: _Work) -> GrowthEnd | None:
        """Why nothing more may be drafted for this advance, if so."""
        deepest = max(work.sequence.tree.depths, default=-1)
        if work.num_grown >= work.budget.max_nodes or deepest + 1 >= work.budget.max_depth:
            return GrowthEnd.BUDGET
        if work.budget.max_ahead and len(work.sequence.tree) >= work.budget.max_nodes:
            return GrowthEnd.BUDGET  # some of it was grown ahead, and what is still to come need not be waited for
        # The next node is predicted by feeding the position before it.
        if work.sequence.base + deepest + 1 > self._drafter.info.context_length:
            return GrowthEnd.CONTEXT
        return None

    def _grow(self, growing: dict[Key, _Work]) -> list[tuple[Key, Growth | SpecdecError]]:
        grown = self._drafter.grow([work.sequence for work in growing.values()])
        self._passes += 1
        results: list[tuple[Key, Growth | SpecdecError]] = []
        for (key, work), nodes in zip(growing.items(), grown, strict=True):
            if isinstance(nodes, SpecdecError):
                self.close(key)
                results.append((key, nodes))
                continue
            if nodes is None:
                continue
            work.learnt = True
            if work.budget.max_siblings:
                nodes, siblings = nodes[:1], nodes[1:]
                work.siblings.extend(siblings)
            nodes = nodes[: work.budget.max_nodes - work.num_grown]
            work.sequence.tree = _extended(work.sequence.tree, nodes)
            work.num_grown += len(nodes)
            ended = self._ended(work) if nodes else [_answer(work, GrowthEnd.UNLIKELY)]
            results.extend((key, growth) for growth in ended)
        return results

    def _ended(self, work: _Work) -> list[Growth]:
        """What is said once what was asked for is there. Then it may go on below that."""
        end = self._end(work)
        if end is None:
            return []
        if end is not GrowthEnd.BUDGET or not work.budget.max_ahead:
            return [_answer(work, end)]
        sequence = work.sequence
        work.ahead = True
        return [Growth(work.advance, sequence.base, (), _told(work), None)] if work.budget.max_nodes else []

    def _grow_ahead(self, ahead: dict[Key, _Work]) -> list[tuple[Key, Growth | SpecdecError]]:
        results: list[tuple[Key, Growth | SpecdecError]] = []
        growing: dict[Key, _Work] = {}
        for key, work in ahead.items():
            work.sequence.spots = self._spots(work)
            if work.sequence.spots:
                growing[key] = work
            else:
                results.append((key, _answer(work, GrowthEnd.BUDGET)))
        grown = self._drafter.grow([work.sequence for work in growing.values()]) if growing else []
        self._passes += bool(growing)
        for (key, work), nodes in zip(growing.items(), grown, strict=True):
            sequence = work.sequence
            sequence.spots = ()
            if nodes is None:
                continue
            if isinstance(nodes, SpecdecError) and not isinstance(nodes, Overloaded):
                self.close(key)
                results.append((key, nodes))
            elif isinstance(nodes, SpecdecError) or not nodes:
                results.append((key, _answer(work, GrowthEnd.UNLIKELY)))  # no memory for more than is asked for
            else:
                nodes = nodes[: work.budget.max_ahead - work.num_ahead]
                sequence.tree = _extended(sequence.tree, nodes)
                work.num_ahead += len(nodes)
                results.append((key, Growth(work.advance, sequence.base, (), sequence.tree, None)))
        return results

    def _spots(self, work: _Work) -> tuple[Spot, ...]:
        """Where the next pass grows ahead, so far as it may."""
        tree, room = work.sequence.tree, work.budget.max_ahead - work.num_ahead
        # All of the tree is fed in every pass. What was asked for may end at a node that no row can be fed for, or be
        # more than is kept from one advance to the next.
        num_feedable = self._drafter.info.context_length - work.sequence.base
        if max(tree.depths, default=-1) >= num_feedable or len(tree) - work.num_ahead > 2 * MOST_NODES:
            return ()
        deepest = min(work.budget.max_depth, num_feedable)
        # What a later pass would rather grow is left to it, but the verdict may come before that.
        least = work.chances.least(2 * work.budget.max_ahead)
        return spots(tree, work.chances.of_ranks, least, room, deepest)

    def _learn(self, learning: dict[Key, _Work]) -> list[tuple[Key, Growth | SpecdecError]]:
        learnt = self._drafter.learn([work.sequence for work in learning.values()])
        self._passes += 1
        results: list[tuple[Key, Growth | SpecdecError]] = []
        for (key, work), outcome in zip(learning.items(), learnt, strict=True):
            if isinstance(outcome, SpecdecError):
                self.close(key)
                results.append((key, outcome))
            else:
                work.learnt = outcome
        return results


def _answer(work: _Work, end: GrowthEnd) -> Growth:
    work.answered = True
    return Growth(work.advance, work.sequence.base, (), _told(work), end)


def _told(work: _Work) -> TokenTree:
    tree = work.sequence.tree
    if not work.siblings:
        return tree
    there = set(zip(tree.parents, tree.token_ids, strict=True))  # what grew ahead has some of them, too
    return _extended(tree, [node for node in work.siblings if (node.parent, node.token_id) not in there])


def _extended(tree: TokenTree, nodes: Sequence[Node]) -> TokenTree:
    return tree.extended([(node.token_id, node.parent, node.draft_probs) for node in nodes])
