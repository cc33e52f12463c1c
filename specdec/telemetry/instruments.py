"""OpenTelemetry instruments that read existing counters when a scrape or an export asks for them.

Updating a plain counter costs one addition; calling an instrument costs a few microseconds, which is acceptable once
per request but not once per round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from opentelemetry import metrics

Points = Iterable[tuple[float, Mapping[str, str | int]]]
"""Values with their attributes. They are read on another thread than that of the event loop."""


class Instruments:
    """Makes instruments of the current meter provider. Without a provider their values are never read."""

    def __init__(self) -> None:
        self._meter = metrics.get_meter("specdec")

    def counter(self, name: str, unit: str, description: str, read: Callable[[], Points]) -> None:
        """``read`` returns totals that never decrease."""
        self._meter.create_observable_counter(name, [_callback(read)], unit, description)

    def gauge(self, name: str, unit: str, description: str, read: Callable[[], Points]) -> None:
        self._meter.create_observable_gauge(name, [_callback(read)], unit, description)

    def histogram(self, name: str, unit: str, description: str, bounds: Sequence[float]) -> metrics.Histogram:
        """``bounds`` are the upper bounds of the buckets."""
        return self._meter.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=bounds)


def _callback(read: Callable[[], Points]) -> Callable[[metrics.CallbackOptions], Iterable[metrics.Observation]]:
    def callback(_: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        return [metrics.Observation(value, attributes) for value, attributes in read()]

    return callback
