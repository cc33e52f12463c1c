"""A heap of events and the simulated time. Knows no real clock and no meaning of events."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Events:
    """An event queue. Events of the same time run in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._planned = 0

    def after(self, seconds: float, happen: Callable[[Any], None], what: Any) -> None:
        self._planned += 1
        heappush(self._heap, (self.now + seconds, self._planned, happen, what))

    def run(self) -> None:
        """Run events until none is left."""
        heap = self._heap
        while heap:
            self.now, _, happen, what = heappop(heap)
            happen(what)
