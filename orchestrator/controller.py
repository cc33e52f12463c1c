"""How much to draft, from what was measured and what was accepted so far. Pure: no clock, no I/O, no tokens.

K is fixed before anything is drafted, by the past alone: never by what was proposed since.
"""

from __future__ import annotations

from typing import Protocol

from orchestrator.costs import Costs
from orchestrator.sequence import Sequence
from specdec.rounds import Budget, Verdict
from specdec.tree import TokenTree

_FIRST = 4
"""Draft tokens while nothing is known, and of a probe."""

_STAY = 0.98
_ON, _OFF = 1.05, 1.02
"""How much faster than the target alone speculation must promise to be: to begin, and to go on."""

_CHECK_EVERY, _CLEAR = 32, 1.5
"""Rounds with speculation after which one goes without, to see that the target alone is still as slow as it is taken
to be; four times as many where speculation is so much faster that a mistake is unlikely."""

_DOUBTS = 3
_PRIOR_TRIALS = 6
_MEMORY_TRIALS = 100
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 64

_MOST_RUN_ON = 32
"""Unasked tokens: what a slow client has not read of them stays here."""


class Controller(Protocol):
    """Says how much may be drafted, and is told what came of it.

    ``run_on``: after the round to come, so many will have nothing drafted for them either, and the target may make
    their tokens unasked.
    """

    run_on: int

    def budget(self, sequence: Sequence) -> Budget:
        """For the round to come: nodes that are worth waiting for, and the depth that is worth verifying if more are
        there already."""

    def observe(self, tree: TokenTree, verdict: Verdict) -> None:
        """The outcome of a round."""


class Fixed:
    """A chain of ``num_draft_tokens`` every round, as long as it can be used."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self.run_on = 0

    def budget(self, sequence: Sequence) -> Budget:
        self.run_on = 0 if self._num_draft_tokens else _run_on(_MOST_RUN_ON, sequence)
        return _chain(self._num_draft_tokens, self._num_draft_tokens, sequence)

    def observe(self, tree: TokenTree, verdict: Verdict) -> None:
        pass


class Adaptive:
    """As many as promise the most tokens per second, none if that is the target alone.

    Where it drafts none it tries again now and then. What that loses, and what it loses where a promise is not kept,
    is booked in an account that all requests share (orchestrator.costs): when that is empty nobody drafts.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._right = self._tried = 0.0  # draft tokens accepted, and looked at, of late
        self._num_draft_tokens = 0
        self._depth = 0  # of a tree that is there already
        self._asked = 0  # of these, in this round
        self._num_rounds = 0
        self._num_on = 0  # rounds since it drafts, a probe left out
        self._doubts = 0  # of these, the last ones that promised too little
        self._pause = _FIRST_PAUSE
        self._paused = 0  # rounds that it still does without
        self._probing = False
        self._borrowed = 0.0  # for a probe: see Costs
        self._checking = False  # for one round, what the target takes alone
        self.run_on = 0

    def budget(self, sequence: Sequence) -> Budget:
        self._num_rounds += 1
        self._checking = False
        if self._costs.known:
            self._num_draft_tokens = self._choose()
        else:
            # Long, short and none must be seen to tell what a token more costs.
            self._num_draft_tokens = min((0, _FIRST, 1)[self._num_rounds % 3], self._costs.most)
        num_draft_tokens = 0 if self._checking else self._num_draft_tokens
        budget = _chain(num_draft_tokens, max(num_draft_tokens, self._depth), sequence)
        self._asked = budget.max_nodes
        self.run_on = 0 if num_draft_tokens else _run_on(self._paused, sequence)
        return budget

    def observe(self, tree: TokenTree, verdict: Verdict) -> None:
        self._costs.savings += self._borrowed
        self._borrowed = 0.0
        if not verdict.round:
            return
        right, depth = len(verdict.accepted), max(tree.depths, default=-1) + 1
        # Booked also for a draft that never came.
        gained = self._costs.known and self._costs.account(self._asked, right + 1) > 0
        if not tree:
            return
        tried = min(right + 1, depth)  # what follows the first rejection was not tried
        forget = 1 - tried / _MEMORY_TRIALS
        self._right = forget * self._right + right
        self._tried = forget * self._tried + tried
        self._costs.tried(right, tried)
        if self._probing and gained:
            self._paused = 0

    def _choose(self) -> int:
        right = self._right + _PRIOR_TRIALS * self._costs.acceptance
        acceptance = right / (self._tried + _PRIOR_TRIALS)
        promises = _promises(acceptance, self._costs.rounds)
        unwaited = self._costs.unwaited
        self._depth = max(range(len(unwaited)), key=_promises(acceptance, unwaited).__getitem__) if unwaited else 0
        promise = max(promises[1:])
        best = promises.index(promise, 1)
        if self._num_draft_tokens and not self._probing:
            return self._go_on(promises, best)
        self._probing = False
        if self._paused:
            self._paused -= 1
            return 0
        if promise >= _ON and self._costs.savings > 0:
            self._num_on = self._doubts = 0
            return min(best, _FIRST)
        if self._num_rounds == 1:
            self._rest()  # a probe makes the draft take in the whole prompt: not for a text that may be short
            return 0
        return self._probe()

    def _go_on(self, promises: list[float], best: int) -> int:
        self._num_on += 1
        self._doubts = self._doubts + 1 if promises[best] < _OFF else 0
        if self._doubts >= _DOUBTS or self._costs.savings <= 0:
            # What was learnt on this text will be old when it is tried again.
            forget = min(1.0, _PRIOR_TRIALS / max(1.0, self._tried))
            self._right, self._tried = forget * self._right, forget * self._tried
            self._rest()
            return 0
        if self._num_on > _LONGEST_PAUSE:
            self._pause = _FIRST_PAUSE
        now = self._num_draft_tokens
        self._checking = self._num_on % (_CHECK_EVERY if promises[best] < _CLEAR else 4 * _CHECK_EVERY) == 0
        if abs(best - now) <= 1 and promises[now] > _STAY * promises[best]:
            return now
        return min(best, now + 1)  # up step by step, each measured before the next

    def _probe(self) -> int:
        """One round, as long as it costs little more than the shortest."""
        rounds = self._costs.rounds
        dearest = rounds[0] + 1.5 * (rounds[1] - rounds[0])
        length = max(k for k in range(1, len(rounds)) if k == 1 or rounds[k] <= dearest)
        self._borrowed = self._costs.borrow(length)
        if not self._borrowed:
            self._paused = _LONGEST_PAUSE
            return 0
        self._probing = True
        self._rest()
        return length

    def _rest(self) -> None:
        self._paused, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)


def _promises(acceptance: float, rounds: list[float]) -> list[float]:
    """How many times the target alone's tokens per second, by K."""
    promises, expected, chance = [1.0], 1.0, 1.0
    for seconds in rounds[1:]:
        chance *= acceptance
        expected += chance
        promises.append(expected * rounds[0] / seconds)
    return promises


def _chain(num_draft_tokens: int, depth: int, sequence: Sequence) -> Budget:
    # The last token of all comes from the target anyway.
    most = sequence.remaining - 1
    return Budget(max_nodes=min(num_draft_tokens, most), max_depth=min(depth, most))


def _run_on(num_rounds: int, sequence: Sequence) -> int:
    """For ``num_rounds`` after the one to come, which gives a token at least."""
    return max(0, min(num_rounds, _MOST_RUN_ON, sequence.remaining - 1))
