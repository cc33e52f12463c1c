"""What three services export of some requests: traces over OTLP, and metrics over OTLP and to Prometheus alike."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

from specdec.v1.generation_pb2 import SpeculationStats
from tests.observed import observed, samples
from tests.specdec.telemetry.test_telemetry import python

pytestmark = pytest.mark.slow

ROUND_PARTS = {"draft", "network", "queue", "pass", "sample", "open", "orchestrator", "client"}


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


def attributes(holder: Any) -> dict[str, Any]:
    return {
        attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value")) for attribute in holder.attributes
    }


@dataclass
class Told:
    """Per request its statistics, the first of 300 tokens; their spans; metrics as exported and as scraped."""

    stats: list[SpeculationStats]
    spans: list[tuple[str, Any]]
    exported: dict[str, set[str]]
    scraped: dict[str, str]

    def metrics(self, service: str) -> dict[str, Any]:
        return samples(self.scraped[service])


@pytest.fixture(scope="module")
def receiver() -> Told:
    with pytest.MonkeyPatch.context() as environment:
        return asyncio.run(some_requests(environment))


async def some_requests(environment: pytest.MonkeyPatch) -> Told:
    kept = Collector()
    server = grpc.aio.server()
    traces, metrics = trace_grpc.TraceServiceServicer(), metrics_grpc.MetricsServiceServicer()
    traces.Export, metrics.Export = kept.take_spans, kept.take_metrics
    trace_grpc.add_TraceServiceServicer_to_server(traces, server)
    metrics_grpc.add_MetricsServiceServicer_to_server(metrics, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    environment.setenv("https_proxy", "http://127.0.0.1:1")  # gRPC would use it for a collector, too
    environment.delenv("no_proxy", raising=False)
    environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    environment.setenv("OTEL_METRIC_EXPORT_INTERVAL", "300")
    try:
        async with observed() as deployment, asyncio.timeout(30):
            finished = [await deployment.generate(max_tokens=300, num_draft_tokens=1)]
            finished += [await deployment.generate(seed, max_tokens=60, num_draft_tokens=3) for seed in (1, 2)]
            finished += [await deployment.generate(3, max_tokens=20, num_draft_tokens=0)]
            texts = await deployment.scrape()
            while (
                len(kept.spans) < 11
                or len(kept.metrics) < 3
                or "spec_decode_num_drafts" not in kept.metrics.get("specdec-orchestrator", ())
                or not all("specdec_event_loop_lag_seconds_count" in text for text in texts.values())
            ):
                await asyncio.sleep(0.1)  # a service measures its lag for the first time after a second
                texts = await deployment.scrape()
            exported = {service: set(names) for service, names in kept.metrics.items()}
            return Told([sample.finish.speculation for sample in finished], kept.spans, exported, texts)
    finally:
        await server.stop(0)


def test_one_request_is_one_trace_over_three_services_with_every_round_and_its_split(receiver: Told) -> None:
    speculation = receiver.stats[0]
    assert speculation.num_rounds > 128, "more than the events that a span has by default"
    longest = max((span for _, span in receiver.spans), key=lambda span: len(span.events))
    of_one = sorted((pair for pair in receiver.spans if pair[1].trace_id == longest.trace_id), key=lambda pair: pair[0])
    assert [service for service, _ in of_one] == ["specdec-draft", "specdec-orchestrator", "specdec-target"]
    draft, request, target = (span for _, span in of_one)
    assert {target.parent_span_id, draft.parent_span_id} == {request.span_id}
    assert not request.parent_span_id
    assert not any(span.dropped_events_count for span in (request, target, draft))

    rounds = [attributes(event) for event in request.events if event.name == "round"]
    assert len(rounds) == speculation.num_rounds
    assert [round["base"] for round in rounds] == sorted({round["base"] for round in rounds}), "each once, in order"
    assert rounds[0]["open_us"] >= 1000
    drafted = [round for round in rounds if "num_draft_tokens" in round]
    assert len(drafted) == speculation.num_drafts > 0
    assert all(entry.keys() >= {"draft_us", "network_us", "pass_us", "orchestrator_us"} for entry in drafted)
    assert all(entry["pass_us"] >= 1000 for entry in drafted), "a pass sleeps for a millisecond"
    assert sum(round.get("num_accepted_tokens", 0) for round in rounds) == speculation.num_accepted_tokens
    lasted_us = (request.end_time_unix_nano - request.start_time_unix_nano) / 1e3
    assert sum(round.get(f"{part}_us", 0) for round in rounds for part in ROUND_PARTS) <= lasted_us

    verdicts = [attributes(event) for event in target.events if event.name == "verdict"]
    for name in ("round", "base"):
        assert [verdict[name] for verdict in verdicts] == [round[name] for round in rounds]
    assert all({"queue_us", "pass_us", "sample_us", "rows"} <= verdict.keys() for verdict in verdicts)
    growths = [attributes(event) for event in draft.events if event.name == "growth"]
    assert len(growths) >= speculation.num_drafts


def test_metrics_go_to_otlp_and_to_prometheus_alike(receiver: Told) -> None:
    for service, text in receiver.scraped.items():
        exported = receiver.exported[f"specdec-{service}"]
        assert len(exported) >= 5
        for name in exported:
            scraped = f"vllm:{name}" if name.startswith("spec_decode") else name.replace(".", "_")
            assert scraped in text, f"{service} exports {name}, which is not scraped"


def test_speculation_is_counted_in_the_shape_of_vllm_as_clients_are_told(receiver: Told) -> None:
    series = receiver.metrics("orchestrator")
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert series[f"vllm:spec_decode_{name}_total"] == {(): sum(getattr(stat, name) for stat in receiver.stats)}, (
            name
        )
    for depth in range(3):
        accepted = sum(sum(stat.num_accepted_tokens_per_pos[depth : depth + 1]) for stat in receiver.stats)
        assert series["vllm:spec_decode_num_accepted_tokens_per_pos_total"][(("position", str(depth)),)] == accepted
    assert not [name for name in series if name.startswith("spec_decode")]


def test_every_round_is_counted_once_with_its_kind_its_tokens_and_its_time(receiver: Told) -> None:
    series = receiver.metrics("orchestrator")
    rounds = series["specdec_rounds_total"]
    assert sum(rounds.values()) == sum(stat.num_rounds for stat in receiver.stats)
    assert rounds[(("kind", "open"),)] == 4
    assert rounds[(("kind", "speculative"),)] == sum(stat.num_drafts for stat in receiver.stats)
    assert rounds[(("kind", "plain"),)] >= 19, "one of the requests had no draft tokens"
    assert 440 <= sum(series["specdec_round_tokens_total"].values()) <= 440 + 4 * 3, "a last round may bring too much"
    parts = series["specdec_round_time_seconds_total"]
    durations = series["specdec_round_duration_seconds_total"]
    assert sum(parts.values()) - parts[(("part", "client"),)] == pytest.approx(sum(durations.values()))
    waited = series["specdec_round_draft_wait_seconds_total"]
    assert sum(waited.values()) == pytest.approx(parts[(("part", "draft"),)])
    assert {dict(labels)["part"] for labels in parts} == ROUND_PARTS
    assert parts[(("part", "pass"),)] >= 0.001 * rounds[(("kind", "speculative"),)], "a pass sleeps for a millisecond"


def test_requests_have_histograms_with_buckets_below_ten_milliseconds(receiver: Told) -> None:
    series = receiver.metrics("orchestrator")
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        metric = f"gen_ai_server_{name}_seconds"
        assert series[f"{metric}_count"] == {(("outcome", "ok"),): 4}, name
        buckets = {float(dict(labels)["le"]) for labels in series[f"{metric}_bucket"]}
        assert len([bound for bound in buckets if bound < 0.01]) >= (1 if name == "request_duration" else 4), name


def test_a_draft_is_known_by_what_became_of_its_tokens(receiver: Told) -> None:
    series = receiver.metrics("orchestrator")
    [(labels, verified)] = series["specdec_draft_tokens_total"].items()
    assert verified == sum(stat.num_draft_tokens for stat in receiver.stats)
    accepted, drafts = (
        sum(getattr(stat, name) for stat in receiver.stats) for name in ("num_accepted_tokens", "num_drafts")
    )
    assert series["specdec_draft_accepted_tokens_total"] == {labels: accepted}
    assert series["specdec_draft_rounds_total"] == {labels: drafts}
    assert series["specdec_draft_wait_seconds_total"][labels] > 0
    assert series["specdec_draft_late_total"].keys() == {labels}, "how many is a matter of the machine"
    unused = series["specdec_draft_nodes_received_total"][()] - verified
    assert series["specdec_draft_nodes_unused_total"] == {(): unused}
    assert unused >= 0


def test_every_replica_tells_its_model_and_every_orchestrator_which_replicas_it_uses(receiver: Told) -> None:
    series = receiver.metrics("orchestrator")
    seen = {(dict(labels)["role"], dict(labels)["digest"]) for labels in series["specdec_replica_info"]}
    listed = set()
    for service in ("target", "draft"):
        [labels] = receiver.metrics(service)["specdec_model_info"]
        listed.add((service, dict(labels)["digest"]))
        assert dict(labels)["service"] == service
    assert seen == listed
    assert set(series["specdec_replica_ready"].values()) == {1.0}


def test_every_service_tells_its_load_its_cpu_time_and_its_event_loops_lag(receiver: Told) -> None:
    for service in receiver.scraped:
        series, labels = receiver.metrics(service), (("service", service),)
        assert series["process_cpu_time_seconds_total"][labels] > 0
        assert series["specdec_event_loop_lag_seconds_count"][labels] > 0
        assert series["specdec_event_loop_tasks"][labels] > 0
        assert series["specdec_live_sequences"].keys() == {labels}
        if service == "orchestrator":
            assert series["specdec_waiting_requests"] == {labels: 0}
            continue
        assert series["specdec_passes_total"][labels] > 0
        assert series["specdec_busy_seconds_total"][labels] > 0
        for name in ("waiting_sequences", "kv_slots_used", "kv_slots_total", "open_streams"):
            assert f"specdec_{name}" in series, name
        if service == "target":
            assert series["specdec_rows_total"][labels] > series["specdec_passes_total"][labels]


def test_trouble_is_counted_from_zero_so_that_a_first_one_is_an_increase(receiver: Told) -> None:
    series = receiver.metrics("orchestrator")
    for name in ("specdec_replays_total", "specdec_replayed_tokens_total"):
        assert series[name][(("reason", "WATCHDOG_FIRED"),)] == 0
    losses = series["specdec_replica_losses_total"]
    assert {dict(labels)["reason"] for labels in losses} >= {"WATCHDOG_FIRED", "EJECTED", "REPLICA_LOST"}
    assert set(losses.values()) == {0}
    assert series["specdec_parked_total"] == {(): 0}


def test_a_metrics_port_in_use_is_reported_in_a_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = python("-m", "orchestrator", "--target=127.0.0.1:1", f"--metrics-port={port}")
    assert run.returncode == 2
    assert f"--metrics-port: cannot listen on 127.0.0.1:{port}" in run.stderr
    assert "Traceback" not in run.stderr
