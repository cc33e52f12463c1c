"""Chunk limits: how much is computed at once.

Callers decide how many rows wait, but they must not decide how much memory a pass takes. Work without a bound is
therefore computed in chunks. The result of a row does not depend on the other rows of its chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core.tree import MAX_TREE_NODES

MAX_TREE_ROWS = 1 + MAX_TREE_NODES
"""Roots and nodes in one pass (prompt rows do not count): room for at least the largest tree."""

MAX_GRAMMAR_BYTES = 1 << 16
"""Of a grammar in llguidance's form."""

MAX_DRAFT_TOKENS = 64
"""Draft tokens of a round, chosen by the client or by the policy."""

MAX_CHAIN_NODES = 64
"""Nodes of a chain under token or block verification, which needs all rows of the chain at once."""


def chunked(sizes: Sequence[int], max_total: int) -> list[range]:
    """Consecutive ranges of ``sizes`` with a total of at most ``max_total`` each. A larger item gets its own range."""
    chunks: list[range] = []
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > max_total:
            chunks.append(range(start, index))
            start, total = index, 0
        total += size
    if sizes:
        chunks.append(range(start, len(sizes)))
    return chunks
