"""Blocks that are found again: what is shared, what is copied, and what never changes under anybody."""

from __future__ import annotations

import pytest

from specdec.kvcache.block_pool import BlockPool, Move, SequenceCache
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


def test_different_salts_never_share():
    pool = BlockPool(16, SIZE)
    prompt = list(range(11))
    feed(SequenceCache(pool, b"one"), prompt)
    stranger = SequenceCache(pool, b"two")
    assert stranger.attach(prompt) == []
    assert len(stranger) == 0
    assert stranger.awaited(prompt) != SequenceCache(pool, b"one").awaited(prompt)
    feed(stranger, prompt)
    assert pool.num_used == 6 * SIZE
    assert remembered(pool, prompt, b"two") == 11
    assert remembered(pool, prompt) == 0


@pytest.mark.parametrize("length", range(1, 13))
def test_attaching_leaves_at_least_one_id_to_feed(length):
    pool = BlockPool(16, SIZE)
    prompt = list(range(12))
    feed(SequenceCache(pool), prompt).release()
    cache = SequenceCache(pool)
    cache.attach(prompt[:length])
    assert len(cache) == length - 1
    assert len(cache.block_table) == -(-(length - 1) // SIZE)


def test_nothing_comes_of_nothing():
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
    cache = SequenceCache(pool)
    assert len(cache.attach([0, 0, 0, 0, 1, 2, 3, 4, 5])) == 3
    assert len(cache) == 7
    cache = SequenceCache(pool)
    assert len(cache.attach([0, 0, 0, 0, 1, 2, 8, 7, 5])) == 3
    cache = SequenceCache(pool)
    assert len(cache.attach([0, 0, 0, 0, 5, 2, 8, 7, 5])) == 0
    assert len(cache) == 4


def test_what_a_block_holds_depends_on_all_text_before_it():
    pool = BlockPool(16, SIZE)
    feed(SequenceCache(pool), [1, 1, 1, 1, 7, 7, 7, 7, 7])
    cache = SequenceCache(pool)
    cache.attach([2, 2, 2, 2, 7, 7, 7, 7, 7])
    assert len(cache) == 0
    cache.attach([7, 7, 7, 7, 7])
    assert len(cache) == 0


def test_a_finished_sequence_is_found_by_the_next_turn():
    pool = BlockPool(16, SIZE)
    turn = list(range(10))
    feed(SequenceCache(pool), turn).release()
    assert pool.num_used == 0
    assert remembered(pool, [*turn, 50, 51, 52]) == 10


def test_what_two_computed_at_once_is_kept_once():
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


def test_who_waited_finds_what_was_filled_meanwhile():
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


def test_a_copy_goes_on_where_it_ended():
    pool = BlockPool(16, SIZE)
    first, second = SequenceCache(pool), SequenceCache(pool)
    feed(first, [1, 2])
    feed(second, [1])
    assert second.attach([1, 2, 3]) == [Move(first.block_table[0] * SIZE + 1, second.block_table[0] * SIZE + 1)]
    assert len(second) == 2
    assert second.attach([1, 2, 3]) == []


def test_a_cache_that_is_not_remembered_attaches_nothing():
    pool = BlockPool(16, SIZE)
    feed(SequenceCache(pool), list(range(20)))
    cache = SequenceCache(pool)
    cache.take(5)
    cache.keep(range(5))
    assert cache.attach(list(range(20))) == []
    assert len(cache) == 5
    assert cache.awaited(list(range(20))) is None
    cache.remember(list(range(5)))
    cache.attach(list(range(20)))
    assert len(cache) == 19


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


def test_only_what_is_given_is_remembered():
    pool = BlockPool(16, SIZE)
    cache = SequenceCache(pool)
    cache.take(12)
    cache.keep(range(12))
    cache.remember(list(range(6)))
    assert remembered(pool, list(range(12))) == 6
    cache.remember(list(range(5)))
    assert remembered(pool, list(range(12))) == 6
    cache.remember(list(range(99)))
    assert remembered(pool, list(range(99))) == 12


def test_two_are_awaiting_the_same_block_if_they_have_the_same_text_up_to_its_end():
    pool = BlockPool(32, SIZE)
    prompt = list(range(20))
    first, second = SequenceCache(pool), SequenceCache(pool)
    assert first.awaited(prompt) == second.awaited(prompt[: SIZE + 1]) is not None
    assert first.awaited(prompt) != second.awaited([9, *prompt[1:]])
    feed(first, prompt[:9])
    assert first.awaited(prompt) != second.awaited(prompt)
    second.attach(prompt)
    assert first.awaited(prompt) == second.awaited(prompt)
    assert first.awaited(prompt) != second.awaited([*prompt[:9], 50, *prompt])
    assert {first.awaited(prompt): 1}[second.awaited(prompt)] == 1


def test_nothing_is_awaited_that_could_not_be_shared():
    cache = SequenceCache(BlockPool(32, SIZE))
    assert cache.awaited([]) is None
    assert cache.awaited(list(range(SIZE))) is None  # one id has to be fed, so the block cannot be attached
    assert cache.awaited(list(range(SIZE + 1))) is not None
    feed(cache, list(range(6)))
    assert cache.awaited(list(range(2 * SIZE))) is None
    assert cache.awaited(list(range(2 * SIZE + 1))) is not None
