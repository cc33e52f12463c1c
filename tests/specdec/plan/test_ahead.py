"""The counts are those of the trees that the draft service grows."""

from __future__ import annotations

import pytest

from draft_service.ahead import spots
from specdec.plan.ahead import most_passes, nodes_below
from specdec.plan.request import Met
from specdec.tree import ROOT, TokenTree


def grown(flying, behind, passes, most_nodes, most_depth):
    """As draft_service/engine.py does: every child is a new token."""
    tree, left = TokenTree.chain(range(flying + behind)), most_nodes
    for number in range(passes):
        for parent, num_children in spots(tree, flying, number > 0, left, most_depth):
            have = sum(1 for each in tree.parents if each == parent)
            new = num_children - have
            tree = TokenTree(tree.token_ids + (len(tree),) * new, (*tree.parents, *(parent,) * new))
            left -= new
    return tree


def below(tree, node):
    """Nodes of the longest path below ``node``: after a verdict the tree is a chain."""
    children = [index for index, parent in enumerate(tree.parents) if parent == node]
    return max((1 + below(tree, child) for child in children), default=0)


@pytest.mark.parametrize("flying", [1, 2, 4, 6])
@pytest.mark.parametrize("behind", [0, 1, 3])
@pytest.mark.parametrize("passes", [0, 1, 2, 5, 20])
@pytest.mark.parametrize("most_nodes", [5, 60, 256])
def test_branches_are_as_long_as_the_drafts(flying, behind, passes, most_nodes):
    most_depth = 2 * max(4, flying) + 1
    tree = grown(flying, behind, passes, most_nodes, most_depth)

    def counted(met, accepted):
        return nodes_below(met, accepted, flying, behind, passes, most_nodes, most_depth)

    # What branches that are full leave over goes to the others: only where that matters may the count be lower.
    spare = 1 if passes < most_nodes // (flying + 2) else 3
    chain = [*range(flying + behind)]
    tail = next((i for i, p in enumerate(tree.parents) if p == flying - 1), None)
    real = 0 if tail is None else below(tree, tail)
    assert counted(Met.TAIL, flying) <= real < counted(Met.TAIL, flying) + spare + (spare > 1) * most_depth
    for accepted in range(flying + (behind > 0)):
        parent = accepted - 1 if accepted else ROOT
        branch = [i for i, p in enumerate(tree.parents) if p == parent and i not in chain]
        real = below(tree, branch[0]) if branch else 0
        mine = counted(Met.BRANCH, accepted)
        assert mine <= real < mine + spare + (spare > 1) * most_depth
        if spare == 1:
            assert mine == real


@pytest.mark.parametrize(("flying", "behind"), [(1, 0), (4, 0), (4, 2)])
def test_nothing_grows_after_the_last_pass(flying, behind):
    last = most_passes(flying, behind, 60, 9)
    full = [nodes_below(Met.TAIL, flying, flying, behind, passes, 60, 9) for passes in (last, last + 5)]
    assert full[0] == full[1]
    assert len(grown(flying, behind, last, 60, 9)) <= flying + behind + 60


def test_what_was_not_met_has_nothing_below():
    assert nodes_below(Met.NOWHERE, 2, 4, 0, 9, 60, 9) == 0
    assert nodes_below(Met.BRANCH, 4, 4, 0, 9, 60, 9) == 0  # the token after the chain has no runner-up yet
