"""One sequence's rows in the blocks of the KV cache: taken, kept, moved and rolled back."""

from __future__ import annotations

import pytest

from specdec.kvcache.block_pool import BlockPool, Move, PoolFullError, SequenceCache
from tests.specdec.kvcache.cached import SIZE, feed, remembered


def test_rows_stand_at_the_positions_after_the_cached_ones():
    cache = SequenceCache(BlockPool(4, SIZE))
    slots = cache.take(6)
    cache.keep(range(6))
    slots += cache.take(3)
    assert slots == [cache.block_table[i // SIZE] * SIZE + i % SIZE for i in range(9)]
    assert len(cache.block_table) == 3
    assert len(cache) == 6


def test_rows_of_a_tree_move_to_the_places_of_those_before_them_that_were_not_kept():
    cache = SequenceCache(BlockPool(4, SIZE))
    cache.take(3)
    cache.keep(range(3))
    slots = cache.take(8)
    assert cache.keep([0, 1, 4, 6]) == [Move(slots[4], slots[2]), Move(slots[6], slots[3])]
    assert len(cache) == 7
    assert len(cache.block_table) == 2


@pytest.mark.parametrize("rows", [[], [0], [0, 1, 2], range(5)])
def test_rows_in_their_place_do_not_move(rows):
    pool = BlockPool(4, SIZE)
    cache = SequenceCache(pool)
    cache.take(5)
    assert cache.keep(rows) == []
    assert len(cache) == len(rows)
    assert pool.num_used == -(-len(rows) // SIZE) * SIZE


def test_a_row_that_was_not_fed_cannot_be_kept():
    cache = SequenceCache(BlockPool(4, SIZE))
    with pytest.raises(ValueError, match="row 0 of 0"):
        cache.keep([0])
    cache.take(3)
    with pytest.raises(ValueError, match="row 3 of 3 fed"):
        cache.keep([0, 3])
    cache.keep([0])
    with pytest.raises(ValueError, match="row 1 of 0"):
        cache.keep([0, 1])


def test_rows_of_a_lost_pass_may_be_taken_again():
    pool = BlockPool(4, SIZE)
    cache = SequenceCache(pool)
    lost = cache.take(9)
    assert cache.take(5) == lost[:5]
    cache.keep(range(5))
    assert pool.num_used == 2 * SIZE


def test_a_full_pool_says_so_and_takes_nothing():
    pool = BlockPool(4, SIZE)
    first, second = SequenceCache(pool), SequenceCache(pool)
    feed(first, list(range(9)))
    feed(second, [50])
    table = list(second.block_table)
    with pytest.raises(PoolFullError, match="1 KV blocks needed, 0 of 4 free"):
        second.take(SIZE)
    assert (pool.num_used, pool.num_free_blocks) == (4 * SIZE, 0)
    assert second.block_table == table
    assert len(second.take(SIZE - 1)) == SIZE - 1


def test_releasing_twice_gives_nothing_back_twice():
    pool = BlockPool(4, SIZE)
    cache = SequenceCache(pool)
    cache.take(7)
    cache.keep([0, 2])
    cache.take(9)  # a pass that is lost
    cache.release()
    cache.release()
    assert pool.num_used == 0
    assert sorted(SequenceCache(pool).take(16)) == list(range(16))


def test_rolling_back_in_its_own_block_takes_and_gives_nothing():
    pool = BlockPool(16, SIZE)
    cache = feed(SequenceCache(pool), list(range(7)))
    table = list(cache.block_table)
    cache.truncate(5)
    assert len(cache) == 5
    assert cache.block_table == table
    assert remembered(pool, list(range(7))) == 4  # what was cut is forgotten
    cache.truncate(9)
    assert len(cache) == 5


def test_a_full_block_that_only_its_holder_knows_is_cut_where_asked():
    pool = BlockPool(16, SIZE)
    cache = feed(SequenceCache(pool), list(range(14)))
    table = list(cache.block_table)
    cache.truncate(6)
    assert len(cache) == 6
    assert cache.block_table == table[:2]
    assert pool.num_used == 2 * SIZE
    assert remembered(pool, list(range(14))) == 4
    feed(cache, [0, 1, 2, 3, 4, 5, 77, 78, 79])
    assert remembered(pool, [0, 1, 2, 3, 4, 5, 77, 78, 79]) == 9
    assert remembered(pool, list(range(14))) == 6


def test_a_block_that_others_hold_is_not_cut_but_let_go_of():
    pool = BlockPool(16, SIZE)
    text = list(range(9))
    first = feed(SequenceCache(pool), text)
    second = SequenceCache(pool)
    second.attach(text)
    second.truncate(6)
    assert len(second) == 4
    assert second.block_table == first.block_table[:1]
    assert not {slot // SIZE for slot in second.take(5)} & set(first.block_table)
    second.truncate(4)
    first.truncate(6)  # now nobody else has it
    assert len(first) == 6


def test_a_block_whose_continuation_is_remembered_is_not_cut():
    pool = BlockPool(16, SIZE)
    feed(SequenceCache(pool), list(range(13))).release()
    cache = SequenceCache(pool)
    cache.attach(list(range(9)))
    cache.truncate(7)
    assert len(cache) == 4
    cache.release()
    assert remembered(pool, list(range(13))) == 13


def test_rolling_back_to_the_end_of_a_shared_block_keeps_it_shared():
    pool = BlockPool(16, SIZE)
    text = list(range(9))
    first = feed(SequenceCache(pool), text)
    second = SequenceCache(pool)
    second.attach([*text, 9])
    second.truncate(8)
    assert len(second) == 8
    assert second.block_table == first.block_table[:2]


def test_rolling_back_drops_the_rows_of_a_lost_pass():
    pool = BlockPool(16, SIZE)
    cache = feed(SequenceCache(pool), list(range(3)))
    cache.take(10)
    cache.truncate(3)
    assert len(cache) == 3
    assert pool.num_used == SIZE
