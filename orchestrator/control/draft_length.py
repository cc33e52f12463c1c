"""How many tokens to draft: one decision per pass of the target, for all its sequences.

The goodput (specdec/speculation/cost.py) is compared with that of the target alone. All sequences of a pass decide
alike: one that drafts alone makes the others' passes longer, and misses some of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from orchestrator.control.cost_model import CostModel
from orchestrator.rounds import RoundRecord
from specdec.core.rounds import OVERRUN
from specdec.speculation.cost import Round, best_number, expected_tokens, mean_round

ON, OFF, OFF_PASSES = 1.05, 1.00, 3
"""Goodput over that of the target alone: drafting begins at ON, and ends after OFF_PASSES passes below OFF."""

START_TOKENS, PROBE_SEQUENCES = 2, 4
"""Draft tokens of a probe, and of the start among several sequences; sequences that probe."""

FIRST_PAUSE, LONGEST_PAUSE, PAUSE_PER_WAIT = 8, 256, 32
"""Passes between two probes while drafting is off, doubled each time, and PAUSE_PER_WAIT for each pass of waiting."""

SURE = 8
"""Draft tokens that are always considered. More are as long as they may pay for their rows."""

MIN_GAIN = 0.01
"""Expected tokens of one draft token more, below which it is not considered."""

LOAD_CHANGE = 2
"""With so many times as many sequences, or as few, the costs are others: drafting is probed at once."""

CHECK_EVERY = 64
"""Passes after which two go without drafts, to measure the target alone."""


class DraftLength:
    """The policy for all sequences of one orchestrator that grow ahead, or for all that do not."""

    def __init__(self, costs: CostModel, most: int, ahead: bool = False) -> None:
        """``most``: draft tokens of one round at most. ``ahead``: drafts grow ahead of the verdict."""
        self.costs, self.most, self.ahead = costs, most, ahead
        self.on = False
        self.now = 0
        """Number of the pass."""
        self.num_tokens = 0
        """Draft tokens that a round waits for; 0: it takes what is there."""
        self._expected, self._expected_of_hit = [1.0] * (SURE + 1), [1.0] * (SURE + 1)  # tokens of a round
        self._reviewed = -1
        self._stretch = 1.0  # rounds with drafts: measured over expected time
        self._load = 1
        self._below = 0  # passes below OFF
        self._begun = self._checked = 0  # when drafting, and its last check, began
        self._pause, self._next_probe, self._probe_until = FIRST_PAUSE, 0, 0
        self._probing: set[int] = set()
        self._num_probes = 0

    def passed(self, before: int) -> int:
        """The pass after ``before``, which was that of a sequence's last verdict."""
        self.now = max(self.now, before + 1)
        return self.now

    @property
    def checking(self) -> bool:
        """Drafting pauses, to measure the target alone."""
        return self.on and self.now - self._checked >= CHECK_EVERY

    def considered(self, chances: Iterable[float], max_nodes: int) -> list[float]:
        """Expected tokens of a round with 0, 1, ... draft tokens of these falling ``chances``: at least SURE, and as
        many as may pay for their rows. Those beyond ``max_nodes``, which the target does not verify, give none."""
        max_nodes = min(max_nodes, self.most)
        within = itertools.islice(chances, max_nodes)
        sure = list(itertools.islice(within, SURE))
        if self.costs.target_known:
            sure.extend(itertools.takewhile(self.costs.min_chance.__le__, within))
        return expected_tokens(sure, max(SURE, len(sure)))

    def goodput(self, num_tokens: int) -> float:
        """Tokens per second of one sequence if all wait for so many draft tokens."""
        return self._rate(num_tokens, self._hit() if self.ahead else None)

    def _rate(self, num_tokens: int, hit: Round | None) -> float:
        expected = self._expected
        mean = Round(expected[min(num_tokens, len(expected) - 1)], self._seconds(num_tokens))
        if hit is not None:
            mean = mean_round(hit, mean, self.costs.hit_rate)
        return mean.tokens / (mean.seconds * self._stretch)

    def _hit(self) -> Round:
        """A round for which a tree has arrived."""
        depth = best_depth(self.costs, self._expected_of_hit)
        return Round(self._expected_of_hit[depth], self.costs.round_s(depth))

    def _best(self) -> int:
        hit = self._hit() if self.ahead else None
        return max(range(0 if self.ahead else 1, len(self._expected)), key=lambda number: self._rate(number, hit))

    def _seconds(self, num_tokens: int) -> float:
        return self.costs.draft_s(num_tokens) + self.costs.round_s(num_tokens * self.costs.rows_per_token)

    def observe(self, record: RoundRecord) -> None:
        """A round of any sequence has ended."""
        self.costs.observe(record, alone=self.checking if self.on else self.now >= self._probe_until)
        drafting = record.drafting
        round_trip_s, num_tokens = record.exchange.round_trip_s, min(drafting.num_asked, self.most)
        if self.on and record.num_nodes and num_tokens and round_trip_s and drafting.waited_s:
            ratio = (drafting.waited_s + round_trip_s) / self._seconds(num_tokens)
            self._stretch += 0.05 / self.costs.num_live * (min(3.0, max(0.5, ratio)) - self._stretch)

    def drafts(self, member: int, expected: Sequence[float], of_hit: Sequence[float], probes: bool) -> bool:
        """Whether sequence ``member`` drafts in this pass. Called once per pass. ``expected``: tokens of a round by the
        number of draft tokens that are waited for; ``of_hit``: by the number of the best nodes of a tree that has
        arrived. ``probes``: it may be one of those that probe."""
        # A probe counts for those that have not tried for long.
        if self.on or member in self._probing or not self._probing:
            weight = 1 / min(self.costs.num_live, len(self._probing) or self.costs.num_live)
            self._expected = _moved(self._expected, expected, weight)
            self._expected_of_hit = _moved(self._expected_of_hit, of_hit, weight)
        if self.now != self._reviewed:
            self._reviewed = self.now
            self._review()
        if self.on:
            return not self.checking
        if self.now >= self._probe_until or not probes:
            return False
        if len(self._probing) < max(1, min(PROBE_SEQUENCES, self.costs.num_live // 4)):
            self._probing.add(member)
        return member in self._probing

    def _review(self) -> None:
        costs = self.costs
        if not costs.known:
            if self.now >= self._next_probe:
                # One number of tokens does not tell how the time depends on it.
                self._probe((START_TOKENS, 1)[self._num_probes % 2])
            return
        if not self._load / LOAD_CHANGE < costs.num_live < self._load * LOAD_CHANGE:
            self._load, self._stretch = costs.num_live, 1.0
            self._pause, self._next_probe = FIRST_PAUSE, self.now
            self.num_tokens = min(self.num_tokens, START_TOKENS)
        best = self._best()
        gain = self.goodput(best) * costs.alone_s
        if self.on:
            self._continue(best, gain)
        elif self._probing and self.now >= self._probe_until:
            self._probing.clear()
            if gain >= ON:
                self.on, self._below, self._begun = True, 0, self.now
                self._checked = self.now
                self.num_tokens = min(best, START_TOKENS) if costs.num_live > 1 else best
        elif self.now >= self._next_probe:
            self._stretch += 0.5 * (1 - self._stretch)  # it may be out of date
            costs.hit_rate = max(costs.hit_rate, 0.5)
            self._probe(START_TOKENS)

    def _continue(self, best: int, gain: float) -> None:
        if self.checking:
            if self.now >= self._checked + CHECK_EVERY + OVERRUN:
                self._checked = self.now
            return
        self.num_tokens += (best > self.num_tokens) - (best < self.num_tokens)
        below = self.goodput(self.num_tokens) * self.costs.alone_s < OFF
        self._below = self._below + 1 if below else 0
        if self._below >= OFF_PASSES and gain < ON:
            self.on = False
            if self.now - self._begun > self._pause:
                self._pause = FIRST_PAUSE
            self._wait_for_probe(self.now)

    def _probe(self, num_tokens: int) -> None:
        self.num_tokens = 0 if self.ahead else min(num_tokens, self.most)
        self._num_probes += 1
        self._probing.clear()
        # Autonomous verdicts in flight come first. What grows ahead is there some passes later.
        self._probe_until = self.now + OVERRUN + (6 if self.ahead else 1 if self._wait_passes > 1 else 2)
        self._wait_for_probe(self._probe_until)

    @property
    def _wait_passes(self) -> float:
        """Passes for which a probe waits for the draft."""
        if self.ahead or not self.costs.known:
            return 0.0
        return self.costs.draft_s(START_TOKENS) / self.costs.alone_s

    def _wait_for_probe(self, now: int) -> None:
        pause = max(self._pause, round(PAUSE_PER_WAIT * self._wait_passes))
        self._next_probe = now + min(pause, LONGEST_PAUSE)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def best_lookup(self, chances: Sequence[float], to_come: int) -> tuple[int, float]:
        """Of a proposal beside the draft, with the chances that its first 1, 2, ... tokens are accepted, the number
        worth verifying, and its goodput. 0: the target alone is faster. ``to_come``: autonomous verdicts in flight,
        after which the proposal must still hold."""
        if not chances:
            return 0, 0.0
        costs = self.costs
        to_come = min(to_come, OVERRUN)  # the target is told to stop
        alive = 1.0 if not to_come else (chances[to_come - 1] if to_come <= len(chances) else 0.0)
        tokens = expected_tokens(chances, len(chances))
        best = best_depth(costs, tokens)
        best_rate = tokens[best] / costs.round_s(best)
        rate = alive * best_rate + (1 - alive) / max(costs.alone_s, costs.round_s(0))
        return (best, best_rate) if rate * costs.alone_s >= ON else (0, 0.0)


def best_depth(costs: CostModel, expected: Sequence[float]) -> int:
    """Nodes of an arrived tree that are worth verifying, at least one. ``expected``: tokens of a round by number."""
    return best_number(expected, costs.round_s, range(1, len(expected)))


def _moved(means: list[float], values: Sequence[float], weight: float) -> list[float]:
    """Where one of them ends, further draft tokens give nothing."""
    longer = [*means, *itertools.repeat(means[-1], len(values) - len(means))]
    padded = itertools.chain(values, itertools.repeat(values[-1]))
    moved = [mean + weight * (value - mean) for mean, value in zip(longer, padded, strict=False)]
    while len(moved) > SURE + 1 and moved[-1] - moved[-2] < MIN_GAIN:
        moved.pop()
    return moved
