"""The methods without weights, by the names that a target's settings give them."""

from __future__ import annotations

import re

from target_service.self_draft.lookahead import Lookahead
from target_service.self_draft.recycling import Recycling
from target_service.self_draft.trees import SelfDrafter, SelfDraftTrees


def self_drafter(name: str, vocab_size: int) -> SelfDrafter:
    """``recycling``, ``lookahead`` or ``lookahead:W,N,G``. Raises ValueError for anything else."""
    if name == Recycling.kind:
        return SelfDraftTrees(Recycling(vocab_size))
    if (found := re.fullmatch(r"lookahead(?::(\d+),(\d+),(\d+))?", name)) is None:
        raise ValueError(f"{name} is neither recycling nor lookahead:W,N,G with three numbers")
    return Lookahead(*map(int, found.groups())) if found[1] else Lookahead()
