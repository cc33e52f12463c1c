"""What a grammar forces, a drafter: where one continuation alone is allowed, such as the next key of an object.

The target may still write the same text in other tokens, so how often a proposal was right is measured. Knows the
output of one sequence; does not know tokenizers and what a round costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from specdec.core.limits import MAX_DRAFT_TOKENS
from specdec.core.tree import TokenTree
from specdec.sampling.grammar import Budget, Compiled
from specdec.speculation.acceptance import AcceptanceRate
from specdec.speculation.prompt_lookup import PromptLookup

_MEMORY, _PRIOR, _PRIOR_TRIALS = 100, 0.8, 8

_TOKENS_AT_ONCE = 1024
"""Of a text that is resumed: the others wait for the next round, and all other streams do not."""

BUDGET = Budget(burst_s=0.02, call_s=0.0005)
"""Of a grammar on the event loop. Beyond it nothing is proposed any more."""


class Mask(Protocol):
    """The part of specdec.sampling.grammar.GrammarMask that is used here."""

    def advance(self, token_id: int) -> bool: ...

    def forced(self) -> list[int]: ...


class ForcedTokens:
    """In the place of a prompt lookup (see PromptLookup), which it asks where nothing is forced."""

    def __init__(self, grammar: Future[Compiled], num_prompt_tokens: int, lookup: PromptLookup) -> None:
        """``grammar``: nothing is forced until it is compiled."""
        self._grammar, self._lookup = grammar, lookup
        self._mask: Mask | None = None
        self._num_seen = num_prompt_tokens
        self._rate = AcceptanceRate(_MEMORY, _PRIOR, _PRIOR_TRIALS)
        self._forced: list[int] = []

    def chances(self, ids: Sequence[int]) -> list[float]:
        if self._mask is None and self._grammar.done() and self._grammar.exception() is None:
            self._mask = self._grammar.result().mask()
        if self._mask is not None:
            self._follow(self._mask, ids)
        if not self._forced:
            return self._lookup.chances(ids)
        return [self._rate.share() ** number for number in range(1, len(self._forced) + 1)]

    @property
    def in_text(self) -> bool:
        return not self._forced and self._lookup.in_text

    def _follow(self, mask: Mask, ids: Sequence[int]) -> None:
        new = ids[self._num_seen : self._num_seen + _TOKENS_AT_ONCE]
        for token in new:
            if self._forced:
                right = token == self._forced.pop(0)
                self._rate.observe(right, 1)
                self._forced = self._forced if right else []
            mask.advance(token)
        self._num_seen += len(new)
        if not self._forced and self._num_seen == len(ids):
            self._forced = mask.forced()[:MAX_DRAFT_TOKENS]

    def propose(self, num_tokens: int) -> TokenTree:
        if self._forced:
            return TokenTree.chain(self._forced[:num_tokens])
        return self._lookup.propose(num_tokens)

    def doubtful(self, num_tokens: int) -> bool:
        if self._forced:
            return self._rate.share() ** num_tokens < 0.5
        return self._lookup.doubtful(num_tokens)
