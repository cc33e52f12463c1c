"""One trace per request over all services, counters that agree with what the client is told, logs without text."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from draft_service.drafters.language_model import LanguageModelDrafter
from orchestrator.api.server import OrchestratorServer
from orchestrator.settings import OrchestratorSettings
from specdec.telemetry import setup as telemetry
from specdec.telemetry.setup import JsonFormatter, context_of, traceparent
from specdec.transport import rpc
from specdec.v1 import generation_pb2, generation_pb2_grpc
from target_service.language_model import LmVerifier
from tests.checkout import ROOT
from tests.cluster import cluster
from tests.instruments import total
from tests.models.table_runner import TableRunner

PROMPT = [1, 2, 3, 1, 2, 3, 7, 7]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


def pair():
    return [LmVerifier(TableRunner(seed=1))], [LanguageModelDrafter(TableRunner(seed=1, blend=(2, 0.3)))]


async def generate(port: int, metadata=(), **fields) -> list[generation_pb2.GenerateResponse]:
    request = dict(token_ids={"token_ids": PROMPT}, max_tokens=40, seed=7, num_draft_tokens=4)
    request = generation_pb2.GenerateRequest(**{**request, **fields})
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return [response async for response in stub.Generate(request, metadata=metadata)]


async def test_one_request_is_one_trace_across_the_services_with_an_event_per_round(spans, measured):
    async with cluster(*pair()) as deployment:
        responses = await generate(deployment.orchestrator.port, metadata=[("traceparent", PARENT)])
        await deployment.settled()
    finish = responses[-1].chunk.finish
    told = finish.speculation
    assert told.num_accepted_tokens > 0

    finished = spans.get_finished_spans()
    assert sorted(span.name for span in finished) == ["generate", "sequence", "sequence"]
    assert {f"{span.context.trace_id:032x}" for span in finished} == {PARENT.split("-")[1]}
    [request] = [span for span in finished if span.name == "generate"]
    assert f"{request.parent.span_id:016x}" == PARENT.split("-")[2]
    served = [span for span in finished if span.name == "sequence"]
    assert all(span.parent.span_id == request.context.span_id for span in served)
    assert {event.name for span in served for event in span.events} == {"verdict", "growth"}, "target and draft"

    rounds = [event for event in request.events if event.name == "round"]
    assert len(rounds) == told.num_rounds
    assert sum(event.attributes.get("num_accepted_tokens", 0) for event in rounds) == told.num_accepted_tokens
    assert request.attributes["request_id"] == responses[0].admission.request_id
    assert request.attributes["outcome"] == "ok"
    assert (request.kind, request.status.status_code) == (SpanKind.SERVER, StatusCode.UNSET)

    counted = total(measured)
    assert sum(counted["specdec.rounds"].values()) == told.num_rounds
    assert counted["specdec.rounds"][(("kind", "speculative"),)] == told.num_drafts
    assert sum(counted["specdec.round_tokens"].values()) >= 40
    assert counted["spec_decode_num_drafts"] == {(): told.num_drafts}
    assert counted["spec_decode_num_draft_tokens"] == {(): told.num_draft_tokens}
    assert counted["spec_decode_num_accepted_tokens"] == {(): told.num_accepted_tokens}
    per_pos = [
        counted["spec_decode_num_accepted_tokens_per_pos"].get((("position", depth),), 0)
        for depth in range(len(told.num_accepted_tokens_per_pos))
    ]
    assert per_pos == list(told.num_accepted_tokens_per_pos)
    assert sum(per_pos) == told.num_accepted_tokens
    assert counted["gen_ai.server.request.duration"] == {(("outcome", "ok"),): 1}


async def test_without_a_callers_trace_each_request_is_a_trace_of_its_own(spans, measured):
    async with cluster(*pair()) as deployment:
        for _ in range(2):
            await generate(deployment.orchestrator.port, max_tokens=3)
        await generate(deployment.orchestrator.port, max_tokens=3, metadata=[("traceparent", "nonsense")])
        await deployment.settled()
    finished = spans.get_finished_spans()
    assert len({span.context.trace_id for span in finished if span.name == "generate"}) == 3
    assert len({span.context.trace_id for span in finished}) == 3
    assert total(measured)["gen_ai.server.request.duration"] == {(("outcome", "ok"),): 3}


async def test_a_refused_request_is_counted_by_what_was_wrong(spans, measured):
    async with cluster(*pair()) as deployment:
        with pytest.raises(Exception, match="temperature"):
            await generate(deployment.orchestrator.port, temperature=-1.0)
    [span] = spans.get_finished_spans()
    assert span.attributes["outcome"] == "InvalidArgument"
    assert (span.status.status_code, span.events) == (StatusCode.UNSET, ()), "its caller's fault"
    assert total(measured)["gen_ai.server.request.duration"] == {(("outcome", "InvalidArgument"),): 1}


async def test_a_request_that_fails_for_our_own_fault_is_marked(spans):
    server = OrchestratorServer(OrchestratorSettings(target=["127.0.0.1:1"], target_wait_s=0.1))
    await server.start()
    try:
        with pytest.raises(Exception, match="target"):
            await generate(server.port)
    finally:
        await server.stop()
    [span] = spans.get_finished_spans()
    assert span.attributes["outcome"] == "NoReplica"
    assert span.status.status_code is StatusCode.ERROR


async def test_logs_are_json_with_the_request_id_and_never_the_prompt():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("specdec-test"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        tokenizer = str(ROOT / "models" / "demo" / "target")
        runner = TableRunner(vocab_size=4096, order=1, seed=1)
        prompt = "a confidential sentence"
        async with cluster([LmVerifier(runner)], tokenizer=tokenizer) as deployment:
            fields = dict(token_ids=None, text=prompt, max_tokens=3, stop=["secret stop"])
            mine = [("x-request-id", "id-of-mine"), ("traceparent", PARENT)]
            await generate(deployment.orchestrator.port, metadata=mine, **fields)
            with pytest.raises(Exception, match="top_p"):
                await generate(deployment.orchestrator.port, **{**fields, "top_p": 7.0})
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    ended = [line for line in lines if line["message"] == "request ended"]
    assert [line["outcome"] for line in ended] == ["ok", "InvalidArgument"]
    assert ended[0]["request_id"] == "id-of-mine"
    assert ended[1]["request_id"]
    assert ended[0]["trace_id"] == PARENT.split("-")[1]
    assert len(ended[0]["span_id"]) == 16
    assert "trace_id" not in ended[1], "it has no trace"
    assert "confidential" not in stream.getvalue()
    assert "secret stop" not in stream.getvalue()
    assert all(line["service"] == "specdec-test" and line["level"] and line["time"] for line in lines)


def test_a_log_line_is_one_json_object_whatever_it_says():
    formatter = JsonFormatter("s")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, 'a "quoted"\n%s', ("ü",), sys.exc_info())
    record.reason = object()
    line = formatter.format(record)
    assert "\n" not in line
    parsed = json.loads(line)
    assert parsed["message"] == 'a "quoted"\nü'
    assert "two\nlines" in parsed["exception"]
    assert parsed["reason"].startswith("<object")


def test_the_trace_context_survives_being_told_to_a_peer(spans):
    assert traceparent() == ""
    with trace.get_tracer("specdec").start_as_current_span("here") as span:
        told = traceparent()
    heard = trace.get_current_span(context_of(told)).get_span_context()
    assert heard.trace_id == span.get_span_context().trace_id
    assert heard.span_id == span.get_span_context().span_id
    for nothing in (None, "", "00-zz"):
        assert not trace.get_current_span(context_of(nothing)).get_span_context().is_valid


# --- exporters, in a process of their own: providers can be set only once ---------------------------------------

SPAN = """
import sys
from opentelemetry import trace, metrics
from specdec.telemetry import setup as telemetry
from specdec.core.settings import ServiceSettings
telemetry.set_up("specdec-test", ServiceSettings(log_level="INFO"))
trace.get_tracer("x").start_span("one span").end()
metrics.get_meter("x").create_counter("one_counter").add(1)
for provider in (trace.get_tracer_provider(), metrics.get_meter_provider()):
    getattr(provider, "shutdown", lambda: None)()
"""


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "SPECDEC_"))}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=clean | environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.slow
def test_nothing_is_exported_by_default():
    run = python("-c", SPAN)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.slow
def test_the_console_exporters_are_chosen_by_the_standard_variables():
    run = python(
        "-c", SPAN, OTEL_TRACES_EXPORTER="console", OTEL_METRICS_EXPORTER="console", OTEL_SERVICE_NAME="renamed"
    )
    assert run.returncode == 0, run.stderr
    assert '"name": "one span"' in run.stdout
    assert '"name": "one_counter"' in run.stdout
    assert '"service.name": "renamed"' in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["TRACES", "METRICS"])
def test_an_unknown_exporter_is_refused_in_words(signal):
    run = python(*("-m", "orchestrator", "--target", "127.0.0.1:1"), **{f"OTEL_{signal}_EXPORTER": "carrier-pigeon"})
    assert run.returncode == 2
    assert f"OTEL_{signal}_EXPORTER=carrier-pigeon: no such exporter is installed" in run.stderr
    assert "Traceback" not in run.stderr


def test_none_switches_an_exporter_off(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert telemetry._exporters("traces") == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"OTEL_TRACES_EXPORTER": ""}, []),
        ({"OTEL_TRACES_EXPORTER": " ", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, ["OTLPSpanExporter"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, ["OTLPSpanExporter"]),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1"}, []),
        ({"OTEL_TRACES_EXPORTER": "otlp, console"}, ["OTLPSpanExporter", "ConsoleSpanExporter"]),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["OTLPSpanExporter"]),
    ],
)
def test_exporters_are_as_the_standard_says(environment, expected, monkeypatch):
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    exporters = telemetry._exporters("traces")
    assert [type(each).__name__ for each in exporters] == expected
    for each in exporters:
        each.shutdown()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"OTEL_TRACES_EXPORTER": "none,console"}, "OTEL_TRACES_EXPORTER=none,console: none goes with no other"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL=http/json: not one of grpc"),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf: no such exporter is installed; pip install opentele",
        ),
        ({"OTEL_METRICS_EXPORTER": "prometheus"}, "OTEL_METRICS_EXPORTER=prometheus: Prometheus reads them where"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(environment, words, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        telemetry._exporters("traces") and telemetry._exporters("metrics")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs,a=b"}, "theirs"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs", "OTEL_SERVICE_NAME": "renamed"}, "renamed"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "a=b", "OTEL_SERVICE_NAME": ""}, "specdec-test"),
    ],
)
def test_a_service_is_called_as_its_environment_says(environment, name):
    run = python("-c", SPAN, OTEL_TRACES_EXPORTER="console", **environment)
    assert run.returncode == 0, run.stderr
    assert f'"service.name": "{name}"' in run.stdout
