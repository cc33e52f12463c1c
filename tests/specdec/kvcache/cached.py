"""Texts in a KV cache, and how much of one is found again."""

from __future__ import annotations

from specdec.kvcache.block_pool import BlockPool, SequenceCache

SIZE = 4
"""Block size of these tests."""


def feed(cache: SequenceCache, text: list[int]) -> SequenceCache:
    """Feed what ``text`` has beyond the cache, and remember it."""
    cache.keep(range(len(cache.take(len(text) - len(cache)))))
    cache.remember(text)
    return cache


def remembered(pool: BlockPool, text: list[int], salt: bytes = b"") -> int:
    """How many positions of ``text`` a sequence that begins with it would find. Asking counts as use."""
    probe = SequenceCache(pool, salt)
    probe.attach([*text, -1])
    num_cached = len(probe)
    probe.release()
    return num_cached
