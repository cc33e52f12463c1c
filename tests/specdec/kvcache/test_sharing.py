"""Blocks that are found again: what is shared and what is copied."""

from __future__ import annotations

from specdec.kvcache.block_pool import BlockPool, SequenceCache
from tests.specdec.kvcache.cached import SIZE, feed, remembered


def test_equal_prompts_share_their_full_blocks():
    pool = BlockPool(16, SIZE)
    prompt = list(range(11))
    first = feed(SequenceCache(pool), prompt)
    second = SequenceCache(pool)
    moves = second.attach(prompt)
    assert second.block_table[:2] == first.block_table[:2]
    # Of the last block, which is not full, it has a copy without the id that is to be fed.
    assert [move.source for move in moves] == [first.block_table[2] * SIZE + i for i in range(2)]
    assert [move.target for move in moves] == [second.block_table[2] * SIZE + i for i in range(2)]
    assert second.block_table[2] != first.block_table[2]
    assert len(second) == 10
    assert pool.num_used == 4 * SIZE


def test_attaching_to_a_finished_text_leaves_one_id_to_feed():
    pool = BlockPool(16, SIZE)
    prompt = list(range(12))
    feed(SequenceCache(pool), prompt).release()
    assert pool.num_used == 0
    for length in range(1, 13):
        cache = SequenceCache(pool)
        cache.attach(prompt[:length])
        assert len(cache) == length - 1
        assert len(cache.block_table) == -(-(length - 1) // SIZE)
        cache.release()
    assert remembered(pool, [*prompt, 50, 51, 52]) == 12


def test_an_empty_cache_attaches_and_remembers_nothing():
    pool = BlockPool(4, SIZE)
    cache = SequenceCache(pool)
    assert cache.attach([]) == cache.attach([1]) == cache.attach([1, 2, 3, 4, 5, 6]) == []
    cache.remember([])
    cache.remember([1, 2])
    cache.truncate(0)
    assert pool.num_used == len(cache) == 0


def test_the_block_that_agrees_longest_is_copied_full_or_not():
    pool = BlockPool(32, SIZE)
    for last in ([9, 9, 9], [1, 2, 8, 8], [1, 2, 3], [1, 7], [2, 2, 3, 4]):
        feed(SequenceCache(pool), [0, 0, 0, 0, *last]).release()
    for end, num_copied in (([1, 2, 3, 4, 5], 3), ([1, 2, 8, 7, 5], 3), ([5, 2, 8, 7, 5], 0)):
        cache = SequenceCache(pool)
        assert len(cache.attach([0, 0, 0, 0, *end])) == num_copied
        assert len(cache) == 4 + num_copied


def test_a_text_that_two_sequences_computed_at_once_is_kept_once():
    pool = BlockPool(16, SIZE)
    text = list(range(11))
    first, second = SequenceCache(pool), SequenceCache(pool)
    for cache in (first, second):
        cache.take(11)
        cache.keep(range(11))
    assert pool.num_used == 6 * SIZE
    first.remember(text)
    second.remember(text)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert pool.num_used == 4 * SIZE


def test_a_waiting_sequence_finds_what_was_filled_meanwhile():
    pool = BlockPool(16, SIZE)
    prompt = list(range(30))
    first, second = SequenceCache(pool), SequenceCache(pool)
    feed(first, prompt[:10])
    second.attach(prompt)
    assert len(second) == 10  # eight shared, two copied
    feed(first, prompt[:18])
    moves = second.attach(prompt)
    assert second.block_table[:4] == first.block_table[:4]
    assert len(second) == 18
    assert [move.source // SIZE for move in moves] == [first.block_table[4]] * 2
    assert pool.num_used == 6 * SIZE  # its copy of the third block went back


def test_attaching_drops_the_rows_of_a_lost_pass():
    pool = BlockPool(16, SIZE)
    text = list(range(10))
    first = feed(SequenceCache(pool), text)
    second = feed(SequenceCache(pool), text[:2])
    second.take(9)
    second.attach([*text, 10])
    assert second.block_table[:2] == first.block_table[:2]
    assert len(second.block_table) == 3
    assert len(second) == 10


def test_exactly_the_longest_text_that_was_given_is_remembered():
    pool = BlockPool(16, SIZE)
    cache = SequenceCache(pool)
    cache.take(12)
    cache.keep(range(12))
    for length, num_attached in ((6, 6), (5, 6), (99, 12)):
        cache.remember(list(range(length)))
        assert remembered(pool, list(range(99))) == num_attached
