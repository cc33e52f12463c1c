"""What Prometheus reads is what clients are told, under the names that users know."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import urllib.request
from typing import Any

import pytest
from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import MeterProvider

from specdec.core.settings import ServiceSettings
from specdec.telemetry import setup as telemetry
from specdec.telemetry.prometheus import Scrape
from tests.observed import observed, samples
from tests.specdec.telemetry.test_telemetry import python


@pytest.fixture(scope="module")
async def scraped():
    """(statistics told to the clients, samples by service) of a deployment that has served some requests."""
    async with observed() as deployment:
        finished = [await deployment.generate(seed, max_tokens=60, num_draft_tokens=3) for seed in range(2)]
        finished += [await deployment.generate(2, max_tokens=20, num_draft_tokens=0)]
        texts = await deployment.scrape()
        while not all("specdec_event_loop_lag_seconds_count" in text for text in texts.values()):
            await asyncio.sleep(0.1)  # a service measures that for the first time when it is a second old
            texts = await deployment.scrape()
    return [sample.finish.speculation for sample in finished], {name: samples(text) for name, text in texts.items()}


async def test_speculation_is_counted_in_the_shape_of_vllm_as_clients_are_told(scraped):
    told, by_service = scraped
    found = by_service["orchestrator"]
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert found[f"vllm:spec_decode_{name}_total"] == {(): sum(getattr(each, name) for each in told)}, name
    for depth in range(3):
        accepted = sum(
            each.num_accepted_tokens_per_pos[depth] for each in told if depth < len(each.num_accepted_tokens_per_pos)
        )
        assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total"][(("position", str(depth)),)] == accepted
    assert not [name for name in found if name.startswith("spec_decode")]


async def test_every_round_is_counted_once_with_its_kind_its_tokens_and_its_time(scraped):
    told, by_service = scraped
    found = by_service["orchestrator"]
    rounds = found["specdec_rounds_total"]
    assert sum(rounds.values()) == sum(each.num_rounds for each in told)
    assert rounds[(("kind", "open"),)] == 3
    assert rounds[(("kind", "speculative"),)] == sum(each.num_drafts for each in told)
    assert rounds[(("kind", "plain"),)] >= 19, "one of the requests had no draft tokens"
    assert 140 <= sum(found["specdec_round_tokens_total"].values()) <= 140 + 3 * 3, "a last round may bring too much"
    parts = found["specdec_round_time_seconds_total"]
    durations = found["specdec_round_duration_seconds_total"]
    assert sum(parts.values()) - parts[(("part", "client"),)] == pytest.approx(sum(durations.values()))
    waited = found["specdec_round_draft_wait_seconds_total"]
    assert sum(waited.values()) == pytest.approx(parts[(("part", "draft"),)])
    assert {dict(labels)["part"] for labels in parts} == {
        *("draft", "network", "queue", "pass", "sample", "open", "orchestrator", "client")
    }
    assert parts[(("part", "pass"),)] >= 0.001 * rounds[(("kind", "speculative"),)], "a pass sleeps for a millisecond"


async def test_requests_have_histograms_with_buckets_below_ten_milliseconds(scraped):
    _, by_service = scraped
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        metric = f"gen_ai_server_{name}_seconds"
        assert by_service["orchestrator"][f"{metric}_count"] == {(("outcome", "ok"),): 3}, name
        buckets = {float(dict(labels)["le"]) for labels in by_service["orchestrator"][f"{metric}_bucket"]}
        assert len([bound for bound in buckets if bound < 0.01]) >= (1 if name == "request_duration" else 4), name


async def test_a_draft_is_known_by_what_became_of_its_tokens(scraped):
    told, by_service = scraped
    found = by_service["orchestrator"]
    [(labels, verified)] = found["specdec_draft_tokens_total"].items()
    assert verified == sum(each.num_draft_tokens for each in told)
    assert found["specdec_draft_accepted_tokens_total"] == {labels: sum(each.num_accepted_tokens for each in told)}
    assert found["specdec_draft_rounds_total"] == {labels: sum(each.num_drafts for each in told)}
    assert found["specdec_draft_wait_seconds_total"][labels] > 0
    assert found["specdec_draft_late_total"] == {labels: 0}
    unused = found["specdec_draft_nodes_received_total"][()] - verified
    assert found["specdec_draft_nodes_unused_total"] == {(): unused}
    assert unused >= 0


async def test_every_replica_tells_its_model_and_every_orchestrator_whom_it_uses(scraped):
    _, by_service = scraped
    seen = {
        (dict(labels)["role"], dict(labels)["digest"]) for labels in by_service["orchestrator"]["specdec_replica_info"]
    }
    own = set()
    for service in ("target", "draft"):
        [labels] = by_service[service]["specdec_model_info"]
        own.add((service, dict(labels)["digest"]))
        assert dict(labels)["service"] == service
    assert seen == own
    assert set(by_service["orchestrator"]["specdec_replica_ready"].values()) == {1.0}


async def test_every_service_tells_its_load_its_cpu_time_and_its_event_loops_lag(scraped):
    _, by_service = scraped
    for service, found in by_service.items():
        labels = (("service", service),)
        assert found["process_cpu_time_seconds_total"][labels] > 0
        assert found["specdec_event_loop_lag_seconds_count"][labels] > 0
        assert found["specdec_event_loop_tasks"][labels] > 0
        assert found["specdec_live_sequences"].keys() == {labels}
    for service in ("target", "draft"):
        labels = (("service", service),)
        assert by_service[service]["specdec_passes_total"][labels] > 0
        assert by_service[service]["specdec_busy_seconds_total"][labels] > 0
        for name in ("waiting_sequences", "kv_slots_used", "kv_slots_total", "open_streams"):
            assert f"specdec_{name}" in by_service[service], name
    passes = by_service["target"]["specdec_passes_total"][(("service", "target"),)]
    assert by_service["target"]["specdec_rows_total"][(("service", "target"),)] > passes
    assert by_service["orchestrator"]["specdec_waiting_requests"] == {(("service", "orchestrator"),): 0}


async def test_trouble_is_counted_from_zero_so_that_a_first_one_is_an_increase(scraped):
    _, by_service = scraped
    found = by_service["orchestrator"]
    for name in ("specdec_replays_total", "specdec_replayed_tokens_total"):
        assert found[name][(("reason", "WATCHDOG_FIRED"),)] == 0
    losses = found["specdec_replica_losses_total"]
    assert {dict(labels)["reason"] for labels in losses} >= {"WATCHDOG_FIRED", "SET_ASIDE", "REPLICA_LOST"}
    assert set(losses.values()) == {0}
    assert found["specdec_parked_total"] == {(): 0}


@pytest.mark.slow
def test_a_metrics_port_in_use_is_said_in_a_sentence(monkeypatch):
    monkeypatch.setattr(telemetry.logging, "basicConfig", lambda **_: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--metrics-port: cannot listen on 127.0.0.1:{port}"):
            telemetry.set_up("specdec-test", ServiceSettings(metrics_port=port))
        run = python("-m", "orchestrator", "--target=127.0.0.1:1", f"--metrics-port={port}")
        assert run.returncode == 2
        assert "--metrics-port: cannot listen" in run.stderr
        assert "Traceback" not in run.stderr


async def test_scrapes_at_once_come_one_after_the_other_for_they_would_take_from_each_other(monkeypatch):
    scrape, answer = Scrape(), threading.Lock()
    provider = MeterProvider([scrape.reader], shutdown_on_exit=False)
    provider.get_meter("test").create_observable_gauge("one", [lambda _: [Observation(7)]])
    app = scrape._app

    def slow(*arguments: Any) -> Any:
        assert answer.acquire(blocking=False), "two at once"
        try:
            time.sleep(0.05)
            return app(*arguments)
        finally:
            answer.release()

    monkeypatch.setattr(scrape, "_app", slow)
    port = scrape.serve("127.0.0.1", 0)

    def text() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            return str(response.read().decode())

    found = await asyncio.gather(*(asyncio.to_thread(text) for _ in range(4)))
    assert [samples(each)["one"] for each in found] == [{(): 7}] * 4
    provider.shutdown()
