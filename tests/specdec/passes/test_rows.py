"""How many keys a row is attended over depends on its position alone, in chains and in trees."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from specdec.passes.rows import KeyCounts, Member, Segment, members_of, paths

COUNTS = KeyCounts((64, 128, 256), 512)
LENGTHS = (0, 1, 40, 58, 62, 63, 64, 70, 120, 126, 127, 128, 130, 245, 254, 255, 256, 300, 505, 511, 512, 1020)


def segment_of(rng: random.Random, num_context: int) -> Segment:
    num_rows = rng.choice([1, 2, 3, 5, 9, 20, 70, 300])
    reach = rng.choice([1, 1, 2, 5])  # 1: a chain
    parents = [rng.randrange(max(-1, row - reach), row) if row else -1 for row in range(num_rows)]
    if rng.random() < 0.3:  # a chunk, then a tree
        parents[: num_rows // 2] = range(-1, num_rows // 2 - 1)
    return Segment([0] * num_rows, parents, num_context, [], [])


def mistakes(rule: Callable[..., Iterator[Member]]) -> set[str]:
    rng, mistaken = random.Random(0), set()
    num_split = 0
    for _ in range(8):
        for num_context in LENGTHS:
            segment = segment_of(rng, num_context)
            members = list(rule(segment, 0, segment.positions, COUNTS))
            if sorted(row for member in members for row in member.rows) != list(range(len(segment.parents))):
                mistaken.add("each row once")
            for member in members:
                num_split += not member.is_contiguous
                num_keys = COUNTS.at_least(member.level, member.num_keys)
                if num_keys < member.num_keys:
                    mistaken.add("room for the keys")
                for row in member.rows:
                    position = segment.positions[row]
                    expected = next((count for count in COUNTS.short if position < count), None)
                    if num_keys != expected and (expected or num_keys % 512):
                        mistaken.add("keys by position")
                    path = [row]
                    while segment.parents[path[0]] >= 0:
                        path.insert(0, segment.parents[path[0]])
                    if not set(path) <= set(member.keys):
                        mistaken.add("a row sees its ancestors")
                    if member.is_chain and list(member.keys[: len(path)]) != path:
                        mistaken.add("a chain's key is at its position")
    assert rule is not members_of or num_split > 20
    return mistaken


def test_every_row_has_the_keys_of_its_position() -> None:
    assert not mistakes(members_of)


def by_slot(segment: Segment, start: int, positions: list[int], counts: KeyCounts) -> Iterator[Member]:
    slots = [segment.num_context + row for row in range(len(positions))]
    for member in members_of(segment, start, slots, counts):
        yield replace(member, row_positions=positions)


def by_segment(segment: Segment, start: int, positions: list[int], counts: KeyCounts) -> Iterator[Member]:
    rows = range(len(positions))
    yield Member(segment, start, counts.level(segment.num_context + rows[-1]), rows, rows, positions)


def never_apart(segment: Segment, start: int, positions: list[int], counts: KeyCounts) -> Iterator[Member]:
    for member in members_of(segment, start, positions, counts):
        yield replace(member, keys=range(member.rows[-1] + 1))


@pytest.mark.parametrize("rule", [by_slot, by_segment, never_apart])
def test_a_wrong_rule_is_found(rule: Callable[..., Iterator[Member]]) -> None:
    assert mistakes(rule)


def test_paths_share_what_comes_before() -> None:
    assert paths([-1, 0, 0, 1, 2, 1, -1]) == [([0, 1, 3], 0), ([0, 2, 4], 1), ([0, 1, 5], 2), ([6], 0)]


def test_a_tree_that_need_not_be_exact_stays_as_it_is_stored_and_without_short_counts_is_in_chains() -> None:
    rng, multiple = random.Random(1), KeyCounts((), 16)
    for num_context in LENGTHS:
        segment = replace(segment_of(rng, num_context), exact=False)
        for member in members_of(replace(segment, exact=True), 0, segment.positions, multiple):
            assert multiple.at_least(member.level, member.num_keys) % 16 == 0
            assert member.is_chain
        members = list(members_of(segment, 0, segment.positions, COUNTS))
        assert all(member.is_contiguous for member in members)
        assert sorted(row for member in members for row in member.rows) == list(range(len(segment.parents)))
        for member in members:
            assert COUNTS.at_least(member.level, member.num_keys) >= member.num_keys
