"""Row 23: a collector that is down, or that never answers, changes nothing for requests and for the end."""

from __future__ import annotations

import socket

import pytest

from testing.table_model import Table
from testing.traffic import Asked
from tests.observed import PROMPT, observed

REQUEST = {"max_tokens": 120, "num_draft_tokens": 3, "temperature": 0.8}


@pytest.mark.slow
async def test_requests_do_not_notice_a_collector_that_is_down(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    with socket.socket() as refuses, socket.socket() as is_silent:
        for signal, taken in (("TRACES", refuses), ("METRICS", is_silent)):
            taken.bind(("127.0.0.1", 0))
            endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
            monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", endpoint)
        is_silent.listen(16)
        async with observed() as deployment:
            samples = [await deployment.generate(seed, **REQUEST) for seed in range(3)]
            found = await deployment.scrape()
    asked = [Asked((*PROMPT, seed), REQUEST["max_tokens"], seed, REQUEST["temperature"]) for seed in range(3)]
    assert [sample.token_ids for sample in samples] == [each.expected(Table()) for each in asked]
    assert not any(sample.finish.speculation.num_replays for sample in samples)
    assert "vllm:spec_decode_num_drafts_total" in found["orchestrator"], "Prometheus reads on"
    assert [process.returncode for process in deployment.running.processes] == [0, 0, 0], "they end in good order"
