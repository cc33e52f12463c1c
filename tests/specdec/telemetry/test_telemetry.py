"""One trace per request over all services, outcomes that are counted, logs without text, and which exporters run."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from draft_service.drafters.language_model import LanguageModelDrafter
from orchestrator.api.server import OrchestratorServer
from orchestrator.settings import OrchestratorSettings
from specdec.telemetry import setup as telemetry
from specdec.telemetry.prometheus import Scrape
from specdec.telemetry.setup import JsonFormatter, context_of, traceparent
from specdec.transport import rpc
from specdec.v1 import generation_pb2, generation_pb2_grpc
from target_service.language_model import LmVerifier
from testing.raw import started
from tests.checkout import ROOT
from tests.cluster import cluster
from tests.instruments import total
from tests.models.table_runner import TableRunner
from tests.observed import samples

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


async def test_a_request_continues_its_callers_trace_in_every_service(spans, measured):
    async with cluster(*pair()) as deployment:
        responses = await generate(deployment.orchestrator.port, metadata=[("traceparent", PARENT)])
        await deployment.settled()
    statistics = responses[-1].chunk.finish.speculation
    assert statistics.num_accepted_tokens > 0

    finished = spans.get_finished_spans()
    assert sorted(span.name for span in finished) == ["generate", "sequence", "sequence"]
    assert {f"{span.context.trace_id:032x}" for span in finished} == {PARENT.split("-")[1]}
    [request] = [span for span in finished if span.name == "generate"]
    assert f"{request.parent.span_id:016x}" == PARENT.split("-")[2]
    served = [span for span in finished if span.name == "sequence"]
    assert all(span.parent.span_id == request.context.span_id for span in served)
    assert {event.name for span in served for event in span.events} == {"verdict", "growth"}, "target and draft"
    assert request.attributes["request_id"] == responses[0].admission.request_id
    assert request.attributes["outcome"] == "ok"
    assert (request.kind, request.status.status_code) == (SpanKind.SERVER, StatusCode.UNSET)
    per_pos = total(measured)["spec_decode_num_accepted_tokens_per_pos"]
    assert [
        per_pos.get((("position", depth),), 0) for depth in range(len(statistics.num_accepted_tokens_per_pos))
    ] == list(statistics.num_accepted_tokens_per_pos)


async def test_other_requests_are_traces_of_their_own_and_counted_by_their_outcome(spans, measured):
    async with cluster(*pair()) as deployment:
        port = deployment.orchestrator.port
        for metadata in ((), (), [("traceparent", "nonsense")]):
            await generate(port, max_tokens=3, metadata=metadata)
        with pytest.raises(Exception, match="temperature"):
            await generate(port, temperature=-1.0)
        await deployment.settled()
    finished = spans.get_finished_spans()
    *_, refused = requests = [span for span in finished if span.name == "generate"]
    assert len({span.context.trace_id for span in requests}) == len({span.context.trace_id for span in finished}) == 4
    assert refused.attributes["outcome"] == "InvalidArgument"
    assert (refused.status.status_code, refused.events) == (StatusCode.UNSET, ()), "its caller's fault"
    outcomes = {(("outcome", "ok"),): 3, (("outcome", "InvalidArgument"),): 1}
    assert total(measured)["gen_ai.server.request.duration"] == outcomes


async def test_a_request_that_fails_by_our_fault_is_marked(spans):
    async with started(OrchestratorServer(OrchestratorSettings(target=["127.0.0.1:1"], target_wait_s=0.1))) as server:
        with pytest.raises(Exception, match="target"):
            await generate(server.port)
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
        statistics = traceparent()
    heard = trace.get_current_span(context_of(statistics)).get_span_context()
    assert heard.trace_id == span.get_span_context().trace_id
    assert heard.span_id == span.get_span_context().span_id
    for nothing in (None, "", "00-zz"):
        assert not trace.get_current_span(context_of(nothing)).get_span_context().is_valid


async def test_concurrent_scrapes_come_one_after_the_other_because_they_would_take_from_each_other(monkeypatch):
    scrape, answer = Scrape(), threading.Lock()
    provider = MeterProvider([scrape.reader], shutdown_on_exit=False)
    provider.get_meter("test").create_observable_gauge("one", [lambda _: [Observation(7)]])
    app = scrape._app

    def slow(*arguments: Any) -> Any:
        assert answer.acquire(blocking=False), "two at once"
        try:
            time.sleep(0.02)
            return app(*arguments)
        finally:
            answer.release()

    monkeypatch.setattr(scrape, "_app", slow)
    port = scrape.serve("127.0.0.1", 0)

    def text() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            return str(response.read().decode())

    pages = await asyncio.gather(*(asyncio.to_thread(text) for _ in range(4)))
    assert [samples(item)["one"] for item in pages] == [{(): 7}] * 4
    provider.shutdown()


# --- exporters, in a process of their own: providers can be set only once ---------------------------------------

SPAN = """
import sys
from opentelemetry import trace, metrics
from specdec.telemetry import setup as telemetry
from specdec.telemetry.prometheus import Scrape
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
@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs,a=b"}, "theirs"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs", "OTEL_SERVICE_NAME": "renamed"}, "renamed"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "a=b", "OTEL_SERVICE_NAME": ""}, "specdec-test"),
    ],
)
def test_the_environment_chooses_console_exporters_and_the_services_name(environment, name):
    exporters = dict.fromkeys(("OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER"), "console")
    run = python("-c", SPAN, **environment, **exporters)
    assert run.returncode == 0, run.stderr
    for shown in ('"name": "one span"', '"name": "one_counter"', f'"service.name": "{name}"'):
        assert shown in run.stdout


@pytest.fixture
def chosen(monkeypatch):
    """The exporters of a signal in an environment of these variables alone."""
    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)

    def choose(signal, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        exporters = telemetry._exporters(signal)
        for exporter in exporters:
            exporter.shutdown()
        return [type(exporter).__name__ for exporter in exporters]

    return choose


ENDPOINT = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"OTEL_TRACES_EXPORTER": ""}, []),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT}, []),
        ({"OTEL_TRACES_EXPORTER": " ", "OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT}, ["OTLPSpanExporter"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": ENDPOINT}, ["OTLPSpanExporter"]),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": ENDPOINT}, []),
        ({"OTEL_TRACES_EXPORTER": "otlp, console"}, ["OTLPSpanExporter", "ConsoleSpanExporter"]),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["OTLPSpanExporter"]),
    ],
)
def test_exporters_are_as_the_standard_says(environment, expected, chosen):
    assert chosen("traces", **environment) == expected


@pytest.mark.parametrize(
    ("signal", "environment", "words"),
    [
        ("traces", {"OTEL_TRACES_EXPORTER": "carrier-pigeon"}, "=carrier-pigeon: no such exporter is installed"),
        ("metrics", {"OTEL_METRICS_EXPORTER": "carrier-pigeon"}, "=carrier-pigeon: no such exporter is installed"),
        ("traces", {"OTEL_TRACES_EXPORTER": "none,console"}, "=none,console: none goes with no other"),
        ("traces", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "=http/json: not one of grpc"),
        (
            "traces",
            {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            "=http/protobuf: no such exporter is installed; pip install opentele",
        ),
        ("metrics", {"OTEL_METRICS_EXPORTER": "prometheus"}, "=prometheus: Prometheus reads them where"),
    ],
)
def test_an_exporter_that_cannot_be_had_is_refused_by_name(signal, environment, words, chosen):
    [variable] = environment
    with pytest.raises(ValueError, match=variable + words):
        chosen(signal, **{"OTEL_TRACES_EXPORTER": "otlp"} | environment)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"OTEL_EXPORTER_OTLP_COMPRESSION": "zstd"}, "zstd"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "soon"),
    ],
)
def test_a_variable_that_an_exporter_cannot_read_is_refused_in_words(environment, words, chosen):
    with pytest.raises(ValueError, match=f"OTEL_TRACES_EXPORTER=otlp.*{words}"):
        chosen("traces", OTEL_TRACES_EXPORTER="otlp", **environment)


def test_a_limit_of_events_that_is_no_number_is_refused_by_its_name(monkeypatch):
    monkeypatch.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "many")
    with pytest.raises(ValueError, match="OTEL_SPAN_EVENT_COUNT_LIMIT"):
        telemetry._span_limits()


@pytest.mark.slow
@pytest.mark.parametrize("propagators", ["b3", "none"])
def test_services_understand_each_others_traces_whatever_propagators_the_environment_names(propagators):
    script = f"from specdec.telemetry import setup; print(setup.context_of('{PARENT}'))"
    run = python("-c", script, OTEL_PROPAGATORS=propagators)
    assert PARENT.split("-")[1] in run.stdout, run.stderr
