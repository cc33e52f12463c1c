"""A grammar that can be checked by hand: a finite automaton over token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Automaton:
    """See specdec.sampling.logits_processors.Mask. ``edges[state][token]`` is the next state; what has no edge is
    forbidden."""

    problem = None
    call_s = 0.0

    def __init__(self, edges: Sequence[Mapping[int, int]], state: int = 0) -> None:
        self._edges, self.state = edges, state

    def advance(self, token_id: int) -> bool:
        if token_id not in self._edges[self.state]:
            return False
        self.state = self._edges[self.state][token_id]
        return True

    def copy(self) -> Automaton:
        return Automaton(self._edges, self.state)

    def allowed(self) -> bytes:
        bits = sum(1 << token_id for token_id in self._edges[self.state])
        return bits.to_bytes((bits.bit_length() + 7) // 8, "little")

    def accepts(self, token_ids: Sequence[int]) -> bool:
        state = 0
        for token_id in token_ids:
            if token_id not in self._edges[state]:
                return False
            state = self._edges[state][token_id]
        return True
