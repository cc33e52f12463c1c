"""How many nodes a target drafts by itself: the number with the most tokens per second, or none.

The goodput (specdec/speculation/cost.py) is compared with that of the target alone. There is no wait for another
service in it, so rounds stay autonomous.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.control.cost_model import CostModel, Line
from orchestrator.rounds import RoundRecord, Source
from specdec.core.limits import MAX_TREE_ROWS
from specdec.speculation.acceptance import AcceptanceModel
from specdec.speculation.cost import best_number

START_NODES = 3
"""Nodes of a self-draft while nothing is known of its costs."""

PROBE_EVERY, PROBE_ROUNDS = 48, 3
"""Where self-drafts do not pay, every so many rounds so many are drafted."""

ON = 1.02
"""Goodput over that of the target alone from which the target drafts."""

_MEMORY_ROUNDS, _PRIOR_TOKENS = 500, 50.0
"""Rounds that accepted and expected tokens are counted over, about, and tokens that came true before. Many, as this
is about the method: what is about one text, its acceptance knows."""


class SelfDraftLength:
    """The policy for all sequences of one orchestrator, where targets draft by themselves."""

    def __init__(self, costs: CostModel, most: int, looks_up: bool = False) -> None:
        """``most``: nodes of a self-draft at most. ``looks_up``: targets look up in their texts, and draft where these
        repeat themselves alone."""
        self.costs, self.most, self.looks_up = costs, most, looks_up
        self.acceptance = AcceptanceModel()  # of all texts
        self._drafting = Line(0.2)
        self._num_rounds = 0
        self._accepted = self._expected = 0.0  # tokens of self-drafts

    def choose(self, expected: Sequence[float], only: int = 0) -> tuple[int, float]:
        """The nodes of the next self-drafts, and their goodput in tokens per second (0: not known). ``expected``:
        tokens of a round by the number of nodes. ``only``: the number of nodes that a method always has; 0: any."""
        costs, first = self.costs, only or min(START_NODES, self.most)
        max_nodes = min(self.most, len(expected) - 1, max(1, MAX_TREE_ROWS // costs.num_live - 1))  # all in one pass
        if not (costs.target_known and self._drafting.known):
            return first, 0.0
        tokens = [1 + self._came_true * (number - 1) for number in expected]
        best = best_number(tokens, self._seconds, [only] if only else range(1, max_nodes + 1))
        rate = tokens[best] / self._seconds(best)
        if rate * costs.alone_s >= ON:
            return best, rate
        probes = self._num_rounds % PROBE_EVERY < PROBE_ROUNDS
        return (first if probes else 0), 0.0

    @property
    def _came_true(self) -> float:
        """The share of what was expected of self-drafts that was accepted. The chances of ranks are those of one kind
        of tree, and methods differ in theirs."""
        return (self._accepted + _PRIOR_TOKENS) / (self._expected + _PRIOR_TOKENS)

    def _seconds(self, number: int) -> float:
        live = self.costs.num_live
        drafting_s = self._drafting(live * number) if number else 0.0
        return drafting_s + self.costs.target_s(live * (number + 1))

    def observe(self, record: RoundRecord, expected: float) -> None:
        """A round of any sequence that its target drafts for has ended; the costs know it already. ``expected``: its
        accepted tokens."""
        self._num_rounds += 1
        timings = record.timings
        if record.source is Source.SELF_DRAFT:
            self._drafting.observe(record.num_nodes * timings.sequences, max(1, timings.self_draft_us) / 1e6)
            self._accepted += len(record.accepted) - self._accepted / _MEMORY_ROUNDS
            self._expected += expected - self._expected / _MEMORY_ROUNDS
