"""The KV cache of a text and of a tree below it: which rows are cached, and which are still to be fed.

Knows tokens and slots; does not know models and acceptance rates. The text's rows come first, then those of the nodes,
each after its parent. When the text grows along the tree, the subtree below its new end stays, and the rest is dropped.
The model's guesses after a row are kept as long as the row, so that no row is fed twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from specdec.core.sequence import Draw
from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree
from specdec.kvcache.block_pool import Move, SequenceCache
from specdec.passes.rows import Segment


class Guesses(NamedTuple):
    """The children that a node may get, likeliest first (empty: not known), and the confidence bucket of the first of
    them (specdec.speculation.acceptance)."""

    token_ids: tuple[int, ...] = ()
    confidence: int = 0


NOT_KNOWN = Guesses()


class TreeCache:
    """The cache of one sequence. Node indices are those of the tree given to the last ``follow``."""

    def __init__(self, text: SequenceCache) -> None:
        self.text = text
        self.tree = EMPTY_TREE  # the cached nodes: a node for each row after the text
        self._guesses: list[Guesses] = [NOT_KNOWN]  # after the text, and after each row
        self._rows: list[int | None] = []  # by node: its row after the text
        self._grown = self.tree, self._rows  # the two after the last segment, set by ``fed``: its pass may fail

    def follow(self, ids: Sequence[int], tree: TokenTree, wants_end: bool) -> list[Move]:
        """Move to the text ``ids``, which continues the cached text, and its ``tree``. Returns the row moves to make.
        ``wants_end``: the last row of the text is dropped, to be fed again, if the guesses after it are not known."""
        length = len(self.text)
        path = self.tree.trace(ids[length : length + len(self.tree)])
        root = path[-1] if path else ROOT
        if length + len(path) < len(ids) or (wants_end and not self._guesses[root + 1].token_ids):
            moves = self.text.keep(path[: max(0, len(ids) - 1 - length)])
            if wants_end:
                self.text.truncate(len(ids) - 1)
            self.tree, self._guesses, self._rows = EMPTY_TREE, [NOT_KNOWN], [None] * len(tree)
            return moves
        below, places = self.tree.below(root)
        kept = sorted(row for row in _rows(below, tree) if row is not None)
        moves = self.text.keep(path, [places[row] for row in kept])
        self._guesses = [self._guesses[root + 1], *(self._guesses[places[row] + 1] for row in kept)]
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
        reads_end: bool,
        nodes: Sequence[int],
        tree: TokenTree,
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
            new.append((tree.token_ids[node], above, None, 0))
            rows[node] = row
        grown = self.tree.extended(new)
        self._grown = grown, rows
        return Segment(
            [*ids, *(tree.token_ids[node] for node in nodes)],
            [*range(-1, num_ids - 1), *(num_ids + above for above in grown.parents)],
            num_context,
            self.text.block_table,
            [*range(num_ids - reads_end, num_ids), *range(num_ids + num_kept, num_ids + len(grown))],
            exact=False,
            num_further=num_further,
            draw=draw,
        )

    def fed(self, num_ids: int, further: Sequence[int] = ()) -> None:
        """Record that the last segment was fed: ``num_ids`` ids, its nodes, and below them a chain of ``further``."""
        num_kept = len(self.tree)
        tree, self._rows = self._grown
        last = len(tree) - 1
        self.tree = tree.extended([(token, last + place, None, 0) for place, token in enumerate(further)])
        self.text.keep(range(num_ids), range(num_ids, num_ids + len(self.tree)))
        self._guesses += [NOT_KNOWN] * (len(self.tree) - num_kept)

    def learn(self, guesses: Sequence[Guesses]) -> None:
        """Store the guesses after the last rows of the text and the tree."""
        self._guesses[len(self._guesses) - len(guesses) :] = guesses

    def guesses(self, node: int) -> Guesses:
        """The guesses after a node, or ROOT."""
        return next(self.guesses_down(node))

    def guesses_down(self, node: int) -> Iterator[Guesses]:
        """The guesses after a node, or ROOT, then after its likeliest child, and so on, as far as these are cached."""
        row = ROOT if node == ROOT else self._rows[node]
        if row is None:
            yield NOT_KNOWN
            return
        while row is not None:
            guesses = self._guesses[row + 1]
            yield guesses
            row = self.tree.child(row, guesses.token_ids[0]) if guesses.token_ids else None

    def drop_tree(self) -> None:
        """Release the rows of the nodes."""
        self.text.keep(())
        self.tree, self._rows = EMPTY_TREE, [None] * len(self._rows)
        del self._guesses[1:]

    def forget_guesses(self) -> None:
        """Drop all guesses and nodes. Rows of which guesses are needed are then fed again."""
        self.drop_tree()
        self._guesses = [NOT_KNOWN]


def _rows(cached: TokenTree, tree: TokenTree) -> list[int | None]:
    """The index in ``cached`` of each node of ``tree``; None: it is not there."""
    edges = {edge: row for row, edge in enumerate(zip(cached.parents, cached.token_ids, strict=True))}
    rows: list[int | None] = []
    for parent, token in zip(tree.parents, tree.token_ids, strict=True):
        above = ROOT if parent == ROOT else rows[parent]
        rows.append(None if above is None else edges.get((above, token)))
    return rows
