"""Which block holds the keys and values of which text; refuses to know who uses a block and when it must go.

A tree: a node is one block's ids after the text of its parent. Ids are compared, never only their hashes, so two
texts are one only if they are equal. A node's children are sorted by their ids, and in that order the child with
the longest common beginning stands beside the place of the text that is looked up, however many children there are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import attrgetter

_IDS = attrgetter("ids")


class TextBlock:
    """``block`` holds ``ids`` after the text of ``parent``; fewer ids than a block has slots: a partial block.

    ``holders`` counts the sequences that have it in their block table. A full block's children, and its text, stay
    what they are as long as it is in the tree. The root, one for every salt, has no ids and no block.
    """

    __slots__ = ("__weakref__", "_children", "block", "holders", "ids", "parent")

    def __init__(self, parent: TextBlock | None = None, ids: tuple[int, ...] = (), block: int = -1) -> None:
        self.parent = parent
        self.ids = ids
        self.block = block
        self.holders = 0
        self._children: list[TextBlock] = []

    @property
    def is_leaf(self) -> bool:
        return not self._children

    def find(self, ids: tuple[int, ...]) -> TextBlock | None:
        """The child with exactly these ids."""
        place = bisect_left(self._children, ids, key=_IDS)
        if place < len(self._children) and self._children[place].ids == ids:
            return self._children[place]
        return None

    def closest(self, ids: tuple[int, ...]) -> tuple[TextBlock | None, int]:
        """The child whose ids begin most like ``ids``, and how many they have in common (no child if none)."""
        place = bisect_left(self._children, ids, key=_IDS)
        best, longest = None, 0
        for child in self._children[max(0, place - 1) : place + 1]:
            common = _num_common(child.ids, ids)
            if common > longest:
                best, longest = child, common
        return best, longest

    def add(self, ids: tuple[int, ...], block: int) -> TextBlock:
        """A new child. Equal ones may stand side by side if they are partial."""
        child = TextBlock(self, ids, block)
        self._children.insert(bisect_right(self._children, ids, key=_IDS), child)
        return child

    def remove(self) -> None:
        """Take this leaf out of the tree."""
        siblings = self._siblings()
        del siblings[siblings.index(self, bisect_left(siblings, self.ids, key=_IDS))]

    def covering(self) -> TextBlock | None:
        """A sibling that holds all of this block's ids, and perhaps more."""
        siblings = self._siblings()
        place = bisect_left(siblings, self.ids, key=_IDS)
        if siblings[place] is not self:
            return siblings[place]
        if place + 1 < len(siblings) and siblings[place + 1].ids[: len(self.ids)] == self.ids:
            return siblings[place + 1]
        return None

    def covered(self) -> TextBlock | None:
        """The sibling before this one if it holds nothing that this one lacks."""
        siblings = self._siblings()
        place = siblings.index(self, bisect_left(siblings, self.ids, key=_IDS))
        if place > 0 and self.ids[: len(siblings[place - 1].ids)] == siblings[place - 1].ids:
            return siblings[place - 1]
        return None

    def _siblings(self) -> list[TextBlock]:
        if self.parent is None:
            raise ValueError("a root has no siblings")
        return self.parent._children


def _num_common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return min(len(left), len(right))
