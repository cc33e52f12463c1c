"""How much is computed at once. Knows counts; refuses to know tensors and what is computed.

What callers ask for decides how many rows wait, so it must not decide how much memory they take: of what has no bound
a part is computed at a time. What comes of a row does not depend on the others of its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from specdec.core.tree import MAX_TREE_NODES

_Name = TypeVar("_Name")

MAX_TREE_ROWS = 1 + MAX_TREE_NODES
"""Rows of a pass that are no prompt: roots and nodes. No fewer than the largest tree has."""

MAX_CHAIN_NODES = 64
"""Of a chain that is verified against the distributions it was drawn from: all its rows are needed together."""


def chunked(sizes: Sequence[int], most: int) -> list[range]:
    """Neighbours together as far as they have ``most`` in all. Who is larger than that is alone."""
    found: list[range] = []
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > most:
            found.append(range(start, index))
            start, total = index, 0
        total += size
    if sizes:
        found.append(range(start, len(sizes)))
    return found


def take_turns(line: dict[_Name, Any], sizes: Mapping[_Name, int], most: int) -> list[_Name]:
    """Those of ``line`` that have a size, from its beginning on, as far as they have ``most`` in all.

    If that is not everybody, they go to the end of the line.
    """
    waiting = [name for name in line if name in sizes]
    parts = chunked([sizes[name] for name in waiting], most)
    taken = waiting[: parts[0].stop] if parts else []
    for name in taken if len(parts) > 1 else ():
        line[name] = line.pop(name)
    return taken
