"""Where a tree grows while a part of it is being verified: the children that it lacks, likeliest first.

Knows how likely nodes are; refuses to know tokens. The verdict is a path from the root. It may leave the tree anywhere,
so the tree grows wherever the text is likeliest to go: deep below guesses that are right as a rule, wide where they
are not. To choose costs what is added, however large the tree is by then.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specdec.core.tree import ROOT, TokenTree

PASS_ROWS = 32
"""A pass of a small model takes as long as so many rows of it, about: on two cores one row 10 ms, sixty 30
(bench/LOG.md)."""


_NONE = 1 << 30
"""A rank that no child has."""


class Open(NamedTuple):
    """A child that a tree does not have yet: the ``rank``-th of node ``parent``, committed with this ``chance``."""

    chance: float
    parent: int
    rank: int


class Frontier:
    """Of ``tree``, which gets no nodes at ``max_depth`` or deeper. ``of_ranks`` says how often a node's first, second,
    ... child is right where the draft is so ``sure``."""

    def __init__(self, of_ranks: Callable[[int], Sequence[float]], tree: TokenTree, max_depth: int) -> None:
        self._of_ranks, self._of_any = of_ranks, of_ranks(0)
        self._max_depth = max_depth
        # By node, from ROOT on: how likely it is, its depth, its children, how likely those are, and which is open.
        self._chances, self._depths, self._num_children = [1.0], [-1], [0]
        self._of_children = [self._of_any]
        self._open_ranks = [_NONE]
        self._heap: list[tuple[float, int, int]] = []
        self.grow(tree)
        self._open(ROOT)

    def take(self, max_nodes: int, pass_rows: float = PASS_ROWS) -> list[Open]:
        """What one pass is to add, and is not given again: the likeliest, as long as they gain more for their row than
        the pass gains for its time, which is that of ``pass_rows`` rows and its own.

        A row is a parent, so that a child beside others costs none; but it must be as likely as one that does. What is
        left to a later pass may come too late, but a wide pass is longer, and whatever is below its nodes comes later.
        """
        taken: list[Open] = []
        gained, num_rows = 0.0, 0
        while self._heap and len(taken) < max_nodes and -self._heap[0][0] * (pass_rows + num_rows) >= gained:
            chance, parent, rank = heapq.heappop(self._heap)
            if -chance != self._chance(parent, rank):
                continue  # it was put in anew, when more was known
            taken.append(Open(-chance, parent, rank))
            gained, num_rows = gained - chance, num_rows + (rank == 0)
            self._push(parent, rank + 1)
        return taken

    def grow(self, tree: TokenTree) -> None:
        """It is this by now, with nodes behind those that it had."""
        new = range(len(self._chances) - 1, len(tree))
        self._num_children += [0] * len(new)
        self._of_children += [self._of_any] * len(new)
        self._open_ranks += [_NONE] * len(new)
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
        """How sure the draft was of what comes after a node is told with its first child."""
        rank = self._open_ranks[parent + 1]
        before = self._chance(parent, rank)
        self._of_children[parent + 1] = self._of_ranks(confidence)
        if rank != _NONE and self._chance(parent, rank) != before:
            self._push(parent, rank)

    def _open(self, node: int) -> None:
        self._push(node, self._num_children[node + 1])

    def _push(self, parent: int, rank: int) -> None:
        self._open_ranks[parent + 1] = rank
        chance = self._chance(parent, rank)
        if chance > 0 and self._depths[parent + 1] + 1 < self._max_depth:
            heapq.heappush(self._heap, (-chance, parent, rank))
