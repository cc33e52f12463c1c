"""A grammar that can be checked by hand: a finite automaton over token ids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor


class Automaton:
    """See specdec.sampling.logits_processors.Mask. ``edges[state][token]`` is the next state; what has no edge is
    forbidden."""

    def __init__(self, edges: Sequence[Mapping[int, int]]) -> None:
        self._edges = edges
        self.states = [0]

    def advance(self, token_id: int) -> bool:
        if token_id not in self._edges[self.states[-1]]:
            return False
        self.states.append(self._edges[self.states[-1]][token_id])
        return True

    def rewind(self, num_tokens: int) -> None:
        assert 0 <= num_tokens < len(self.states)
        del self.states[len(self.states) - num_tokens :]

    def mask(self, row: Tensor) -> None:
        allowed = list(self._edges[self.states[-1]])
        kept = row[allowed].clone()
        row.fill_(-math.inf)
        row[allowed] = kept

    def accepts(self, token_ids: Sequence[int]) -> bool:
        state = 0
        for token_id in token_ids:
            if token_id not in self._edges[state]:
                return False
            state = self._edges[state][token_id]
        return True
