"""One request's trace, exported over OTLP: three services, every round with its split, one trace id."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

from specdec.client import Sample
from tests.observed import observed

ROUND_PARTS = {
    f"{part}_us" for part in ("draft", "network", "queue", "pass", "sample", "open", "orchestrator", "client")
}


class Collector(trace_grpc.TraceServiceServicer, metrics_grpc.MetricsServiceServicer):
    """Keeps what it is sent. (Both services name their method Export, so each has a servicer of its own.)"""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []  # with the name of the service that sent it
        self.metrics: dict[str, set[str]] = {}  # by service: names

    async def take_spans(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            service = attributes(resource.resource)["service.name"]
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        return trace_pb2.ExportTraceServiceResponse()

    async def take_metrics(self, request: Any, context: Any) -> Any:
        for resource in request.resource_metrics:
            names = self.metrics.setdefault(attributes(resource.resource)["service.name"], set())
            names.update(metric.name for scope in resource.scope_metrics for metric in scope.metrics)
        return metrics_pb2.ExportMetricsServiceResponse()

    def of(self, service: str) -> list[Any]:
        return [span for sender, span in self.spans if sender == service]


def attributes(holder: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in holder.attributes}


@dataclass
class Told:
    """Of one request: its spans, the names of the metrics that were sent, and what Prometheus read after that."""

    sample: Sample
    collector: Collector
    exported: dict[str, set[str]]
    scraped: dict[str, str]


@pytest.fixture(scope="module")
def told() -> Told:
    with pytest.MonkeyPatch.context() as environment:
        return asyncio.run(one_request(environment))


async def one_request(environment: pytest.MonkeyPatch) -> Told:
    kept = Collector()
    server = grpc.aio.server()
    traces, metrics = trace_grpc.TraceServiceServicer(), metrics_grpc.MetricsServiceServicer()
    traces.Export, metrics.Export = kept.take_spans, kept.take_metrics
    trace_grpc.add_TraceServiceServicer_to_server(traces, server)
    metrics_grpc.add_MetricsServiceServicer_to_server(metrics, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    environment.setenv("OTEL_METRIC_EXPORT_INTERVAL", "300")
    try:
        async with observed() as deployment:
            sample = await deployment.generate(max_tokens=300, num_draft_tokens=1)
            async with asyncio.timeout(30):
                while (
                    len(kept.spans) < 3
                    or len(kept.metrics) < 3
                    or "spec_decode_num_drafts" not in kept.metrics.get("specdec-orchestrator", ())
                ):
                    await asyncio.sleep(0.05)
            exported = {service: set(names) for service, names in kept.metrics.items()}
            return Told(sample, kept, exported, await deployment.scrape())
    finally:
        await server.stop(0)


def test_one_request_is_one_trace_over_three_services_with_every_round_and_its_split(told: Told) -> None:
    collector, speculation = told.collector, told.sample.finish.speculation
    assert speculation.num_rounds > 128, "more than the events that a span has by default"
    assert sorted(service for service, _ in collector.spans) == [
        *("specdec-draft", "specdec-orchestrator", "specdec-target")
    ]
    assert len({span.trace_id for _, span in collector.spans}) == 1
    [request], [target], [draft] = (collector.of(f"specdec-{name}") for name in ("orchestrator", "target", "draft"))
    assert {target.parent_span_id, draft.parent_span_id} == {request.span_id}
    assert not request.parent_span_id
    assert not any(span.dropped_events_count for span in (request, target, draft))

    rounds = [attributes(event) for event in request.events if event.name == "round"]
    assert len(rounds) == speculation.num_rounds
    assert [each["base"] for each in rounds] == sorted({each["base"] for each in rounds}), "each once, in order"
    assert rounds[0]["open_us"] >= 1000
    drafted = [each for each in rounds if "num_draft_tokens" in each]
    assert len(drafted) == speculation.num_drafts > 0
    assert all(each.keys() >= {"draft_us", "network_us", "pass_us", "orchestrator_us"} for each in drafted)
    assert all(each["pass_us"] >= 1000 for each in drafted), "a pass sleeps for a millisecond"
    assert sum(each.get("num_accepted_tokens", 0) for each in rounds) == speculation.num_accepted_tokens
    lasted_us = (request.end_time_unix_nano - request.start_time_unix_nano) / 1e3
    assert sum(each.get(part, 0) for each in rounds for part in ROUND_PARTS) <= lasted_us

    verdicts = [attributes(event) for event in target.events if event.name == "verdict"]
    assert [each["round"] for each in verdicts] == [each["round"] for each in rounds]
    assert [each["base"] for each in verdicts] == [each["base"] for each in rounds]
    assert all({"queue_us", "pass_us", "sample_us", "rows"} <= each.keys() for each in verdicts)
    growths = [attributes(event) for event in draft.events if event.name == "growth"]
    assert len(growths) >= speculation.num_drafts


def test_metrics_go_to_otlp_and_to_prometheus_alike(told: Told) -> None:
    for service, text in told.scraped.items():
        exported = told.exported[f"specdec-{service}"]
        assert len(exported) >= 5
        for name in exported:
            scraped = f"vllm:{name}" if name.startswith("spec_decode") else name.replace(".", "_")
            assert scraped in text, f"{service} exports {name}, which is not scraped"
