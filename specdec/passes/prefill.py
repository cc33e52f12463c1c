"""Chunked prefill: the number of prompt rows of each sequence in a pass.

Long prompts are fed in chunks that share a pass fairly, so that a sequence does not wait for the whole prompt of
another one. A sequence waits for a block that another sequence of the pass computes anyway.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from specdec.kvcache.block_pool import SequenceCache

ROWS_PER_PASS, MIN_ROWS = 512, 16
"""The largest and the smallest chunk: prompt rows of all sequences in one pass."""

_CHUNK_S = 1.0
"""All sequences wait for a chunk, and a pass that takes much longer looks like one that hangs."""


class Chunk:
    """The chunk limit, ``rows``: as many as one pass computes in a second at the measured speed. What rows are computed
    with does not change them, so neither does the limit."""

    def __init__(self, rows: int = ROWS_PER_PASS) -> None:
        self.rows = rows

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn from a pass, unless it has fewer rows than the limit: those take longer than their share."""
        if num_rows >= self.rows:
            rows = int(num_rows * _CHUNK_S / max(seconds, 1e-9)) // MIN_ROWS * MIN_ROWS
            if seconds < _CHUNK_S:  # a part of the time does not depend on rows
                rows = max(rows, num_rows + MIN_ROWS)
            self.rows = max(MIN_ROWS, min(rows // MIN_ROWS * MIN_ROWS, ROWS_PER_PASS))


def rows_to_feed(texts: Sequence[tuple[SequenceCache, Sequence[int]]], limit: int = ROWS_PER_PASS) -> list[int]:
    """Per sequence, the number of ids that this pass feeds after the cached ones: about ``limit`` together.

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
    share = fair_share(feeding, limit)
    return [0 if waiting else min(count, share) for count, waiting in zip(missing, waits, strict=True)]


def fair_share(wanted: Sequence[int], total: int) -> int:
    """The limit per item with which all items take about ``total``. Items below the limit leave more to the others."""
    left = total
    for position, count in enumerate(sorted(wanted)):
        share = max(1, left // (len(wanted) - position))
        if count > share:
            return share
        left -= count
    return total
