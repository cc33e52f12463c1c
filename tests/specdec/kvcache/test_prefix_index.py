"""The tree of remembered texts against a plain search through all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.kvcache.prefix_index import ID_BYTES, TextBlock, num_equal, packed

IDS = st.lists(st.sampled_from([0, 1, 2, 256, 65536]), min_size=1, max_size=4).map(packed)


def num_common(one: bytes, other: bytes, width: int = ID_BYTES) -> int:
    """The bytes of the pieces of ``width`` bytes that both begin with."""
    places = range(0, min(len(one), len(other)) // width * width, width)
    differs = (place for place in places if one[place : place + width] != other[place : place + width])
    return next(differs, len(places) * width)


@given(st.lists(IDS, max_size=12), st.data())
def test_it_finds_what_a_search_through_all_children_finds(texts, data):
    root = TextBlock()
    children = [root.add(ids, block) for block, ids in enumerate(texts)]
    for _ in range(data.draw(st.integers(0, len(children)))):
        children.pop(data.draw(st.integers(0, len(children) - 1))).remove()
    assert root.is_leaf == (not children)

    wanted = data.draw(IDS)
    closest, common = root.closest(wanted)
    assert common == max((num_common(child.ids, wanted) for child in children), default=0)
    assert (closest is None) == (common == 0)
    if closest is not None:
        assert closest in children
        assert num_common(closest.ids, wanted) == common
    known = root.find(wanted)
    assert (known is None) == (wanted not in [child.ids for child in children])
    assert known is None or known in children

    for child in children:
        others = [other for other in children if other is not child]
        covering = child.covering()
        assert covering is None or (covering in others and covering.ids[: len(child.ids)] == child.ids)
        if not any(other.ids[: len(child.ids)] == child.ids for other in others):
            assert covering is None
        covered = child.covered()
        assert covered is None or (covered in others and child.ids[: len(covered.ids)] == covered.ids)
    # Of those that hold the same or less than another one, some are always told so, until none is left.
    while (child := next((child for child in children if child.covering()), None)) is not None:
        child.remove()
        children.remove(child)
    assert not any(one is not two and two.ids[: len(one.ids)] == one.ids for one in children for two in children)


@given(st.lists(st.integers(0, 1), max_size=40).map(bytes), st.data(), st.integers(1, 4))
def test_equal_beginnings_are_counted_in_whole_blocks(one, data, width):
    same = one[: data.draw(st.integers(0, len(one)))]
    other = same + data.draw(st.lists(st.integers(0, 1), max_size=20).map(bytes))
    assert num_equal(one, other, width) == num_common(one, other, width)


def test_a_root_has_no_siblings():
    with pytest.raises(ValueError, match="no siblings"):
        TextBlock().remove()
