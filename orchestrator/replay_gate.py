"""Replays in good order: oldest request first, a few at a time per replica.

When a target dies, all its sequences want to prefill elsewhere at once; let in together, they would stand in the way
of each other and of everyone who was there already. Knows order and number; refuses to know sequences.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

PER_REPLICA = 4


class ReplayGate:
    """``num_replicas()`` is how many can take replays now; ``changed`` says that it may have grown."""

    def __init__(self, num_replicas: Callable[[], int]) -> None:
        self._num_replicas = num_replicas
        self._inside = 0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @asynccontextmanager
    async def turn(self, arrived: float) -> AsyncIterator[None]:
        """Wait for a turn; the smaller ``arrived`` (any clock), the sooner."""
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (arrived, next(self._order), admitted))
        self.changed()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    def changed(self) -> None:
        """Let in as many as there is room for."""
        while self._waiting and self._inside < PER_REPLICA * max(1, self._num_replicas()):
            _, _, admitted = heapq.heappop(self._waiting)
            if not admitted.done():
                self._inside += 1
                admitted.set_result(None)

    def _leave(self) -> None:
        self._inside -= 1
        self.changed()
