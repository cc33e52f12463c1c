"""How much to draft, from what was measured and what was accepted so far. Pure: no clock, no I/O, no tokens.

K is fixed before anything is drafted, by the past alone: never by what was proposed since.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Protocol

from orchestrator.control.concert import Concert, Turn
from orchestrator.control.guesses import Guesses
from orchestrator.control.promises import chain, promises
from orchestrator.control.prompt_lookup import MOST_GUESSED, PromptLookup
from orchestrator.rounds import NO_GUESS, Guess, Proposal, Rival, RoundPlan
from orchestrator.sequence import Sequence
from specdec.core.rounds import Budget, Verdict
from specdec.speculation.acceptance import AcceptanceModel, best_chances

_FIRST_TOKENS = 4
"""Draft tokens while nothing is known."""

_SHORT_WAIT = 0.3
"""A draft that grows ahead is waited for where that takes no more than this share of a round without it. Meanwhile the
target makes a token, and what is grown below that is there afterwards as a rule."""

_MOST_LOST = 5.5
"""Tokens that a text loses by drafting with the others, to those it would have made meanwhile without, until it leaves:
about what chance takes from a good text at times."""

_LEAVE_PASSES, _MOST_LEAVE_PASSES = 64, 256
"""That it then goes without, twice as many each time."""

MOST_RUN_ON = 32
"""Unasked tokens: what a slow client has not read of them stays here."""

_MISSED_ROUNDS = 3
"""In a row asked for a draft in vain before anything was known of one: there may be none at all."""

_NO_DRAFT_ROUNDS = 256
"""That then ask for none."""


class Controller(Protocol):
    """Says what a round is to be, and is told what came of it."""

    def plan(self, sequence: Sequence) -> RoundPlan:
        """The round to come."""

    def observe(self, proposal: Proposal, verdict: Verdict) -> None:
        """The outcome of a round."""


class Fixed:
    """A chain of ``num_draft_tokens`` every round, as long as it can be used."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens

    def plan(self, sequence: Sequence) -> RoundPlan:
        run_on = 0 if self._num_draft_tokens else _run_on(MOST_RUN_ON, sequence)
        budget = _chain(self._num_draft_tokens, self._num_draft_tokens, sequence)
        return RoundPlan(budget, run_on, early=self._num_draft_tokens > 0)

    def observe(self, proposal: Proposal, verdict: Verdict) -> None:
        pass


class Adaptive:
    """Draft tokens where they promise more tokens per second, as many and at the same time as all requests
    (orchestrator.control.concert).

    Where a draft grows ahead and nothing was foreseen, a round waits for it if that is short, or goes on alone.
    What a trial loses, and what is lost where a promise is not kept, is booked in an account that all requests share
    (orchestrator.control.costs): when that is empty nobody drafts.
    """

    def __init__(
        self,
        concert: Concert,
        lookup: PromptLookup | None = None,
        chances: AcceptanceModel | None = None,
        ahead: bool = False,
    ) -> None:
        """``lookup``: of this sequence, whose guesses are verified where they promise more than the draft does;
        ``chances`` of its draft tokens are learnt here; ``ahead``: the draft is asked to grow ahead."""
        self._concert = concert
        self._costs = concert.costs
        self._chances = chances or AcceptanceModel(concert.costs.chances)
        self._guesses = Guesses(concert.costs, lookup) if lookup is not None else None
        self._ahead = ahead
        self._num_draft_tokens = 0
        self._waits = True  # where no tree is there, for so many draft tokens; else such a round goes on alone
        self._depth = 0  # nodes of a tree that is there already
        self._asked = 0  # draft tokens that this round waits for
        self._num_rounds = 0
        self._turn = Turn.REST
        self._tried = -1  # number of a trial
        self._pass = concert.now
        self._lost = 0.0  # tokens, by drafting with the others
        self._leave = _LEAVE_PASSES  # passes that it will then go without
        self._back = 0  # the pass in which it drafts with the others again
        self._num_missed = 0  # rounds in a row that asked for a draft in vain, while nothing is known
        self._without = 0  # rounds that it still does without because of that
        self._unasked = 0  # verdicts to come that nobody need ask for

    def plan(self, sequence: Sequence) -> RoundPlan:
        self._num_rounds += 1
        self._without = max(0, self._without - 1)
        self._num_draft_tokens = self._choose() if self._costs.known else self._try()
        rests = self._turn is Turn.REST if self._costs.known else self._without > 0
        called = self._unasked > 0 and not rests
        if self._unasked:
            self._turn, self._num_draft_tokens = Turn.REST, 0
        num_draft_tokens = 0 if self._turn is Turn.CHECK else self._num_draft_tokens
        waits_for = num_draft_tokens if self._waits else 0
        depth = max(waits_for, self._depth) if num_draft_tokens else 0
        if called and self._ahead:
            depth = self._concert.num_draft_tokens  # it will find a tree
        budget = _chain(waits_for, depth, sequence)
        self._asked = budget.max_nodes
        guess, most_unasked = self._guess(sequence, num_draft_tokens)
        run_on = _run_on(most_unasked if rests else 0, sequence)
        # The last token of all comes from the target.
        most = min(self._costs.most, sequence.remaining - 1)
        rounds = tuple(self._costs.unwaited[: most + 1]) if self._ahead and self._costs.known else ()
        # What is sent early goes before any guess.
        early = self._ahead and self._turn is Turn.DRAFT and budget.max_depth > 0 and guess.beats < Rival.TREE
        return RoundPlan(budget, run_on, guess, called, rounds, early)

    def observe(self, proposal: Proposal, verdict: Verdict) -> None:
        self._pass = self._concert.passed(self._pass)
        self._unasked = verdict.run_on
        tree, taken = proposal.tree, proposal.guessed
        if proposal.foreseen is not None:
            self._costs.foreseen(proposal.foreseen, waits=self._asked > 0)
        if self._guesses:
            self._guesses.observe(proposal, verdict)
        if not verdict.round:
            return
        drafted = bool(tree) and taken is None
        waited = taken in (None, Rival.NOTHING)
        self._num_missed = 0 if drafted else self._num_missed + (waited and self._asked > 0)
        if self._costs.known:
            took_s = self._took_s(len(tree) if drafted else 0, waited)
            self._book(took_s, len(verdict.accepted) + 1 if taken is None else 1)
        if not drafted:
            return
        self._chances.observe(tree, verdict.accepted, ended=True)
        self._costs.grown(len(tree), max(tree.depths) + 1)

    def _took_s(self, num_nodes: int, waited: bool) -> float | None:
        """A round with so many nodes of the draft, which is as long as such rounds are; ``waited``: it went before
        nothing else. None: it was without speculation."""
        if waited and self._num_draft_tokens and not self._waits:
            return self._costs.unwaited[min(num_nodes, MOST_GUESSED)]
        # Also of a draft that never came.
        return self._costs.rounds[self._asked] if waited and self._asked else None

    def _book(self, took_s: float | None, num_tokens: int) -> None:
        costs = self._costs
        if took_s is None:
            costs.savings.book(costs.probing)
            return
        self._concert.book(costs.gain(took_s, num_tokens, costs.alone_s), self._turn is Turn.TRY)
        if self._turn is Turn.DRAFT:
            among_s = costs.among_s(self._asked or self._depth, waits=self._asked > 0)
            self._lost = max(0.0, self._lost + took_s / among_s - num_tokens)

    def _try(self) -> int:
        """Long, short and none must be seen to tell what a token more costs."""
        if self._without:
            return 0
        if self._num_missed >= _MISSED_ROUNDS:
            self._num_missed = _MISSED_ROUNDS - 1
            self._without = _NO_DRAFT_ROUNDS
            return 0
        return min((0, _FIRST_TOKENS, 1)[self._num_rounds % 3], self._costs.most)

    def _choose(self) -> int:
        drafting = self._turn in (Turn.DRAFT, Turn.CHECK)
        if self._concert.now < self._back:
            return 0
        tries = self._tried == self._concert.num_trials
        if self._unasked:
            self._turn = self._concert.call(self._depth, self._num_rounds, tries)
            if self._turn is Turn.TRY:
                self._tried = self._concert.num_trials
            return 0
        self._depth, expected = self._foreseen()
        promised = self._promised(self._depth, expected)
        promise = max(promised[1:])
        if self._ahead:
            self._waits = self._worth_waiting(
                self._concert.num_draft_tokens if drafting else promised.index(promise, 1)
            )
            # Whichever it does: how often a tree is there is learnt by doing it, and may be old.
            promise = max(promise, self._promised_alone(self._depth, expected))
        self._turn = self._concert.turn(promise, promised, self._depth, self._num_rounds, tries)
        if self._turn is Turn.REST:
            if drafting:
                # What was learnt on this text will be old when it is tried again.
                self._chances.forget()
                self._lost = 0.0
            return 0
        num_draft_tokens = self._concert.num_draft_tokens
        if self._turn is Turn.TRY:
            self._tried = self._concert.num_trials
            self._waits = self._concert.waits or not self._ahead
            return num_draft_tokens
        return 0 if self._leaves() else num_draft_tokens

    def _worth_waiting(self, num_draft_tokens: int) -> bool:
        """Where nothing was foreseen: for so many, before the target goes on."""
        costs = self._costs
        away_s = costs.waited[num_draft_tokens] - costs.unwaited[num_draft_tokens]
        return away_s < _SHORT_WAIT * costs.unwaited[0]

    def _leaves(self) -> bool:
        """To draft with the others is not for this text: in their passes it had better make a token each."""
        if self._lost < _MOST_LOST:
            return False
        self._lost, self._turn = 0.0, Turn.REST
        self._back, self._leave = self._concert.now + self._leave, min(2 * self._leave, _MOST_LEAVE_PASSES)
        return True

    def _foreseen(self) -> tuple[int, float]:
        """Of a tree that is there already: how many of its nodes are worth verifying, and how many tokens are to be
        expected of them, with the one after."""
        if not self._ahead:
            return 0, 1.0
        unwaited = self._unwaited(self._chances.of_ranks)
        depth = unwaited.index(max(unwaited))
        return depth, unwaited[depth] * self._costs.unwaited[depth] / self._costs.alone_s if depth else 1.0

    def _promised(self, depth: int, expected: float) -> list[float]:
        """By the number of draft tokens that are waited for, where nothing was foreseen."""
        costs = self._costs
        drafted = chain(self._chances.of_ranks, costs.num_siblings)
        alone_s = costs.alone_s
        if not self._ahead:
            return promises(drafted, costs.waited, alone_s)
        # Of all rounds a share waits, in the others such a tree is there.
        share = costs.waits
        foreseen, foreseen_s = (1 - share) * expected, (1 - share) * costs.unwaited[depth]
        found, waited = [1.0], 1.0
        for chance, seconds in zip(drafted, costs.waited[1:], strict=False):
            waited += chance
            found.append((share * waited + foreseen) * alone_s / (share * seconds + foreseen_s))
        return found

    def _promised_alone(self, depth: int, expected: float) -> float:
        """If a round for which nothing was foreseen goes on alone."""
        unwaited, share = self._costs.unwaited, self._costs.misses
        tokens = share + (1 - share) * expected
        return tokens * self._costs.alone_s / (share * unwaited[0] + (1 - share) * unwaited[depth])

    def _unwaited(self, of_ranks: list[float]) -> list[float]:
        """By its nodes, what a tree of the draft's promises that is there already."""
        rounds = self._costs.unwaited[: self._costs.most + 1]
        return promises(best_chances(of_ranks), rounds, self._costs.alone_s)

    def _guess(self, sequence: Sequence, num_draft_tokens: int) -> tuple[Guess, int]:
        """What the lookup guesses for the round to come, and how many tokens may come unasked after it."""
        if not self._guesses:
            return NO_GUESS, MOST_RUN_ON
        if self._turn is Turn.CHECK:
            self._guesses.forgo()
            return NO_GUESS, 0
        # Who grows ahead seldom waits.
        awaited = 0 if self._ahead else num_draft_tokens
        return self._guesses.grant(
            sequence, num_draft_tokens > 0, awaited, self._unasked, partial(self._beaten, num_draft_tokens)
        )

    def _beaten(self, num_draft_tokens: int, promise: float) -> Rival:
        """The best of what promises less than a guess that promises so much."""
        if not num_draft_tokens:
            return Rival.TREE  # which nobody would verify
        if self._turn is Turn.TRY or not self._costs.known:
            return Rival.NOTHING  # the draft is being measured
        of_ranks = self._chances.of_ranks
        if promise >= max(self._unwaited(of_ranks)):
            return Rival.TREE
        if not self._waits:
            return Rival.WAIT
        expected = 1.0 + sum(itertools.islice(chain(of_ranks, self._costs.num_siblings), num_draft_tokens))
        waiting = expected * self._costs.alone_s / self._costs.waited[num_draft_tokens]
        return Rival.WAIT if promise >= waiting else Rival.NOTHING


def _chain(num_draft_tokens: int, depth: int, sequence: Sequence) -> Budget:
    # The last token of all comes from the target anyway.
    most = sequence.remaining - 1
    return Budget(max_nodes=min(num_draft_tokens, most), max_depth=min(depth, most))


def _run_on(num_rounds: int, sequence: Sequence) -> int:
    """For ``num_rounds`` after the one to come, which gives a token at least."""
    return max(0, min(num_rounds, MOST_RUN_ON, sequence.remaining - 1))
