"""How much to draft, from what was measured and what was accepted so far. Pure: no clock, no I/O, no tokens.

K is fixed before anything is drafted, by the past alone: never by what was proposed since.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Protocol

from orchestrator.acceptance import Acceptance
from orchestrator.costs import Costs
from orchestrator.prompt_lookup import MOST_GUESSED, PromptLookup, Rival
from orchestrator.sequence import Sequence
from specdec.rounds import Budget, Verdict
from specdec.tree import EMPTY_TREE, TokenTree

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

_SHORT_RUN_ON = 8
"""Where the text may begin to repeat itself: nothing can be verified among tokens that come unasked."""

_AGAIN = 4
"""Rounds after a guess in which the target is asked for each token, because copied text goes on after an edit."""

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
        self._lookup = lookup
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
        self._num_guessed = 0  # rounds in a row that promise more with a guess than without
        self._guessed_at = -_AGAIN  # the round that was granted a guess last
        self._cut = False  # for the lookup's sake nothing more may come unasked
        self._held = False  # and so this round had to be asked for
        self._unasked = 0  # rounds that may still come unasked
        self.run_on = 0

    def budget(self, sequence: Sequence) -> Budget:
        self._num_rounds += 1
        self._checking = False
        self._num_draft_tokens = self._choose() if self._costs.known else self._try()
        num_draft_tokens = 0 if self._checking else self._num_draft_tokens
        budget = _chain(num_draft_tokens, max(num_draft_tokens, self._depth), sequence)
        self._asked = budget.max_nodes
        most = self._guess(sequence, num_draft_tokens)
        self.run_on = 0 if num_draft_tokens else _run_on(min(self._paused, most), sequence)
        self._held = self._cut and not (num_draft_tokens or self._unasked)
        self._cut = not (num_draft_tokens or most)
        self._unasked = max(self._unasked - 1, self.run_on)
        return budget

    def observe(self, tree: TokenTree, verdict: Verdict) -> None:
        self._costs.savings += self._borrowed
        self._borrowed = 0.0
        if not verdict.round:
            self._unasked = 0  # it was opened anew
            return
        right, depth = len(verdict.accepted), max(tree.depths, default=-1) + 1
        taken = self._lookup.taken if self._lookup else None
        guessed = tree if taken is not None else EMPTY_TREE
        drafted = tree if taken is None else EMPTY_TREE
        self._num_missed = 0 if drafted else self._num_missed + (taken in (None, Rival.NOTHING) and self._asked > 0)
        if self._lookup and self._costs.alone_known:
            self._costs.account_lookup(len(guessed), right + 1, bool(guessed) or self._held)
        # Booked also for a draft that never came, but not where nobody waited for it.
        asked = self._asked if taken in (None, Rival.NOTHING) else 0
        gained = self._costs.known and self._costs.account(asked, 1 if guessed else right + 1) > 0
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
        promises = _promises(_powers(acceptance), self._costs.rounds, self._costs.rounds[0])
        unwaited = self._unwaited(acceptance) if self._costs.waits < 1 else [1.0]
        self._depth = unwaited.index(max(unwaited))
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

    @property
    def _accepted(self) -> float:
        """What share of the draft tokens is."""
        return self._acceptance.share(self._costs.acceptance, _PRIOR_TRIALS)

    def _unwaited(self, acceptance: float) -> list[float]:
        """What trees of the draft promise that are there already."""
        rounds = self._costs.unwaited[: self._costs.most + 1]
        return _promises(_powers(acceptance), rounds, self._costs.alone_s)

    def _guess(self, sequence: Sequence, num_draft_tokens: int) -> int:
        """Grant what the lookup guesses, as far as it is worth verifying.

        How many tokens may come unasked after this round: none where a guess is there that is worth to be verified.
        """
        lookup, costs, most = self._lookup, self._costs, sequence.remaining - 1
        if lookup is None:
            return _MOST_RUN_ON
        lookup.grant(0, Rival.NOTHING)
        if costs.lookup_savings <= 0 or self._checking or most <= 0 or not sequence.num_committed:
            return _SHORT_RUN_ON
        if not costs.rows_known:
            # What rows cost is to be known, where no draft shows it.
            num_guessed, promise = min(_FIRST, most, len(lookup.look(sequence.ids))), 1.0
        elif max(_promises([1.0] * MOST_GUESSED, costs.unwaited, costs.alone_s)) < _ON:
            return _MOST_RUN_ON  # rows cost so much that nothing would be gained if all were right
        else:
            chances = lookup.look(sequence.ids)[:most]
            promises = _promises(chances, costs.unwaited, costs.alone_s)
            promise = max(promises)
            # Will it be there still when all has come that comes unasked? If not, a round is asked for in vain.
            alive = [1.0, *chances][self._unasked] if self._unasked <= len(chances) else 0.0
            hope = alive * promise + (1 - alive) * costs.alone_s / costs.unwaited[0]
            num_guessed = promises.index(promise) if hope >= (_OFF if self._num_guessed else _ON) else 0
        self._num_guessed = self._num_guessed + 1 if num_guessed else 0
        if not num_guessed or self._num_guessed % (4 * _CHECK_EVERY) == 0:
            return 0 if self._num_rounds - self._guessed_at <= _AGAIN else _SHORT_RUN_ON
        if not self._unasked:
            lookup.grant(num_guessed, self._beaten(promise, num_draft_tokens))
            self._guessed_at = self._num_rounds
        return 0

    def _beaten(self, promise: float, num_draft_tokens: int) -> Rival:
        """The best of what promises less than the lookup does."""
        if not num_draft_tokens:
            return Rival.TREE  # which nobody would verify
        if self._probing or not self._costs.known:
            return Rival.NOTHING  # the draft is being measured
        acceptance = self._accepted
        if promise >= max(self._unwaited(acceptance)):
            return Rival.TREE
        expected = 1.0 + sum(itertools.islice(_powers(acceptance), num_draft_tokens))
        waiting = expected * self._costs.alone_s / self._costs.waited_s(num_draft_tokens)
        return Rival.WAIT if promise >= waiting else Rival.NOTHING

    def _go_on(self, promises: list[float], best: int) -> int:
        self._num_on += 1
        self._doubts = self._doubts + 1 if promises[best] < _OFF else 0
        if self._doubts >= _DOUBTS or self._costs.savings <= 0:
            # What was learnt on this text will be old when it is tried again.
            self._acceptance.forget(_PRIOR_TRIALS)
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


def _promises(chances: Iterable[float], rounds: Seq[float], alone_s: float) -> list[float]:
    """How many times the target alone's tokens per second, by K; ``chances`` are those of the first 1, 2, ... draft
    tokens all being accepted, ``rounds`` seconds by K."""
    promises, expected = [1.0], 1.0
    for chance, seconds in zip(chances, rounds[1:], strict=False):
        expected += chance
        promises.append(expected * alone_s / seconds)
    return promises


def _powers(acceptance: float) -> Iterator[float]:
    return itertools.accumulate(itertools.repeat(acceptance), operator.mul)


def _chain(num_draft_tokens: int, depth: int, sequence: Sequence) -> Budget:
    # The last token of all comes from the target anyway.
    most = sequence.remaining - 1
    return Budget(max_nodes=min(num_draft_tokens, most), max_depth=min(depth, most))


def _run_on(num_rounds: int, sequence: Sequence) -> int:
    """For ``num_rounds`` after the one to come, which gives a token at least."""
    return max(0, min(num_rounds, _MOST_RUN_ON, sequence.remaining - 1))
