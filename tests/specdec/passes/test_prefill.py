"""How the rows of a pass are shared among prompts, and which prompts wait for another to fill their blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.kvcache.block_pool import BlockPool, SequenceCache
from specdec.passes.prefill import MIN_ROWS, ROWS_PER_PASS, Chunk, fair_share, rows_to_feed
from tests.specdec.kvcache.cached import SIZE, feed

PROMPT = list(range(4000))


def fresh(*texts: list[int]) -> list[tuple[SequenceCache, list[int]]]:
    pool = BlockPool(4096, SIZE)
    return [(SequenceCache(pool), text) for text in texts]


def other(number: int, length: int = len(PROMPT)) -> list[int]:
    return [1000 + number] * length


def test_a_prompt_alone_has_the_whole_pass() -> None:
    assert rows_to_feed(fresh(PROMPT)) == [ROWS_PER_PASS]
    assert rows_to_feed(fresh(PROMPT[:100])) == [100]
    assert rows_to_feed([]) == []


def test_all_prompts_of_a_pass_have_the_limit_together() -> None:
    assert rows_to_feed(fresh(PROMPT), 48) == [48]
    assert rows_to_feed(fresh(other(1), other(2)), 48) == [24, 24]


@pytest.mark.parametrize(
    ("num_rows", "seconds", "limit"),
    [
        (512, 80.0, MIN_ROWS),  # a chunk is never smaller
        (512, 5.1, 96),  # 100 rows a second, and whole blocks
        (1024, 4.0, 256),  # also with rows that are no prompt's
        (512, 0.4, ROWS_PER_PASS),
        (512, 0.0, ROWS_PER_PASS),
        (511, 80.0, ROWS_PER_PASS),  # says too little
    ],
)
def test_a_chunk_has_the_rows_of_a_second(num_rows: int, seconds: float, limit: int) -> None:
    chunk = Chunk()
    chunk.observe(num_rows, seconds)
    assert chunk.rows == limit


def test_a_chunk_grows_to_the_rows_of_a_second_where_a_pass_has_a_fixed_time() -> None:
    chunk = Chunk(MIN_ROWS)
    for _ in range(20):
        chunk.observe(chunk.rows, 0.6 + 0.002 * chunk.rows)
    assert 184 <= chunk.rows <= 216, "0.6 s and 2 ms a row: 200 rows"


def test_a_chunk_grows_again_when_passes_are_fast_again() -> None:
    chunk = Chunk()
    for seconds, limit in ((80.0, MIN_ROWS), (0.2, 80), (0.1, ROWS_PER_PASS)):
        chunk.observe(chunk.rows, seconds)
        assert chunk.rows == limit


def test_different_prompts_share_a_pass_and_of_equal_ones_the_first_has_it() -> None:
    assert rows_to_feed(fresh(other(1), other(2))) == [ROWS_PER_PASS // 2] * 2
    assert rows_to_feed(fresh(other(1), other(2, 12))) == [ROWS_PER_PASS - 12, 12]
    assert rows_to_feed(fresh(*[PROMPT] * 8)) == [ROWS_PER_PASS, *[0] * 7]


def test_a_waiting_prompt_leaves_its_rows_to_the_others() -> None:
    rows = rows_to_feed(fresh(PROMPT, other(1), PROMPT, other(2, 12), PROMPT))
    share = (ROWS_PER_PASS - 12) // 2
    assert rows == [share, share, 0, 12, 0]


def test_a_decoding_sequence_has_its_row_beside_prefills() -> None:
    decoding, first, second = fresh(list(range(9)), PROMPT, PROMPT)
    feed(decoding[0], decoding[1][:8])
    assert rows_to_feed([first, decoding, second]) == [ROWS_PER_PASS, 1, 0]


def test_equal_prompts_are_computed_once_and_in_as_few_passes_as_one() -> None:
    sequences = fresh(*[PROMPT] * 8)
    num_rows = num_passes = 0
    while any(len(cache) < len(ids) for cache, ids in sequences):
        for cache, ids in sequences:
            if len(ids) - len(cache) > 1:
                cache.attach(ids)
        for (cache, ids), count in zip(sequences, rows_to_feed(sequences), strict=True):
            if count:
                feed(cache, ids[: len(cache) + count])
                num_rows += count
        num_passes += 1
    assert num_rows == len(PROMPT) + 7, "all but one attach to it, and feed the last id"
    assert num_passes == -(-len(PROMPT) // ROWS_PER_PASS) + 1


@given(st.lists(st.integers(2, 3000), min_size=1, max_size=9), st.integers(9, 1000))
def test_a_fair_share_uses_the_pass_up_and_grants_every_small_wish(wanted: list[int], total: int) -> None:
    per_item = fair_share(wanted, total)
    taken = [min(wanted_rows, per_item) for wanted_rows in wanted]
    assert sum(taken) <= total
    assert sum(taken) > total - len(wanted) or taken == wanted
