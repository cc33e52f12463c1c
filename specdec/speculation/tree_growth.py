"""The frontier of a tree that grows while a part of it is being verified: missing children, most likely first.

Knows the probabilities of nodes; does not know tokens. The verdict is a path from the root, and may leave the tree
anywhere. So the tree grows at its most likely places: deep below guesses that are usually right, wide elsewhere. The
cost of a choice depends on the number of nodes added, not on the size of the tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specdec.core.tree import ROOT, TokenTree

PASS_ROWS = 32
"""Fixed time of a small model's pass, in rows: on two cores a pass of one row takes 10 ms, of sixty 30 ms
(bench/LOG.md, 2026-11-23)."""


_NO_RANK = 1 << 30
"""Rank of a node without an open child."""


class Open(NamedTuple):
    """A child that the tree lacks: number ``rank`` of node ``parent``, committed with probability ``chance``."""

    chance: float
    parent: int
    rank: int


class Frontier:
    """The open children of ``tree`` at depths less than ``max_depth``. ``of_ranks`` maps a confidence bucket to the
    probabilities of a node's first, second, ... child (`AcceptanceModel.at_confidence`)."""

    def __init__(self, of_ranks: Callable[[int], Sequence[float]], tree: TokenTree, max_depth: int) -> None:
        self._of_ranks, self._of_any = of_ranks, of_ranks(0)
        self._max_depth = max_depth
        # Per node, from ROOT on: probability, depth, number of children, probabilities of children, open child's rank.
        self._chances, self._depths, self._num_children = [1.0], [-1], [0]
        self._of_children = [self._of_any]
        self._open_ranks = [_NO_RANK]
        self._heap: list[tuple[float, int, int]] = []
        self.grow(tree)
        self._open(ROOT)

    def take(self, max_nodes: int, pass_rows: float = PASS_ROWS) -> list[Open]:
        """The most likely open children, to be added by one pass; they leave the frontier.

        Takes a child while its probability is at least the pass's gain per row so far; the pass itself costs
        ``pass_rows`` rows. A row is a parent: its further children cost nothing, but have the same threshold. A node
        left to a later pass may come too late, but a wider pass delays all later nodes.
        """
        taken: list[Open] = []
        gained, num_rows = 0.0, 0
        while self._heap and len(taken) < max_nodes and -self._heap[0][0] * (pass_rows + num_rows) >= gained:
            chance, parent, rank = heapq.heappop(self._heap)
            if -chance != self._chance(parent, rank):
                continue  # outdated: `_learn` has pushed it again
            taken.append(Open(-chance, parent, rank))
            gained, num_rows = gained - chance, num_rows + (rank == 0)
            self._push(parent, rank + 1)
        return taken

    def grow(self, tree: TokenTree) -> None:
        """Update to ``tree``, which is the tree so far with new nodes behind it."""
        new = range(len(self._chances) - 1, len(tree))
        self._num_children += [0] * len(new)
        self._of_children += [self._of_any] * len(new)
        self._open_ranks += [_NO_RANK] * len(new)
        for node in new if tree.confidence else ():
            if tree.confidence[node] and self._of_children[tree.parents[node] + 1] is self._of_any:
                self._learn(tree.parents[node], tree.confidence[node])
        for node in new:
            above = tree.parents[node] + 1
            self._chances.append(self._chance(tree.parents[node], self._num_children[above]))
            self._depths.append(self._depths[above] + 1)
            self._num_children[above] += 1
        for node in new:
            self._open(node)

    def _chance(self, parent: int, rank: int) -> float:
        of_ranks = self._of_children[parent + 1]
        return self._chances[parent + 1] * of_ranks[rank] if rank < len(of_ranks) else 0.0

    def _learn(self, parent: int, confidence: int) -> None:
        """Use the confidence bucket at ``parent``, which arrives with its first child."""
        rank = self._open_ranks[parent + 1]
        before = self._chance(parent, rank)
        self._of_children[parent + 1] = self._of_ranks(confidence)
        if rank != _NO_RANK and self._chance(parent, rank) != before:
            self._push(parent, rank)

    def _open(self, node: int) -> None:
        self._push(node, self._num_children[node + 1])

    def _push(self, parent: int, rank: int) -> None:
        self._open_ranks[parent + 1] = rank
        chance = self._chance(parent, rank)
        if chance > 0 and self._depths[parent + 1] + 1 < self._max_depth:
            heapq.heappush(self._heap, (-chance, parent, rank))
