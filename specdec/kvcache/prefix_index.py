"""A tree from texts to the blocks with their keys and values.

A node is one block's ids after the text of its parent. Ids are compared themselves, not only their hashes, so only
equal texts share a block. They are packed (``packed``), because bytes take a tenth of the memory of a tuple and are
compared in one call. A node's children are sorted by their ids. In that order the child with the longest common prefix
is next to the insertion point of the text, so a look-up is a binary search.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

ID_BYTES = array("I").itemsize

_IDS = attrgetter("ids")


def packed(ids: Sequence[int]) -> bytes:
    """Token ids, ID_BYTES each. Of an array this is a copy; of a list it takes 20 ns per id."""
    return array("I", ids).tobytes()


def num_equal(one: bytes, other: bytes, width: int) -> int:
    """The number of equal bytes at the beginning of both, a multiple of ``width``."""
    low, high = 0, min(len(one), len(other)) // width
    if one[: high * width] == other[: high * width]:
        return high * width
    while low < high:  # equal up to ``low``
        middle = (low + high + 1) // 2
        if one[low * width : middle * width] == other[low * width : middle * width]:
            low = middle
        else:
            high = middle - 1
    return low * width


class TextBlock:
    """A remembered block: ``block`` holds ``ids`` after the text of ``parent``. A partial one has fewer ids than slots.

    ``holders`` counts the sequences that end with it, and the children that have holders themselves. So a sequence that
    joins another one on its path counts at one block, not at thousands. The text of a block does not change while it is
    in the tree. The root, one for every salt, has no ids, no block and no holders.
    """

    __slots__ = ("__weakref__", "_children", "block", "holders", "ids", "parent")

    def __init__(self, parent: TextBlock | None = None, ids: bytes = b"", block: int = -1) -> None:
        self.parent = parent
        self.ids = ids
        self.block = block
        self.holders = 0
        self._children: list[TextBlock] = []

    @property
    def is_leaf(self) -> bool:
        return not self._children

    def find(self, ids: bytes) -> TextBlock | None:
        """The child with exactly these ids; None if there is none."""
        index = bisect_left(self._children, ids, key=_IDS)
        if index < len(self._children) and self._children[index].ids == ids:
            return self._children[index]
        return None

    def descend(self, text: bytes, width: int, max_blocks: int) -> list[TextBlock]:
        """Up to ``max_blocks`` remembered blocks of ``text``, of ``width`` bytes each, one below the other."""
        path: list[TextBlock] = []
        last = self
        for start in range(0, min(len(text) // width, max_blocks) * width, width):
            known = last.find(text[start : start + width])
            if known is None:
                break
            path.append(known)
            last = known
        return path

    def closest(self, ids: bytes) -> tuple[TextBlock | None, int]:
        """The child with the longest common prefix with ``ids``, and the prefix's bytes; (None, 0) without any."""
        index = bisect_left(self._children, ids, key=_IDS)
        best, longest = None, 0
        for child in self._children[max(0, index - 1) : index + 1]:
            common = num_equal(child.ids, ids, ID_BYTES)
            if common > longest:
                best, longest = child, common
        return best, longest

    def add(self, ids: bytes, block: int) -> TextBlock:
        """Add a child. Partial children may have equal ids."""
        child = TextBlock(self, ids, block)
        self._children.insert(bisect_right(self._children, ids, key=_IDS), child)
        return child

    def remove(self) -> None:
        """Take this leaf out of the tree."""
        siblings = self._siblings()
        del siblings[siblings.index(self, bisect_left(siblings, self.ids, key=_IDS))]

    def covering(self) -> TextBlock | None:
        """A sibling with ids that begin with all of this block's ids; None if there is none."""
        siblings = self._siblings()
        index = bisect_left(siblings, self.ids, key=_IDS)
        if siblings[index] is not self:
            return siblings[index]
        if index + 1 < len(siblings) and siblings[index + 1].ids[: len(self.ids)] == self.ids:
            return siblings[index + 1]
        return None

    def covered(self) -> TextBlock | None:
        """The sibling before this one, if this block's ids begin with all of its ids; else None."""
        siblings = self._siblings()
        index = siblings.index(self, bisect_left(siblings, self.ids, key=_IDS))
        if index > 0 and self.ids[: len(siblings[index - 1].ids)] == siblings[index - 1].ids:
            return siblings[index - 1]
        return None

    def _siblings(self) -> list[TextBlock]:
        if self.parent is None:
            raise ValueError("a root has no siblings")
        return self.parent._children


class Walk(NamedTuple):
    """A look-up, for the next sequence that looks the same text up, another sample of the same request: the blocks of
    ``text`` (packed ids) below ``root``, and their numbers."""

    root: TextBlock
    text: bytes
    path: list[TextBlock]
    blocks: list[int]

    def beyond(self, root: TextBlock, path: list[TextBlock], text: bytes, *, width: int) -> int:
        """How many blocks of ``text`` below ``root`` are known; 0 if no more than ``path``. ``width``: in bytes."""
        start = len(path)
        if self.root is not root or len(self.path) <= start or (path and self.path[start - 1] is not path[-1]):
            return 0
        equal = num_equal(text[start * width :], self.text[start * width : len(self.path) * width], width)
        return start + equal // width if equal else 0
