"""How many nodes a target drafts by itself: the number with the most tokens per second, or none.

The goodput (specdec/speculation/cost.py) is compared with that of the target alone. There is no wait for another
service in it, so rounds stay autonomous.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from orchestrator.control.cost_model import CostModel, Curve
from orchestrator.rounds import RoundRecord, Source
from specdec.core.limits import MAX_TREE_ROWS
from specdec.core.tree import MAX_TREE_NODES
from specdec.speculation.acceptance import AcceptanceRate, CallersAcceptance
from specdec.speculation.cost import best_number

START_NODES = 3
"""Nodes of a self-draft while nothing is known of its costs."""

PROBE_EVERY, PROBE_ROUNDS = 48, 3
"""Where self-drafts do not pay, every so many rounds so many are drafted."""

ON = 1.02
"""Goodput over that of the target alone from which the target drafts."""

_MEMORY_TOKENS, _PRIOR_TOKENS = 500, 20
"""Expected tokens that those that came true are counted over, about, and those that came true before. Many, as this is
about the method: what is about one text, its acceptance knows."""


class SelfDraftLength:
    """The policy for all sequences of one orchestrator, where targets draft by themselves."""

    def __init__(self, costs: CostModel, most: int, looks_up: bool = False) -> None:
        """``most``: nodes of a self-draft at most. ``looks_up``: targets look up in their texts, and draft where these
        repeat themselves alone."""
        self.costs, self.most, self.looks_up = costs, most, looks_up
        self.acceptance = CallersAcceptance()
        self._drafting = Curve(0.2)
        self._num_rounds = 0
        # Of the first node, the next two, the next four, ...: the share of the expected tokens that was accepted. The
        # chances of ranks are those of one kind of tree; methods differ in theirs, and most of them far from the root.
        self._came_true = [
            AcceptanceRate(_MEMORY_TOKENS, 1.0, _PRIOR_TOKENS) for _ in range(MAX_TREE_NODES.bit_length())
        ]

    def choose(self, expected: Sequence[float], only: int = 0) -> tuple[int, float]:
        """The nodes of the next self-drafts, and their goodput in tokens per second (0: not known). ``expected``:
        tokens of a round by the number of nodes. ``only``: the number of nodes that a method always has; 0: any."""
        costs, first = self.costs, only or min(START_NODES, self.most)
        max_nodes = min(self.most, len(expected) - 1, max(1, MAX_TREE_ROWS // costs.num_live - 1))  # all in one pass
        if not (costs.target_known and self._drafting.known):
            return first, 0.0
        tokens = self._true_tokens(expected)
        best = best_number(tokens, self._seconds, [only] if only else range(1, max_nodes + 1))
        rate = tokens[best] / self._seconds(best)
        if rate * costs.alone_s >= ON:
            return best, rate
        probes = self._num_rounds % PROBE_EVERY < PROBE_ROUNDS
        return (first if probes else 0), 0.0

    def _true_tokens(self, expected: Sequence[float]) -> list[float]:
        """Of what is expected of a round with 0, 1, ... nodes, what comes true."""
        shares = [rate.share() for rate in self._came_true]
        gains = (more - fewer for fewer, more in itertools.pairwise(expected))
        true = (gain * shares[number.bit_length() - 1] for number, gain in enumerate(gains, 1))
        return list(itertools.accumulate(true, initial=1.0))

    def _seconds(self, number: int) -> float:
        live = self.costs.num_live
        drafting_s = self._drafting(live * number) if number else 0.0
        return drafting_s + self.costs.target_s(live * (number + 1))

    def observe(self, record: RoundRecord, chances: Iterable[float]) -> None:
        """A round of any sequence that its target drafts for has ended; the costs know it already. ``chances``: those
        of its nodes to be accepted."""
        self._num_rounds += 1
        timings = record.timings
        if record.source is Source.SELF_DRAFT:
            self._drafting.observe(record.num_nodes * timings.sequences, max(1, timings.self_draft_us) / 1e6)
            for node, chance in zip(range(record.num_nodes), chances, strict=False):
                self._came_true[(node + 1).bit_length() - 1].observe(node in record.accepted, chance)
