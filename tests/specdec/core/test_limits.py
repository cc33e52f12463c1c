"""Chunks: how much of a pass's rows are computed at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec.core.limits import chunked

sizes = st.lists(st.integers(1, 20), max_size=30)


@given(sizes, st.integers(1, 30))
def test_chunks_are_neighbours_and_as_large_as_they_may_be(sizes, max_total):
    parts = chunked(sizes, max_total)
    assert [index for part in parts for index in part] == list(range(len(sizes)))
    totals = [sum(sizes[index] for index in part) for part in parts]
    assert all(total <= max_total or len(part) == 1 for part, total in zip(parts, totals, strict=True))
    for part, total, following in zip(parts, totals, parts[1:], strict=False):
        assert total + sizes[following.start] > max_total, part
