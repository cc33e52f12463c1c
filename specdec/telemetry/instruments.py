"""Numbers that somebody keeps anyway, told to OpenTelemetry when a scrape or an export asks for them.

Knows how instruments are made; refuses to know what they measure. A number that is only kept costs an addition; an
instrument that is called costs some microseconds each time, which is fit for once per request, not per round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from opentelemetry import metrics

Points = Iterable[tuple[float, Mapping[str, str | int]]]
"""Values with their attributes. They are read on another thread than the event loop's."""


class Instruments:
    """Of the meter provider in force when this is made; without one, nobody ever asks."""

    def __init__(self) -> None:
        self._meter = metrics.get_meter("specdec")

    def counter(self, name: str, unit: str, description: str, read: Callable[[], Points]) -> None:
        """``read`` gives totals that never fall."""
        self._meter.create_observable_counter(name, [_callback(read)], unit, description)

    def gauge(self, name: str, unit: str, description: str, read: Callable[[], Points]) -> None:
        self._meter.create_observable_gauge(name, [_callback(read)], unit, description)

    def histogram(self, name: str, unit: str, description: str, bounds: Sequence[float]) -> metrics.Histogram:
        """``bounds``: the upper ends of its buckets."""
        return self._meter.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=bounds)


def _callback(read: Callable[[], Points]) -> Callable[[metrics.CallbackOptions], Iterable[metrics.Observation]]:
    def callback(_: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        return [metrics.Observation(value, attributes) for value, attributes in read()]

    return callback
