"""How much to draft, from what was measured and what was accepted so far. Pure: no clock, no I/O, no tokens.

K is fixed before anything is drafted, by the past alone: never by what was proposed since.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Protocol

from orchestrator.acceptance import Acceptance
from orchestrator.costs import Costs
from orchestrator.guesses import Guesses
from orchestrator.promises import OFF, ON, powers, promises
from orchestrator.prompt_lookup import PromptLookup, Rival
from orchestrator.sequence import Sequence
from specdec.rounds import Budget, Verdict
from specdec.tree import TokenTree

_FIRST = 4
"""Draft tokens while nothing is known, and of a probe."""

_STAY = 0.98
"""A number of draft tokens that promises this share of the best one's is kept."""

_CHECK_EVERY, _CLEAR = 32, 1.5
"""Rounds with speculation after which one goes without, to see that the target alone is still as slow as it is taken
to be; four times as many where speculation is so much faster that a mistake is unlikely."""

_DOUBTS = 3
_PRIOR_TRIALS = 6
_MEMORY_TRIALS = 100
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 64

_MOST_RUN_ON = 32
"""Unasked tokens: what a slow client has not read of them stays here."""

_MISSED, _NO_DRAFT_PAUSE = 3, 256
"""Rounds in a row that asked for a draft in vain before anything was known of one: there may be none at all."""


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

    def __init__(self, costs: Costs, lookup: PromptLookup | None = None) -> None:
        """``lookup``: of this sequence, whose guesses are verified where they promise more than the draft does."""
        self._costs = costs
        self._guesses = Guesses(costs, lookup) if lookup is not None else None
        self._acceptance = Acceptance(_MEMORY_TRIALS)  # of draft tokens
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
        self._num_missed = 0  # rounds in a row that asked for a draft in vain
        self.run_on = 0

    def budget(self, sequence: Sequence) -> Budget:
        self._num_rounds += 1
        self._checking = False
        self._num_draft_tokens = self._choose() if self._costs.known else self._try()
        num_draft_tokens = 0 if self._checking else self._num_draft_tokens
        budget = _chain(num_draft_tokens, max(num_draft_tokens, self._depth), sequence)
        self._asked = budget.max_nodes
        self.run_on = self._run_on(sequence, num_draft_tokens)
        return budget

    def observe(self, tree: TokenTree, verdict: Verdict) -> None:
        self._costs.savings += self._borrowed
        self._borrowed = 0.0
        taken = None
        if self._guesses:
            self._guesses.observe(tree, verdict)
            taken = self._guesses.taken
        if not verdict.round:
            return
        drafted = bool(tree) and taken is None
        waited = taken in (None, Rival.NOTHING)
        self._num_missed = 0 if drafted else self._num_missed + (waited and self._asked > 0)
        right, depth = len(verdict.accepted), max(tree.depths, default=-1) + 1
        # Booked also for a draft that never came, but not where nobody waited for it.
        asked, num_tokens = self._asked if waited else 0, right + 1 if taken is None else 1
        gained = self._costs.known and self._costs.account(asked, num_tokens) > 0
        if not drafted:
            return
        tried = min(right + 1, depth)  # what follows the first rejection was not tried
        self._acceptance.observe(right, tried)
        self._costs.tried(right, tried)
        self._costs.grown(len(tree), depth)
        if self._probing and gained:
            self._paused = 0

    def _try(self) -> int:
        """Long, short and none must be seen to tell what a token more costs."""
        if self._paused:
            self._paused -= 1
            return 0
        if self._num_missed >= _MISSED:
            self._num_missed = _MISSED - 1
            self._paused = _NO_DRAFT_PAUSE
            return 0
        return min((0, _FIRST, 1)[self._num_rounds % 3], self._costs.most)

    def _choose(self) -> int:
        acceptance = self._accepted
        promised = promises(powers(acceptance), self._costs.rounds, self._costs.rounds[0])
        unwaited = self._unwaited(acceptance) if self._costs.waits < 1 else [1.0]
        self._depth = unwaited.index(max(unwaited))
        promise = max(promised[1:])
        best = promised.index(promise, 1)
        if self._num_draft_tokens and not self._probing:
            return self._go_on(promised, best)
        self._probing = False
        if self._paused:
            self._paused -= 1
            return 0
        if promise >= ON and self._costs.savings > 0:
            self._num_on = self._doubts = 0
            return min(best, _FIRST)
        if self._num_rounds == 1:
            self._rest()  # a probe makes the draft take in the whole prompt: not for a text that may be short
            return 0
        return self._probe()

    @property
    def _accepted(self) -> float:
        """What share of the draft tokens is."""
        return self._acceptance.share(self._costs.acceptance, _PRIOR_TRIALS)

    def _unwaited(self, acceptance: float) -> list[float]:
        """What trees of the draft promise that are there already."""
        rounds = self._costs.unwaited[: self._costs.most + 1]
        return promises(powers(acceptance), rounds, self._costs.alone_s)

    def _run_on(self, sequence: Sequence, num_draft_tokens: int) -> int:
        """How many tokens may come unasked after the round to come, in which a guess may be verified."""
        most = _MOST_RUN_ON
        if self._guesses and self._checking:
            self._guesses.forgo()
        elif self._guesses:
            beaten = partial(self._beaten, num_draft_tokens)
            most = self._guesses.grant(sequence, num_draft_tokens > 0, beaten)
        run_on = 0 if num_draft_tokens else _run_on(min(self._paused, most), sequence)
        if self._guesses:
            self._guesses.goes_on(run_on)
        return run_on

    def _beaten(self, num_draft_tokens: int, promise: float) -> Rival:
        """The best of what promises less than a guess that promises so much."""
        if not num_draft_tokens:
            return Rival.TREE  # which nobody would verify
        if self._probing or not self._costs.known:
            return Rival.NOTHING  # the draft is being measured
        acceptance = self._accepted
        if promise >= max(self._unwaited(acceptance)):
            return Rival.TREE
        expected = 1.0 + sum(itertools.islice(powers(acceptance), num_draft_tokens))
        waiting = expected * self._costs.alone_s / self._costs.waited_s(num_draft_tokens)
        return Rival.WAIT if promise >= waiting else Rival.NOTHING

    def _go_on(self, promised: list[float], best: int) -> int:
        self._num_on += 1
        self._doubts = self._doubts + 1 if promised[best] < OFF else 0
        if self._doubts >= _DOUBTS or self._costs.savings <= 0:
            # What was learnt on this text will be old when it is tried again.
            self._acceptance.forget(_PRIOR_TRIALS)
            self._rest()
            return 0
        if self._num_on > _LONGEST_PAUSE:
            self._pause = _FIRST_PAUSE
        now = self._num_draft_tokens
        self._checking = self._num_on % (_CHECK_EVERY if promised[best] < _CLEAR else 4 * _CHECK_EVERY) == 0
        if abs(best - now) <= 1 and promised[now] > _STAY * promised[best]:
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


def _chain(num_draft_tokens: int, depth: int, sequence: Sequence) -> Budget:
    # The last token of all comes from the target anyway.
    most = sequence.remaining - 1
    return Budget(max_nodes=min(num_draft_tokens, most), max_depth=min(depth, most))


def _run_on(num_rounds: int, sequence: Sequence) -> int:
    """For ``num_rounds`` after the one to come, which gives a token at least."""
    return max(0, min(num_rounds, _MOST_RUN_ON, sequence.remaining - 1))
