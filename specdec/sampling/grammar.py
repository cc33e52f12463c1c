"""Grammars: which tokens may follow in an output that has to match one. By llguidance, which works on the CPU.

Knows grammars in llguidance's form and a tokenizer; does not know sequences and logits of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import llguidance.numpy
import torch
from llguidance import LLMatcher
from torch import Tensor

from specdec.sampling.matchers import Matchers


class Grammars:
    """The grammars of one model."""

    def __init__(self, tokenizer: Path, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """``tokenizer``: a tokenizer.json, which is read at once. The model must have end tokens."""
        self.origin = tokenizer, vocab_size, tuple(end_token_ids)
        """What it was made of, for another process."""
        self._vocab_size, self._end_token_ids = vocab_size, frozenset(end_token_ids)
        self._matchers = Matchers(str(tokenizer), vocab_size, end_token_ids)

    def knows(self, grammar: str) -> bool:
        """Whether ``mask`` takes no time."""
        return not grammar or self._matchers.knows(grammar)

    def mask(self, grammar: str) -> GrammarMask | None:
        """At the beginning of an output; None: any output will do. Raises InvalidArgument for a bad grammar."""
        if not grammar:
            return None
        return GrammarMask(self._matchers.matcher(grammar), self._vocab_size, self._end_token_ids)


class GrammarMask:
    """See specdec.sampling.logits_processors.Mask. Behind an end token everything is allowed: it is not part of the
    output."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        self._matcher, self._end_token_ids = matcher, end_token_ids
        self._words = llguidance.numpy.allocate_token_bitmask(1, vocab_size)  # [1, vocab / 32] int32
        self._vocab_size = vocab_size
        self._num_behind = 0  # the end token, and tokens after it

    def advance(self, token_id: int) -> bool:
        if self._num_behind or (token_id in self._end_token_ids and self._matcher.is_accepting()):
            self._num_behind += 1
            return True
        return self._matcher.try_consume_tokens([token_id]) == 1

    def rewind(self, num_tokens: int) -> None:
        behind = min(self._num_behind, num_tokens)
        self._num_behind -= behind
        if num_tokens > behind:
            self._matcher.rollback(num_tokens - behind)

    def mask(self, row: Tensor) -> None:
        if self._num_behind:
            return
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._words)
        if self._matcher.is_error():  # too complex at this place: no token is allowed from now on
            return
        bits = torch.from_numpy(self._words.view("uint8")).to(row.device)  # [1, vocab / 8]
        allowed = (bits[..., None] >> torch.arange(8, dtype=torch.uint8, device=row.device) & 1).bool()
        row.masked_fill_(~allowed.flatten()[: self._vocab_size], -torch.inf)
