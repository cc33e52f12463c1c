"""The draft of one sequence: requests nodes and receives them, or has no draft at the moment.

Knows advances and lanes; does not know the trie. A missing draft is None, never an error; the next advance tries again.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.replicas.allowances import of_budget
from orchestrator.replicas.lane import Lane
from orchestrator.replicas.pool import Pool
from orchestrator.replicas.replica import Replica, Tally
from orchestrator.sequence import Sequence
from specdec.core.errors import Draining, Overloaded, ReplicaLost, SpecdecError
from specdec.core.rounds import AHEAD, SIBLINGS, Advance, Budget, Growth, GrowthEnd
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.transport.opening import draft_open
from specdec.transport.wire import write_advance

_PATIENCE_S = 1.0
_FIRST_PAUSE_S = 5.0
"""A draft may send heartbeats and still not answer. A round waits at most until the draft deadline. After _PATIENCE_S
without an answer the sequence pauses drafting, for _FIRST_PAUSE_S at first and twice as long each time."""

_PATIENCE_IN_GROWTHS, _LONGEST_PATIENCE_S = 5, 15.0
"""Under token and block verification a round waits for so many times the usual growth, at least _PATIENCE_S and at most
_LONGEST_PATIENCE_S. Then the request gives up drafting for good. That is decided by time alone, and once, so it biases
no later round."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """An unanswered advance that requests nodes, sent at time ``at``."""

    advance: int
    num_nodes: int
    at: float
    takes_in: bool
    """The draft first feeds much text, so that the time until the answer is not that of growing."""
    num_new: int
    """Requested nodes that are not in the trie yet; 0: not known."""


LATE = 1.25
"""A late answer is taken to need so many times the time that was waited."""

_MAX_LOST = 2
"""Replicas lost in a row while they owed an answer. Then drafting pauses, as after a refusal of the text."""

_CATCH_UP_TOKENS = 64
"""Committed tokens that the draft may lag behind while nothing is requested. It feeds them in one pass."""

_MAX_NEW_TOKENS = 16
"""For more new tokens than this the draft needs a separate pass before anything can grow."""


class DraftClient:
    """``async with`` closes the sequence on its replica."""

    def __init__(self, pool: Pool, traceparent: str = "") -> None:
        self._pool = pool
        self._traceparent = traceparent
        self._replica: Replica | None = None
        self._failed: Replica | None = None  # the last one that was late, refused the text or was lost
        self._lane: Lane | None = None
        self._advance = 0
        self._asked: _Asked | None = None  # None: every advance is answered
        self._owed_since: float | None = None  # since when an answer is late
        self._answer: tuple[int, float] | None = None  # see take_answer
        self._num_lost = 0  # replicas lost in a row while they owed an answer
        self._pause_s = _FIRST_PAUSE_S
        self._paused_until = 0.0  # infinity: drafting is given up
        self._base = 0  # length of the text that the replica knows
        self._requested_to = 0  # end of the positions for which the replica was ever asked for nodes

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
        """Send the committed tokens and the tree in flight, and request nodes, of which ``num_there`` are in the trie
        already. Opens a lane if there is none. False: there is no draft."""
        now = time.monotonic()
        # The time of the first nodes is measured even if the round does not wait for them.
        num_nodes = budget.max_nodes or int(not in_flight)
        if self._lane is not None and sequence.base > self._context_length:
            self.park()
        opens = self._lane is None
        if self._lane is None:
            if now < self._paused_until:
                return False
            self._owed_since = None
            self._open(sequence, budget)
            self._asked = _Asked(advance=0, num_nodes=num_nodes, at=now, takes_in=True, num_new=num_nodes)
            # Under token and block verification the open requests nothing: the draws need the first token.
            if self._lane is None or sequence.keyed_by_token or not sequence.num_committed:
                return self._lane is not None
        budget = self._possible(budget)
        if not (budget.max_nodes or budget.max_ahead):
            self.catch_up(sequence)  # the draft supports nothing of the request
            return True
        takes_in = opens or sequence.base - self._base > _MAX_NEW_TOKENS
        # The nodes requested with an unanswered open may be half done.
        half_done = not opens and self._asked is not None and self._asked.advance == 0
        num_new = 0 if half_done else max(0, num_nodes - num_there)
        self._send(self._lane, sequence, budget, in_flight=in_flight)
        self._asked = _Asked(advance=self._advance, num_nodes=num_nodes, at=now, takes_in=takes_in, num_new=num_new)
        return True

    @property
    def _context_length(self) -> float:
        """The context length of the draft, which may be shorter than the target's."""
        info = self._replica.info if self._replica is not None else None
        return math.inf if info is None else info.context_length

    def catch_up(self, sequence: Sequence) -> None:
        """Request nothing, but send the committed tokens now and then, so that a later request is answered quickly."""
        if self._lane is not None and sequence.base - self._base >= _CATCH_UP_TOKENS:
            self._send(self._lane, sequence, Budget())

    def _send(self, lane: Lane, sequence: Sequence, budget: Budget, in_flight: TokenTree = EMPTY_TREE) -> None:
        self._advance += 1
        new = tuple(sequence.ids[self._base :])
        self._base = sequence.base
        # A prompt-lookup proposal may reach beyond the draft's context.
        if self._base + max(in_flight.depths, default=0) >= self._context_length:
            in_flight = EMPTY_TREE
        advance = Advance(self._advance, self._base, token_ids=new, in_flight=in_flight, budget=budget)
        allows = self._allowed(sequence, budget, 1 + max(in_flight.depths, default=-1))
        lane.send(write_advance(lane.sequence, advance), allows)

    def _allowed(self, sequence: Sequence, budget: Budget, num_in_flight: int = 0) -> int:
        """Entries of the growths that answer. ``num_in_flight``: levels of the tree in flight."""
        self._requested_to = max(self._requested_to, self._base + max(budget.max_depth, num_in_flight))
        return of_budget(budget, self._requested_to - self._base, with_probs=not sequence.keyed_by_token)

    def _possible(self, budget: Budget) -> Budget:
        """The part of ``budget`` that this draft supports: not every draft grows ahead or proposes siblings."""
        able = self._replica is not None and self._replica.can(frozenset({AHEAD}))
        wide = self._replica is not None and self._replica.can(frozenset({SIBLINGS}))
        ahead, siblings = budget.max_ahead if able else 0, budget.max_siblings if wide else 0
        return dataclasses.replace(budget, max_ahead=ahead, max_siblings=siblings)

    async def growth(self, sequence: Sequence, deadline_s: float, waited_s: float = 0.0) -> Growth | None:
        """The next growth. None: the draft was lost, or did not answer within ``deadline_s``. ``waited_s``: how long
        the round has waited already.

        Under token and block verification the deadline does not count: dropping late chains would bias the output. A
        draft that takes far longer than usual is given up for the rest of the request.
        """
        if self._lane is None or self._replica is None:
            return None
        if sequence.keyed_by_token:
            patience_s = min(_PATIENCE_S, deadline_s)
        else:
            patience_s = max(_PATIENCE_S, _PATIENCE_IN_GROWTHS * self._replica.load.slowest_growth_s)
            patience_s = min(patience_s, _LONGEST_PATIENCE_S)
        try:
            growth: Growth = await self._lane.receive(patience_s - waited_s)
        except TimeoutError:
            self._late(gives_up=not sequence.keyed_by_token)
            return None
        except SpecdecError as error:
            self._lose(error)
            return None
        self._observe_growth(self._lane, growth)
        return growth

    def arrived(self) -> Iterator[Growth]:
        """Growths that have arrived, without waiting."""
        while self._lane is not None and self._lane.arrived:
            try:
                growth: Growth = self._lane.next_result()
            except SpecdecError as error:
                self._lose(error)
                return
            self._observe_growth(self._lane, growth)
            yield growth

    def _observe_growth(self, lane: Lane, growth: Growth) -> None:
        num_nodes = self._asked.num_nodes if self._asked else 0
        answered = growth.advance == self._advance and bool(growth.end or len(growth.tree) >= num_nodes)
        self._owed_since = None if answered else time.monotonic()
        if not answered:
            return
        self._pause_s, self._num_lost, self._failed = _FIRST_PAUSE_S, 0, None
        asked, self._asked = self._asked, None
        if asked is None or growth.advance != asked.advance or not num_nodes:
            return  # this growth may answer a later request
        took_s = max(0.0, lane.heard - asked.at)
        if self._replica is not None:
            self._replica.load.observe_growth(took_s)
        if growth.end in (None, GrowthEnd.BUDGET) and asked.num_new and not asked.takes_in:
            self._answer = asked.num_new, took_s

    def _lose(self, error: SpecdecError) -> None:
        """The lane has ended. Pause drafting if the draft refused the text, or if losses in a row suggest that the text
        makes its drafts fail."""
        self._lane, self._failed = None, self._replica
        if isinstance(error, ReplicaLost):
            self._num_lost += self._asked is not None and not isinstance(error, Draining)
            if self._num_lost < _MAX_LOST:
                return
        self._pause(max(self._pause_s, error.retry_after_s if isinstance(error, Overloaded) else 0.0))

    def _pause(self, seconds: float) -> None:
        """Pause drafting for ``seconds``, and for twice as long the next time."""
        self._paused_until, self._failed = time.monotonic() + seconds, self._replica
        self._pause_s *= 2

    def _late(self, gives_up: bool) -> None:
        """The draft deadline has passed: this round has no draft. The answer may still serve the next round, unless the
        request ``gives_up`` drafting."""
        now = time.monotonic()
        if self._replica is not None:
            self._replica.tally.num_late += 1
        if self._asked is not None:
            if self._asked.num_nodes and not self._asked.takes_in:
                self._answer = self._asked.num_nodes, LATE * (now - self._asked.at)
            self._owed_since = self._owed_since or self._asked.at
        if gives_up:
            if self._replica is not None and self._asked is not None:
                self._replica.load.observe_growth(now - self._asked.at)  # the next request waits longer
            self.park()
            self._pause(math.inf)
        elif now - (self._owed_since or now) >= _PATIENCE_S:
            self.park()
            self._pause(self._pause_s)

    def take_answer(self) -> tuple[int, float] | None:
        """The number of tokens and the seconds of the last request that was answered, or was late, since the last call.
        Requests that the draft answers after much text show nothing."""
        answer, self._answer = self._answer, None
        return answer

    def compare(self, of_one_s: float) -> None:
        """Compare the replica with others by the time of one token, since one may be asked for more than another."""
        if self._replica is not None:
            self._replica.observe_latency(of_one_s)

    @property
    def tally(self) -> Tally | None:
        """The tally of the present or last replica."""
        return self._replica.tally if self._replica is not None else None

    @property
    def num_advances(self) -> int:
        """The number of the last advance."""
        return self._advance

    def eject(self, reason: str) -> None:
        """The draft broke the contract: eject its replica, and use another."""
        self.park()
        if self._replica is not None:
            self._replica.eject(reason)

    def _open(self, sequence: Sequence, budget: Budget) -> None:
        prefixes = sequence.request.prefixes
        self._replica = self._pool.pick(self._failed, sequence.request.draft_needs, prefixes=prefixes)
        if self._replica is None or sequence.base > self._context_length:
            return
        try:
            self._lane = lane = self._replica.lane()
        except SpecdecError:
            return
        self._pool.count_open(self._replica, prefixes)
        self._advance, self._base, self._requested_to = 0, sequence.base, 0
        budget = self._possible(budget) if sequence.keyed_by_token else Budget()
        allows = self._allowed(sequence, budget)
        lane.open(draft_open(lane.sequence, sequence.spec, budget, traceparent=self._traceparent), allows)
