"""The result of a look-up, for the next sequence that looks the same text up: another sample of the same request.

Knows the tree of texts; does not know who holds its blocks.
"""

from __future__ import annotations

from typing import NamedTuple

from specdec.kvcache.prefix_index import TextBlock, num_equal


class Walk(NamedTuple):
    """The blocks of ``text`` (packed ids) below ``root``, and their numbers."""

    root: TextBlock
    text: bytes
    path: list[TextBlock]
    blocks: list[int]

    def beyond(self, root: TextBlock, path: list[TextBlock], text: bytes, width: int) -> int:
        """How many blocks of ``text`` below ``root`` are known; 0 if no more than ``path``. ``width``: in bytes."""
        start = len(path)
        if self.root is not root or len(self.path) <= start or (path and self.path[start - 1] is not path[-1]):
            return 0
        equal = num_equal(text[start * width :], self.text[start * width : len(self.path) * width], width)
        return start + equal // width if equal else 0
