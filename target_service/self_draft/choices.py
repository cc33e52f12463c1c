"""A static tree, as Medusa's authors write it: paths of ranks, such as [0, 2] for the third candidate below the first.

All nodes may be given, or the longest paths alone: their beginnings are nodes as well. Knows ranks; does not know
tokens. (Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads".)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.core.tree import ROOT, TokenTree
from specdec.speculation.tree_growth import Open

Path = tuple[int, ...]


def nodes_of(choices: Any) -> list[Path]:
    """The paths of all nodes, short ones first, then by their ranks. Raises ValueError for what is no list of paths."""
    if not (_is_list(choices) and all(_is_list(path) and path and all(map(_is_rank, path)) for path in choices)):
        raise ValueError("a static tree is a list of paths, each a list of ranks from 0 to 63")
    paths = {tuple(path[:end]) for path in choices for end in range(1, 1 + len(path))}
    return sorted(paths, key=lambda path: (len(path), path))


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 64


class RankTree:
    """The nodes of a static tree, level by level. Takes the place of a Frontier."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """``paths``: see nodes_of."""
        self._paths_left = paths
        self._nodes: dict[Path, int] = {(): ROOT}
        self._taken: list[Path] = []

    def take(self, max_nodes: int, pass_rows: float = 0.0) -> list[Open]:
        """The nodes of the next level of which the parents are there. Each has a chance of 1."""
        level = [path for path in self._paths_left if len(path) == len(self._paths_left[0])]
        self._paths_left = self._paths_left[len(level) :]
        self._taken = [path for path in level if path[:-1] in self._nodes][:max_nodes]
        return [Open(1.0, self._nodes[path[:-1]], path[-1]) for path in self._taken]

    def grow(self, tree: TokenTree) -> None:
        """``tree``: with the nodes that were taken last; without all of them it grows no further."""
        start = len(self._nodes) - 1
        if len(tree) - start == len(self._taken):
            self._nodes.update({path: start + number for number, path in enumerate(self._taken)})
