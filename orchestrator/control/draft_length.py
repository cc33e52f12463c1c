"""How many tokens to draft: one decision per pass of the target, for all its sequences.

The goodput (specdec/speculation/cost.py) is compared with that of the target alone. The sequences of a pass share the
longest draft, which all wait for, and the price of a row, by which a text may have fewer. They draft in the same pass:
one that drafts alone makes the others' passes longer, and misses some of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from orchestrator.control.cost_model import CostModel
from specdec.core.limits import MAX_DRAFT_TOKENS
from specdec.core.rounds import OVERRUN
from specdec.speculation.cost import Round, best_number, expected_tokens, mean_round

ON, OFF, OFF_PASSES = 1.05, 1.00, 3
"""Goodput over that of the target alone: drafting begins at ON, and ends after OFF_PASSES passes below OFF."""

LEAVE, LEAVE_PASSES = 0.9, 128
"""A text with less than LEAVE of the tokens that it would make without drafts decodes autonomously for LEAVE_PASSES
passes."""

START_TOKENS = 2
"""Draft tokens of a probe."""

FIRST_PAUSE, LONGEST_PAUSE, PAUSE_PER_LOSS = 8, 512, 64
"""Passes between two probes while drafting is off, doubled each time, and PAUSE_PER_LOSS for each pass that is lost."""

START_DEPTH = 8
"""Draft tokens of a tree that grows ahead while nothing is known of its costs."""

MIN_PRICE = 0.01
"""The least chance of a draft token that is verified: even free rows take time."""

LOAD_CHANGE = 2
"""With so many times as many sequences, or as few, the costs are others: drafting is probed at once."""

SETTLE_PASSES = 4
"""More draft tokens are tried when a pass with the present ones was measured, or after so many passes."""

CHECK_EVERY = 64
"""Passes after which two go without drafts, to measure the target alone; where drafting gains more, more passes, as it
costs more and matters less."""


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
        self.price = MIN_PRICE
        """Chance of a draft token that pays for its row: the seconds of a row, times the tokens per second of the pass
        that it makes longer."""
        # Tokens of a round by the number of draft tokens, means over the texts.
        self._expected, self._expected_of_hit = [1.0, 1.0], [1.0, 1.0]
        self._reviewed = -1
        self._load, self._paid = 1, 1  # sequences, and the last draft tokens that paid with so many
        self._below = 0  # passes below OFF
        self._moved = 0  # when the draft tokens changed
        self._begun = self._next_check = 0  # when drafting began, and is checked again
        self._pause, self._next_probe, self._probe_until = FIRST_PAUSE, 0, 0

    def passed(self, before: int) -> int:
        """The pass after ``before``, which was that of a sequence's last verdict."""
        self.now = max(self.now, before + 1)
        return self.now

    @property
    def checking(self) -> bool:
        """Drafting pauses, to measure the target alone."""
        return self.on and self.now >= self._next_check

    def considered(self, chances: Iterable[float], max_nodes: int) -> list[float]:
        """Expected tokens of a round with 0, 1, ... draft tokens of these falling ``chances``: one, and as many as pay
        for their rows. The target does not verify more than ``max_nodes``."""
        within = itertools.islice(chances, min(max_nodes, self.most))
        worth = [next(within), *itertools.takewhile(self.price.__le__, within)]
        return expected_tokens(worth, len(worth))

    def goodput(self, num_tokens: int) -> float:
        """Tokens per second of one sequence if all wait for so many draft tokens."""
        return self._round(num_tokens, self._expected, self._hit(self._expected_of_hit)).tokens_per_s

    def pays(self, expected: Sequence[float], of_hit: Sequence[float]) -> bool:
        """Whether a text with these expected tokens gains where all draft, so many tokens as now or more: a round of
        theirs takes it some passes, in each of which it would make a token without drafts."""
        hit, num_live = self._hit(of_hit), self.costs.num_live
        for number in range(self.num_tokens, max(self.num_tokens + 1, len(expected))):
            mean = self._round(number, expected, hit)
            pass_s = max(self.costs.alone_s, self.costs.target_s(num_live * (1 + number)))
            if mean.tokens * pass_s >= LEAVE * mean.seconds:
                return True
        return False

    def _round(self, num_tokens: int, expected: Sequence[float], hit: Round | None) -> Round:
        # Where the expected tokens end, further draft tokens give nothing.
        mean = Round(expected[min(num_tokens, len(expected) - 1)], self._seconds(num_tokens))
        if hit is not None:
            mean = mean_round(hit, mean, self.costs.hit_rate)
        return mean

    def _hit(self, expected: Sequence[float]) -> Round | None:
        """A round for which a tree has arrived, where drafts grow ahead."""
        if not self.ahead:
            return None
        depth = best_depth(self.costs, expected)
        return Round(expected[depth], self.costs.round_s(depth))

    def _best(self, last: int = MAX_DRAFT_TOKENS) -> int:
        """The number with the highest goodput, ``last`` at most."""
        hit = self._hit(self._expected_of_hit)
        numbers = range(0 if self.ahead else 1, min(last, len(self._expected) - 1) + 1)
        return max(numbers, key=lambda number: self._round(number, self._expected, hit).tokens_per_s)

    @property
    def _settled(self) -> bool:
        """A pass with the present draft tokens is known."""
        return self.costs.round_measured(self.num_tokens) or self.now - self._moved > SETTLE_PASSES

    def _seconds(self, num_tokens: int) -> float:
        return self.costs.draft_s(num_tokens) + self.costs.round_s(num_tokens * self.costs.rows_per_token)

    def drafts(self, expected: Sequence[float], of_hit: Sequence[float]) -> bool:
        """Whether the sequences of this pass draft. Called once per pass by each of them. ``expected``: tokens of a
        round by the number of draft tokens that are waited for; ``of_hit``: by the number of the best nodes of a tree
        that has arrived."""
        weight = 1 / self.costs.num_live
        self._expected = _moved(self._expected, expected, weight)
        self._expected_of_hit = _moved(self._expected_of_hit, of_hit, weight)
        if self.now != self._reviewed:
            self._reviewed = self.now
            self._review()
            self.price = self._price()
        return self.now < self._probe_until or (self.on and not self.checking)

    def _price(self) -> float:
        costs = self.costs
        if not costs.target_known:
            return MIN_PRICE
        number = max(1, self.num_tokens) if self.on else 1
        row_s = costs.target_s(costs.num_live * (number + 1)) - costs.target_s(costs.num_live * number)
        return max(MIN_PRICE, row_s * (self.goodput(number) if self.on else 1 / costs.alone_s))

    def _review(self) -> None:
        costs = self.costs
        if not costs.known:
            if self.now >= self._next_probe:
                self._probe()
            return
        if not self._load / LOAD_CHANGE < costs.num_live < self._load * LOAD_CHANGE:
            self._load, self._paid = costs.num_live, 1
            self._pause, self._next_probe = FIRST_PAUSE, self.now
            self.num_tokens = min(self.num_tokens, START_TOKENS)
        if self.on:
            self._continue()
            return
        best = self._best()
        gain = self.goodput(best) * costs.alone_s
        if gain >= ON:
            self._probe_until = 0
            self.on, self._below, self._begun, self._moved = True, 0, self.now, self.now
            self._next_check = self.now + CHECK_EVERY
            self.num_tokens = min(best, self._paid) if costs.num_live > 1 and not self.ahead else best
        elif self.now >= self._next_probe:
            costs.hit_rate = max(costs.hit_rate, 0.5)
            self._probe()

    def _continue(self) -> None:
        # One more than at present at most: what is far away is not measured. Ahead there is another top at 0.
        settled = self._settled
        best = self._best() if self.ahead else self._best(self.num_tokens + settled)
        gain = self.goodput(best) * self.costs.alone_s
        if self.checking:
            if self.now >= self._next_check + OVERRUN:
                self._next_check = self.now + round(CHECK_EVERY * max(1.0, gain))
            return
        rises = not settled or best > self.num_tokens
        if best != self.num_tokens:
            self.num_tokens, self._moved = best, self.now
        if gain >= OFF:
            self._paid, self._below = best, 0
        elif not rises or self.goodput(self._best()) * self.costs.alone_s < OFF:
            self._below += 1
        if self._below >= OFF_PASSES:
            self.on = False
            if self.now - self._begun > self._pause:
                self._pause = FIRST_PAUSE
            self._wait_for_probe(self.now)

    def _probe(self) -> None:
        self.num_tokens = 0 if self.ahead else min(START_TOKENS, self.most)
        # Autonomous verdicts in flight come first. What grows ahead is there some passes later.
        self._probe_until = self.now + OVERRUN + (6 if self.ahead else 1 if self._lost_passes > 1 else 2)
        self._wait_for_probe(self._probe_until)

    @property
    def _lost_passes(self) -> float:
        """Passes that a round of a probe takes longer than one of the target alone."""
        if self.ahead or not self.costs.known:
            return 0.0
        return self._seconds(START_TOKENS) / self.costs.alone_s - 1

    def _wait_for_probe(self, now: int) -> None:
        pause = max(self._pause, round(PAUSE_PER_LOSS * self._lost_passes))
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
    longer = [*means, *itertools.repeat(means[-1], len(values) - len(means))]
    padded = itertools.chain(values, itertools.repeat(values[-1]))
    moved = [mean + weight * (value - mean) for mean, value in zip(longer, padded, strict=False)]
    while len(moved) > 2 and moved[-1] - moved[-2] < MIN_PRICE:
        moved.pop()
    return moved
