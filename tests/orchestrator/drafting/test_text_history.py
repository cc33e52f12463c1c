"""What is found is the longest agreement in a text of the same owner, and what followed there; never another's text."""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.drafting import text_history
from orchestrator.drafting.text_history import TextHistory
from specdec.core.limits import MAX_DRAFT_TOKENS
from specdec.speculation.prompt_lookup import LENGTHS, LONGEST, HitRates, PromptLookup, agreement
from tests.models.fake_peers import hit_rates

OWNERS = (b"", b"a", b"\xffb")

few_ids = st.lists(st.integers(0, 2), min_size=1, max_size=40)
written_texts = st.lists(st.tuples(st.sampled_from(OWNERS), few_ids), max_size=8)


def hashes(function: Callable[[bytes], int]) -> Any:
    """Replaces ``hash``, which is another one in each process."""
    return patch.object(text_history, "hash", function, create=True)


def no_collisions() -> Any:
    numbers: dict[bytes, int] = {}
    return hashes(lambda value: numbers.setdefault(value, len(numbers)))


def holding(texts, num_tokens: int = 0) -> TextHistory:
    history = TextHistory(num_tokens)
    for owner, ids in texts:
        history.write(owner, array("I", ids), 0, ended=True)
    return history


def continuation_of(texts, owner: bytes, ids: list[int], at_least: int) -> tuple[int, list[int]]:
    """By reading all texts: how much agrees in classes of LENGTHS, and what follows the latest place of the best."""
    best, follows = bisect(LENGTHS, at_least - 1), []
    for of, text in texts:
        for place in range(1, len(text)) if of == owner else ():
            agreed = agreement(text, place, ids)
            if agreed >= max(LENGTHS[0], at_least) and bisect(LENGTHS, agreed) >= best:
                best, follows = bisect(LENGTHS, agreed), text[place:]
    return best if follows else 0, follows


@given(written_texts, st.sampled_from(OWNERS), few_ids, st.sampled_from([2, *LENGTHS]))
@example([(b"", [0, 0, 1, 2, 0]), (b"", [1, 0, 1, 2, 1])], b"", [0, 0, 1, 2], 2)
def test_what_is_found_is_what_reading_all_texts_of_the_owner_would_find(texts, owner, ids, at_least):
    with no_collisions():
        agreed, copied = holding(texts, 1 << 12).find(owner, ids, at_least)
    expected = continuation_of(texts, owner, ids, at_least)
    assert (bisect(LENGTHS, agreed), list(copied[1:])) == expected


@given(
    st.lists(st.tuples(st.sampled_from(OWNERS), few_ids.map(lambda ids: ids * 4)), max_size=20),
    st.sampled_from(OWNERS),
    few_ids,
    st.integers(1, 8),
)
def test_whatever_was_overwritten_and_collides_nothing_but_a_part_of_one_text_of_the_owner_is_found(
    texts, owner, ids, num_hashes
):
    with hashes(lambda value: len(value) + sum(value) % num_hashes):
        history = TextHistory(0)  # smaller than the texts are
        for of, text in texts:
            history.write(of, array("I", text), 0, ended=True)
            agreed, copied = history.find(owner, ids, 2)
            if agreed:
                found = [*ids[-agreed:], *copied[1:]]
                own = [array("I", text).tobytes() for of, text in texts if of == owner]
                assert any(array("I", found).tobytes() in text for text in own)
                assert len(copied) > 1


@pytest.mark.parametrize("function", [hash, lambda value: 0], ids=["hash", "one hash for all"])
def test_what_one_owner_wrote_is_never_proposed_to_another(function):
    page = list(range(100))
    with hashes(function):
        history = holding([(b"a", page)])
        assert history.find(b"a", page[:99], 2)[0] == LONGEST
        for owner in (b"", b"b", b"a" + array("I", page[:1]).tobytes(), array("I", page[:4]).tobytes()):
            for length in range(3, 100):
                assert history.find(owner, page[:length], 2) == (0, ())
            assert not PromptLookup(HitRates(), (), history, owner).chances(page[:99])


def test_nothing_agrees_across_two_texts_even_where_one_fills_its_place():
    for size in range(8, 40):
        one, two = list(range(size)), list(range(100, 110))
        history = holding([(b"a", one), (b"b", two)], 1 << 20)
        assert history.find(b"b", [*one, *two[:5]], 2)[0] == 5


def test_the_oldest_texts_go_first_and_the_memory_stays_what_it_was():
    history = TextHistory(4096)
    size = len(history._ids), len(history._texts), *(len(table) for _, table in history._tables)
    pages = [[1000 * number + token for token in range(200)] for number in range(100)]
    for number, page in enumerate(pages):
        history.write(b"%d" % number, page, 0, ended=True)
    there = [
        any(history.find(b"%d" % number, page[:length], 2)[0] for length in range(20, 200))
        for number, page in enumerate(pages)
    ]
    assert there == sorted(there), "what is there is the latest"
    assert 4096 // 224 <= sum(there) <= 1 + 4096 // 208
    assert (len(history._ids), len(history._texts), *(len(table) for _, table in history._tables)) == size
    assert len({owner for owner, _ in history._texts}) <= 1 + sum(there), "owners without a text are forgotten"


def test_a_text_is_there_while_it_is_written_and_the_rest_at_its_end():
    history, page, written = TextHistory(1 << 14), list(range(1000)), 0
    with no_collisions():
        for length in range(1001):
            written = history.write(b"", page[:length], written)
            assert length - written < 256
            assert bool(history.find(b"", page[: max(3, written - 1)], 2)[0]) == (written > 0)
        assert history.find(b"", page[:990], 2) == (0, ())
        assert history.write(b"", page, written, ended=True) == 1000
        assert history.find(b"", page[:990], 2)[0] == LONGEST


def test_a_long_text_is_proposed_from_end_to_end_and_no_further():
    history, page, written = TextHistory(1 << 14), list(range(1000)), 0
    history.rates = hit_rates(0.95)
    with no_collisions():
        for length in range(0, 1001, 50):
            written = history.write(b"", page[:length], written, ended=length == 1000)
        history.write(b"", list(range(2000, 2100)), 0, ended=True)
        lookup = PromptLookup(hit_rates(0.95), (), history)
        for length in range(3, 1000):
            count = len(lookup.chances(page[:length]))
            assert 0 < count <= MAX_DRAFT_TOKENS
            assert list(lookup.propose(count).token_ids) == page[length : length + count]
        assert not lookup.chances(page)


def test_the_longer_agreement_is_proposed_and_of_two_as_long_that_of_the_text_itself():
    history = holding([(b"", [7, *range(20, 32), 50, 51])], 1 << 20)
    history.rates = hit_rates(0.95)
    own = [9, 28, 29, 30, 31, 60, 61]

    def first(*ids: int) -> tuple[int, ...]:
        lookup = PromptLookup(hit_rates(0.95), (), history)
        lookup.chances(ids)
        return lookup.propose(1).token_ids

    assert first(*own, 28, 29, 30, 31) == (60,)
    assert first(*own, 27, 28, 29, 30, 31) == (50,)
    history.rates = hit_rates(0.0)
    assert first(*own, 27, 28, 29, 30, 31) == (60,), "other texts proved to be worse"


def test_what_other_texts_are_worth_is_learnt_apart_and_is_where_the_next_request_begins():
    page = [*range(40), 98]
    history, of_own = holding([(b"", page)], 1 << 20), HitRates()
    before = history.rates.after(LONGEST), of_own.after(LONGEST)
    for _ in range(20):
        lookup = PromptLookup(of_own, (), history)
        lookup.chances(page[:40])
        lookup.chances([*page[:40], 99])
    assert history.rates.after(LONGEST) < before[0] / 2
    assert of_own.after(LONGEST) == before[1]
    assert PromptLookup(of_own, (), history).chances(page[:40])[0] < before[0] / 2
