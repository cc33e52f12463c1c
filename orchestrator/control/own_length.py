"""How many nodes a target drafts with its own head: the number with the most tokens per second, or none.

goodput(k) = E[accepted(k) + 1] / (drafting(n k) + target(n (k + 1))), compared with the target alone. There is no wait
for another service in it, so rounds stay autonomous.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.control.cost_model import CostModel, Line
from orchestrator.rounds import RoundRecord, Source

START_NODES = 3
"""Nodes of an own tree while nothing is known of its costs."""

PROBE_EVERY, PROBE_ROUNDS = 48, 3
"""Where the head does not pay, every so many rounds so many are drafted by it."""

ON = 1.02
"""Goodput over that of the target alone from which the head drafts."""


class OwnLength:
    """The policy for all sequences of one orchestrator, where targets have a head."""

    def __init__(self, costs: CostModel, most: int) -> None:
        """``most``: nodes of an own tree at most."""
        self.costs, self.most = costs, most
        self._drafting = Line(0.2)
        self._num_rounds = 0

    def choose(self, expected: Sequence[float]) -> tuple[int, float]:
        """The nodes of the next own trees, and their goodput in tokens per second (0: not known). ``expected``: tokens
        of a round by the number of nodes."""
        costs = self.costs
        if not (costs.target_known and self._drafting.known):
            return min(START_NODES, self.most), 0.0
        rates = [tokens / self._seconds(number) for number, tokens in enumerate(expected[: self.most + 1])]
        best = max(range(len(rates)), key=rates.__getitem__)
        if best and rates[best] * costs.alone_s >= ON:
            return best, rates[best]
        probes = self._num_rounds % PROBE_EVERY < PROBE_ROUNDS
        return (min(START_NODES, self.most) if probes else 0), 0.0

    def _seconds(self, number: int) -> float:
        live = self.costs.num_live
        drafting_s = self._drafting(live * number) if number else 0.0
        return drafting_s + self.costs.target_s(live * (number + 1))

    def observe(self, record: RoundRecord) -> None:
        """A round of any sequence with a head has ended; the costs know it already."""
        self._num_rounds += 1
        timings = record.timings
        if record.proposal.source is Source.HEAD:
            self._drafting.observe(record.num_nodes * timings.sequences, max(1, timings.own_us) / 1e6)
