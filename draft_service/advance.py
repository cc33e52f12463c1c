"""One advance of a sequence: its budget, the progress of its growth, and the growths that it reports.

Knows budgets and trees; does not know passes and other sequences.
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
    """The work on advance ``advance`` (0: the open); each newer advance gets a new Work.

    ``chances`` is the acceptance model of the sequence; the drafter's context has ``context_length`` positions.
    First the requested nodes (``max_nodes``) grow, and one growth reports them all when they are complete. Then, with
    ``ahead`` set, the tree grows below and beside them, and each node is reported once."""

    sequence: DraftSequence
    chances: AcceptanceModel
    advance: int
    budget: Budget
    context_length: int
    ahead: bool = False
    answered: bool = False
    learnt: bool = False
    num_told: int = 0  # nodes at the start of the tree that the caller knows
    superseded: list[Growth] = field(default_factory=list)
    _num_grown: int = 0
    _num_ahead: int = 0
    _num_unreported: int = 0  # passes since the last growth
    _frontier: Frontier | None = None  # set once the tree grows ahead
    spots: tuple[Spot, ...] = ()  # where the next pass grows ahead; kept until a pass has grown there
    _siblings: list[Node] = field(default_factory=list)  # of the requested chain; leaves, kept out of ``tree``

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

    def grow(self, nodes: Sequence[Node]) -> list[Growth]:
        """Add the nodes that a pass proposed for the requested chain. Returns the growths to report."""
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
        """Where the next pass grows ahead (see Frontier.take). Unchanged if the last pass only took in the text."""
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
        """Add the nodes that a pass proposed at ``spots``. Returns the growths to report: one per ``every`` passes."""
        self.spots = ()
        size = len(self.sequence.tree)
        tree = _extended(self.sequence.tree, nodes[: self.budget.max_ahead - self._num_ahead])
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
        return Growth(self.advance, self.sequence.base, path, tree, end)

    def _unreported(self) -> tuple[TokenTree, tuple[int, ...]]:
        """The nodes that the caller does not know, and the path to them; marks them as known."""
        path, tree = self.sequence.tree.since(self.num_told)
        self.num_told, self._num_unreported = len(self.sequence.tree), 0
        return tree, path

    def _requested(self) -> TokenTree:
        """The whole tree with the siblings; marks it as known to the caller."""
        self.num_told = len(self.sequence.tree)
        tree = self.sequence.tree
        if not self._siblings:
            return tree
        there = set(zip(tree.parents, tree.token_ids, strict=True))  # nodes grown ahead may include some siblings
        return _extended(tree, [node for node in self._siblings if (node.parent, node.token_id) not in there])


def _extended(tree: TokenTree, nodes: Sequence[Node]) -> TokenTree:
    return tree.extended([(node.token_id, node.parent, node.draft_probs, node.confidence) for node in nodes])
