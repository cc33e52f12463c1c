"""How much of a text the KV cache shares, or will share, with other open sequences.

Knows the texts of the open sequences as they were opened, fed or not; does not know the cache. It counts as the cache
shares: full blocks with equal ids after equal text, under one salt, are held once. Sequences opened at the same moment
share, too: one feeds a block while the others wait for it (specdec.passes.prefill). The cache itself cannot tell this
in advance, because it knows only blocks that are full.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from specdec.core.sequence import SequenceSpec
from specdec.kvcache.prefix_index import TextBlock


class SharedTexts:
    """The texts of the open sequences, in blocks of ``block_size`` ids; 0: nothing is shared."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._num_blocks = 0
        self._roots: WeakValueDictionary[bytes, TextBlock] = WeakValueDictionary()

    @property
    def num_ids(self) -> int:
        """Ids in full blocks; equal blocks count once."""
        return self._num_blocks * self._size

    def in_full_blocks(self, spec: SequenceSpec) -> int:
        """How many ids of ``spec`` can be shared."""
        return len(spec.token_ids) // self._size * self._size if self._size else 0

    def missing(self, spec: SequenceSpec) -> int:
        """How many of the shareable ids are in no open sequence."""
        known = self._roots.get(spec.cache_salt)
        end, start = self.in_full_blocks(spec), 0
        while known is not None and start < end:
            known = known.find(tuple(spec.token_ids[start : start + self._size]))
            start += self._size if known is not None else 0
        return end - start

    def add(self, spec: SequenceSpec) -> TextBlock:
        """A sequence was opened. Returns its last full block, which ``remove`` takes."""
        last = self._roots.setdefault(spec.cache_salt, TextBlock())
        for start in range(0, self.in_full_blocks(spec), self._size or 1):
            ids = tuple(spec.token_ids[start : start + self._size])
            known = last.find(ids)
            if known is None:
                known = last.add(ids, block=-1)
                self._num_blocks += 1
            known.holders += 1
            last = known
        return last

    def remove(self, last: TextBlock) -> None:
        """The sequence was closed."""
        while last.parent is not None:
            last.holders -= 1
            if not last.holders:
                last.remove()
                self._num_blocks -= 1
            last = last.parent
