"""How much to speculate. Pure: no clock of its own, no I/O."""

from __future__ import annotations

from orchestrator.sequence import Sequence
from specdec.rounds import Budget, Verdict
from specdec.tree import TokenTree


class Controller:
    """A chain of ``num_draft_tokens`` every round, as long as it can be used."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens

    def budget(self, sequence: Sequence) -> Budget:
        """Fixed before anything is drafted, by the length that is left alone: never by what was proposed."""
        # The last token of all comes from the target anyway.
        depth = min(self._num_draft_tokens, sequence.remaining - 1)
        return Budget(max_nodes=depth, max_depth=depth)

    def observe(self, tree: TokenTree, verdict: Verdict) -> None:
        """The outcome of a round."""
