"""The KV cache of a text and of a tree below it: which rows are cached, and which are still to be fed.

The text's rows come first, then those of the nodes, each after its parent. When the text grows along the tree, the
subtree below its new end stays, and the rest is dropped. The model's candidates after a row are kept as long as the
row, so that no row is fed twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from draft_service.drafter import Candidates
from specdec.core.sequence import Draw
from specdec.core.tree import EMPTY_TREE, ROOT, Candidate, TokenTree
from specdec.kvcache.block_pool import Move, SequenceCache
from specdec.passes.rows import Segment

UNKNOWN = Candidates()


class TreeCache:
    """The cache of one sequence. Node indices are those of the tree given to the last ``follow``."""

    def __init__(self, text: SequenceCache) -> None:
        self.text = text
        self.tree = EMPTY_TREE  # the cached nodes: a node for each row after the text
        self._candidates: list[Candidates] = [UNKNOWN]  # after the text, and after each row
        self._rows: list[int | None] = []  # by node: its row after the text
        self._grown = self.tree, self._rows  # the two after the last segment, set by ``fed``: its pass may fail

    def follow(self, ids: Sequence[int], tree: TokenTree, wants_end: bool) -> list[Move]:
        """Move to the text ``ids``, which continues the cached text, and its ``tree``. Returns the row moves to make.
        ``wants_end``: the last row of the text is dropped, to be fed again, if the candidates after it are
        unknown."""
        length = len(self.text)
        path = self.tree.trace(ids[length : length + len(self.tree)])
        root = path[-1] if path else ROOT
        if length + len(path) < len(ids) or (wants_end and not self._candidates[root + 1].token_ids):
            moves = self.text.keep(path[: max(0, len(ids) - 1 - length)])
            if wants_end:
                self.text.truncate(len(ids) - 1)
            self.tree, self._candidates, self._rows = EMPTY_TREE, [UNKNOWN], [None] * len(tree)
            return moves
        below, old_rows = self.tree.below(root)
        kept = sorted(row for row in _rows(below, tree) if row is not None)
        moves = self.text.keep(path, [old_rows[row] for row in kept])
        self._candidates = [self._candidates[root + 1], *(self._candidates[old_rows[row] + 1] for row in kept)]
        self.tree = below.part(kept)
        self._rows = _rows(self.tree, tree)
        return moves

    def lacking(self, nodes: Iterable[int], tree: TokenTree) -> list[int]:
        """The nodes to feed so that these nodes of the tree are cached: those without a row, and their ancestors."""
        lacking: set[int] = set()
        for node in nodes:
            while node != ROOT and node not in lacking and self._rows[node] is None:
                lacking.add(node)
                node = tree.parents[node]
        return sorted(lacking)

    def segment(
        self,
        ids: Sequence[int],
        nodes: Sequence[int],
        tree: TokenTree,
        *,
        reads_end: bool,
        num_further: int = 0,
        draw: Draw | None = None,
    ) -> Segment:
        """The segment of a pass over ``ids``, which continue the text, and ``nodes``. ``reads_end``: the logits after
        the last id are wanted too. ``num_further``, ``draw``: see Segment. Raises PoolFullError."""
        num_context, num_ids, num_kept = len(self.text), len(ids), len(self.tree)
        self.text.take(num_ids + len(nodes) + num_further)
        rows, new = list(self._rows), []
        for row, node in enumerate(nodes, num_kept):
            parent = tree.parents[node]
            above = ROOT if parent == ROOT else rows[parent]
            assert above is not None, "a node comes after its parent"
            new.append(Candidate(above, tree.token_ids[node]))
            rows[node] = row
        grown = self.tree.extended(new)
        self._grown = grown, rows
        return Segment(
            token_ids=[*ids, *(tree.token_ids[node] for node in nodes)],
            parents=[*range(-1, num_ids - 1), *(num_ids + above for above in grown.parents)],
            num_context=num_context,
            block_table=self.text.block_table,
            logit_rows=[*range(num_ids - reads_end, num_ids), *range(num_ids + num_kept, num_ids + len(grown))],
            exact=False,
            num_further=num_further,
            draw=draw,
        )

    def fed(self, num_ids: int, further: Sequence[int] = ()) -> None:
        """Record that the last segment was fed: ``num_ids`` ids, its nodes, and below them a chain of ``further``."""
        num_kept = len(self.tree)
        tree, self._rows = self._grown
        last = len(tree) - 1
        self.tree = tree.extended(list(itertools.starmap(Candidate, enumerate(further, last))))
        self.text.keep(range(num_ids), range(num_ids, num_ids + len(self.tree)))
        self._candidates += [UNKNOWN] * (len(self.tree) - num_kept)

    def learn(self, candidates: Sequence[Candidates]) -> None:
        """Store the candidates after the last rows of the text and the tree."""
        self._candidates[len(self._candidates) - len(candidates) :] = candidates

    def candidates(self, node: int) -> Candidates:
        """The candidates after a node, or ROOT."""
        return next(self.candidates_down(node))

    def candidates_down(self, node: int) -> Iterator[Candidates]:
        """The candidates after a node, or ROOT, then after the first of them, and so on, while these are cached."""
        row = ROOT if node == ROOT else self._rows[node]
        if row is None:
            yield UNKNOWN
            return
        while row is not None:
            candidates = self._candidates[row + 1]
            yield candidates
            row = self.tree.child(row, candidates.token_ids[0]) if candidates.token_ids else None

    def drop_tree(self) -> None:
        """Release the rows of the nodes."""
        self.text.keep(())
        self.tree, self._rows = EMPTY_TREE, [None] * len(self._rows)
        del self._candidates[1:]

    def forget_candidates(self) -> None:
        """Drop all candidates and nodes. Rows of which candidates are needed are then fed again."""
        self.drop_tree()
        self._candidates = [UNKNOWN]


def _rows(cached: TokenTree, tree: TokenTree) -> list[int | None]:
    """The index in ``cached`` of each node of ``tree``; None: it is not there."""
    row_of = {edge: row for row, edge in enumerate(cached.edges)}
    rows: list[int | None] = []
    for parent, token in tree.edges:
        above = ROOT if parent == ROOT else rows[parent]
        rows.append(None if above is None else row_of.get((above, token)))
    return rows
