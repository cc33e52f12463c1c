"""The methods without weights, by the names that a target's settings give them."""

from __future__ import annotations

import re
from typing import Any

from target_service.self_draft.lookahead import Lookahead
from target_service.self_draft.recycling import Recycling
from target_service.self_draft.text_lookup import TextLookup
from target_service.self_draft.trees import SelfDrafter, SelfDraftTrees


def self_drafter(name: str, vocab_size: int) -> SelfDrafter[Any]:
    """``lookup``, ``recycling``, ``lookahead`` or ``lookahead:W,N,G``. Raises ValueError for anything else."""
    if name == TextLookup.kind:
        return TextLookup()
    if name == Recycling.kind:
        return SelfDraftTrees(Recycling(vocab_size))
    if (match := re.fullmatch(r"lookahead(?::(\d+),(\d+),(\d+))?", name)) is None:
        raise ValueError(f"{name} is none of lookup, recycling and lookahead:W,N,G with three numbers")
    return Lookahead(*map(int, match.groups())) if match[1] else Lookahead()
