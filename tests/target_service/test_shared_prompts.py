"""Text that sequences share counts once, as the KV cache holds it once; and what happens when they grow."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.errors import Overloaded, Preempted
from specdec.core.rounds import Round, TargetOpen, Verdict
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import TokenTree
from specdec.server.step_loop import Key
from target_service.admission import BACK_WITHIN_S, HEADROOM
from target_service.engine import TargetEngine
from target_service.language_model import LmVerifier
from target_service.shared_prefixes import SharedTexts
from tests.models.table_runner import TableRunner

BLOCK = 16
PROMPT = 1024


class Pool:
    """An engine around a real pool of blocks; a request has as many samples as are opened, all of one age."""

    def __init__(self, num_slots: int) -> None:
        self.runner = TableRunner(num_slots=num_slots, block_size=BLOCK, context_length=4096)
        self.now = 1e6
        self.verifier: Any = LmVerifier(self.runner)
        self.engine = TargetEngine(self.verifier, clock=lambda: self.now)

    def opens(self, number: int, ids: list[int], salt: bytes = b"", adapter: str = "") -> Key:
        spec = SequenceSpec(tuple(ids), len(ids), seed=number, cache_salt=salt)
        self.engine.open(Key(1, number), TargetOpen(spec, adapter=adapter))
        return Key(1, number)

    def runs(self) -> list[object]:
        results: list[object] = []
        while not self.engine.idle:
            results += [result for _, result in self.engine.step()]
        return results


def text(length: int, first: int = 0) -> list[int]:
    return [(first + position // 3) % 8 for position in range(length)]


def test_samples_that_are_opened_together_are_served_together():
    """None of them is in the cache yet."""
    pool = Pool(PROMPT + 8 * HEADROOM)
    for number in range(8):
        pool.opens(number, text(PROMPT))
    with pytest.raises(Overloaded):
        pool.opens(8, text(PROMPT))
    results = pool.runs()
    assert [type(result) for result in results] == [Verdict] * 8
    assert pool.runner.pool.num_used <= PROMPT + 8 * BLOCK


@pytest.mark.parametrize(("rows", "num_passes"), [(16, 20), (48, 7), (512, 1)])
def test_a_prompt_is_fed_in_chunks_of_the_limit_and_its_verdict_is_the_same(rows: int, num_passes: int) -> None:
    pool = Pool(PROMPT)
    pool.runner.chunk.rows = rows
    pool.opens(0, text(320))
    [verdict] = pool.runs()
    assert isinstance(verdict, Verdict)
    assert verdict.next_token == whole_verdict().next_token
    assert pool.runner.num_passes == num_passes


def whole_verdict() -> Verdict:
    pool = Pool(PROMPT)
    pool.opens(0, text(320))
    [verdict] = pool.runs()
    assert isinstance(verdict, Verdict)
    return verdict


def test_a_sample_that_comes_while_the_prompt_is_fed_is_let_in_too():
    pool = Pool(PROMPT + 2 * HEADROOM)
    pool.opens(0, text(PROMPT))
    pool.engine.step()
    assert BLOCK < pool.runner.pool.num_used < PROMPT, "in the midst of it"
    pool.opens(1, text(PROMPT))
    assert [type(result) for result in pool.runs()] == [Verdict] * 2


@pytest.mark.parametrize(
    ("second", "salt", "adapter", "shared"),
    [
        (text(PROMPT), b"", "", PROMPT),
        (text(PROMPT + 1), b"", "", PROMPT),
        ([*text(PROMPT)[:-1], 7], b"", "", PROMPT - BLOCK),
        (text(PROMPT)[: PROMPT // 2], b"", "", PROMPT // 2),
        (text(PROMPT)[: PROMPT // 2 - 1], b"", "", PROMPT // 2 - BLOCK),
        (text(PROMPT, 1), b"", "", 0),
        (text(PROMPT), b"another tenant", "", 0),
        (text(PROMPT), b"", "poems", 0),
    ],
)
def test_only_full_blocks_of_equal_text_under_one_salt_and_adapter_are_counted_once(second, salt, adapter, shared):
    exact = PROMPT + HEADROOM + len(second) - shared + HEADROOM
    for num_slots, let_in in ((exact, True), (exact - 1, False)):
        pool = Pool(2 * PROMPT + 4 * HEADROOM)
        pool.verifier.cache_use = lambda num_slots=num_slots: (0, num_slots)
        pool.opens(0, text(PROMPT))
        if let_in:
            pool.opens(1, second, salt, adapter)
        else:
            with pytest.raises(Overloaded):
                pool.opens(1, second, salt, adapter)


def test_what_one_of_them_leaves_is_still_the_others():
    pool = Pool(2 * (PROMPT + HEADROOM) + HEADROOM + BLOCK)  # a block for what they will have said
    keys = [pool.opens(number, text(PROMPT)) for number in range(2)]
    pool.opens(2, text(PROMPT, 1))
    pool.runs()
    pool.engine.close(keys[0])
    pool.opens(3, text(PROMPT))
    with pytest.raises(Overloaded):
        pool.opens(4, text(PROMPT))
    pool.engine.close(keys[1])
    pool.engine.close(Key(1, 3))
    pool.now += 2 * BACK_WITHIN_S  # the one that was refused
    pool.opens(5, text(PROMPT, 2))
    assert [type(result) for result in pool.runs()] == [Verdict]


@given(st.lists(st.tuples(st.text("ab", max_size=9), st.booleans(), st.booleans()), max_size=12))
def test_the_count_is_that_of_distinct_beginnings(opens):
    texts, size = SharedTexts(2), 2
    held: list[tuple[SequenceSpec, object]] = []

    def beginnings(specs: list[SequenceSpec]) -> set[tuple[object, ...]]:
        return {
            (spec.cache_salt, *spec.token_ids[:end])
            for spec in specs
            for end in range(size, len(spec.token_ids) + 1, size)
        }

    for letters, salted, closes in opens:
        spec = SequenceSpec(tuple(map(ord, letters)), 1, cache_salt=b"salt" if salted else b"")
        before = beginnings([spec for spec, _ in held])
        assert texts.missing(spec) == size * len(beginnings([spec]) - before)
        held.append((spec, texts.add(spec)))
        if closes:
            texts.remove(held.pop(len(held) // 2)[1])
        assert texts.num_ids == size * len(beginnings([spec for spec, _ in held]))
    while held:
        texts.remove(held.pop()[1])
    assert texts.num_ids == 0


@pytest.mark.parametrize("num_slots", [448, 960])
def test_samples_that_outgrow_the_pool_end_with_few_replays(num_slots):
    """8 samples of 256 + 100 ids, all admitted at first, need 1,056 slots. Those preempted return every fifth pass."""
    pool = Pool(num_slots)
    prompt = text(256)
    texts = dict.fromkeys(range(8), prompt)
    preempted = dict.fromkeys(range(8), 0)
    live: dict[Key, int] = {}
    most = stream = num_passes = 0
    while texts:
        num_passes += 1
        assert num_passes < 2000, f"never ended: {preempted}"
        waiting = sorted(set(texts) - set(live.values())) if num_passes % 5 == 1 else []
        for number in waiting:
            key = Key(stream := stream + 1, number)
            spec = SequenceSpec(tuple(texts[number]), len(prompt), seed=number)
            try:
                pool.engine.open(key, TargetOpen(spec, age_s=100 - number, num_preemptions=preempted[number]))
            except Overloaded:
                continue
            live[key] = number
        most = max(most, len(live))
        for key, result in pool.engine.step():
            number = live[key]
            if isinstance(result, Verdict):
                texts[number] = [*texts[number], result.next_token]
                if len(texts[number]) < len(prompt) + 100:
                    pool.engine.submit(key, Round(result.round + 1, len(texts[number]), TokenTree.chain([8] * 4)))
                    continue
                pool.engine.close(key)
                del texts[number]
            else:
                assert isinstance(result, Preempted)
                assert len(live) > 1, "a sequence that is alone is not preempted"
                preempted[number] += 1
            del live[key]
    assert pool.runner.pool.num_used == 0
    assert most >= min(8, (num_slots - len(prompt)) // HEADROOM), "they were served together"
    assert sum(preempted.values()) > 0
    assert max(preempted.values()) <= 2
    assert sum(preempted.values()) <= 8


def test_a_tree_finds_no_memory_and_no_text_gives_way_to_it():
    """In a real pool; what is verified of it is nothing, and the text goes on."""
    pool = Pool(PROMPT + 4 * HEADROOM)
    keys = [pool.opens(number, text(PROMPT)) for number in range(4)]
    assert [type(result) for result in pool.runs()] == [Verdict] * 4
    bases = dict.fromkeys(keys, PROMPT + 1)
    for number in (1, 2):
        for key in keys:
            tree = TokenTree.chain([0] * (16 * HEADROOM)) if key == keys[0] else TokenTree.chain([0, 0])
            pool.engine.submit(key, Round(number, bases[key], tree))
        results: dict[Key, Any] = dict(pool.engine.step())
        assert [type(results[key]) for key in keys] == [Verdict] * 4
        assert results[keys[0]].accepted == ()
        bases = {key: bases[key] + 1 + len(results[key].accepted) for key in keys}
    for key in keys:
        pool.engine.close(key)
    assert pool.runner.pool.num_used == 0
