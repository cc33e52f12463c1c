"""One sequence's rows in the blocks of the KV cache: kept, moved, rolled back. test_stateful.py has the invariants."""

from __future__ import annotations

import pytest

from specdec.kvcache.block_pool import BlockPool, Move, SequenceCache
from tests.specdec.kvcache.cached import SIZE, feed, remembered


@pytest.mark.parametrize("rows", [[], [0], [0, 1, 2], range(5)])
def test_only_rows_out_of_place_move(rows):
    pool = BlockPool(4, SIZE)
    cache = SequenceCache(pool)
    cache.take(5)
    assert cache.keep(rows) == []
    assert pool.num_used == -(-len(rows) // SIZE) * SIZE
    slots = cache.take(8)
    assert cache.keep([0, 1, 4, 6]) == [Move(slots[4], slots[2]), Move(slots[6], slots[3])]
    assert len(cache) == len(rows) + 4


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


def test_a_block_that_only_its_holder_knows_is_cut_where_asked():
    pool = BlockPool(16, SIZE)
    cache = feed(SequenceCache(pool), list(range(14)))
    table = list(cache.block_table)
    for length, num_remembered in ((13, 12), (6, 4)):
        cache.truncate(length)
        assert (len(cache), cache.block_table) == (length, table[: -(-length // SIZE)])
        assert remembered(pool, list(range(14))) == num_remembered, "the part of a block that is left is forgotten"
    cache.truncate(9)
    assert len(cache) == 6
    feed(cache, [0, 1, 2, 3, 4, 5, 77, 78, 79])
    assert remembered(pool, [0, 1, 2, 3, 4, 5, 77, 78, 79]) == 9
    assert remembered(pool, list(range(14))) == 6


def test_a_block_that_others_hold_is_not_cut_but_released():
    pool = BlockPool(16, SIZE)
    text = list(range(9))
    first = feed(SequenceCache(pool), text)
    second = SequenceCache(pool)
    second.attach([*text, 9])
    for length, kept in ((8, 8), (6, 4)):
        second.truncate(length)
        assert (len(second), second.block_table) == (kept, first.block_table[: kept // SIZE])
    assert not {slot // SIZE for slot in second.take(5)} & set(first.block_table)
    second.truncate(4)
    first.truncate(6)  # now it is the only holder
    assert len(first) == 6


def test_a_block_with_a_remembered_continuation_is_not_cut():
    pool = BlockPool(16, SIZE)
    feed(SequenceCache(pool), list(range(13))).release()
    cache = SequenceCache(pool)
    cache.attach(list(range(9)))
    cache.truncate(7)
    assert len(cache) == 4
    cache.release()
    assert remembered(pool, list(range(13))) == 13
