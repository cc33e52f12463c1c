"""One advance of a sequence: its budget, the progress of its growth, and the growths that it reports."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_service.drafter import Branch, DraftSequence
from specdec.core.rounds import Budget, Growth, GrowthEnd
from specdec.core.tree import EMPTY_TREE, Candidate, TokenTree
from specdec.speculation.acceptance import AcceptanceModel
from specdec.speculation.tree_growth import Frontier


@dataclass(slots=True)
class Work:
    """The work on advance ``advance`` (0: the open); each newer advance gets a new Work.

    ``chances`` is the acceptance model of the sequence; the drafter's context has ``context_length`` positions.
    First the requested nodes (``max_nodes``) grow, and one growth reports them all when they are complete. Then, with
    ``ahead`` set, the tree grows below and next to them, and each node is reported once."""

    sequence: DraftSequence
    chances: AcceptanceModel
    advance: int
    budget: Budget
    context_length: int
    since: float  # arrival of the advance
    ahead: bool = False
    answered: bool = False
    learnt: bool = False
    num_reported: int = 0  # nodes at the start of the tree that the caller knows
    superseded: list[Growth] = field(default_factory=list)
    _num_grown: int = 0
    _num_ahead: int = 0
    _num_unreported: int = 0  # passes since the last growth
    _frontier: Frontier | None = None  # set once the tree grows ahead
    branches: tuple[Branch, ...] = ()  # where the next pass grows ahead; kept until a pass has grown there
    _siblings: list[Candidate] = field(default_factory=list)  # of the requested chain; leaves, kept out of ``tree``

    def ended(self) -> list[Growth]:
        """The growth to report if the requested nodes are complete, else nothing. May switch to growing ahead."""
        end = self._end()
        if end is None:
            return []
        if end is not GrowthEnd.BUDGET or not self.budget.max_ahead:
            return [self.answer(end)]
        self.ahead = True
        return [self._growth(self._requested(), end=None)] if self.budget.max_nodes else []

    def _end(self) -> GrowthEnd | None:
        """Why no further requested node may be drafted; None: one may."""
        if self._num_within_budget() <= 0:
            return GrowthEnd.BUDGET
        if self._num_within_context() <= 0:
            return GrowthEnd.CONTEXT
        return None

    def _num_within_budget(self) -> int:
        """Nodes that the budget still allows, one below the other."""
        tree = self.sequence.tree
        num = min(self.budget.max_nodes - self._num_grown, self.budget.max_depth - 1 - max(tree.depths, default=-1))
        # Nodes grown ahead earlier count towards max_nodes, so that the caller waits for the missing ones only.
        return min(num, self.budget.max_nodes - len(tree)) if self.budget.max_ahead else num

    def _num_within_context(self) -> int:
        # A node is predicted by feeding the position before it.
        return self.context_length - self.sequence.base - max(self.sequence.tree.depths, default=-1)

    @property
    def num_wanted(self) -> int:
        """How many nodes to grow below the last one."""
        return min(self._num_within_budget(), self._num_within_context())

    def grow(self, candidates: Sequence[Candidate]) -> list[Growth]:
        """Add what a pass proposed for the requested chain. Returns the growths to report."""
        self.learnt = True
        if not candidates:
            return [self.answer(GrowthEnd.UNLIKELY)]
        if self.budget.max_siblings:
            firsts = {candidate.parent: candidate for candidate in reversed(candidates)}
            self._siblings.extend(candidate for candidate in candidates if candidate is not firsts[candidate.parent])
            candidates = [candidate for candidate in candidates if candidate is firsts[candidate.parent]]
        candidates = candidates[: self.budget.max_nodes - self._num_grown]
        self.sequence.tree = self.sequence.tree.extended(candidates)
        self._num_grown += len(candidates)
        return self.ended()

    def choose_branches(self, pass_rows: float) -> tuple[Branch, ...]:
        """Where the next pass grows ahead (see Frontier.take). Unchanged if the last pass only took in the text."""
        if self.branches:
            return self.branches
        if self._frontier is None:
            self._frontier = self._begin()
        open_children = self._frontier.take(self.budget.max_ahead - self._num_ahead, pass_rows)
        num_children = {child.parent: child.rank + 1 for child in open_children}
        self.branches = tuple(itertools.starmap(Branch, num_children.items()))
        return self.branches

    def _begin(self) -> Frontier:
        max_depth = min(self.budget.max_depth, self.context_length - self.sequence.base)
        return Frontier(self.chances.at_confidence, self.sequence.tree, max_depth)

    def grow_ahead(self, candidates: Sequence[Candidate], every: int = 1) -> list[Growth]:
        """Add what a pass proposed at ``branches``. Returns the growths to report: one per ``every`` passes."""
        self.branches = ()
        size = len(self.sequence.tree)
        tree = self.sequence.tree.extended(candidates[: self.budget.max_ahead - self._num_ahead])
        if self._frontier is None or len(tree) == size:
            return [self.answer(GrowthEnd.UNLIKELY)]
        self._frontier.grow(tree)
        self._num_ahead += len(tree) - size
        self.sequence.tree = tree
        self._num_unreported += 1
        if self._num_unreported < every:
            return []
        return [self._growth(*self._unreported(), end=None)]

    def answer(self, end: GrowthEnd) -> Growth:
        """The last growth of this advance."""
        self.answered = True
        if self.ahead:
            return self._growth(*self._unreported(), end=end)
        return self._growth(EMPTY_TREE if end is GrowthEnd.SUPERSEDED else self._requested(), end=end)

    def _growth(self, tree: TokenTree, path: tuple[int, ...] = (), *, end: GrowthEnd | None) -> Growth:
        return Growth(self.advance, self.sequence.base, path=path, tree=tree, end=end)

    def _unreported(self) -> tuple[TokenTree, tuple[int, ...]]:
        """The nodes that the caller does not know, and the path to them; marks them as known."""
        path, tree = self.sequence.tree.since(self.num_reported)
        self.num_reported, self._num_unreported = len(self.sequence.tree), 0
        return tree, path

    def _requested(self) -> TokenTree:
        """The whole tree with the siblings; marks it as known to the caller."""
        self.num_reported = len(self.sequence.tree)
        tree = self.sequence.tree
        return tree.extended(tree.lacking(self._siblings))  # nodes grown ahead may include some siblings
