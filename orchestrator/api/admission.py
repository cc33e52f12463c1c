"""Admission of requests: start now, wait in the queue, or be refused at once.

Knows numbers and order; does not know requests. First come, first served: small requests do not overtake a large one at
the head of the queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from specdec.core.errors import InvalidArgument, Overloaded

_SMOOTHING = 0.2


class Admission:
    """At most ``max_live`` sequences at a time and ``max_waiting`` requests in the queue."""

    def __init__(self, max_live: int, max_waiting: int) -> None:
        self.live = 0
        self._max_live = max_live
        self._max_waiting = max_waiting
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._between_ends_s = 0.1  # smoothed
        self._last_end: float | None = None

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @asynccontextmanager
    async def admitted(self, count: int) -> AsyncIterator[None]:
        """Wait until ``count`` sequences may start. Raises Overloaded at once if the queue is full, InvalidArgument if
        ``count`` exceeds ``max_live``."""
        if count > self._max_live:
            raise InvalidArgument([("n", f"at most {self._max_live} samples at a time are served here, not {count}")])
        if self.live + count > self._max_live or self._queue:
            if len(self._queue) >= self._max_waiting:
                raise Overloaded(
                    f"{self.live} sequences are being generated and {len(self._queue)} requests wait",
                    self._retry_after_s(),
                )
            await self._wait(count)
        else:
            self.live += count
        try:
            yield
        finally:
            self.live -= count
            self._note_end()
            self._let_in()

    async def _wait(self, count: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (count, turn)
        self._queue.append(place)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.live -= count
            else:
                with suppress(ValueError):  # removed already, by a request that left at the same moment
                    self._queue.remove(place)
            self._let_in()
            raise

    def _let_in(self) -> None:
        while self._queue and self.live + self._queue[0][0] <= self._max_live:
            count, turn = self._queue.popleft()
            if not turn.done():
                self.live += count
                turn.set_result(None)

    def _note_end(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._last_end is not None:
            self._between_ends_s += _SMOOTHING * (now - self._last_end - self._between_ends_s)
        self._last_end = now

    def _retry_after_s(self) -> float:
        """Time until half the queue has moved, at the present pace; 0.1 to 60 s."""
        return min(60.0, max(0.1, self._between_ends_s * (len(self._queue) + 1) / 2))
