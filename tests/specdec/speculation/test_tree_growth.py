"""Where a tree grows: the likeliest children first, none twice, whether it is looked at anew or has grown since."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.tree import EMPTY_TREE, ROOT, Candidate, TokenTree
from specdec.speculation.cost import tree_chances
from specdec.speculation.tree_growth import Frontier, Open
from tests.specdec.core.trees import OF_RANKS, chances_by_hand, trees

EVERYTHING = 10**9
OF_CONFIDENCE = [OF_RANKS, [0.98, 0.01], [0.4, 0.35, 0.1, 0.05]]


@given(trees(), st.integers(1, 6))
def test_the_likeliest_children_come_first_and_none_that_is_there(tree, max_depth):
    depths = (-1, *tree.depths)
    chance = dict(enumerate(chances_by_hand(tree))) | {ROOT: 1.0}
    expected = sorted(
        (
            chance[node] * OF_RANKS[rank]
            for node in range(ROOT, len(tree))
            for rank in range(tree.parents.count(node), len(OF_RANKS))
            if depths[node + 1] + 1 < max_depth and chance[node]
        ),
        reverse=True,
    )
    found = Frontier(always(OF_RANKS), tree, max_depth).take(EVERYTHING, EVERYTHING)
    assert [each.chance for each in found] == pytest.approx(expected)
    ranks: dict[int, list[int]] = {}
    for each in found:
        ranks.setdefault(each.parent, []).append(each.rank)
    for parent, of_parent in ranks.items():
        assert of_parent == list(range(tree.parents.count(parent), len(OF_RANKS))), "a rank after the one before it"


def always(of_ranks: Sequence[float]) -> Callable[[int], Sequence[float]]:
    return lambda confidence: of_ranks


def below(tree: TokenTree, *parents: int) -> TokenTree:
    """With one more node below each of ``parents``; its confidence depends on its parent."""
    new = enumerate(parents, 1000 + len(tree))
    return tree.extended([Candidate(parent, token, None, (parent + 1) % len(OF_CONFIDENCE)) for token, parent in new])


@given(trees(max_nodes=8), st.integers(1, 7), st.lists(st.tuples(st.integers(0, 6), st.floats(0, 9)), max_size=6))
def test_a_frontier_that_has_grown_equals_a_new_one(tree, max_depth, passes):
    tree = below(EMPTY_TREE, *tree.parents)
    frontier = Frontier(OF_CONFIDENCE.__getitem__, tree, max_depth)
    for limits in passes:
        anew = Frontier(OF_CONFIDENCE.__getitem__, tree, max_depth).take(*limits)
        taken = frontier.take(*limits)
        assert taken == anew
        tree = below(tree, *(each.parent for each in taken))
        frontier.grow(tree)


def test_a_tree_grows_deeper_where_confidence_is_high_and_wider_elsewhere():
    of_ranks = {0: (0.7, 0.2), 1: (0.4, 0.3), 9: (0.95, 0.02)}
    tree = TokenTree((1, 2), (ROOT, ROOT), confidence=(0, 9)).extended([Candidate(0, 3, None, 1)])
    found = Frontier(of_ranks.__getitem__, tree, 9).take(4, EVERYTHING)
    assert [(each.parent, each.rank) for each in found] == [(0, 1), (2, 0), (2, 1), (1, 0)]
    expected = [0.95 * 0.3, 0.95 * 0.4 * 0.7, 0.95 * 0.4 * 0.2, 0.02 * 0.7]
    assert [each.chance for each in found] == pytest.approx(expected)


def spots(tree: TokenTree, of_ranks, max_nodes: int, pass_rows: float, max_depth: int = 9) -> list[tuple[int, int]]:
    return [(each.parent, each.rank) for each in Frontier(always(of_ranks), tree, max_depth).take(max_nodes, pass_rows)]


def test_a_pass_takes_the_likely_nodes_and_leaves_the_rest_to_the_next():
    tree = TokenTree.chain([1, 2])
    good, poor = (0.8, 0.1, 0.05), (0.4, 0.2, 0.1)
    assert spots(tree, good, 9, 9)[:3] == [(1, 0), (ROOT, 1), (0, 1)]
    assert spots(tree, good, 9, 1) == [(1, 0)], "the others may wait, and there is always one"
    assert spots(tree, poor, 3, 9) == [(ROOT, 1), (ROOT, 2), (0, 1)], "wide before deep"
    assert spots(tree, good, 2, 99) == [(1, 0), (ROOT, 1)], "the likeliest"
    assert spots(tree, good, 3, 9, max_depth=2) == [(ROOT, 1), (0, 1), (ROOT, 2)], "none so deep"
    assert spots(tree, good, 0, 9) == []


@given(trees(max_nodes=12), st.floats(0.1, 99))
def test_a_pass_gains_the_most_for_its_time(tree, pass_rows):
    """Of all numbers of nodes, where each is a row: for the likeliest that are taken, and no others."""
    of_ranks = (0.7,)  # only children for free would be siblings
    everything = Frontier(always(of_ranks), tree, 99).take(EVERYTHING, EVERYTHING)
    if not everything:
        return
    gains = list(itertools.accumulate(each.chance for each in everything))
    rates = [gain / (pass_rows + count) for count, gain in enumerate(gains, 1)]
    taken = Frontier(always(of_ranks), tree, 99).take(EVERYTHING, pass_rows)
    assert taken == everything[: len(taken)]
    assert rates[len(taken) - 1] == pytest.approx(max(rates))


def test_a_guess_without_a_chance_is_not_grown_and_an_open_place_taken_once():
    tree = below(EMPTY_TREE, *[ROOT] * 40)
    frontier = Frontier(always((1.0, 0.0)), tree, 9)
    assert [each.parent for each in frontier.take(EVERYTHING)] == [0]
    frontier.grow(below(tree, 0))
    assert [each.parent for each in frontier.take(EVERYTHING)] == [40]
    frontier = Frontier(always((0.8, 0.1)), EMPTY_TREE, 9)
    assert [frontier.take(count, 9) for count in (1, 9, 9)] == [[Open(0.8, ROOT, 0)], [Open(0.1, ROOT, 1)], []]


def test_the_best_chances_are_those_of_the_nodes_that_would_be_grown():
    frontier, grown, tree = Frontier(always(OF_RANKS), EMPTY_TREE, 99), [], EMPTY_TREE
    for _ in range(20):
        [each] = frontier.take(1)
        grown.append(each.chance)
        tree = below(tree, each.parent)
        frontier.grow(tree)
    assert list(itertools.islice(tree_chances(OF_RANKS), 20)) == pytest.approx(grown)
    assert grown == sorted(grown, reverse=True)
