"""When the requests of this process draft, and when none does.

They begin together, stop together, try together (or, where that promises to lose, a few of them) and see together what
the target takes alone: a request that drafts while the others go on unasked waits for a whole pass of theirs in every
round, and slows them down; one that drafts less than the others waits for their drafts. Knows what is promised and
gained; refuses to know tokens, trees and clocks: its time is counted in passes, of which every request takes part in
one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from orchestrator.control.costs import Costs
from orchestrator.control.load import load_size
from orchestrator.control.promises import OFF, OFF_AMONG, ON, ON_AMONG
from orchestrator.control.toll import Toll
from specdec.core.rounds import OVERRUN

FIRST_PAUSE, _LONGEST_PAUSE, _LONGEST_PAUSE_AMONG = 8, 64, 256
"""Passes without drafts after one that did not pay, twice as many each time. Among several requests a trial costs more:
also those pay who do not try."""

_DOUBTS_IN_ALL = 0.1
"""The sum, over passes, of how much less than OFF was promised, at which drafts end: a few passes where it is near, one
where the load has grown a lot."""

_TRIAL_PASSES = 2
"""Of a trial among many; one where a single request waits, which shows at once what it takes, and one where nobody
does, as trees are there or not."""

_FEW_TRY = 4
"""Requests that try at a time where they promise to lose, or where nobody waits: a draft has to take in the text of
each, and then within a pass. Where they wait and promise to gain all try: few never show what the rows of all cost."""

_CHECK_EVERY = 32
"""Passes with drafts after which some go without, to see what the target takes alone."""

_CLEAR, _CLEAR_CHECK_EVERY = 1.5, 128
"""Where so many times the target alone is promised, a mistake is unlikely."""

_FIRST_CHECK = 8
"""Sooner at first, and then twice as many each time, where several may slow each other down."""

_CHECK_PASSES = 6
"""Without drafts, at most."""

_FIRST_TOKENS, _FIRST_TOKENS_AMONG = 4, 2
"""Draft tokens at first; of several requests, which find together only by and by, fewer: as long as they take turns
every token more seems cheap."""

_SETTLED = 3
"""Passes after which several requests draft a token more at the earliest."""

_ENOUGH = 0.98
"""A number of draft tokens that promises this share of what the best one does is kept; and the fewest of those are the
best, as less is thrown away."""

_HOPELESS = 0.95
"""The share of rounds without a tree from which there will be none of a draft that nobody waits for."""


class Turn(Enum):
    """What a request does in the round to come."""

    REST = auto()
    DRAFT = auto()
    TRY = auto()
    CHECK = auto()


@dataclass(slots=True)
class _Trial:
    """Of ``room`` requests, which is over ``until`` a pass."""

    until: int = 0
    room: int = 0
    num_trying: int = 0
    num_told: int = 0  # rounds
    gained: float = 0.0

    def join(self, tries: bool) -> bool:
        """Whether there is room for a request that ``tries`` already, or would."""
        if not tries and self.num_trying >= self.room:
            return False
        self.num_trying += not tries
        return True

    def book(self, gain: float) -> bool:
        """Of a round of it. Whether it has paid so far."""
        self.gained += gain
        self.num_told += 1
        return self.num_told >= self.num_trying and self.gained > 0


class Concert:
    """Of all requests that choose for themselves how much to draft. ``costs`` is what they have measured."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.now = 0
        """The pass that the quickest of them is in."""
        self._drafting = False
        self._promise = 1.0  # the mean of what the requests promised last
        self._promised = [1.0] * (1 + costs.most)  # the same by the number of draft tokens, if they are waited for
        self._load = -1  # the load under which that was promised
        self._since = 0  # the pass in which it began to draft
        self._raised = 0  # the pass since which it drafts as many tokens as now
        self._trial = _Trial()  # the last one
        self._toll = Toll()
        self.num_trials = 0
        """So far: that of the last one, for those who are in it."""
        self._until = 0  # before this pass nobody drafts
        self._pause = FIRST_PAUSE
        self._size = 0  # of the load, within a factor of two
        self._pauses: dict[int, tuple[int, int]] = {}  # of other loads
        self._doubts = 0.0
        self._reviewed = 0
        self._checked = 0
        self._num_checks: dict[int, int] = {}  # by the size of the load
        self._check: tuple[int, int] | None = None  # since when, and how many calm passes there had been
        self.num_draft_tokens = 0
        """Of everybody, where somebody drafts: who drafts less than the others would wait for them."""
        self.waits = True
        """In a trial: for the draft; else trees are verified if they are there."""

    def call(self, depth: int, num_rounds: int, tries: bool) -> Turn:
        """What a request is to do as soon as nothing of it comes unasked any more, which takes OVERRUN passes; REST: it
        may go on so. See ``turn``."""
        if self._drafting:
            return Turn.DRAFT
        if self.now < self._trial.until:
            return Turn.TRY if num_rounds > FIRST_PAUSE and self._trial.join(tries) else Turn.REST
        if self.now < self._until - OVERRUN:
            return Turn.REST
        if self._begins and self._load == self.costs.num_loads:
            return Turn.DRAFT
        return Turn.TRY if num_rounds > FIRST_PAUSE and self._try(depth, OVERRUN) else Turn.REST

    def turn(self, promise: float, promised: Sequence[float], depth: int, num_rounds: int, tries: bool = False) -> Turn:
        """Of a request that promises so much if it drafts: ``promised`` by the number of draft tokens that it waits
        for, or with trees of ``depth`` nodes that nobody waits for. ``tries``: it is in the last trial.

        In the first of its ``num_rounds`` a request tries nothing: its draft would have to take in a prompt, and it may
        be short. One that is alone begins afresh, as its text is another.
        """
        young = num_rounds <= FIRST_PAUSE
        if num_rounds == 1 and self.costs.everybody == 1:
            self._until, self._pause = 0, FIRST_PAUSE
        weight = 1 / self.costs.everybody
        another_load = self._load != self.costs.num_loads
        if another_load:
            self._load, self._reviewed, weight = self.costs.num_loads, -1, 1.0
            self._pauses[self._size] = self._until, self._pause
            self._size = load_size(self.costs.everybody)
            self._until, self._pause = self._pauses.get(self._size, (0, FIRST_PAUSE))
            if self._drafting and promise < self._on:
                self._stop()  # what has begun goes on only where it began
        self._promise += weight * (promise - self._promise)
        self._promised = [mean + weight * (one - mean) for mean, one in zip(self._promised, promised, strict=True)]
        if another_load and self._drafting:
            self._draft_few()
        if self.now < self._trial.until:
            return Turn.TRY if not young and self._trial.join(tries) else Turn.REST
        if self._drafting:
            if self._check is None:
                self._doubts = max(0.0, self._doubts + (self._off - promise) / self.costs.everybody)
            return self._go_on()
        if self.now < self._until:
            return Turn.REST
        if self._begins:
            self._drafting, self._since, self._doubts, self._reviewed = True, self.now, 0.0, self.now
            self._draft_few()
            self._checked, self._check = self.now, None
            self.costs.few_draft = False
            return Turn.DRAFT
        return Turn.TRY if not young and self._try(depth) else Turn.REST

    def book(self, gain: float, tries: bool) -> None:
        """A request gained so much in a round; ``tries``: of a trial. One that gains ends the rest after it."""
        self.costs.savings.book(gain)
        if tries:
            self._toll.reckoned(gain)
            if self._trial.book(gain):
                self._until = 0

    def took(self, seconds: float, num_tokens: int) -> None:
        """From one verdict of a request to the next, which made so many tokens: what a trial really costs."""
        costs = self.costs
        if costs.known and costs.everybody > 1:
            self._toll.gained(costs.gain(seconds, num_tokens, costs.alone_s), costs.everybody, self.now)

    def passed(self, before: int) -> int:
        """A request has a verdict, ``before`` being the pass that it was in when it had one last. Returns the pass that
        it is in now: all of one target are in the same, and nobody stays behind."""
        self.now = max(self.now, before + 1)
        return self.now

    def _go_on(self) -> Turn:
        """Decided once a pass, by the first who asks: where some of a pass did one thing and some another, they would
        be in different passes from then on."""
        now = self.now
        if now == self._reviewed:
            return Turn.DRAFT if self._check is None else Turn.CHECK
        self._reviewed = now
        best, kept = self._best, self.num_draft_tokens
        settled = self.costs.everybody == 1 or now - self._raised >= _SETTLED
        better = abs(best - kept) > 1 or self._promised[kept] <= _ENOUGH * self._promised[best]
        if better and (best < kept or settled):
            self.num_draft_tokens = min(best, kept + 1)  # up step by step, each measured before the next
            self._raised = now
        if not self.costs.savings.left:
            return self._stop()
        if now - self._since > self._longest_pause:
            self._pause = FIRST_PAUSE
        if self._check is not None:
            since, num_calm = self._check
            if self.costs.contention.num_calm == num_calm:
                if now - since < _CHECK_PASSES:
                    return Turn.CHECK
                self.costs.contention.unseen(self.costs.everybody)
            self._check, self._checked = None, now
            self._num_checks[self._size] = self._num_checks.get(self._size, 0) + 1
        doubtful = self._doubts >= _DOUBTS_IN_ALL
        # Also before they stop: it may be the target that takes longer.
        if now - self._checked >= (_FIRST_CHECK if doubtful else self._check_every):
            self._check = now, self.costs.contention.num_calm
            self._doubts /= 2 if doubtful else 1
            return Turn.CHECK
        return self._stop() if doubtful else Turn.DRAFT

    def _draft_few(self) -> None:
        """At first, also under another load."""
        self.num_draft_tokens = min(self._best, _FIRST_TOKENS if self.costs.everybody == 1 else _FIRST_TOKENS_AMONG)
        self._raised = self.now

    def _stop(self) -> Turn:
        self._drafting = False
        self._rest()
        return Turn.REST

    @property
    def _check_every(self) -> int:
        every = _CHECK_EVERY if self._promise < _CLEAR else _CLEAR_CHECK_EVERY
        if self.costs.everybody == 1:
            return every
        return min(every, _FIRST_CHECK << min(self._num_checks.get(self._size, 0), 4))

    @property
    def _begins(self) -> bool:
        return self._promise >= self._on and self.costs.savings.left

    @property
    def _on(self) -> float:
        return ON if self.costs.everybody == 1 else ON_AMONG

    @property
    def _off(self) -> float:
        return OFF if self.costs.everybody == 1 else OFF_AMONG

    @property
    def _longest_pause(self) -> int:
        return _LONGEST_PAUSE if self.costs.everybody == 1 else _LONGEST_PAUSE_AMONG

    @property
    def _best(self) -> int:
        """The fewest draft tokens that promise about as much as any number."""
        enough = _ENOUGH * max(self._promised[1:])
        return next(k for k, promised in enumerate(self._promised) if k and promised >= enough)

    def _try(self, depth: int, delay: int = 0) -> bool:
        """After ``delay`` passes: rounds that wait for nobody, or that wait, for as long a draft as costs little more
        than the shortest."""
        costs, rounds = self.costs, self.costs.rounds
        dearest = costs.alone_s + 1.5 * (rounds[1] - costs.alone_s)
        self.num_draft_tokens = max(k for k in range(1, len(rounds)) if k == 1 or rounds[k] <= dearest)
        self.waits = not costs.ahead or costs.misses > _HOPELESS
        passes = _TRIAL_PASSES if self.waits and costs.everybody > 1 else 1
        if self.waits:
            gain = costs.gain(rounds[self.num_draft_tokens], 1, costs.alone_s)
        else:
            gain = costs.gain(costs.unwaited[depth], 1, costs.alone_s)
        promising = self._promise > 1.0 and self._load == costs.num_loads and self.waits
        room = costs.everybody if promising else min(costs.everybody, _FEW_TRY)
        dear = self.now < self._toll.again(costs.everybody)
        if dear or not costs.savings.cover(-gain * passes * room):
            self._until = self.now + self._longest_pause
            return False
        delay = delay or int(not self.waits)  # a tree is grown meanwhile
        self._trial = _Trial(self.now + delay + passes, room)
        self._toll.begin(self._trial.until, costs.everybody)
        self.num_trials += 1
        costs.let_few_draft(room < costs.everybody)
        self._rest()
        self._until += delay + passes
        return self._trial.join(tries=False)

    def _rest(self) -> None:
        self._until, self._pause = self.now + self._pause, min(2 * self._pause, self._longest_pause)
