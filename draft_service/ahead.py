"""Where a tree grows while a part of it is being verified.

Knows how likely its nodes are; refuses to know tokens. The verdict is a path from the root. It may leave the tree
anywhere, so the tree grows wherever the text is likeliest to go: deep below guesses that are right as a rule, wide
where they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specdec.chances import grown
from specdec.tree import TokenTree


class Spot(NamedTuple):
    """A node, or ROOT, that is to have its likeliest children; some of them may be there already."""

    parent: int
    num_children: int


def spots(tree: TokenTree, of_ranks: Sequence[float], least: float, max_nodes: int, max_depth: int) -> tuple[Spot, ...]:
    """For one pass, the likeliest first (see specdec.chances.grown): ``max_nodes`` children at most come of them, none
    at ``max_depth``."""
    most: dict[int, int] = {}
    for each in grown(of_ranks, least, tree, max_nodes, max_depth):
        most[each.parent] = each.rank + 1
    return tuple(Spot(*spot) for spot in most.items())
