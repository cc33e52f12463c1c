"""Metrics as Prometheus reads them: text over HTTP, on a port of its own.

Knows names and the endpoint; refuses to know what is measured. The server is a thread, so that a scrape is answered
also while the event loop stands still.
"""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector

_OURS, _THEIRS = "spec_decode_", "vllm:spec_decode_"


class _Renamed(Collector):
    """The counters that vLLM has as well under vLLM's names: an OpenTelemetry name can have no colon."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            if family.name.startswith(_OURS):
                family.name = _theirs(family.name)
                family.samples = [sample._replace(name=_theirs(sample.name)) for sample in family.samples]
            yield family


def _theirs(name: str) -> str:
    return _THEIRS + name.removeprefix(_OURS)


class Scrape:
    """``reader`` belongs into a MeterProvider; from ``serve`` on its metrics are at /metrics."""

    def __init__(self) -> None:
        inner = CollectorRegistry()
        self.reader = PrometheusMetricReader(scope_info_enabled=False, registry=inner)
        self._registry = CollectorRegistry()
        self._registry.register(_Renamed(inner))

    def serve(self, host: str, port: int) -> int:
        """Returns the port: another than asked for if that was 0. Raises ValueError if it cannot be had."""
        try:
            server, _ = start_http_server(port, host, self._registry)
        except OSError as error:
            raise ValueError(f"--metrics-port: cannot listen on {host}:{port}: {error}") from error
        return int(server.server_port)
