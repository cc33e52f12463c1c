"""Token trees: the draft grows them, the orchestrator keeps them, the target verifies them.

A chain is a tree and no draft is the empty tree, so neither needs a special case elsewhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_TREE_NODES = 1024
"""Limit of a tree that a peer sends."""

MAX_CONFIDENCE = 15
"""See TokenTree.confidence."""

ROOT = -1
"""The parent of a tree's topmost nodes: the last committed token."""


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """The exact distribution a draft token was sampled from: ``weights / sum(weights)`` on ``token_ids``.

    ``weights`` are representable in fp16 and the largest is 1, so both sides compute the same float64 numbers.
    """

    token_ids: tuple[int, ...]
    weights: tuple[float, ...]


class Candidate(NamedTuple):
    """A token that is not yet in a tree: a child of node ``parent``. The other fields: see TokenTree."""

    parent: int
    token_id: int
    draft_probs: SparseDistribution | None = None
    confidence: int = 0


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Draft tokens below the root, parents before children.

    ``parents[i] < i`` is a node index or ROOT; siblings have different tokens. Hence every prefix of the node list is
    itself a tree. ``draft_probs`` is empty, or has one entry per node (None: the token was certain). ``confidence`` is
    empty, or has per node the confidence bucket of its parent's first child (specdec.speculation.acceptance; 0:
    unknown). Confidence does not count in comparisons.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    draft_probs: tuple[SparseDistribution | None, ...] = ()
    confidence: tuple[int, ...] = field(default=(), compare=False)

    @staticmethod
    def chain(token_ids: Sequence[int], draft_probs: Sequence[SparseDistribution | None] = ()) -> TokenTree:
        return TokenTree(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)), tuple(draft_probs))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Per node: its parent and its token id."""
        return list(zip(self.parents, self.token_ids, strict=True))

    @property
    def depths(self) -> tuple[int, ...]:
        """Per node: 0 for a child of the root. A node's position in the text is base + depth."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def problem(self, vocab_size: int) -> str | None:
        """A description of what is malformed in this tree; None if nothing is."""
        if len(self.parents) != len(self.token_ids):
            return f"{len(self.token_ids)} token_ids but {len(self.parents)} parents"
        if self.draft_probs and len(self.draft_probs) != len(self.token_ids):
            return f"{len(self.token_ids)} token_ids but {len(self.draft_probs)} draft_probs"
        if self.confidence and len(self.confidence) != len(self.token_ids):
            return f"{len(self.token_ids)} token_ids but {len(self.confidence)} confidence"
        # Every received tree is checked, and nearly all are valid: loop over the nodes only after a check has failed.
        nodes = range(len(self))
        if nodes and not 0 <= min(self.token_ids) <= max(self.token_ids) < vocab_size:
            node = next(node for node in nodes if not 0 <= self.token_ids[node] < vocab_size)
            return f"token_ids[{node}] = {self.token_ids[node]} is outside the vocabulary of {vocab_size}"
        if min(self.parents, default=ROOT) < ROOT or not all(map(operator.lt, self.parents, nodes)):
            node = next(node for node in nodes if not ROOT <= self.parents[node] < node)
            return f"parents[{node}] = {self.parents[node]} is not -1 or an earlier node"
        edges = self.edges
        if len(set(edges)) < len(edges):
            node = next(node for node in nodes if edges[node] in edges[:node])
            return f"node {node} repeats its sibling's token {self.token_ids[node]}"
        return None

    def prefix(self, num_nodes: int) -> TokenTree:
        """The first ``num_nodes`` nodes."""
        if num_nodes >= len(self):
            return self
        return TokenTree(
            self.token_ids[:num_nodes],
            self.parents[:num_nodes],
            draft_probs=self.draft_probs[:num_nodes],
            confidence=self.confidence[:num_nodes],
        )

    def trunk(self) -> TokenTree:
        """The longest prefix of the node list that is a chain."""
        parents = enumerate(self.parents)
        return self.prefix(next((node for node, parent in parents if parent != node - 1), len(self)))

    def most_likely_chains(self, first: int = ROOT) -> list[int]:
        """The nodes that are left if every node from ``first`` on keeps only its first child, the most likely one.
        From ROOT on: one chain."""
        nodes: list[int] = []
        kept, full = {ROOT}, set()
        for node, parent in enumerate(self.parents):
            if parent in kept and parent not in full:
                nodes.append(node)
                kept.add(node)
                if parent >= first:
                    full.add(parent)
        return nodes

    def child(self, node: int, token_id: int) -> int | None:
        """The child of ``node`` (or ROOT) with ``token_id``; None if there is none."""
        index = node
        while True:
            try:
                index = self.token_ids.index(token_id, index + 1)
            except ValueError:
                return None
            if self.parents[index] == node:
                return index

    def is_path(self, nodes: Sequence[int]) -> bool:
        """Whether ``nodes`` form a path of this tree from the root downwards."""
        above = (ROOT, *nodes)
        return all(
            0 <= node < len(self) and self.parents[node] == parent for parent, node in zip(above, nodes, strict=False)
        )

    def ends_with(self, nodes: Sequence[int]) -> bool:
        """Whether the last of ``nodes``, a path from the root downwards, is a leaf."""
        return (nodes[-1] if nodes else ROOT) not in self.parents

    def trace(self, path: Sequence[int]) -> list[int]:
        """The nodes along ``path`` (token ids from the root), up to the first that the tree lacks."""
        nodes: list[int] = []
        for token_id in path:
            node = self.child(nodes[-1] if nodes else ROOT, token_id)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def walk(self, path: Sequence[int]) -> int | None:
        """The node at the end of ``path`` (token ids from the root); ROOT for an empty path, None if absent."""
        nodes = self.trace(path)
        return None if len(nodes) < len(path) else nodes[-1] if nodes else ROOT

    def below(self, node: int) -> tuple[TokenTree, tuple[int, ...]]:
        """The subtree rooted at ``node``, and for each of its nodes the index in this tree."""
        if node == ROOT:
            return self, tuple(range(len(self)))
        within = {node}
        kept: list[int] = []
        for index, parent in enumerate(self.parents):
            if parent in within:
                within.add(index)
                kept.append(index)
        return self.part(kept, node), tuple(kept)

    def part(self, nodes: Sequence[int], root: int = ROOT) -> TokenTree:
        """The tree of ``nodes`` below ``root``. Each node comes after its parent, which is in ``nodes`` or the root."""
        index_of = {root: ROOT} | {node: index for index, node in enumerate(nodes)}
        return TokenTree(
            tuple(self.token_ids[node] for node in nodes),
            tuple(index_of[self.parents[node]] for node in nodes),
            draft_probs=tuple(self.draft_probs[node] for node in nodes) if self.draft_probs else (),
            confidence=tuple(self.confidence[node] for node in nodes) if self.confidence else (),
        )

    def descend(self, path: Sequence[int]) -> TokenTree:
        """The tree that is left once ``path`` is committed; empty if the path leaves the tree."""
        node = self.walk(path)
        return EMPTY_TREE if node is None else self.below(node)[0]

    def merge(self, other: TokenTree) -> TokenTree:
        """This tree, followed by those nodes of ``other`` that it lacks."""
        grown = GrowingTree(self)
        grown.add(other)
        return grown.tree

    def extended(self, candidates: Sequence[Candidate]) -> TokenTree:
        """This tree with ``candidates`` appended, which it must not have yet."""
        if not candidates:
            return self
        parents, token_ids, probs, confidence = zip(*candidates, strict=True)
        with_probs = bool(self.draft_probs) or any(probs)
        return TokenTree(
            self.token_ids + token_ids,
            self.parents + parents,
            draft_probs=(self.draft_probs or (None,) * len(self)) + probs if with_probs else (),
            confidence=(self.confidence or (0,) * len(self)) + confidence if self.confidence or any(confidence) else (),
        )

    def lacking(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those of ``candidates`` that this tree lacks."""
        edges = set(self.edges)
        return [candidate for candidate in candidates if candidate[:2] not in edges]

    def path(self, node: int) -> list[int]:
        """The nodes from the root down to ``node``, which is included; empty for ROOT."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_ids(self, node: int) -> tuple[int, ...]:
        """The token ids from the root down to ``node``, which is included; empty for ROOT."""
        return tuple(self.token_ids[above] for above in self.path(node))

    def since(self, num_nodes: int) -> tuple[tuple[int, ...], TokenTree]:
        """The nodes after the first ``num_nodes``: the path (token ids from the root) that all of them are below, and
        the tree there, including the older nodes between. Without draft_probs."""
        new = range(num_nodes, len(self))
        paths = [self.path(parent) for parent in {self.parents[node] for node in new} if parent < num_nodes]
        shared = list(itertools.takewhile(lambda nodes: len(set(nodes)) == 1, zip(*paths, strict=False)))
        above = [nodes[0] for nodes in shared]
        kept = sorted({*itertools.chain.from_iterable(path[len(above) :] for path in paths), *new})
        end = above[-1] if above else ROOT
        return self.path_ids(end), dataclasses.replace(self.part(kept, end), draft_probs=())

    def under(self, path: Sequence[int]) -> TokenTree:
        """This tree, moved below the chain of ``path``."""
        shift = len(path)
        chain = TokenTree.chain(path)
        return TokenTree(
            chain.token_ids + self.token_ids,
            chain.parents + tuple(shift + parent for parent in self.parents),
            draft_probs=(None,) * shift + self.draft_probs if self.draft_probs else (),
            confidence=(0,) * shift + self.confidence if self.confidence else (),
        )


EMPTY_TREE = TokenTree()


class GrowingTree:
    """A tree to which others are added. An addition takes time for its own nodes, not for those that are there."""

    def __init__(self, tree: TokenTree = EMPTY_TREE) -> None:
        self._tree: TokenTree | None = tree  # None: nodes were added since it was built
        self._token_ids, self._parents = list(tree.token_ids), list(tree.parents)
        self._probs: list[SparseDistribution | None] = list(tree.draft_probs or (None,) * len(tree))
        self._confidence = list(tree.confidence or (0,) * len(tree))
        self._with_probs = bool(tree.draft_probs)
        self._index_of = {edge: node for node, edge in enumerate(tree.edges)}

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def tree(self) -> TokenTree:
        if self._tree is None:
            probs = tuple(self._probs) if self._with_probs else ()
            confidence = tuple(self._confidence) if any(self._confidence) else ()
            self._tree = TokenTree(tuple(self._token_ids), tuple(self._parents), probs, confidence=confidence)
        return self._tree

    def add(self, other: TokenTree) -> int:
        """Append the nodes of ``other`` that are missing. Returns how many were."""
        size = len(self)
        self._with_probs |= bool(other.draft_probs)
        probs = other.draft_probs or itertools.repeat(None)
        confidence = other.confidence or itertools.repeat(0)
        here = [ROOT]  # the index of each node of ``other``, one to the right: a parent of -1 is the first
        for token_id, parent, prob, bucket in zip(other.token_ids, other.parents, probs, confidence, strict=False):
            edge = (here[parent + 1], token_id)
            node = self._index_of.setdefault(edge, len(self._token_ids))
            if node == len(self._token_ids):
                self._token_ids.append(token_id)
                self._parents.append(edge[0])
                self._probs.append(prob)
                self._confidence.append(bucket)
            else:
                self._confidence[node] = self._confidence[node] or bucket
            here.append(node)
        if len(other):
            self._tree = None
        return len(self) - size
