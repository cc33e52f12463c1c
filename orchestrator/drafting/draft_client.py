"""One sequence's draft: asks for nodes and receives them, or has no draft at the moment.

Knows advances and lanes; refuses to know the trie. No draft, for whatever reason, is None and never an error: the
next advance tries again.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.control.costs import Costs
from orchestrator.replicas.frames import chunked
from orchestrator.replicas.link import Lane
from orchestrator.replicas.pool import Pool
from orchestrator.replicas.replica import Replica, Tally
from orchestrator.sequence import Sequence
from specdec.core.errors import Draining, Overloaded, ReplicaLost, SpecdecError
from specdec.core.rounds import AHEAD, SIBLINGS, Advance, Budget, Growth, GrowthEnd
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.transport.wire import write_advance, write_budget
from specdec.v1 import draft_pb2

_PATIENCE_S = 1.0
_FIRST_PAUSE_S = 5.0
"""A draft whose heart beats may still owe an answer. One round does not wait for it longer than that pays; when it has
answered nothing for so long, it is done without for a while, twice as long each time."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """An advance that asks for nodes, and when."""

    advance: int
    num_nodes: int
    at: float
    takes_in: bool
    """Much of the text, which is no part of growing."""
    num_new: int
    """Of the nodes, that are not there yet; 0: nobody knows."""


_MOST_LOST = 2
"""In a row while they owed an answer: then the text is kept from drafts for a while, as if one had refused it."""

_CATCH_UP = 64
"""Tokens that a draft of which nothing is asked may be behind: they are fed in one pass, at its leisure."""

_MOST_NEW = 16
"""More new tokens than that are taken in before anything can grow."""


class DraftClient:
    """``async with`` closes the sequence on its replica."""

    def __init__(self, pool: Pool, costs: Costs, traceparent: str = "") -> None:
        self._pool = pool
        self._costs = costs
        self._traceparent = traceparent
        self._replica: Replica | None = None
        self._lane: Lane | None = None
        self._advance = 0
        self._asked: _Asked | None = None  # that is not answered yet
        self._owed_since: float | None = None  # nothing came since then though something was asked for
        self._num_lost = 0  # in a row, while something was asked for
        self._pause_s = _FIRST_PAUSE_S
        self._paused_until = 0.0
        self._base = 0  # as far as the replica knows the text

    async def __aenter__(self) -> DraftClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.park()

    def park(self) -> None:
        """Give up the lane; the next advance opens the sequence again."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    def advance(
        self, sequence: Sequence, budget: Budget, in_flight: TokenTree = EMPTY_TREE, num_there: int = 0
    ) -> bool:
        """Tell what was committed and what is about to be verified, and ask for nodes, of which ``num_there`` are there
        from before; where there is no lane, open one. False: there is no draft."""
        now = time.monotonic()
        # Where nobody waits for a tree, what its first nodes take is measured all the same.
        num_nodes = budget.max_nodes or int(not in_flight)
        if self._lane is not None and sequence.base > self._context_length:
            self.park()
        opens = self._lane is None
        if self._lane is None:
            if now < self._paused_until:
                return False
            self._owed_since = None
            self._open(sequence, budget)
            self._asked = _Asked(0, num_nodes, now, takes_in=True, num_new=num_nodes)
            # A chain that is verified against its distribution is never drawn before the first token is known.
            if self._lane is None or sequence.keyed_by_token or not sequence.num_committed:
                return self._lane is not None
        budget = self._possible(budget)
        if not (budget.max_nodes or budget.max_ahead):
            self.catch_up(sequence)  # it can do nothing of that
            return True
        takes_in = opens or sequence.base - self._base > _MOST_NEW
        # What was asked for with an open, and has not come yet, may be half done.
        goes_on = not opens and self._asked is not None and self._asked.advance == 0
        num_new = 0 if goes_on else max(0, num_nodes - num_there)
        self._tell(self._lane, sequence, budget, in_flight)
        self._asked = _Asked(self._advance, num_nodes, now, takes_in, num_new)
        return True

    @property
    def _context_length(self) -> float:
        """Of the draft, which may be shorter than the target's."""
        info = self._replica.info if self._replica is not None else None
        return math.inf if info is None else info.context_length

    def catch_up(self, sequence: Sequence) -> None:
        """Nothing is asked for; the draft hears from time to time what was committed, so that it can be asked again."""
        if self._lane is not None and sequence.base - self._base >= _CATCH_UP:
            self._tell(self._lane, sequence, Budget())

    def _tell(self, lane: Lane, sequence: Sequence, budget: Budget, in_flight: TokenTree = EMPTY_TREE) -> None:
        if budget.max_nodes or budget.max_ahead:
            self._costs.contention.asked()
        self._advance += 1
        new = tuple(sequence.ids[self._base :])
        self._base = sequence.base
        # What a prompt lookup guesses may reach beyond the draft's context.
        if self._base + max(in_flight.depths, default=0) >= self._context_length:
            in_flight = EMPTY_TREE
        advance = Advance(self._advance, self._base, new, in_flight, budget)
        lane.send(write_advance(lane.sequence, advance))

    def _possible(self, budget: Budget) -> Budget:
        """Not every draft grows ahead, or proposes siblings."""
        able = self._replica is not None and self._replica.can(frozenset({AHEAD}))
        wide = self._replica is not None and self._replica.can(frozenset({SIBLINGS}))
        ahead, siblings = budget.max_ahead if able else 0, budget.max_siblings if wide else 0
        return dataclasses.replace(budget, max_ahead=ahead, max_siblings=siblings)

    async def growth(self, sequence: Sequence) -> Growth | None:
        """The next growth. None: the draft was lost, or owes its answer for longer than it is worth.

        A chain that is verified against its distribution is awaited as long as the draft lives: to drop it for its
        lateness would bias the output.
        """
        if self._lane is None:
            return None
        num_nodes = self._asked.num_nodes if self._asked else 0
        patience_s = min(_PATIENCE_S, self._costs.patience_s(num_nodes)) if sequence.keyed_by_token else None
        try:
            growth: Growth = await self._lane.receive(patience_s)
        except TimeoutError:
            self._late()
            return None
        except SpecdecError as error:
            self._lose(error)
            return None
        self._observe(self._lane, growth)
        return growth

    def arrived(self) -> Iterator[Growth]:
        """Growths that came without being waited for."""
        while self._lane is not None and self._lane.arrived:
            try:
                growth: Growth = self._lane.take()
            except SpecdecError as error:
                self._lose(error)
                return
            self._observe(self._lane, growth)
            yield growth

    def _observe(self, lane: Lane, growth: Growth) -> None:
        num_nodes = self._asked.num_nodes if self._asked else 0
        answered = growth.advance == self._advance and bool(growth.end or len(growth.tree) >= num_nodes)
        self._owed_since = None if answered else time.monotonic()
        if not answered:
            return
        self._pause_s, self._num_lost = _FIRST_PAUSE_S, 0
        asked, self._asked = self._asked, None
        if asked is None or growth.advance != asked.advance or not num_nodes:
            return  # what is asked of it later may be answered instead
        took_s = max(0.0, lane.heard - asked.at)
        if self._replica is not None and not asked.takes_in:
            # Drafts are compared, of which one may be asked for more.
            self._replica.observe(self._costs.draft_of_one_s(num_nodes, took_s))
        if growth.end in (None, GrowthEnd.BUDGET) and asked.num_new:
            self._costs.drafted(asked.num_new, took_s, asked.takes_in)

    def _lose(self, error: SpecdecError) -> None:
        """The lane has ended. Who refused the text would take in all of it again, only to refuse it once more; and it
        may be the text that fails its drafts."""
        self._lane = None
        if isinstance(error, ReplicaLost):
            self._num_lost += self._asked is not None and not isinstance(error, Draining)
            if self._num_lost < _MOST_LOST:
                return
        self._pause(max(self._pause_s, error.retry_after_s if isinstance(error, Overloaded) else 0.0))

    def _pause(self, seconds: float) -> None:
        """Do without, and longer the next time."""
        self._paused_until = time.monotonic() + seconds
        self._pause_s *= 2

    def _late(self) -> None:
        """This round does without; the answer may still count in the next."""
        now = time.monotonic()
        if self._replica is not None:
            self._replica.tally.num_late += 1
        if self._asked is not None:
            if self._asked.num_nodes and not self._asked.takes_in:
                self._costs.late(self._asked.num_nodes, now - self._asked.at)
            self._owed_since = self._owed_since or self._asked.at
        if now - (self._owed_since or now) >= _PATIENCE_S:
            self.park()
            self._pause(self._pause_s)

    @property
    def tally(self) -> Tally | None:
        """Of the replica that it has now, or had last."""
        return self._replica.tally if self._replica is not None else None

    @property
    def num_advances(self) -> int:
        """The number of the last advance."""
        return self._advance

    def eject(self, reason: str) -> None:
        """This draft breaks the contract: use another."""
        self.park()
        if self._replica is not None:
            self._replica.eject(reason)

    def _open(self, sequence: Sequence, budget: Budget) -> None:
        self._replica = self._pool.pick(needs=sequence.draft_needs)
        if self._replica is None or sequence.base > self._context_length:
            return
        try:
            self._lane = lane = self._replica.lane()
        except SpecdecError:
            return
        self._costs.contention.asked()
        self._advance, self._base = 0, sequence.base
        if not sequence.keyed_by_token:
            budget = Budget()
        lane.open(
            chunked(
                sequence.spec,
                "",
                self._traceparent,
                lambda spec, more: draft_pb2.DraftOpen(
                    sequence=lane.sequence, spec=spec, more=more, budget=write_budget(self._possible(budget))
                ),
            )
        )
