"""What a request takes along when it goes to another target: its age and its model, and no blame for what is no crash.

The services are real, around a model whose every token is known (tests.models.table_reader).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from bench.models.table_model import Table, TableVerifier
from specdec.client import Sample
from specdec.core.errors import ModelMismatch
from specdec.core.settings import EngineSettings
from specdec.server.model_server import ModelServer
from target_service.engine import TargetEngine
from target_service.server import create_server
from target_service.verifier import TargetOpen
from tests.cluster import Cluster, cluster
from tests.models.faulty import GatedFaulty
from tests.models.gated import PATIENCE_S, Gated, GatedTable
from tests.models.table_reader import TABLE, oracle

REQUEST: dict[str, Any] = dict(
    token_ids={"token_ids": [1, 2, 3]}, max_tokens=60, seed=7, n=1, temperature=1.0, stop_token_ids=[]
)


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> list[TargetOpen]:
    """What targets of this process were asked to open."""
    seen: list[TargetOpen] = []
    open_ = TargetEngine.open

    def remembering(engine: TargetEngine, key: Any, each: TargetOpen) -> None:
        seen.append(each)
        open_(engine, key, each)

    monkeypatch.setattr(TargetEngine, "open", remembering)
    return seen


async def drain(server: ModelServer, verifier: Gated) -> None:
    """While a pass of its model waits."""
    stopping = asyncio.create_task(server.stop(PATIENCE_S))
    async with asyncio.timeout(PATIENCE_S):
        while not server.servicer.streams._loop._inbox.qsize():
            await asyncio.sleep(0.01)
    verifier.gate.set()
    await stopping


async def test_a_replay_keeps_the_age_of_its_request(opens: list[TargetOpen]) -> None:
    verifier = GatedFaulty(TABLE, closes_at=5)
    async with asyncio.timeout(PATIENCE_S), cluster([verifier]) as running:
        request = asyncio.create_task(running.client.generate(**REQUEST))
        await verifier.in_a_pass()
        since = time.monotonic()
        await asyncio.sleep(0.3)
        verifier.to_preempt = 1
        elapsed_s = time.monotonic() - since
        verifier.gate.set()
        await request
    first, again = opens
    assert len(again.spec.token_ids) > len(first.spec.token_ids)
    assert again.age_s >= first.age_s + elapsed_s


async def test_a_request_never_goes_on_with_another_model() -> None:
    """The only target goes, and one that serves another model comes in its place."""
    verifier, received = GatedTable(TABLE, closes_at=20), Sample()

    async def read(running: Cluster) -> None:
        async for response in running.client.stream(**REQUEST):
            if response.HasField("chunk"):
                received.add(response.chunk)

    async with asyncio.timeout(PATIENCE_S), cluster([verifier]) as running:
        reading = asyncio.create_task(read(running))
        await verifier.in_a_pass()
        [target] = running.targets
        stopping = asyncio.create_task(target.stop())
        while running.orchestrator.targets.replicas[0].ready:
            await asyncio.sleep(0.01)
        verifier.gate.set()
        await stopping
        other = Table(vocab_size=TABLE.vocab_size + 1)
        there = create_server(TableVerifier(other), EngineSettings(port=target.port))
        await there.start()
        try:
            with pytest.raises(ModelMismatch) as refused:
                await reading
            [fresh] = await running.client.generate(**REQUEST)
        finally:
            await running.orchestrator.stop()
            await there.stop()
    expected, _ = oracle(REQUEST, 0)
    assert 0 < len(received.token_ids) < 60
    assert received.token_ids == expected[: len(received.token_ids)]
    assert all(digest in str(refused.value) for digest in (verifier.info.model_digest, "table-target-41"))
    assert fresh.token_ids != expected, "it is another model, for which new requests are welcome"


async def test_neither_drains_nor_preemptions_count_as_crashes() -> None:
    """Four of each: as many crashes, also in part, would be too many for one request."""
    verifiers = [GatedFaulty(TABLE, closes_at=5) for _ in range(5)]
    async with asyncio.timeout(2 * PATIENCE_S), cluster(verifiers) as running:
        request = asyncio.create_task(running.client.generate(**REQUEST))
        there = dict(zip(verifiers, running.targets, strict=True))
        for _ in range(4):
            while not (used := [each for each in there if each.entered.is_set()]):
                await asyncio.sleep(0.01)
            await drain(there.pop(used[0]), used[0])
        [last] = there
        await last.in_a_pass()
        last.to_preempt = 4
        last.gate.set()
        [sample] = await request
    expected, _ = oracle(REQUEST, 0)
    assert sample.token_ids == expected
    assert sample.finish.speculation.num_replays == 8
