"""Random trees, and the chance of each of their nodes."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from specdec.core.tree import ROOT, TokenTree

OF_RANKS = [0.5, 0.2, 0.1, 0.05]


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12) -> TokenTree:
    """Every node has a token of its own."""
    size = draw(st.integers(0, max_nodes))
    return TokenTree(tuple(range(size)), tuple(draw(st.integers(-1, node - 1)) for node in range(size)))


def chances_by_hand(tree: TokenTree, of_ranks: Sequence[float] = OF_RANKS) -> list[float]:
    """The chance of each node, from its path to the root."""
    chances = []
    for node in range(len(tree)):
        chance, here = 1.0, node
        while here != ROOT:
            siblings = [other for other, parent in enumerate(tree.parents) if parent == tree.parents[here]]
            rank = siblings.index(here)
            chance *= of_ranks[rank] if rank < len(of_ranks) else 0.0
            here = tree.parents[here]
        chances.append(chance)
    return chances
