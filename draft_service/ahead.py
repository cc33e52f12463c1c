"""Where a tree grows while a part of it is being verified.

Knows its shape and what of it is in flight; refuses to know tokens. A verdict is a path through what is in flight and
one token more: the token after all of it, or a correction on the way. So every branch begins at one of these, and all
branches grow alike until the verdict comes.
"""

from __future__ import annotations

from typing import NamedTuple

from specdec.tree import ROOT, TokenTree


class Spot(NamedTuple):
    """A node, or ROOT, that is to have its likeliest children; some of them may be there already."""

    parent: int
    num_children: int


def spots(tree: TokenTree, num_flying: int, branched: bool, max_nodes: int, max_depth: int) -> tuple[Spot, ...]:
    """For one pass, the most likely first; no more than ``max_nodes`` children come of them, none at ``max_depth``.

    The first ``num_flying`` nodes of ``tree`` are in flight. Unless it ``branched`` before, every one of them, and the
    root, gets its likeliest child that is not there yet; branches get one at their end.
    """
    depths = (-1, *tree.depths)  # by node, from ROOT on
    with_children = set(tree.parents)
    found = [Spot(node, 1) for node in range(num_flying, len(tree)) if node not in with_children]
    if not branched:
        found += [Spot(node, 1 + (node in with_children)) for node in range(num_flying - 1, ROOT - 1, -1)]
    return tuple(spot for spot in found if depths[spot.parent + 1] + 1 < max_depth)[: max(0, max_nodes)]
