"""What an advance may request, by the limits of the contract and of a drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from specdec.core.errors import InvalidArgument
from specdec.core.limits import MAX_CHAIN_NODES
from specdec.core.rounds import AHEAD, SIBLINGS, Budget, ModelInfo
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import MAX_TREE_NODES, TokenTree

MAX_AHEAD_NODES = 256
"""Limit of the nodes of a tree in flight, and of the nodes grown ahead of it."""

_MAX_SIBLINGS = 8


def granted(spec: SequenceSpec, budget: Budget, drafter: ModelInfo) -> Budget:
    """``budget``, its node counts clipped to what a tree may have.

    Raises InvalidArgument, which names everything that this drafter cannot do for this sequence.
    """
    if problems := list(_problems(spec, budget, drafter)):
        raise InvalidArgument(problems)
    # A caller that wants as many nodes as possible may send any number, which must not size later computations.
    max_nodes = min(budget.max_nodes, MAX_TREE_NODES if spec.keyed_by_token else MAX_CHAIN_NODES)
    return dataclasses.replace(budget, max_nodes=max_nodes, max_ahead=min(budget.max_ahead, MAX_AHEAD_NODES))


def _problems(spec: SequenceSpec, budget: Budget, drafter: ModelInfo) -> Iterator[tuple[str, str]]:
    for capability, field, wanted in (
        (AHEAD, "max_ahead", budget.max_ahead),
        (SIBLINGS, "max_siblings", budget.max_siblings),
    ):
        if wanted and capability not in drafter.capabilities:
            yield f"budget.{field}", "not supported by this drafter; must be 0"
        elif wanted and not spec.keyed_by_token:
            yield f"budget.{field}", f"must be 0 with {spec.method.value} verification"
    if budget.max_siblings > _MAX_SIBLINGS:
        yield "budget.max_siblings", f"at most {_MAX_SIBLINGS}, not {budget.max_siblings}"


def check_in_flight(tree: TokenTree, base: int, drafter: ModelInfo) -> None:
    """Raises InvalidArgument if the tree has more than MAX_AHEAD_NODES nodes or exceeds the context."""
    if len(tree) > MAX_AHEAD_NODES:
        raise InvalidArgument([("in_flight", f"at most {MAX_AHEAD_NODES} nodes, not {len(tree)}")])
    if tree and base + max(tree.depths) >= drafter.context_length:
        raise InvalidArgument([("in_flight", f"beyond the context of {drafter.context_length}")])
