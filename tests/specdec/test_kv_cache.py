"""The KV pool against a reference that remembers, per sequence, what should stand at each position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.kv_cache import KvPool, PoolFullError, SequenceCache

NUM_SLOTS = 12


def new_pool() -> KvPool:
    return KvPool(NUM_SLOTS, torch.device("cpu"))


def write(pool: KvPool, slots: list[int], stamps: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Store each row's stamp as its key and the negative as its value."""
    rows = torch.tensor(stamps, dtype=torch.float32).reshape(-1, 1, 1)
    return pool.write(0, torch.tensor(slots, dtype=torch.int64), rows, -rows)


def is_whole(pool: KvPool) -> bool:
    """Every slot is free, and exactly once."""
    if pool.num_used:
        return False
    slots = pool.take(NUM_SLOTS)
    pool.give_back(slots)
    return sorted(slots) == list(range(NUM_SLOTS))


@given(st.data())
def test_any_history_leaves_each_sequence_its_own_rows_and_at_the_end_the_pool_whole(data):
    pool = new_pool()
    caches = [SequenceCache(pool) for _ in range(3)]
    reference: list[list[int]] = [[], [], []]
    stamp = 0
    for _ in range(data.draw(st.integers(1, 20))):
        which = data.draw(st.integers(0, 2))
        cache, expected = caches[which], reference[which]
        verb = data.draw(st.sampled_from(["feed", "feed", "truncate", "release", "lost pass"]))
        if verb in ("feed", "lost pass"):
            num_rows = data.draw(st.integers(0, 6))
            used = pool.num_used
            if num_rows > NUM_SLOTS - used:
                with pytest.raises(PoolFullError, match=f"{num_rows} KV slots needed, {NUM_SLOTS - used} of"):
                    cache.take(num_rows)
                assert pool.num_used == used
                continue
            slots = cache.take(num_rows)
            stamps = list(range(stamp, stamp + num_rows))
            stamp += num_rows
            write(pool, slots, stamps)
            if verb == "lost pass":
                cache.release()
                expected.clear()
            else:
                kept = data.draw(st.lists(st.integers(0, max(0, num_rows - 1)), unique=True, max_size=num_rows))
                cache.keep(kept)
                expected.extend(stamps[row] for row in kept)
        elif verb == "truncate":
            length = data.draw(st.integers(0, 8))
            cache.truncate(length)
            del expected[length:]
        else:
            cache.release()
            expected.clear()

        assert [len(cache) for cache in caches] == [len(texts) for texts in reference]
        assert pool.num_used == sum(map(len, reference))
        taken = [slot for cache in caches for slot in cache.slots]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(NUM_SLOTS))
        if stamp:
            keys, values = write(pool, [], [])
            for cache, texts in zip(caches, reference, strict=True):
                assert keys[cache.slots, 0, 0].tolist() == texts
                assert (-values[cache.slots, 0, 0]).tolist() == texts
    for cache in caches:
        cache.release()
    assert is_whole(pool)


def test_releasing_twice_gives_nothing_back_twice():
    pool = new_pool()
    cache = SequenceCache(pool)
    cache.take(4)
    cache.keep([0, 2])
    cache.release()
    cache.release()
    assert is_whole(pool)


def test_a_full_pool_says_so_and_takes_nothing():
    pool = new_pool()
    pool.take(10)
    with pytest.raises(PoolFullError, match="3 KV slots needed, 2 of 12 free"):
        pool.take(3)
    assert pool.num_used == 10
    assert len(pool.take(2)) == 2


def test_rolling_back_moves_no_tensor():
    pool = new_pool()
    cache = SequenceCache(pool)
    write(pool, cache.take(5), [1, 2, 3, 4, 5])
    cache.keep([0, 3])
    keys, _ = write(pool, [], [])
    before = keys.clone()
    cache.truncate(1)
    assert torch.equal(keys, before)
    assert keys[cache.slots, 0, 0].tolist() == [1]


def test_a_slot_never_written_brings_no_garbage():
    pool = new_pool()
    keys, values = pool.write(3, torch.tensor([5]), torch.ones(1, 2, 4), torch.ones(1, 2, 3))
    assert keys.shape == (NUM_SLOTS, 2, 4)
    assert values.shape == (NUM_SLOTS, 2, 3)
    assert keys.sum() == 8
    assert values.sum() == 6
