"""The metrics of several processes of one service as one: what Prometheus scrapes of their parent.

Counters and histograms are added up, also those of processes that have ended, as they were last seen. Of gauges the
numbers of things are added up; of times, and of what is 0 or 1, the largest is taken.
"""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from specdec.telemetry.prometheus import serve_registry

_TIMEOUT_S = 2.0
_LARGEST = ("_ready", "_info", "_seconds")

_Key = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of a sample."""


class SummedMetrics(Collector):
    """``begin`` names the processes; ``serve`` answers scrapes, from a thread of its own."""

    def __init__(self) -> None:
        self._addresses: dict[int, str] = {}
        self._seen: dict[int, dict[str, Metric]] = {}  # of present processes, by name
        self._ended: list[dict[str, Metric]] = []  # of former ones, added up: one entry at most
        self._lock = threading.Lock()

    def begin(self, number: int, address: str) -> None:
        """A process has its metrics at ``address``. What the one before it under this number had counted stays."""
        with self._lock:
            self._addresses[number] = address
            if (last := self._seen.pop(number, None)) is not None:
                counted = {name: family for name, family in last.items() if family.type != "gauge"}
                self._ended = [_added([*self._ended, counted])]

    def serve(self, host: str, port: int) -> int:
        """Serve /metrics; returns the port. Raises ValueError if it cannot listen there."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return serve_registry(registry, host, port)

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            for number, address in self._addresses.items():
                if (families := _read(address)) is not None:
                    self._seen[number] = families
            return list(_added([*self._ended, *self._seen.values()]).values())

    def describe(self) -> Iterable[Metric]:
        return ()


def _read(address: str) -> dict[str, Metric] | None:
    """By name; None: it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode()
    except OSError:
        return None
    return {family.name: family for family in text_string_to_metric_families(text)}


def _added(parts: Iterable[dict[str, Metric]]) -> dict[str, Metric]:
    sums: dict[str, Metric] = {}
    for families in parts:
        for name, family in families.items():
            if name not in sums:
                sums[name] = Metric(name, family.documentation, family.type)
            sums[name].samples = list(_combined(family, sums[name].samples, family.samples))
    return sums


def _combined(family: Metric, one: Iterable[Sample], other: Iterable[Sample]) -> Iterator[Sample]:
    largest = family.type == "gauge" and family.name.endswith(_LARGEST)
    values: dict[_Key, Sample] = {}
    for sample in (*one, *other):
        key = sample.name, tuple(sorted(sample.labels.items()))
        if (before := values.get(key)) is not None:
            value = max(before.value, sample.value) if largest else before.value + sample.value
            sample = sample._replace(value=value)
        values[key] = sample
    yield from values.values()
