"""Chunks and turns: how much of a pass's rows are computed at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec.core.limits import chunked, take_turns

sizes = st.lists(st.integers(1, 20), max_size=30)


@given(sizes, st.integers(1, 30))
def test_chunks_are_neighbours_and_as_large_as_they_may_be(sizes, max_total):
    parts = chunked(sizes, max_total)
    assert [index for part in parts for index in part] == list(range(len(sizes)))
    totals = [sum(sizes[index] for index in part) for part in parts]
    assert all(total <= max_total or len(part) == 1 for part, total in zip(parts, totals, strict=True))
    for part, total, following in zip(parts, totals, parts[1:], strict=False):
        assert total + sizes[following.start] > max_total, part


@given(st.dictionaries(st.integers(), st.integers(1, 20), max_size=20), st.integers(1, 30))
def test_each_name_has_a_turn_before_any_has_two(sizes, max_total):
    line = dict.fromkeys([*sizes, "waits for nothing"])
    num_turns = dict.fromkeys(sizes, 0)
    while 0 in num_turns.values():
        taken = take_turns(line, sizes, max_total)
        assert sum(sizes[name] for name in taken) <= max(max_total, sizes[taken[0]])
        for name in taken:
            num_turns[name] += 1
    assert set(line) == {*sizes, "waits for nothing"}
    assert max(num_turns.values(), default=1) <= 2


def test_names_that_all_fit_keep_their_places_in_the_line():
    line = dict.fromkeys("abc")
    assert take_turns(line, {"a": 3, "c": 3}, 6) == ["a", "c"]
    assert list(line) == ["a", "b", "c"]
    assert take_turns(line, {}, 6) == []
