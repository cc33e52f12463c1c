"""Traces, metrics and logs: OpenTelemetry with the standard OTEL_* variables, and one JSON object per log line.

Prompts and outputs are never logged.
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

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specdec.core.environment import proxy_options
from specdec.core.settings import ServiceSettings
from specdec.telemetry.prometheus import Scrape

log = logging.getLogger(__name__)

_MAX_EVENTS = 4096
"""Default limit of events per span."""

_LAST_EXPORT_S = 2.0

_OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
"""The entry point name of the exporter, by OTEL_EXPORTER_OTLP_PROTOCOL."""
_OUR_OTLP = "in a checkout: pip install -e '.[otlp]'"

_W3C = TraceContextTextMapPropagator()
"""Fixed, because the contract's field is a W3C traceparent, and services may have different OTEL_PROPAGATORS."""

_RECORD_FIELDS = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """One JSON object per line. Everything in ``extra`` becomes a field; so do the ids of the current span."""

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
        if (span := trace.get_current_span().get_span_context()).is_valid:
            line |= {"trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"}
        line.update({k: v for k, v in record.__dict__.items() if k not in _RECORD_FIELDS})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logs(service: str, settings: ServiceSettings) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=settings.log_level, handlers=[handler], force=True)


def set_up(service: str, settings: ServiceSettings, scrape: Scrape | None = None) -> None:
    """Log to standard error; export traces and metrics as OTEL_TRACES_EXPORTER and OTEL_METRICS_EXPORTER say.

    A variable may name several exporters, with commas. Without these variables, OTLP is used if
    OTEL_EXPORTER_OTLP_ENDPOINT (or that of the signal) is set, else no exporter. With ``metrics_port`` Prometheus can
    scrape the metrics there as well; ``scrape``, if given, has them too. Raises ValueError if an exporter is not
    installed or the port is not free.
    """
    set_up_logs(service, settings)
    # A name in the environment takes precedence: OTEL_SERVICE_NAME, then service.name in OTEL_RESOURCE_ATTRIBUTES.
    own_name = OTELResourceDetector().detect().attributes.get(SERVICE_NAME)
    resource = Resource.create({SERVICE_NAME: own_name or service})
    providers: list[TracerProvider | MeterProvider] = []
    if span_exporters := _exporters("traces"):
        tracing = TracerProvider(resource=resource, span_limits=_span_limits(), shutdown_on_exit=False)
        for span_exporter in span_exporters:
            tracing.add_span_processor(BatchSpanProcessor(span_exporter))
        trace.set_tracer_provider(tracing)
        providers.append(tracing)
    readers: list[MetricReader] = [PeriodicExportingMetricReader(exporter) for exporter in _exporters("metrics")]
    if settings.metrics_port is not None:
        scrape = scrape or Scrape()
        port = scrape.serve(settings.host, settings.metrics_port)
        log.info("metrics", extra={"address": settings.address(port)})
    if scrape is not None:
        readers.append(scrape.reader)
    if readers:
        metering = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        metrics.set_meter_provider(metering)
        providers.append(metering)
    if providers:
        _shut_down_at_exit(providers)


def _shut_down_at_exit(providers: Sequence[TracerProvider | MeterProvider]) -> None:
    """At exit, export the rest for at most _LAST_EXPORT_S. Without it a dead collector delays the exit by over 10 s."""
    asked, done = threading.Event(), threading.Event()

    def shut_down() -> None:
        asked.wait()
        for provider in providers:
            provider.shutdown()
        done.set()

    # Started now, because threads cannot be started at interpreter exit.
    threading.Thread(target=shut_down, name="last-export", daemon=True).start()

    def at_exit() -> None:
        asked.set()
        done.wait(_LAST_EXPORT_S)

    atexit.register(at_exit)


def _span_limits() -> SpanLimits:
    """A higher event limit than the default of 128, because every round is an event of its request's span."""
    return SpanLimits(max_events=None if _variable("OTEL_SPAN_EVENT_COUNT_LIMIT") else _MAX_EVENTS)


def _variable(variable: str) -> str:
    """An environment variable; empty if it is not set."""
    return os.environ.get(variable, "").strip()


def _exporters(signal: str) -> list[Any]:
    """The exporters for ``signal``, traces or metrics. Raises ValueError with a readable message."""
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    default = "otlp" if any(map(_variable, endpoints)) else "none"
    names = [name.strip() for name in (_variable(variable) or default).split(",") if name.strip()]
    if names == ["none"]:
        return []
    if "none" in names:
        raise ValueError(f"{variable}={','.join(names)}: none goes with no other")
    return [_exporter(signal, variable, name) for name in names]


def _exporter(signal: str, variable: str, name: str) -> Any:
    if (signal, name) == ("metrics", "prometheus"):
        raise ValueError(f"{variable}={name}: Prometheus reads them where --metrics-port (SPECDEC_METRICS_PORT) says")
    setting, entry = f"{variable}={name}", name
    if name == "otlp":
        of_signal = f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL"
        chosen = of_signal if _variable(of_signal) else "OTEL_EXPORTER_OTLP_PROTOCOL"
        protocol = _variable(chosen) or "grpc"
        if protocol not in _OTLP:
            raise ValueError(f"{chosen}={protocol}: not one of {', '.join(_OTLP)}")
        setting, entry = f"{setting} with {chosen}={protocol}", _OTLP[protocol]
    options = {"channel_options": tuple(proxy_options())} if entry == _OTLP["grpc"] else {}
    for entry_point in entry_points(group=f"opentelemetry_{signal}_exporter", name=entry):
        try:
            return entry_point.load()(**options)
        except Exception as error:  # of a variable that the exporter reads
            raise ValueError(f"{setting}: {error}") from error
    remedy = "pip install opentelemetry-exporter-otlp-proto-http" if entry == _OTLP["http/protobuf"] else _OUR_OTLP
    raise ValueError(f"{setting}: no such exporter is installed; {remedy}")


def traceparent() -> str:
    """The current W3C trace context; empty outside a trace."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return carrier.get("traceparent", "")


def context_of(traceparent: str | None) -> Context:
    """The trace context that a peer sent."""
    return _W3C.extract({"traceparent": traceparent} if traceparent else {})
