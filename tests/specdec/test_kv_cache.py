"""The KV cache in blocks: what is shared, what is copied, what goes first, and what never changes under anybody."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest

from specdec.kv_cache import BlockPool, Move, PoolFullError, SequenceCache

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
    found = len(probe)
    probe.release()
    return found


# Feeding and keeping


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


# Finding what is remembered


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
    assert len(second) == pool.num_reused == 10
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
    assert pool.num_reused == 11


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
    assert pool.num_used == pool.num_reused == len(cache) == 0


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


# Rolling back


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


# What goes when room is needed


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
