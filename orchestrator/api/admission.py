"""Admission of requests: start now, wait in the queue, or be refused at once.

Knows numbers and order; does not know requests. First come, first served, where a less urgent request counts as if it
had come later: small requests do not overtake a large one at the head of the queue.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter

from specdec.core.errors import InvalidArgument, Overloaded
from specdec.core.sequence import Priority

_SMOOTHING = 0.2

_BATCH_SHARE = 0.75
"""Of the places, that batch requests may have together: the others need not wait until one of these ends."""


@dataclass(eq=False, slots=True)
class _Place:
    """Of a request in the queue: ``due`` is its arrival, later by what its priority is behind."""

    due: float
    count: int
    priority: Priority
    turn: asyncio.Future[None]


class Admission:
    """At most ``max_live`` sequences at a time and ``max_waiting`` requests in the queue. Of a full queue the last
    request gives way to one that is due before it."""

    def __init__(self, max_live: int, max_waiting: int) -> None:
        self.live = 0
        self._live_batch = 0  # of batch requests
        self._max_live = max_live
        self._max_batch = int(_BATCH_SHARE * max_live)
        self._max_waiting = max_waiting
        self._queue: list[_Place] = []  # in order
        self._between_ends_s = 0.1  # smoothed
        self._last_end: float | None = None

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @asynccontextmanager
    async def admitted(self, count: int, priority: Priority = Priority.STANDARD) -> AsyncIterator[None]:
        """Wait until ``count`` sequences may start. Raises Overloaded at once if the queue is full, or later if a more
        urgent request takes the place in it, InvalidArgument if ``count`` exceeds ``max_live``."""
        if count > self._max_live:
            raise InvalidArgument([("n", f"at most {self._max_live} samples at a time are served here, not {count}")])
        loop = asyncio.get_running_loop()
        place = _Place(loop.time() + priority.behind_s, count, priority, loop.create_future())
        insort(self._queue, place, key=attrgetter("due"))
        self._let_in()
        if len(self._queue) > self._max_waiting:
            last = self._queue.pop()
            last.turn.set_exception(self._overloaded())
        try:
            await place.turn
        except asyncio.CancelledError:
            if place.turn.done() and not place.turn.cancelled() and place.turn.exception() is None:
                self._leave(place)
            else:
                with suppress(ValueError):  # removed already, by a request that left at the same moment
                    self._queue.remove(place)
                self._let_in()
            raise
        try:
            yield
        finally:
            self._note_end()
            self._leave(place)

    def _let_in(self) -> None:
        """Admit the first ones. Batch requests that have all of their places wait, and let others pass."""
        for place in list(self._queue):
            is_batch = place.priority is Priority.BATCH
            if is_batch and self._live_batch and self._live_batch + place.count > self._max_batch:
                continue
            if self.live + place.count > self._max_live:
                return
            self._queue.remove(place)
            if not place.turn.done():
                self.live += place.count
                self._live_batch += place.count if is_batch else 0
                place.turn.set_result(None)

    def _leave(self, place: _Place) -> None:
        self.live -= place.count
        self._live_batch -= place.count if place.priority is Priority.BATCH else 0
        self._let_in()

    def _overloaded(self) -> Overloaded:
        num_waiting = len(self._queue)
        problem = f"{self.live} sequences are being generated and {num_waiting} requests wait"
        return Overloaded(problem, self._retry_after_s())

    def _note_end(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._last_end is not None:
            self._between_ends_s += _SMOOTHING * (now - self._last_end - self._between_ends_s)
        self._last_end = now

    def _retry_after_s(self) -> float:
        """Time until half the queue has moved, at the present pace; 0.1 to 60 s."""
        return min(60.0, max(0.1, self._between_ends_s * (len(self._queue) + 1) / 2))
