"""Which blocks go when room is needed, and which never do."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest

from specdec.kvcache.block_pool import BlockPool, PoolFullError, SequenceCache
from tests.specdec.kvcache.cached import SIZE, feed, remembered


def fill(pool: BlockPool) -> SequenceCache:
    """A sequence that takes one block, then gives it back unremembered."""
    cache = SequenceCache(pool)
    cache.take(SIZE)
    cache.keep(range(SIZE))
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


def test_what_was_found_lately_stays():
    pool = BlockPool(4, SIZE)
    first, second = [1] * 8, [2] * 8
    feed(SequenceCache(pool), first).release()
    feed(SequenceCache(pool), second).release()
    assert remembered(pool, first) == 8
    taker = SequenceCache(pool)
    taker.take(2 * SIZE)
    taker.keep(range(2 * SIZE))
    assert remembered(pool, first) == 8
    assert remembered(pool, second) == 0


def test_what_was_copied_from_lately_stays():
    pool = BlockPool(4, SIZE)
    feed(SequenceCache(pool), [1, 1]).release()
    feed(SequenceCache(pool), [2, 2]).release()
    cache = SequenceCache(pool)
    cache.attach([1, 1, 3])
    other = SequenceCache(pool)
    other.take(2 * SIZE)
    other.keep(range(2 * SIZE))
    cache.release()
    assert remembered(pool, [1, 1]) == 2
    assert remembered(pool, [2, 2]) == 0


def test_a_beginning_that_is_in_use_outlives_its_ends():
    pool = BlockPool(4, SIZE)
    start = [0] * SIZE
    for end in (1, 2, 3):
        feed(SequenceCache(pool), [*start, *[end] * SIZE]).release()
    taker = SequenceCache(pool)
    taker.take(3 * SIZE)
    taker.keep(range(3 * SIZE))
    assert remembered(pool, [*start, *[3] * SIZE]) == SIZE


def test_what_is_held_is_never_evicted():
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


def test_a_full_pool_attaches_what_needs_no_block():
    pool = BlockPool(3, SIZE)
    prompt = list(range(11))
    first = feed(SequenceCache(pool), prompt)
    second = SequenceCache(pool)
    assert second.attach(prompt) == []
    assert len(second) == 8
    assert second.block_table == first.block_table[:2]


def test_a_block_is_not_evicted_for_its_own_copy():
    pool = BlockPool(1, SIZE)
    feed(SequenceCache(pool), [1, 2, 3]).release()
    cache = SequenceCache(pool)
    assert cache.attach([1, 2, 3, 4]) == []
    assert len(cache) == 0
    pool = BlockPool(2, SIZE)
    feed(SequenceCache(pool), [9, 9, 9]).release()
    feed(SequenceCache(pool), [1, 2, 3]).release()
    cache = SequenceCache(pool)
    moves = cache.attach([1, 2, 3, 4])
    assert len(moves) == 3
    assert moves[0].source // SIZE != moves[0].target // SIZE


def test_what_is_known_already_takes_no_room_again():
    pool = BlockPool(3, SIZE)
    feed(SequenceCache(pool), [9, 9, 9, 9]).release()
    for text in ([1, 2, 3], [1, 2, 3], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]):
        feed(SequenceCache(pool), text).release()
    assert remembered(pool, [9, 9, 9, 9]) == remembered(pool, [1, 2, 3, 4]) == 4


def test_forgetting_leaves_what_is_held():
    pool = BlockPool(8, SIZE)
    feed(SequenceCache(pool), [1] * 9).release()
    holder = feed(SequenceCache(pool), [2] * 9)
    pool.forget()
    assert remembered(pool, [1] * 9) == 0
    assert remembered(pool, [2] * 9) == 9
    holder.release()
    pool.forget()
    assert sorted(SequenceCache(pool).take(8 * SIZE)) == list(range(8 * SIZE))


def test_salts_that_nobody_uses_leave_nothing():
    pool = BlockPool(4, SIZE)
    for tenant in range(100):
        feed(SequenceCache(pool, str(tenant).encode()), [1] * 6).release()
    gc.collect()
    assert len(pool._roots) <= pool.num_blocks


def test_a_prompt_of_many_beginnings_is_found_among_them():
    """Ids are compared as a whole, whatever order they came in."""
    pool = BlockPool(200, SIZE)
    texts = [[a, b, c, d, 0] for a, b, c, d in [(i % 3, i % 5, i % 7, i) for i in range(0, 90, 2)]]
    caches = [feed(SequenceCache(pool), text) for text in reversed(texts)]
    for text in texts:
        assert remembered(pool, text) == 5
        assert remembered(pool, [*text[:3], 1]) == 3
    assert all(one.block_table[0] != other.block_table[0] for one, other in pairwise(caches))
