"""How much of each text goes into a pass; nothing of what a pass computes.

Long prompts are fed in chunks that share a pass fairly, so that nobody waits for somebody else's prompt. What another
sequence of the pass computes anyway is waited for.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from specdec.kvcache.block_pool import SequenceCache

ROWS_PER_PASS = 512
"""Of prompts, over all sequences of a pass."""


def rows_to_feed(texts: Sequence[tuple[SequenceCache, Sequence[int]]]) -> list[int]:
    """Per sequence, how many ids of its text are fed after its cached ones in this pass.

    All that is missing, or a chunk of it; 0 where the next block is what an earlier sequence of this pass fills.
    """
    missing = [len(ids) - len(cache) for cache, ids in texts]
    being_filled: set[Hashable] = set()
    waits = []
    for (cache, ids), count in zip(texts, missing, strict=True):
        awaited = cache.awaited(ids) if count > 1 else None
        waits.append(awaited in being_filled)
        if awaited is not None:
            being_filled.add(awaited)
    # Who waits takes no rows, and so leaves them to the others.
    feeding = [count for count, waiting in zip(missing, waits, strict=True) if count > 1 and not waiting]
    most = fair_share(feeding, ROWS_PER_PASS)
    return [0 if waiting else min(count, most) for count, waiting in zip(missing, waits, strict=True)]


def fair_share(wanted: Sequence[int], total: int) -> int:
    """The most that each may take so that all take about ``total``: who wants less leaves it to the others."""
    left = total
    for position, count in enumerate(sorted(wanted)):
        share = max(1, left // (len(wanted) - position))
        if count > share:
            return share
        left -= count
    return total
