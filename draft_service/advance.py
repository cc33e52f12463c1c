"""One advance of a sequence: what was asked for, how much of it is there, and what is said of it.

Knows budgets and trees; refuses to know passes and other sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_service.drafter import DraftSequence, Node, Spot
from specdec.core.rounds import Budget, Growth, GrowthEnd
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.speculation.acceptance import AcceptanceModel
from specdec.speculation.tree_growth import Frontier


@dataclass(slots=True)
class Work:
    """On advance ``advance`` (0: the open). A newer one is new work. ``chances`` are those of the sequence's guesses,
    and the drafter's context has ``context_length`` positions.

    First grows what was asked for, of which all is said when it is there. From then on (``ahead``) what is below it and
    beside it grows, of which every node is said once."""

    sequence: DraftSequence
    chances: AcceptanceModel
    advance: int
    budget: Budget
    context_length: int
    ahead: bool = False
    answered: bool = False
    learnt: bool = False
    num_told: int = 0  # of the tree's nodes, the first ones, are known to who asked
    superseded: list[Growth] = field(default_factory=list)
    _num_grown: int = 0
    _num_ahead: int = 0
    _num_untold: int = 0  # passes of which nothing was said yet
    _frontier: Frontier | None = None  # since it grows ahead
    spots: tuple[Spot, ...] = ()  # where the next pass grows ahead; that no pass has answered yet
    _siblings: list[Node] = field(default_factory=list)  # of what was grown; leaves, which the chain does without

    def ended(self) -> list[Growth]:
        """What is said once what was asked for is there. Then it may go on below that."""
        end = self._end()
        if end is None:
            return []
        if end is not GrowthEnd.BUDGET or not self.budget.max_ahead:
            return [self.answer(end)]
        self.ahead = True
        return [self._growth(self._asked_for(), end=None)] if self.budget.max_nodes else []

    def _end(self) -> GrowthEnd | None:
        """Why nothing more may be drafted, if so."""
        if self._num_within_budget() <= 0:
            return GrowthEnd.BUDGET
        if self._num_within_context() <= 0:
            return GrowthEnd.CONTEXT
        return None

    def _num_within_budget(self) -> int:
        """Nodes that are still to be grown, one below the other."""
        tree = self.sequence.tree
        num = min(self.budget.max_nodes - self._num_grown, self.budget.max_depth - 1 - max(tree.depths, default=-1))
        # Some may have been grown ahead, and what is still to come need not be waited for.
        return min(num, self.budget.max_nodes - len(tree)) if self.budget.max_ahead else num

    def _num_within_context(self) -> int:
        # A node is predicted by feeding the position before it.
        return self.context_length - self.sequence.base - max(self.sequence.tree.depths, default=-1)

    @property
    def num_wanted(self) -> int:
        """Nodes below the last one."""
        return min(self._num_within_budget(), self._num_within_context())

    def grow(self, nodes: Sequence[Node]) -> list[Growth]:
        """A pass proposed these for what was asked for. Returns what is said of it."""
        self.learnt = True
        if not nodes:
            return [self.answer(GrowthEnd.UNLIKELY)]
        if self.budget.max_siblings:
            firsts = {node.parent: node for node in reversed(nodes)}
            self._siblings.extend(node for node in nodes if node is not firsts[node.parent])
            nodes = [node for node in nodes if node is firsts[node.parent]]
        nodes = nodes[: self.budget.max_nodes - self._num_grown]
        self.sequence.tree = _extended(self.sequence.tree, nodes)
        self._num_grown += len(nodes)
        return self.ended()

    def choose_spots(self, pass_rows: float) -> tuple[Spot, ...]:
        """See Frontier.take. Where the last pass should have grown, if that took in the text."""
        if self.spots:
            return self.spots
        if self._frontier is None:
            self._frontier = self._begin()
        most: dict[int, int] = {}
        for each in self._frontier.take(self.budget.max_ahead - self._num_ahead, pass_rows):
            most[each.parent] = each.rank + 1
        self.spots = tuple(Spot(*spot) for spot in most.items())
        return self.spots

    def _begin(self) -> Frontier:
        max_depth = min(self.budget.max_depth, self.context_length - self.sequence.base)
        return Frontier(self.chances.at_confidence, self.sequence.tree, max_depth)

    def grow_ahead(self, nodes: Sequence[Node], every: int = 1) -> list[Growth]:
        """A pass proposed these at its spots. Returns what is said of it: something after ``every`` so many passes."""
        self.spots = ()
        size = len(self.sequence.tree)
        tree = _extended(self.sequence.tree, nodes[: self.budget.max_ahead - self._num_ahead])
        if self._frontier is None or len(tree) == size:
            return [self.answer(GrowthEnd.UNLIKELY)]
        self._frontier.grow(tree)
        self._num_ahead += len(tree) - size
        self.sequence.tree = tree
        self._num_untold += 1
        if self._num_untold < every:
            return []
        return [self._growth(*self._untold(), end=None)]

    def answer(self, end: GrowthEnd) -> Growth:
        """Nothing more comes."""
        self.answered = True
        if self.ahead:
            return self._growth(*self._untold(), end=end)
        return self._growth(EMPTY_TREE if end is GrowthEnd.SUPERSEDED else self._asked_for(), end=end)

    def _growth(self, tree: TokenTree, path: tuple[int, ...] = (), *, end: GrowthEnd | None) -> Growth:
        return Growth(self.advance, self.sequence.base, path, tree, end)

    def _untold(self) -> tuple[TokenTree, tuple[int, ...]]:
        """What is new to who asked, and the path to it."""
        path, tree = self.sequence.tree.since(self.num_told)
        self.num_told, self._num_untold = len(self.sequence.tree), 0
        return tree, path

    def _asked_for(self) -> TokenTree:
        """All of it, with the siblings."""
        self.num_told = len(self.sequence.tree)
        tree = self.sequence.tree
        if not self._siblings:
            return tree
        there = set(zip(tree.parents, tree.token_ids, strict=True))  # what grew ahead has some of them, too
        return _extended(tree, [node for node in self._siblings if (node.parent, node.token_id) not in there])


def _extended(tree: TokenTree, nodes: Sequence[Node]) -> TokenTree:
    return tree.extended([(node.token_id, node.parent, node.draft_probs, node.confidence) for node in nodes])
