"""Metrics as Prometheus reads them: text over HTTP, on a port of its own.

Knows names and the endpoint; refuses to know what is measured. The server is a thread, so that a scrape is answered
also while the event loop stands still.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from prometheus_client import CollectorRegistry, Metric, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
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


class _IPv6Server(ThreadingWSGIServer):
    address_family = socket.AF_INET6


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no event."""


class Scrape:
    """``reader`` belongs into a MeterProvider; from ``serve`` on its metrics are at /metrics."""

    def __init__(self) -> None:
        inner = CollectorRegistry()
        self.reader = PrometheusMetricReader(scope_info_enabled=False, registry=inner)
        registry = CollectorRegistry()
        registry.register(_Renamed(inner))
        self._app = make_wsgi_app(registry)
        self._one_at_a_time = threading.Lock()

    def serve(self, host: str, port: int) -> int:
        """``host`` is without brackets. Returns the port: another than asked for if that was 0.

        Raises ValueError if it cannot be had.
        """
        kind = _IPv6Server if ":" in host else ThreadingWSGIServer
        try:
            server = make_server(host, port, self._answer, kind, handler_class=_Silent)
        except OSError as error:
            raise ValueError(f"--metrics-port: cannot listen on {host}:{port}: {error}") from error
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        return int(server.server_port)

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        # Always the plain text format: where Prometheus asks for OpenMetrics the library may turn colons into
        # underscores.
        environ.pop("HTTP_ACCEPT", None)
        # The reader hands a scrape what it collected through itself: two at once would take from each other. The app
        # makes all of its output within this call.
        with self._one_at_a_time:
            return self._app(environ, start_response)
