"""Prompt lookup in the target: where the text repeats itself, what followed the last time is the self-draft.

Knows ids alone, so it serves every engine, and no message lies between two passes. (Saxena 2023, "Prompt Lookup
Decoding".)
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from operator import neg

from specdec.core.rounds import LOOKUP
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.speculation.prompt_lookup import HitRates, PromptLookup
from target_service.self_draft.trees import DraftRequest, Passed

MIN_CHANCE = 0.3
"""Less likely tokens are not proposed. How many of the likely ones pay is the orchestrator's to say."""


class TextLookup:
    """See self_draft/trees.py, SelfDrafter."""

    kind = LOOKUP
    taps = None
    num_nodes = 0

    def __init__(self) -> None:
        self._rates = HitRates()

    def open(self, salt: bytes) -> PromptLookup:
        return PromptLookup(self._rates)

    def num_rows(self, state: PromptLookup) -> None:
        return None

    def learn(self, state: PromptLookup, passed: Passed) -> None:
        """It compares its proposals with the text when it drafts."""

    def grow(self, requests: Sequence[DraftRequest[PromptLookup]]) -> list[TokenTree]:
        return [chain_of(request.state, request.ids, request.max_nodes) for request in requests]


def chain_of(lookup: PromptLookup, ids: Sequence[int], max_nodes: int) -> TokenTree:
    """What probably follows ``ids``, at most ``max_nodes`` tokens."""
    if max_nodes < 1:
        return EMPTY_TREE
    chances = lookup.chances(ids)
    return lookup.propose(min(max_nodes, bisect(chances, -MIN_CHANCE, key=neg)))
