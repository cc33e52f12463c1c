"""The keys and values of a text and of a tree below it: what is there, and what is still to be fed.

Knows tokens and slots; refuses to know models and chances. Behind the text are the rows of nodes, a node after its
parent. When the text goes on along the tree, what is below stays; the rest is dropped. What the model says after a row
is kept as long as the row, so that no row is fed twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from specdec.core.sequence import Draw
from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree
from specdec.kvcache.block_pool import Move, SequenceCache
from specdec.passes.rows import Segment


class Guesses(NamedTuple):
    """Children that a place may get, likeliest first (none: that is not known), and how sure the model is of the first
    of them (specdec.speculation.acceptance)."""

    token_ids: tuple[int, ...] = ()
    confidence: int = 0


NOT_KNOWN = Guesses()


class TreeCache:
    """Of one sequence. Nodes are those of the tree that was followed last."""

    def __init__(self, text: SequenceCache) -> None:
        self.text = text
        self.tree = EMPTY_TREE  # what is behind the text: a node for each row
        self._guesses: list[Guesses] = [NOT_KNOWN]  # after the text, and after each row
        self._rows: list[int | None] = []  # by node
        self._grown = self.tree, self._rows  # by the last segment: a pass that fails leaves the tree as it is

    def follow(self, ids: Sequence[int], tree: TokenTree, wants_end: bool) -> list[Move]:
        """The text is ``ids`` by now, of which all rows that are here remain: text only grows. ``tree`` is below it.
        ``wants_end``: for what comes after the text its end is fed again, if that is not known."""
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
        """What has to be fed so that these nodes of the followed tree are here."""
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
        """A pass over these ids, which continue the text, and these nodes; ``reads_end``: for what comes after the ids,
        too. So many further rows are welcome, of tokens that are drawn from ``draw`` on. Raises PoolFullError."""
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
        """The last segment was, which began with so many ids, and ``further`` tokens, one below the other."""
        num_kept = len(self.tree)
        tree, self._rows = self._grown
        last = len(tree) - 1
        self.tree = tree.extended([(token, last + place, None, 0) for place, token in enumerate(further)])
        self.text.keep(range(num_ids), range(num_ids, num_ids + len(self.tree)))
        self._guesses += [NOT_KNOWN] * (len(self.tree) - num_kept)

    def learn(self, guesses: Sequence[Guesses]) -> None:
        """What comes after the last rows of the text and the tree."""
        self._guesses[len(self._guesses) - len(guesses) :] = guesses

    def guesses(self, node: int) -> Guesses:
        """What comes after a node, or ROOT."""
        return next(self.guesses_down(node))

    def guesses_down(self, node: int) -> Iterator[Guesses]:
        """What comes after a node, or ROOT, then after the likeliest child of that, and so on, as far as it is here."""
        row = ROOT if node == ROOT else self._rows[node]
        if row is None:
            yield NOT_KNOWN
            return
        while row is not None:
            guesses = self._guesses[row + 1]
            yield guesses
            row = self.tree.child(row, guesses.token_ids[0]) if guesses.token_ids else None

    def drop_tree(self) -> None:
        """Its rows go back."""
        self.text.keep(())
        self.tree, self._rows = EMPTY_TREE, [None] * len(self._rows)
        del self._guesses[1:]

    def forget_guesses(self) -> None:
        """Whatever they are needed for is fed again."""
        self.drop_tree()
        self._guesses = [NOT_KNOWN]


def _rows(cached: TokenTree, tree: TokenTree) -> list[int | None]:
    """Where each node of ``tree`` is in ``cached``."""
    edges = {edge: row for row, edge in enumerate(zip(cached.parents, cached.token_ids, strict=True))}
    rows: list[int | None] = []
    for parent, token in zip(tree.parents, tree.token_ids, strict=True):
        above = ROOT if parent == ROOT else rows[parent]
        rows.append(None if above is None else edges.get((above, token)))
    return rows
