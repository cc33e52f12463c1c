"""Whatever ends a sequence, nothing of it is left: no KV slot, no task, no open stream. The metrics show it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.core.errors import SpecdecError
from specdec.transport import rpc
from specdec.v1 import generation_pb2, generation_pb2_grpc
from target_service.language_model import LmVerifier
from testing.patience import eventually
from testing.raw import (
    BLOCK,
    COUPLED,
    TOKEN,
    advance,
    draft,
    draft_open,
    orchestrator,
    round_,
    target,
    target_open,
    tree,
)
from tests.cluster import Cluster, cluster
from tests.models.table_runner import TableRunner

LIVE, SLOTS, STREAMS = "specdec.live_sequences", "specdec.kv_slots_used", "specdec.open_streams"
TARGET, DRAFT, ORCHESTRATOR = "target", "draft", "orchestrator"
Gauges = Callable[[], dict[tuple[str, str], int]]


@pytest.fixture
def gauges(monkeypatch: pytest.MonkeyPatch) -> Gauges:
    """Reads every number but histograms: (name, service) -> value. Services made in this test report to it."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    # A meter has each instrument once, but here several services share a process: a meter for each.
    versions = itertools.count()
    monkeypatch.setattr(metrics, "get_meter", lambda name: provider.get_meter(name, str(next(versions))))

    def read() -> dict[tuple[str, str], int]:
        data = reader.get_metrics_data()
        return {
            (metric.name, str(point.attributes["service"])): int(point.value)
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
            if "service" in (point.attributes or {}) and hasattr(point, "value")
        }

    return read


@pytest.fixture(autouse=True)
def no_complaints(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A client that goes away is no error: none is logged, by us or by the libraries."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def until(gauges: Gauges, expected: dict[tuple[str, str], int]) -> None:
    """Returns once the gauges say so."""
    try:
        await eventually(lambda: {key: value for key, value in gauges().items() if key in expected} == expected)
    except TimeoutError:
        raise AssertionError(f"{gauges()} never became {expected}") from None


def idle(num_streams: int = 1) -> dict[tuple[str, str], int]:
    """Nothing of any sequence; only the orchestrator's own streams."""
    return {
        (LIVE, ORCHESTRATOR): 0,
        (LIVE, TARGET): 0,
        (LIVE, DRAFT): 0,
        (SLOTS, TARGET): 0,
        (SLOTS, DRAFT): 0,
        (STREAMS, TARGET): num_streams,
        (STREAMS, DRAFT): num_streams,
    }


def pair() -> tuple[LmVerifier, LanguageModelDrafter]:
    return LmVerifier(TableRunner(seed=1)), LanguageModelDrafter(TableRunner(seed=1, blend=(2, 0.3)))


async def tasks_at_rest(running: Cluster, gauges: Gauges) -> int:
    """How many tasks there are once every stream of the orchestrator is open and has served."""
    await running.client.generate(**request(random.Random(1)))
    await until(gauges, idle())
    return len(asyncio.all_tasks())


async def tasks_back_to(baseline: int) -> None:
    try:
        await eventually(lambda: len(asyncio.all_tasks()) <= baseline)
    except TimeoutError:
        raise AssertionError(f"{baseline} tasks at the beginning, now {asyncio.all_tasks()}") from None


def request(random_: random.Random, **fields: Any) -> dict[str, Any]:
    return {
        "token_ids": {"token_ids": [1, 2, 3]},
        "max_tokens": random_.randrange(5, 60),
        "seed": random_.randrange(99),
        "temperature": random_.choice([0.0, 0.8]),
        "verification": random_.choice([COUPLED, COUPLED, TOKEN, BLOCK]),
        "n": random_.choice([1, 1, 1, 2, 4]),
        **fields,
    }


async def test_the_gauges_show_what_is_there(gauges: Gauges) -> None:
    """Else their zeros would prove nothing."""
    verifier, drafter = pair()
    async with target(verifier) as targets, draft(drafter) as drafts:
        stream, other = targets.stream(), drafts.stream()
        await stream.send(opens=[target_open(1), target_open(2, token_ids=[7] * 10)])
        await other.send(opens=[draft_open(1, 4)])
        await asyncio.gather(stream.answer(1), stream.answer(2), other.answer(1))
        await until(gauges, {(LIVE, TARGET): 2, (SLOTS, TARGET): 13, (STREAMS, TARGET): 1})
        await until(gauges, {(LIVE, DRAFT): 1, (SLOTS, DRAFT): 6, (STREAMS, DRAFT): 1})
        await stream.send(closes=[2])
        await until(gauges, {(LIVE, TARGET): 1, (SLOTS, TARGET): 3, (STREAMS, TARGET): 1})
        load = await targets.load()
        assert (load.live_sequences, load.kv_slots_used, load.open_streams) == (1, 3, 1)
        stream.cancel()
        await until(gauges, {(LIVE, TARGET): 0, (SLOTS, TARGET): 0, (STREAMS, TARGET): 0})


async def cancelled_at_random(running: Cluster, random_: random.Random) -> bool:
    """One request, dropped after some chunks, or never. Whether it was finished."""
    chunks_to_read = random_.choice([0, 1, 2, 3, 8, 10**6, 10**6])
    finished = 0
    fields = request(random_)
    async with aclosing(running.client.stream(**fields)) as responses:
        async for response in responses:
            finished += response.HasField("chunk") and response.chunk.HasField("finish")
            chunks_to_read -= 1
            if chunks_to_read < 0:
                break
    return finished == fields["n"]


@pytest.mark.slow
async def test_finished_and_cancelled_requests_leave_nothing(gauges: Gauges) -> None:
    verifier, drafter = pair()
    random_ = random.Random(5)
    async with cluster([verifier], [drafter]) as running:
        baseline = await tasks_at_rest(running, gauges)
        outcomes: list[bool] = []
        for _ in range(5):
            outcomes += await asyncio.gather(*(cancelled_at_random(running, random_) for _ in range(20)))
        assert 10 < sum(outcomes) < 90
        await until(gauges, idle())
        await tasks_back_to(baseline)
        assert (await running.client.server_info()).live_sequences == 0


async def test_requests_cancelled_at_any_moment_leave_nothing(gauges: Gauges) -> None:
    """Not between chunks but at any turn of the event loop, also before the first answer."""
    verifier, drafter = pair()
    random_ = random.Random(6)
    async with cluster([verifier], [drafter]) as running:
        baseline = await tasks_at_rest(running, gauges)
        for _ in range(3):
            tasks = [asyncio.create_task(running.client.generate(**request(random_))) for _ in range(20)]
            for task in tasks:
                for _ in range(random_.randrange(40)):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await until(gauges, idle())
        await tasks_back_to(baseline)


async def test_deadlines_leave_nothing(gauges: Gauges) -> None:
    verifier, drafter = pair()
    random_ = random.Random(8)
    async with cluster([verifier], [drafter]) as running:
        baseline = await tasks_at_rest(running, gauges)
        calls = [running.client.generate(random_.uniform(0.001, 0.3), **request(random_, n=4)) for _ in range(30)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, list | SpecdecError) for outcome in outcomes)
        assert any(isinstance(outcome, SpecdecError) for outcome in outcomes)
        await until(gauges, idle())
        await tasks_back_to(baseline)


async def test_a_client_that_goes_away_with_its_connection_leaves_nothing(gauges: Gauges) -> None:
    verifier, drafter = pair()
    random_ = random.Random(9)
    async with cluster([verifier], [drafter]) as running:
        baseline = await tasks_at_rest(running, gauges)
        for _ in range(5):
            channel = rpc.channel(f"127.0.0.1:{running.orchestrator.port}")
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            calls = [stub.Generate(generation_pb2.GenerateRequest(**request(random_))) for _ in range(8)]
            await asyncio.gather(*(call.read() for call in calls))
            await channel.close()
        await until(gauges, idle())
        await tasks_back_to(baseline)


async def test_an_orchestrator_that_goes_away_leaves_nothing_on_the_replicas(gauges: Gauges) -> None:
    verifier, drafter = pair()
    async with target(verifier) as targets, draft(drafter) as drafts:
        async with orchestrator([targets.server.port], [drafts.server.port]) as (_, client):
            responses = client.stream(**request(random.Random(3), max_tokens=400, n=4))
            async for response in responses:
                if response.HasField("chunk"):
                    break
            await until(gauges, {(STREAMS, TARGET): 1, (STREAMS, DRAFT): 1})
            await responses.aclose()
        await until(gauges, {key: 0 for key in idle() if key[1] != ORCHESTRATOR})


@pytest.mark.parametrize("end", ["close", "cancel", "half-close"])
async def test_raw_streams_that_end_at_any_moment_leave_nothing(gauges: Gauges, end: str) -> None:
    verifier, drafter = pair()
    random_ = random.Random(end)
    async with target(verifier) as targets, draft(drafter) as drafts:
        warm_up = targets.stream()
        await warm_up.ask(target_open(1))
        await warm_up.close()
        await until(gauges, {(STREAMS, TARGET): 0})
        baseline = len(asyncio.all_tasks())
        for _ in range(12):
            stream, other = targets.stream(), drafts.stream()
            await stream.send(opens=[target_open(s, token_ids=[1] * 20) for s in (1, 2, 3)])
            await stream.send(opens=[target_open(4, more=True)])
            await other.send(opens=[draft_open(s, 20) for s in (1, 2, 3)])
            for _ in range(random_.randrange(3)):
                await asyncio.sleep(0)
            if random_.random() < 0.5:
                await stream.answer(1)
                await stream.send(rounds=[round_(1, 1, 21, tree([1, 2, 3, 4]), num_autonomous=300)])
                await other.send(advances=[advance(1, 1, 21, [1], 30)])
            for each in (stream, other):
                if end == "close":
                    await each.send(closes=[1, 2, 3, 4])
                elif end == "half-close":
                    await each.half_close()
                else:
                    each.cancel()
                    await each.close()
        if end == "close":
            await until(gauges, {(STREAMS, TARGET): 12, (STREAMS, DRAFT): 12})
            for name, service in ((LIVE, TARGET), (LIVE, DRAFT), (SLOTS, TARGET), (SLOTS, DRAFT)):
                await until(gauges, {(name, service): 0})
            await targets.close()
            await drafts.close()
        if end == "half-close":
            for each in (*targets.streams[1:], *drafts.streams):
                assert await each.status() is grpc.StatusCode.OK
        await until(gauges, {key: 0 for key in idle() if key[1] != ORCHESTRATOR})
        await tasks_back_to(baseline)
