"""How far a tree has grown below what is in flight. The counterpart of draft_service/ahead.py, in counts.

Every pass makes every branch one node longer: the chain's end, and a runner-up beside each node in flight.
"""

from __future__ import annotations

from specdec.plan.request import Met


def num_branches(flying: int, behind: int) -> int:
    """The end of the chain and the runner-ups; the token after the chain has one only if the chain goes on."""
    return flying + 1 + (behind > 0)


def most_passes(flying: int, behind: int, most_nodes: int, most_depth: int) -> int:
    """After so many there is nothing left to grow."""
    return min(-(-most_nodes // num_branches(flying, behind)), most_depth)


def nodes_below(
    met: Met, accepted: int, flying: int, behind: int, passes: int, most_nodes: int, most_depth: int
) -> int:
    """Nodes below the token that ended the verdict, where the draft had it.

    ``accepted`` of ``flying`` nodes were; ``behind`` of the same chain followed them before the ``passes`` began.
    """
    branches = num_branches(flying, behind)
    if met is Met.TAIL:
        grown = min(passes, _share(most_nodes, branches, 0))
        return max(0, min(flying + behind + grown, most_depth) - flying - 1)
    if met is Met.BRANCH and (accepted < flying or behind):
        grown = min(passes, _share(most_nodes, branches, flying - accepted + (behind > 0)))
        return max(0, min(grown, most_depth - accepted) - 1)
    return 0


def _share(most_nodes: int, branches: int, index: int) -> int:
    """Of a budget that is dealt out in turns; deeper branches are dealt first."""
    return (most_nodes - index + branches - 1) // branches
