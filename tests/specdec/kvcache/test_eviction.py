"""Which blocks go when room is needed, and which never do."""

from __future__ import annotations

import gc
import weakref

import pytest

from specdec.kvcache.block_pool import BlockPool, PoolFullError, SequenceCache
from tests.specdec.kvcache.cached import SIZE, feed, remembered


def fill(pool: BlockPool, num_blocks: int = 1) -> SequenceCache:
    """A sequence that holds so many blocks, not remembered."""
    cache = SequenceCache(pool)
    cache.take(num_blocks * SIZE)
    cache.keep(range(num_blocks * SIZE))
    return cache


def test_the_least_recently_used_goes_first_and_a_text_loses_its_end_first():
    pool = BlockPool(6, SIZE)
    old, new = list(range(12)), list(range(100, 112))
    feed(SequenceCache(pool), old).release()
    feed(SequenceCache(pool), new).release()
    assert pool.num_used == 0
    takers = [fill(pool)]
    for left in (8, 4, 0):
        # ``old`` was found last by the probe of the round before, so ask for it first, then for ``new``.
        assert remembered(pool, old) == left
        assert remembered(pool, new) == 12
        takers.append(fill(pool))
    assert remembered(pool, new) == 8
    for taker in takers:
        taker.release()
    pool.forget()
    assert pool.num_free_blocks == 6


def test_a_block_that_was_copied_from_lately_stays():
    pool = BlockPool(4, SIZE)
    feed(SequenceCache(pool), [1, 1]).release()
    feed(SequenceCache(pool), [2, 2]).release()
    cache = SequenceCache(pool)
    cache.attach([1, 1, 3])
    fill(pool, 2)
    cache.release()
    assert remembered(pool, [1, 1]) == 2
    assert remembered(pool, [2, 2]) == 0


def test_a_beginning_that_is_in_use_outlives_its_ends():
    pool = BlockPool(4, SIZE)
    start = [0] * SIZE
    for end in (1, 2, 3):
        feed(SequenceCache(pool), [*start, *[end] * SIZE]).release()
    fill(pool, 3)
    assert remembered(pool, [*start, *[3] * SIZE]) == SIZE


def test_a_held_block_is_never_evicted():
    pool = BlockPool(4, SIZE)
    holder = feed(SequenceCache(pool), [1] * 8)
    feed(SequenceCache(pool), [2] * 8).release()
    taker = SequenceCache(pool)
    with pytest.raises(PoolFullError, match="3 KV blocks needed, 2 of 4 free"):
        taker.take(3 * SIZE)
    assert remembered(pool, [2] * 8) == 8  # and a refusal evicts nothing
    taker.take(2 * SIZE)
    assert not set(taker.block_table) & set(holder.block_table)
    assert remembered(pool, [1] * 8) == 8


def test_a_full_pool_attaches_what_needs_no_block_and_evicts_none_for_its_own_copy():
    pool = BlockPool(3, SIZE)
    first, second = feed(SequenceCache(pool), prompt := list(range(11))), SequenceCache(pool)
    assert second.attach(prompt) == []
    assert (len(second), second.block_table) == (8, first.block_table[:2])
    for texts, num_copied in (([[1, 2, 3]], 0), ([[9, 9, 9], [1, 2, 3]], 3)):
        pool = BlockPool(len(texts), SIZE)
        for text in texts:
            feed(SequenceCache(pool), text).release()
        cache = SequenceCache(pool)
        moves = cache.attach([1, 2, 3, 4])
        assert len(moves) == len(cache) == num_copied
        assert all(move.source // SIZE != move.target // SIZE for move in moves)


def test_a_text_that_is_known_takes_no_room_again():
    pool = BlockPool(3, SIZE)
    feed(SequenceCache(pool), [9, 9, 9, 9]).release()
    for text in ([1, 2, 3], [1, 2, 3], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]):
        feed(SequenceCache(pool), text).release()
    assert remembered(pool, [9, 9, 9, 9]) == remembered(pool, [1, 2, 3, 4]) == 4


def test_forgetting_leaves_held_blocks():
    pool = BlockPool(8, SIZE)
    feed(SequenceCache(pool), [1] * 9).release()
    holder = feed(SequenceCache(pool), [2] * 9)
    pool.forget()
    assert remembered(pool, [1] * 9) == 0
    assert remembered(pool, [2] * 9) == 9
    holder.release()
    pool.forget()
    assert sorted(SequenceCache(pool).take(8 * SIZE)) == list(range(8 * SIZE))


def test_salts_that_are_no_longer_used_leave_nothing():
    pool = BlockPool(4, SIZE)
    roots = []
    for tenant in range(100):
        salt = str(tenant).encode()
        feed(cache := SequenceCache(pool, salt), [1] * 6).release()
        roots.append(weakref.ref(pool.root(salt)))
    del cache
    gc.collect()
    assert sum(root() is not None for root in roots) <= pool.num_blocks
