"""What happens when: a heap of events and the simulated time. Knows no clock and no meaning."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Events:
    """Events of one time happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._planned = 0

    def after(self, seconds: float, happen: Callable[[Any], None], what: Any) -> None:
        self._planned += 1
        heappush(self._heap, (self.now + seconds, self._planned, happen, what))

    def run(self) -> None:
        """Until nothing is left to happen."""
        heap = self._heap
        while heap:
            self.now, _, happen, what = heappop(heap)
            happen(what)
