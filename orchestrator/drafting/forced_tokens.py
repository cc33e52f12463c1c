"""What a grammar forces, a drafter: where one continuation alone is allowed, such as the next key of an object.

The target may still write the same text in other tokens, so how often a proposal was right is measured. Knows the
output of one sequence; does not know tokenizers and what a round costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from orchestrator.drafting.prompt_lookup import MAX_LOOKUP_TOKENS, PromptLookup
from specdec.core.tree import TokenTree
from specdec.speculation.acceptance import AcceptanceRate

_MEMORY, _PRIOR, _PRIOR_TRIALS = 100, 0.8, 8


class Matcher(Protocol):
    """The part of llguidance.LLMatcher that is used here."""

    def try_consume_tokens(self, tokens: list[int]) -> int: ...

    def compute_ff_tokens(self) -> list[int]: ...

    def is_stopped(self) -> bool: ...


class ForcedTokens:
    """In the place of a prompt lookup (see PromptLookup), which it asks where nothing is forced."""

    def __init__(self, matcher: Matcher, num_prompt_tokens: int, lookup: PromptLookup) -> None:
        """``matcher``: of the grammar at the beginning of the output."""
        self._matcher, self._lookup = matcher, lookup
        self._num_seen = num_prompt_tokens
        self._rate = AcceptanceRate(_MEMORY, _PRIOR, _PRIOR_TRIALS)
        self._forced: list[int] = []

    def chances(self, ids: Sequence[int]) -> list[float]:
        for token in ids[self._num_seen :]:
            if self._forced:
                right = token == self._forced.pop(0)
                self._rate.observe(right, 1)
                self._forced = self._forced if right else []
            self._matcher.try_consume_tokens([token])
        self._num_seen = len(ids)
        if not self._forced and not self._matcher.is_stopped():
            self._forced = self._matcher.compute_ff_tokens()[:MAX_LOOKUP_TOKENS]
        if not self._forced:
            return self._lookup.chances(ids)
        return [self._rate.share() ** number for number in range(1, len(self._forced) + 1)]

    def propose(self, num_tokens: int) -> TokenTree:
        if self._forced:
            return TokenTree.chain(self._forced[:num_tokens])
        return self._lookup.propose(num_tokens)

    def doubtful(self, num_tokens: int) -> bool:
        if self._forced:
            return self._rate.share() ** num_tokens < 0.5
        return self._lookup.doubtful(num_tokens)
