"""What this process has measured of its models, shared by all its requests: what a round with K draft tokens takes.

Knows durations and counts; refuses to know clocks, tokens and who asks. A round is what the draft takes for K nodes
plus what the target takes for the rows of everybody in the pass: each sequence decides as if all did what it does,
because a row that costs its own round little costs all the others as much.
"""

from __future__ import annotations

import math

from orchestrator.control.beyond import Beyond
from orchestrator.control.contention import Contention
from orchestrator.control.curve import Curve
from orchestrator.control.foresight import Foresight
from orchestrator.control.growths import Growths
from orchestrator.control.load import load_size
from orchestrator.control.patience import patience_s
from orchestrator.control.prompt_lookup import MOST_GUESSED, HitRates
from orchestrator.control.savings import PROBING, Savings
from orchestrator.control.way import Way
from orchestrator.control.worked_out import WorkedOut
from specdec.core.rounds import Timings
from specdec.speculation.acceptance import AcceptanceModel

_LATE = 1.25
"""A growth that nobody waited for any longer would have taken at least so many times what was waited."""

_GAIN = 0.1
"""The share of a round's news that is believed."""

_NARROWER = 1 / 64
"""By so much what is taken for the most nodes of a round falls with every one that has fewer: more rows than that are a
prompt's."""

_MOST_APART = 3.0
"""Passes of the others in each in which a round is away: more is an accident."""

_YOUNG_PASSES, _REVIEW_EVERY = 64, 4
"""After the first ones the rounds are worked out anew only after so many: it takes longer than all else here."""

_ANOTHER_LOAD = 2
"""So many times as many sequences, or as few, cost something else. Several targets may well have 3 and 5."""

_REACH = 1.5
"""The draft is known once so different numbers of nodes were measured."""

_WIDE_PASSES = 4
"""So many passes with more than a row each tell what rows cost: the first alone may be an accident."""


class Costs:
    """Of rounds with up to ``most`` draft tokens. Durations in seconds.

    ``ahead``: drafts are asked to grow ahead. ``num_siblings`` of each draft token are asked for, too.
    """

    def __init__(self, most: int, ahead: bool = False, num_siblings: int = 0) -> None:
        self.most = most
        self._widest = 0.0  # nodes of a round, lately
        self._rows_per_token = 1.0 + num_siblings  # of the target; not every draft proposes siblings
        self.ahead = ahead
        self.contention = Contention(ahead)
        self._drafts = Way()
        self._growths = Growths(self._drafts)
        self._passes = Curve()
        self._beyond = Beyond()
        self._alone_seen = self._known = False
        self.everybody = 1
        """Sequences that share the target, in this pass or another."""
        self._usual = 1  # the same, roughly
        self.num_loads = 0
        """How often that has changed so much that nothing holds of what was promised before."""
        self.few_draft = False
        """Most go on unasked: what keeps those few apart from them is not what would keep all apart if all did."""
        self._apart = 0.0  # with speculation. 0: all are in the same pass; 1: some are while others are not
        self._missed = 1.0  # passes of the others that a round without draft tokens misses until it is at the target
        self._last_pass = (0, 0, 0, 0)
        self._worked_out = WorkedOut()
        self._num_passes = self._num_wide = 0
        self._foresight = Foresight()
        self.chances = AcceptanceModel()
        """Of draft tokens, over all requests."""
        self.hit_rates = HitRates()
        """Of the prompt lookups of all requests."""
        self.savings, self.lookup_savings = Savings(), Savings()
        """Apart, so that neither the draft nor the lookup lives on what the other gains."""

    @property
    def known(self) -> bool:
        if not self._known:
            reached = self._drafts.reach >= min(_REACH, self.most)
            self._known = self.alone_known and reached
        return self._known

    @property
    def alone_known(self) -> bool:
        """What the target takes alone was measured."""
        return self._alone_seen and self._passes.is_known

    @property
    def rows_known(self) -> bool:
        """And what it takes for more rows."""
        return self.alone_known and self._num_wide >= _WIDE_PASSES

    @property
    def alone_s(self) -> float:
        """A round of the target alone, without drafts that slow it down. Unasked, all are in every pass; an older
        target, which is asked for each token, is a little slower. Needs ``alone_known``."""
        if not self._worked_out.alone_s:
            self._worked_out.alone_s = self.contention.share(self.everybody) * self._passes.seconds(self.everybody)
        return self._worked_out.alone_s

    def alone_beside(self, drafting: bool) -> float:
        """What ``unwaited`` is to be compared with: not ``drafting``, what drafts would cost both."""
        if drafting:
            return self.alone_s
        self._worked_out.beside_s = self._worked_out.beside_s or self._seconds(self.everybody)
        return self._worked_out.beside_s

    @property
    def rounds(self) -> list[float]:
        """Seconds of a round with 0, 1, ... ``most`` draft tokens, as the load is now. Needs ``known``."""
        if not self._worked_out.rounds:
            self._worked_out.rounds = self._with_draft(self.waits)
        return self._worked_out.rounds

    @property
    def unwaited(self) -> list[float]:
        """The same, up to MOST_GUESSED, for a tree that is there already. Needs ``alone_known``."""
        if not self._worked_out.unwaited:
            self._worked_out.unwaited = [self._round_s(k, self._beyond.seconds) for k in range(MOST_GUESSED + 1)]
        return self._worked_out.unwaited

    def guessed(self, drafting: bool, awaited: int = 0) -> list[float]:
        """The same for a guess of the text's. Not ``drafting`` most others verify nothing: if that costs more than what
        all would pay, it is what the few rows cost all of them, and the pass of theirs that is missed meanwhile. The
        pass it is in begins when the others are back, who wait for ``awaited`` draft tokens."""
        if self.everybody == 1 or (drafting and not awaited):
            return self.unwaited
        if awaited not in self._worked_out.guessed:
            all_s, pass_s = self.unwaited, self._seconds(self.everybody)
            if awaited:
                found = [self._round_s(k, self._away_s(awaited, waits=1.0)) for k in range(len(all_s))]
            else:
                num, missed_s = self.everybody, max(all_s[0], (1 + self._missed) * pass_s)
                longer_s = [missed_s + num * (self._seconds(num + k) - pass_s) for k in range(len(all_s))]
                found = list(map(max, all_s, longer_s))
            self._worked_out.guessed[awaited] = found
        return self._worked_out.guessed[awaited]

    @property
    def waited(self) -> list[float]:
        """The same with draft tokens that are waited for, whatever is foreseen as a rule. Needs ``known``."""
        if not self.ahead:
            return self.rounds
        if not self._worked_out.waited:
            self._worked_out.waited = self._with_draft(waits=1.0)
        return self._worked_out.waited

    def _with_draft(self, waits: float) -> list[float]:
        """If such a share of the rounds waits."""
        tokens = range(1, self.most + 1)
        return [self.alone_s, *(self._round_s(k * self._rows_per_token, self._away_s(k, waits)) for k in tokens)]

    @property
    def waits(self) -> float:
        """Where rounds that find no tree wait for one, the share of those: not of what was foreseen."""
        return self._foresight.misses(waits=True) if self.ahead else 1.0

    @property
    def misses(self) -> float:
        """Where they go on alone, the share of those that find none."""
        return self._foresight.misses(waits=False)

    @property
    def num_siblings(self) -> int:
        """That a draft token has which is waited for."""
        return round(self._rows_per_token) - 1

    def _round_s(self, num_nodes: float, away_s: float) -> float:
        """If every sequence verifies so many, and its rows are away from the target so long."""
        pass_s = self._pass_s(num_nodes, away_s)
        # The longer of both; where they are alike, who is late by little waits for a whole pass.
        return pass_s + math.pow(away_s**3 + (self._apart * pass_s) ** 3, 1 / 3)

    def _pass_s(self, num_nodes: float, away_s: float) -> float:
        """The same of a pass, in which not all of them are."""
        together = float(self.everybody)
        for _ in range(3):
            pass_s = self._seconds(together * (num_nodes + 1), self._apart)
            before, together = together, max(1.0, self.everybody / (1 + self._apart * max(1.0, away_s / pass_s)))
            if together == before:
                break
        return pass_s

    def _seconds(self, rows: float, apart: float = 0.0) -> float:
        """Of a pass, beside drafts: those that are waited for are made while their sequences are away."""
        away = 1.0 if self.ahead else min(1.0, apart)
        return self._passes.seconds(rows) * math.pow(self.contention.share(self.everybody), 1.0 - away)

    def early_s(self, num_nodes: int, under_way: bool = False) -> float:
        """How long after a round with so many nodes the one after it is to be sent. See Beyond."""
        if not self.alone_known:
            return 0.0
        return self._beyond.early_s(self._pass_s(num_nodes, self._beyond.seconds), under_way)

    def among_s(self, num_nodes: int, waits: bool) -> float:
        """What a token takes a sequence that goes on unasked, and so is in every pass, where the others wait for so
        many draft tokens; or do not, and verify as many where they are there. Needs ``known``."""
        among = self._worked_out.among
        if (num_nodes, waits) not in among:
            rows = num_nodes * (self._rows_per_token if waits else 1 - self.misses)
            among[num_nodes, waits] = self._pass_s(rows, self._away_s(num_nodes if waits else 0, self.waits))
        return among[num_nodes, waits]

    def grown(self, num_nodes: int, depth: int) -> None:
        """A draft's tree of ``num_nodes`` was verified, which was so deep."""
        if self.ahead:
            return  # what was not waited for has any shape
        self._rows_per_token += _GAIN * (num_nodes / depth - self._rows_per_token)

    def gain(self, round_s: float, num_tokens: int, alone_s: float) -> float:
        """Of a round that takes so long and commits so many tokens, where the target alone takes ``alone_s`` for each:
        in rounds of everybody."""
        return (num_tokens - round_s / alone_s) / self.everybody

    def let_few_draft(self, few: bool) -> None:
        """In a trial, and until all draft."""
        self.few_draft = few
        if few:
            self._apart /= 2  # it is not measured meanwhile, and may be out of date

    @property
    def probing(self) -> float:
        """What a round without speculation gives to those that look whether it pays."""
        return PROBING / self.everybody

    def drafted(self, num_nodes: int, seconds: float, takes_in: bool = False) -> None:
        """From the advance to the end of its growth. ``takes_in``: much text before, so that it tells no more than
        that the draft is so quick."""
        self.contention.asked()
        if not takes_in or (self._drafts.is_known and seconds < self._drafts.seconds(num_nodes)):
            self._draft_took(num_nodes, seconds)

    def foreseen(self, foreseen: bool, waits: bool = True) -> None:
        """A request that chooses how much to draft asked for more: of what follows a tree that is there already, or
        because none was; if so, the round ``waits`` or goes on alone."""
        self._foresight.observe(foreseen, waits)

    def draft_of_one_s(self, num_nodes: int, seconds: float) -> float:
        """What one node would have taken a draft that took so long for ``num_nodes``: much of it may be the way."""
        if not self._drafts.is_known:
            return seconds / num_nodes
        return seconds * self._drafts.seconds(1) / self._drafts.seconds(num_nodes)

    def late(self, num_nodes: int, seconds: float) -> None:
        """Nobody waits any longer for a growth of ``num_nodes``."""
        self.contention.asked()
        self._draft_took(num_nodes, _LATE * seconds)

    def _draft_took(self, num_nodes: int, seconds: float) -> None:
        if self._growths.took(num_nodes, seconds, self.everybody):
            self._forget_rounds()  # a round that is booked now is not to be booked by what was thought before

    def patience_s(self, num_nodes: int) -> float:
        """How long a growth of ``num_nodes`` is worth waiting for."""
        draft_s = self._drafts.seconds(num_nodes) if self.known else None
        return patience_s(draft_s, self.alone_s if self.alone_known else None, self.most)

    def verified(
        self,
        num_nodes: int,
        seconds: float,
        timings: Timings,
        num_passes: int,
        everybody: int,
        under_way: bool = False,
    ) -> None:
        """From a round with ``num_nodes`` to its verdict, or from the verdict before if it was ``under_way`` by then;
        the replica made ``num_passes`` since that, and has ``everybody`` as its sequences."""
        self._alone_seen = self._alone_seen or not num_nodes
        self._widest = max(num_nodes, (1 - _NARROWER) * self._widest)
        pass_s = max(1e-6, (timings.pass_us + timings.sample_us) / 1e6)
        beyond_s = max(0.0, seconds - pass_s - timings.queue_us / 1e6)
        self._beyond.observe(beyond_s, under_way)
        if everybody > 1 and not num_nodes:
            self._missed += _GAIN * (min(1, max(0, num_passes - 1)) - self._missed)
        if self._drafts.is_known and num_nodes and not self.few_draft:
            # Of the passes meanwhile that were not its own, how many more than it was away for?
            passes_away = max(1.0, self._away_s(num_nodes / self._rows_per_token, self.waits) / pass_s)
            apart = min(_MOST_APART, max(0, num_passes - 1) / passes_away)
            self._apart += _GAIN * (apart - self._apart)
        self._passed(timings, pass_s, everybody)

    def went_on(self, timings: Timings, everybody: int) -> None:
        """To a verdict that nobody asked for: such a sequence is in every pass of its target."""
        self._passed(timings, max(1e-6, (timings.pass_us + timings.sample_us) / 1e6), everybody)

    def _passed(self, timings: Timings, pass_s: float, everybody: int) -> None:
        self.everybody = max(1, timings.sequences, everybody)
        if not self._usual / _ANOTHER_LOAD < self.everybody < self._usual * _ANOTHER_LOAD:
            self._usual = self.everybody
            self.num_loads += 1
            for savings in (self.savings, self.lookup_savings):
                savings.another_load(load_size(self.everybody))
            self._forget_rounds()
        mine = (timings.pass_us, timings.sample_us, timings.rows, timings.sequences)
        if mine == self._last_pass:
            return  # the verdicts of one pass come one after the other
        self._last_pass = mine
        if self._growths.passed(self.everybody):
            self._forget_rounds()
        self._num_passes += 1
        if self._num_passes < _YOUNG_PASSES or self._num_passes % _REVIEW_EVERY == 0:
            self._forget_rounds()
        # Rows of prompts tell nothing of rounds. Others may draft more than is drafted here.
        if not 0 < timings.rows <= timings.sequences * (1 + max(self._widest, self.most)):
            self.contention.overlooked()
            return
        usual_s = self._passes.seconds(timings.rows) if self._passes.trusts(timings.rows) else None
        pass_s = self.contention.with_drafts(pass_s, usual_s, timings.sequences, self.everybody)
        before_s = self._passes.seconds(self.everybody) if usual_s else 0.0
        self._passes.observe(timings.rows, pass_s)
        if usual_s:
            self.contention.slower(self._passes.seconds(self.everybody) / before_s, self.everybody)
        self._num_wide += timings.rows > timings.sequences

    def _forget_rounds(self) -> None:
        """They are worked out anew when they are asked for."""
        self._worked_out = WorkedOut()

    def _away_s(self, num_nodes: float, waits: float) -> float:
        """From a verdict to the next time that the rows are at the target, if nobody else is there, and such a share of
        the rounds waits for the draft."""
        draft_s = self._drafts.seconds(num_nodes) if num_nodes else 0.0
        if self.alone_known:
            draft_s = min(draft_s, _LATE * self.most * self.alone_s)  # nobody waits longer: see patience_s
        return self._beyond.seconds + waits * draft_s
