"""The counts are those of the trees that the draft service grows."""

from __future__ import annotations

import pytest

from specdec.core.tree import ROOT, TokenTree
from specdec.planner.ahead import Ahead
from specdec.planner.request import Met
from specdec.speculation.tree_growth import Frontier

PAIRS = [(0.8, 0.5), (0.45, 0.4), (0.95, 0.0)]


def grown(pair, chain, passes, most_nodes, most_depth):
    """As draft_service/advance.py does: every child is a new token."""
    acceptance, runner_up = pair
    of_ranks = (acceptance, (1 - acceptance) * runner_up)
    tree, left = TokenTree.chain(range(chain)), most_nodes
    frontier = Frontier(lambda _: of_ranks, tree, most_depth)
    for _ in range(passes):
        parents = [each.parent for each in frontier.take(left)]
        left -= len(parents)
        tree = TokenTree(tuple(range(len(tree) + len(parents))), (*tree.parents, *parents))
        frontier.grow(tree)
    return tree


def below(tree, node):
    """Nodes of the longest path below ``node``: after a verdict the tree is a chain."""
    children = [index for index, parent in enumerate(tree.parents) if parent == node]
    return max((1 + below(tree, child) for child in children), default=0)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("most_nodes", [5, 60])
@pytest.mark.parametrize("behind", [0, 3])
@pytest.mark.parametrize("flying", [1, 4, 6])
def test_paths_are_as_long_as_in_the_trees_that_the_draft_grows(flying, behind, most_nodes, pair):
    most_depth = 2 * max(4, flying) + 1
    ahead = Ahead(*pair, most_nodes, most_depth)
    for passes in (0, 1, 2, 5, 20):
        tree = grown(pair, flying + behind, passes, most_nodes, most_depth)
        for accepted in range(flying + 1):
            last = accepted - 1 if accepted else ROOT
            children = [node for node, parent in enumerate(tree.parents) if parent == last]
            if accepted < flying:
                real = below(tree, children[1]) if len(children) > 1 else 0
                assert ahead.nodes_below(Met.BRANCH, accepted, flying, behind, passes) == real
            else:
                real = below(tree, children[0]) if children else 0
                assert ahead.nodes_below(Met.TAIL, accepted, flying, behind, passes) == real


def test_nothing_grows_after_the_last_pass_nor_below_a_verdict_that_was_not_met():
    for flying, behind in ((1, 0), (4, 0), (4, 2)):
        ahead = Ahead(0.8, 0.5, 60, 9)
        last = ahead.most_passes(flying, behind)
        full = [ahead.nodes_below(Met.TAIL, flying, flying, behind, passes) for passes in (last, last + 5)]
        assert full[0] == full[1]
        size = len(grown((0.8, 0.5), flying + behind, last, 60, 9))
        assert size <= flying + behind + 60
        assert abs(flying + behind + last * ahead.num_branches(flying, behind) - size) < last, "rows, about"
    assert ahead.nodes_below(Met.NOWHERE, 2, 4, 0, 9) == ahead.nodes_below(Met.BRANCH, 4, 4, 0, 0) == 0


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_a_draft_that_is_never_or_always_right_is_counted_too(acceptance):
    ahead = Ahead(acceptance, 0.0, 8, 9)
    assert (ahead.most_passes(2, 0) > 0) == (acceptance > 0)
    assert ahead.nodes_below(Met.TAIL, 2, 2, 0, 3) == (2 if acceptance else 0)
