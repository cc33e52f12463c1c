"""The order of replays: oldest request first, a few at a time per replica.

When a target dies, all its sequences need a prefill elsewhere at once. Together they would delay each other and all
sequences that are already there. Suspects (sequences that waited for the replica when it failed) replay one at a time:
if one of them caused the failure, the next failure shows which. A batch of suspects would crash a second replica, and
finding the cause would take a third. Knows order and number; does not know sequences.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

PER_REPLICA = 4


class ReplayGate:
    """``num_replicas()``: replicas that can take replays now. Call ``changed`` when their number may have grown."""

    def __init__(self, num_replicas: Callable[[], int]) -> None:
        self._num_replicas = num_replicas
        self._inside = {False: 0, True: 0}  # number of replays, by suspect
        self._waiting: dict[bool, list[tuple[float, int, asyncio.Future[None]]]] = {False: [], True: []}
        self._order = itertools.count()

    @asynccontextmanager
    async def turn(self, arrived: float, suspect: bool = False) -> AsyncIterator[None]:
        """Wait for a turn. A smaller ``arrived`` (any clock) comes first."""
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting[suspect], (arrived, next(self._order), admitted))
        self.changed()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self._leave(suspect)
            raise
        try:
            yield
        finally:
            self._leave(suspect)

    def changed(self) -> None:
        """Admit as many replays as there is room for."""
        room = PER_REPLICA * max(1, self._num_replicas())
        while sum(self._inside.values()) < room:
            first_ones = [
                (waiting[0], suspect)
                for suspect, waiting in self._waiting.items()
                if waiting and not (suspect and self._inside[True])
            ]
            if not first_ones:
                return
            _, suspect = min(first_ones, key=lambda entry: entry[0][:2])
            _, _, admitted = heapq.heappop(self._waiting[suspect])
            if not admitted.done():
                self._inside[suspect] += 1
                admitted.set_result(None)

    def _leave(self, suspect: bool) -> None:
        self._inside[suspect] -= 1
        self.changed()
