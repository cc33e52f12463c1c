"""Traces, metrics and logs: OpenTelemetry by the standard OTEL_* variables, one JSON object per log line.

Knows exporters and formats; refuses to know what is measured. Prompts and outputs are never logged.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from specdec.scrape import Scrape
from specdec.settings import ServiceSettings

log = logging.getLogger(__name__)

_MOST_EVENTS = 4096
"""Of a span."""

_LAST_EXPORT_S = 2.0

_RECORD_FIELDS = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """One object per line; whatever is passed in ``extra`` becomes a field."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname,
            "service": self._service,
            "message": record.getMessage(),
        }
        line.update({k: v for k, v in record.__dict__.items() if k not in _RECORD_FIELDS})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up(service: str, settings: ServiceSettings) -> None:
    """Logs to standard error; traces and metrics where OTEL_TRACES_EXPORTER and OTEL_METRICS_EXPORTER say.

    Without those variables, but with OTEL_EXPORTER_OTLP_ENDPOINT, both go to OTLP; with neither, nowhere. With
    ``metrics_port`` Prometheus may read the metrics there as well, or only there.
    Raises ValueError if an exporter is named that is not installed, or if the port cannot be had.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=settings.log_level, handlers=[handler], force=True)

    resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", service)})
    providers: list[TracerProvider | MeterProvider] = []
    if (span_exporter := _exporter("traces")) is not None:
        tracing = TracerProvider(resource=resource, span_limits=_span_limits(), shutdown_on_exit=False)
        tracing.add_span_processor(BatchSpanProcessor(span_exporter))
        trace.set_tracer_provider(tracing)
        providers.append(tracing)
    readers: list[MetricReader] = []
    if (metric_exporter := _exporter("metrics")) is not None:
        readers.append(PeriodicExportingMetricReader(metric_exporter))
    if settings.metrics_port is not None:
        scrape = Scrape()
        readers.append(scrape.reader)
        port = scrape.serve(settings.host, settings.metrics_port)
        log.info("metrics", extra={"address": f"{settings.host}:{port}"})
    if readers:
        metering = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        metrics.set_meter_provider(metering)
        providers.append(metering)
    if providers:
        _shut_down_at_exit(providers)


def _shut_down_at_exit(providers: Sequence[TracerProvider | MeterProvider]) -> None:
    """What is left goes out, but a collector that is down does not keep the process: alone it would, 10 s and more."""
    asked, done = threading.Event(), threading.Event()

    def shut_down() -> None:
        asked.wait()
        for provider in providers:
            provider.shutdown()
        done.set()

    # Begun now: a thread cannot be begun while the interpreter ends.
    threading.Thread(target=shut_down, name="last-export", daemon=True).start()

    def at_exit() -> None:
        asked.set()
        done.wait(_LAST_EXPORT_S)

    atexit.register(at_exit)


def _span_limits() -> SpanLimits:
    """Every round is an event of its request's span, and there are more than the 128 events that are usual."""
    return SpanLimits(max_events=int(os.environ.get("OTEL_SPAN_EVENT_COUNT_LIMIT", _MOST_EVENTS)))


def _exporter(signal: str) -> Any:
    default = "otlp" if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") else "none"
    name = os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", default)
    if name == "none":
        return None
    for candidate in (name, f"{name}_proto_grpc"):
        for entry_point in entry_points(group=f"opentelemetry_{signal}_exporter", name=candidate):
            return entry_point.load()()
    raise ValueError(
        f"OTEL_{signal.upper()}_EXPORTER={name}: no such exporter is installed; in a checkout: pip install -e '.[otlp]'"
    )


def traceparent() -> str:
    """The current W3C trace context; empty outside a trace."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent", "")


def context_of(traceparent: str | None) -> Context:
    """The trace context that a peer sent."""
    return propagate.extract({"traceparent": traceparent} if traceparent else {})
