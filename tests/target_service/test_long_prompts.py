"""Opening long prompts: how many blocks are looked up between two passes, in which no other sequence gets a token."""

from __future__ import annotations

import pytest

import target_service.language_model
from specdec.core.rounds import Round, Verdict
from specdec.server.step_loop import Key
from tests.target_service.test_shared_prompts import BLOCK, PROMPT, Pool, text

MOST = 20


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_service.language_model, "MAX_BLOCKS_PER_PASS", MOST)


def cached(*prompts: list[int]) -> Pool:
    """A pool in which these have been computed by sequences that have ended."""
    pool = Pool(16 * PROMPT)
    for number, prompt in enumerate(prompts):
        pool.opens(number, prompt)
    pool.runs()
    for number in range(len(prompts)):
        pool.engine.close(Key(1, number))
    return pool


def looked_up_by_pass(pool: Pool, watched: Key, num_others: int) -> list[int]:
    """Runs passes until so many others have their first verdict. ``watched`` gets one in each of them."""
    counts, number, base = [], 0, len(pool.engine._sequences[watched].ids)
    while num_others:
        number, base = number + 1, base + 1
        pool.engine.submit(watched, Round(number, base - 1))
        before = pool.runner.pool.num_looked_up
        results = dict(pool.engine.step())
        counts.append(pool.runner.pool.num_looked_up - before)
        assert all(isinstance(result, Verdict) for result in results.values())
        assert watched in results
        num_others -= len(results) - 1
    return counts


def neighbour(pool: Pool) -> Key:
    key = pool.opens(100, [1, 2, 3])
    pool.runs()
    return key


def test_samples_of_one_prompt_look_it_up_once() -> None:
    pool = cached(text(PROMPT))
    key = neighbour(pool)
    before = pool.runner.pool.num_looked_up
    for number in range(101, 165):
        pool.opens(number, text(PROMPT))
    looked_up_by_pass(pool, key, 64)
    assert pool.runner.pool.num_looked_up - before < PROMPT // BLOCK + 64 + 2, "not 64 times as much"


def test_blocks_of_one_path_are_held_at_one_place() -> None:
    pool = cached(text(PROMPT))
    for number in range(64):
        pool.opens(number, text(PROMPT))
    pool.engine.step()
    caches = [sequence.state.cache for sequence in pool.engine._sequences.values()]
    *path, last = caches[0]._path
    assert [block.holders for block in path] == [1] * len(path)
    assert last.holders == 64
    assert pool.runner.pool.num_used < PROMPT + 65 * BLOCK


def test_no_pass_looks_up_more_blocks_than_a_few_ms_allow(few: None) -> None:
    """And a sequence that has found a part of its text does not compute the rest of what is cached."""
    prompts = [text(PROMPT, first) for first in range(4)]
    pool = cached(*prompts)
    key = neighbour(pool)
    rows = pool.engine.load.rows
    for number, prompt in enumerate(prompts, 101):
        pool.opens(number, prompt)
    counts = looked_up_by_pass(pool, key, 4)
    assert max(counts) <= MOST
    assert sum(counts) >= 4 * (PROMPT // BLOCK - 1)
    assert pool.engine.load.rows - rows < len(counts) + 4 * 2 * BLOCK


def test_what_is_found_in_parts_gives_the_same_text(few: None) -> None:
    prompt = text(PROMPT, 5)
    fresh, found = Pool(16 * PROMPT), cached(prompt)
    verdicts = []
    for pool in (fresh, found):
        pool.opens(7, prompt)
        [verdict] = pool.runs()
        assert isinstance(verdict, Verdict)
        verdicts.append(verdict.next_token)
    assert verdicts[0] == verdicts[1]
