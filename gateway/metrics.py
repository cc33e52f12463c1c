"""Metrics of the gateway, counted per request. Knows routes and times; does not know requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from specdec.telemetry.instruments import Instruments, Points

_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The instruments, made with the meter provider that is set at construction."""

    def __init__(self) -> None:
        self._answers: Counter[tuple[str, int]] = Counter()
        self._num_streams = 0
        instruments = Instruments()
        requests = "Answered requests, by route and status; a stream by how it ends."
        instruments.counter("specdec.gateway.requests", "1", requests, self._requests)
        instruments.gauge("specdec.gateway.streams", "1", "Streams that are open.", lambda: [(self._num_streams, {})])
        self._answer_s = instruments.histogram(
            "specdec.gateway.answer", "s", "Time until an answer begins, by route; without a stream its end.", _BOUNDS_S
        )

    def began(self, route: str, seconds: float) -> None:
        """An answer, after so long."""
        self._answer_s.record(seconds, {"route": route})

    def ended(self, route: str, status: int) -> None:
        """An answer; a stream with the status of what broke it, if anything did."""
        self._answers[route, status] += 1

    @contextmanager
    def streaming(self) -> Iterator[None]:
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    def _requests(self) -> Points:
        return [(count, {"route": route, "status": status}) for (route, status), count in [*self._answers.items()]]
