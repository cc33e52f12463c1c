"""One sequence's draft: asks for nodes and receives them, or has no draft at the moment.

Knows advances and lanes; refuses to know the trie. No draft, for whatever reason, is None and never an error: the
next advance tries again.
"""

from __future__ import annotations

import time

from orchestrator.frames import chunked
from orchestrator.link import Lane
from orchestrator.pool import Pool
from orchestrator.replica import Replica
from orchestrator.sequence import Sequence
from specdec.errors import SpecdecError
from specdec.rounds import Advance, Budget, Growth
from specdec.v1 import draft_pb2
from specdec.wire import write_advance, write_budget

_PATIENCE_S = 1.0
_FIRST_PAUSE_S = 5.0
"""A draft whose heart beats may still owe an answer. Who waited in vain does without it for a while, twice as long each
time."""


class DraftClient:
    """``async with`` closes the sequence on its replica."""

    def __init__(self, pool: Pool, traceparent: str = "") -> None:
        self._pool = pool
        self._traceparent = traceparent
        self._replica: Replica | None = None
        self._lane: Lane | None = None
        self._advance = 0
        self._asked = 0.0
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

    def advance(self, sequence: Sequence, budget: Budget) -> bool:
        """Tell what was committed and ask for nodes. False: there is no draft."""
        if self._lane is None:
            if time.monotonic() < self._paused_until:
                return False
            self._open(sequence, budget)
            # A chain that is verified against its distribution is never drawn before the first token is known.
            if self._lane is None or sequence.keyed_by_token or not sequence.num_committed:
                return self._lane is not None
        self._advance += 1
        self._asked = time.monotonic()
        new = tuple(sequence.ids[self._base :])
        self._base = sequence.base
        self._lane.send(write_advance(self._lane.sequence, Advance(self._advance, self._base, new, budget=budget)))
        return True

    async def growth(self, sequence: Sequence) -> Growth | None:
        """The next growth. None: the draft was lost, or owes its answer for too long.

        A chain that is verified against its distribution is awaited as long as the draft lives: to drop it for its
        lateness would bias the output.
        """
        if self._lane is None:
            return None
        try:
            growth: Growth = await self._lane.receive(_PATIENCE_S if sequence.keyed_by_token else None)
        except TimeoutError:
            self.park()
            self._paused_until = time.monotonic() + self._pause_s
            self._pause_s *= 2
            return None
        except SpecdecError:
            self._lane = None
            return None
        if growth.end and growth.advance == self._advance and growth.advance and self._replica is not None:
            self._replica.observe(time.monotonic() - self._asked)
        return growth

    @property
    def num_advances(self) -> int:
        """The number of the last advance."""
        return self._advance

    def set_aside(self, reason: str) -> None:
        """This draft breaks the contract: use another."""
        self.park()
        if self._replica is not None:
            self._replica.set_aside(reason)

    def _open(self, sequence: Sequence, budget: Budget) -> None:
        self._replica = self._pool.pick()
        if self._replica is None:
            return
        try:
            self._lane = lane = self._replica.lane()
        except SpecdecError:
            return
        self._advance, self._base = 0, sequence.base
        if not sequence.keyed_by_token:
            budget = Budget()
        lane.open(
            chunked(
                sequence.spec,
                "",
                self._traceparent,
                lambda spec, more: draft_pb2.DraftOpen(
                    sequence=lane.sequence, spec=spec, more=more, budget=write_budget(budget)
                ),
            )
        )
