"""The Prometheus endpoint: metrics as text over HTTP, on a separate port.

The server has a thread, so that it answers a scrape
even while the event loop is blocked.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from prometheus_client import CollectorRegistry, Metric, generate_latest, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OURS, _THEIRS = "spec_decode_", "vllm:spec_decode_"


class _Renamed(Collector):
    """Gives counters that vLLM also has vLLM's names, because an OpenTelemetry name cannot contain a colon."""

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
        """Log nothing about scrapes."""


class Scrape:
    """The metrics of a MeterProvider that has ``reader``, as an HTTP endpoint /metrics from ``serve`` on."""

    def __init__(self) -> None:
        inner = CollectorRegistry()
        self.reader = PrometheusMetricReader(scope_info_enabled=False, registry=inner)
        registry = CollectorRegistry()
        registry.register(_Renamed(inner))
        self._registry = registry
        self._app = make_wsgi_app(registry)
        self._one_at_a_time = threading.Lock()

    def serve(self, host: str, port: int) -> int:
        """Serve /metrics. ``host`` has no brackets. Returns the port, which is a free one if ``port`` is 0.

        Raises ValueError if it cannot listen there.
        """
        return _serve(self._answer, host, port)

    def text(self) -> bytes:
        """All metrics, as CONTENT_TYPE."""
        with self._one_at_a_time:
            return generate_latest(self._registry)

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        # Always the plain text format. For OpenMetrics, which Prometheus prefers, the library may replace colons by
        # underscores.
        environ.pop("HTTP_ACCEPT", None)
        # The reader keeps collected metrics in itself, so concurrent scrapes would take each other's. The app computes
        # its whole output within this call.
        with self._one_at_a_time:
            return self._app(environ, start_response)


def serve_registry(registry: CollectorRegistry, host: str, port: int) -> int:
    """Serve /metrics as ``Scrape.serve`` does."""
    app = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        environ.pop("HTTP_ACCEPT", None)  # as in Scrape
        return app(environ, start_response)

    return _serve(answer, host, port)


def _serve(app: Any, host: str, port: int) -> int:
    kind = _IPv6Server if ":" in host else ThreadingWSGIServer
    try:
        server = make_server(host, port, app, server_class=kind, handler_class=_Silent)
    except OSError as error:
        raise ValueError(f"--metrics-port: cannot listen on {host}:{port}: {error}") from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_port)
