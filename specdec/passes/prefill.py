"""Chunked prefill: the number of prompt rows of each sequence in a pass. Does not know what a pass computes.

Long prompts are fed in chunks that share a pass fairly, so that a sequence does not wait for the whole prompt of
another one. A sequence waits for a block that another sequence of the pass computes anyway.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from specdec.kvcache.block_pool import SequenceCache

ROWS_PER_PASS = 512
"""Chunk limit: prompt rows of all sequences in one pass."""


def rows_to_feed(texts: Sequence[tuple[SequenceCache, Sequence[int]]]) -> list[int]:
    """Per sequence, the number of ids that this pass feeds after the cached ones.

    All missing ids or a chunk of them; 0 if an earlier sequence of this pass fills the same next block.
    """
    missing = [len(ids) - len(cache) for cache, ids in texts]
    being_filled: set[Hashable] = set()
    waits = []
    for (cache, ids), count in zip(texts, missing, strict=True):
        awaited = cache.awaited(ids) if count > 1 else None
        waits.append(awaited in being_filled)
        if awaited is not None:
            being_filled.add(awaited)
    # A waiting sequence takes no rows and leaves its share to the others.
    feeding = [count for count, waiting in zip(missing, waits, strict=True) if count > 1 and not waiting]
    most = fair_share(feeding, ROWS_PER_PASS)
    return [0 if waiting else min(count, most) for count, waiting in zip(missing, waits, strict=True)]


def fair_share(wanted: Sequence[int], total: int) -> int:
    """The limit per item with which all items take about ``total``. Items below the limit leave more to the others."""
    left = total
    for position, count in enumerate(sorted(wanted)):
        share = max(1, left // (len(wanted) - position))
        if count > share:
            return share
        left -= count
    return total
