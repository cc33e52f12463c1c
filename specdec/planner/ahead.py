"""How far a tree grows below the nodes in flight. The counterpart of draft_service/advance.py, in counts of nodes.

A draft's first guess is right with probability ``acceptance``, else its second with ``runner_up``, and a third never.
Growth is computed once per shape of the chain in flight, as if no other sequence shared its passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.core.tree import ROOT, TokenTree
from specdec.planner.request import Met
from specdec.planner.scenario import Scenario
from specdec.speculation.tree_growth import Frontier


@dataclass(slots=True)
class _Passes:
    """The trees grown from one chain, by the number of passes."""

    trees: list[TokenTree]
    below: dict[tuple[int, int, bool], int] = field(default_factory=dict)


class Ahead:
    """Trees of a draft that grows at most ``most_nodes`` nodes ahead, to a depth of at most ``most_depth``."""

    def __init__(self, acceptance: float, runner_up: float, most_nodes: int, most_depth: int) -> None:
        self._of_ranks = (acceptance, (1.0 - acceptance) * runner_up)
        self._most_nodes = most_nodes
        self._most_depth = most_depth
        self._known: dict[tuple[int, int], _Passes] = {}

    @staticmethod
    def of(scenario: Scenario) -> Ahead | None:
        """The trees of a scenario; None if its drafts do not grow ahead."""
        pair, drafting = scenario.pair, scenario.drafting
        if not drafting.num_ahead_tokens:
            return None
        return Ahead(pair.acceptance, pair.runner_up, drafting.num_ahead_tokens, 2 * drafting.num_draft_tokens + 1)

    def most_passes(self, flying: int, behind: int) -> int:
        """The number of passes after which the tree is complete."""
        return len(self._passes(flying, behind).trees) - 1

    def num_branches(self, flying: int, behind: int) -> int:
        """The mean number of new nodes per pass, rounded up."""
        trees = self._passes(flying, behind).trees
        return -(-(len(trees[-1]) - len(trees[0])) // max(1, len(trees) - 1))

    def nodes_below(self, met: Met, accepted: int, flying: int, behind: int, passes: int) -> int:
        """The number of nodes below the last token of a verdict, which the draft had where ``met`` says.

        ``accepted`` of the ``flying`` nodes were accepted. ``behind`` nodes followed them before the ``passes`` began.
        """
        if met is Met.NOWHERE:
            return 0
        known = self._passes(flying, behind)
        passes = min(passes, len(known.trees) - 1)
        at_tail = met is Met.TAIL
        asked = (passes, flying if at_tail else accepted, at_tail)
        if asked not in known.below:
            known.below[asked] = _below(known.trees[passes], *asked[1:])
        return known.below[asked]

    def _passes(self, flying: int, behind: int) -> _Passes:
        known = self._known.get((flying, behind))
        if known is None:
            trees, left = [TokenTree.chain(range(flying + behind))], self._most_nodes
            frontier = Frontier(lambda _: self._of_ranks, trees[0], self._most_depth)
            while parents := [each.parent for each in frontier.take(left)]:
                left -= len(parents)
                size = len(trees[-1])
                token_ids = (*trees[-1].token_ids, *range(size, size + len(parents)))
                trees.append(TokenTree(token_ids, (*trees[-1].parents, *parents)))
                frontier.grow(trees[-1])
            known = self._known[flying, behind] = _Passes(trees)
        return known


def _below(tree: TokenTree, accepted: int, at_tail: bool) -> int:
    """The length of the longest path below the first (``at_tail``) or second child of the last accepted node. After a
    verdict the simulation treats the tree as a chain."""
    last = accepted - 1 if accepted else ROOT
    children = [node for node, parent in enumerate(tree.parents) if parent == last]
    if len(children) <= (not at_tail):
        return 0
    heights = [0] * len(tree)
    for node in range(len(tree) - 1, -1, -1):
        if (parent := tree.parents[node]) != ROOT:
            heights[parent] = max(heights[parent], heights[node] + 1)
    return heights[children[0 if at_tail else 1]]
