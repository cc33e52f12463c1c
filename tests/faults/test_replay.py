"""A request loses its target: it continues on another, its text is what it would have been, and it takes along its age
and its model, and no blame for what is no crash."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from specdec.client import Sample
from specdec.core.errors import ModelMismatch, Preempted
from specdec.core.rounds import TargetOpen
from specdec.core.settings import EngineSettings
from specdec.server.model_server import ModelServer
from target_service.engine import TargetEngine
from target_service.server import create_server
from testing.misbehaving import Misbehaving
from testing.patience import PATIENCE_S, eventually
from testing.table_model import Table, TableVerifier
from tests.cluster import Cluster, cluster, live, orders_wait
from tests.faults.undisturbed import NUM_SAMPLES, assert_same, drafter, generate, replays, undisturbed, verifier
from tests.models.table_reader import TABLE, oracle

REQUEST: dict[str, Any] = dict(token_ids={"token_ids": [1, 2, 3]}, max_tokens=60, seed=7, temperature=1.0)


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> list[TargetOpen]:
    """What the targets of this process opened."""
    seen: list[TargetOpen] = []
    open_ = TargetEngine.open

    def remembering(engine: TargetEngine, key: Any, each: TargetOpen) -> None:
        open_(engine, key, each)
        seen.append(each)

    monkeypatch.setattr(TargetEngine, "open", remembering)
    return seen


async def not_ready(running: Cluster, index: int) -> None:
    await eventually(lambda: not running.orchestrator.targets.replicas[index].ready)


async def drain(server: ModelServer, waiting: Misbehaving) -> None:
    """While a pass of its model waits."""
    stopping = asyncio.create_task(server.stop(PATIENCE_S))
    await orders_wait(server)
    waiting.gate.set()
    await stopping


async def test_a_target_that_stops_in_mid_stream_is_replaced() -> None:
    expected = await undisturbed()
    first = Misbehaving(verifier(), closes_at=8)
    async with cluster([first, verifier()], [drafter()]) as running:
        task = asyncio.create_task(generate(running.client))
        await first.in_a_pass()
        stopping = asyncio.create_task(running.targets[0].stop())
        await not_ready(running, 0)
        first.gate.set()
        samples = await task
        await stopping
        assert_same(samples, expected)
        assert max(replays(samples)) == 1
        running.targets.pop(0)  # it has no thread any more that would count
        await running.settled(PATIENCE_S)


async def test_a_target_that_drains_in_mid_stream_is_replaced() -> None:
    expected = await undisturbed()
    first = Misbehaving(verifier(), closes_at=8)
    async with cluster([first, verifier()], [drafter()]) as running:
        task = asyncio.create_task(generate(running.client))
        await first.in_a_pass()
        await drain(running.targets[0], first)
        assert_same(await task, expected)
        assert (running.targets[0].load.live_sequences, running.targets[0].load.kv_slots_used) == (0, 0)
        await running.settled(PATIENCE_S)


@pytest.mark.parametrize("num_targets", [1, 2])
async def test_a_pass_that_fails_is_replayed(num_targets: int) -> None:
    expected = await undisturbed()
    failing = [Misbehaving(verifier(), closes_at=6) for _ in range(num_targets)]
    async with cluster(failing, [drafter()]) as running:
        task = asyncio.create_task(generate(running.client))
        for each in failing:
            await each.in_a_pass()
            each.to_fail = 4  # of three samples together, and of each alone
            each.gate.set()
        samples = await task
        assert_same(samples, expected)
        assert max(replays(samples)) >= 1
        await running.settled(PATIENCE_S)


async def test_a_target_without_kv_slots_is_replaced_by_one_that_has_them() -> None:
    """One of two samples comes to the small one, which has room for the beginning only."""
    expected = await undisturbed(n=2)
    async with cluster([verifier(num_slots=20), verifier()], [drafter()]) as running:
        samples = await generate(running.client, n=2)
        assert_same(samples, expected)
        assert max(replays(samples)) >= 1
        await running.settled(PATIENCE_S)


async def test_preempted_sequences_wait_for_their_turn_and_end_the_same(opens: list[TargetOpen]) -> None:
    """The target has room for the whole of one text, but not for two."""
    expected = await undisturbed(max_tokens=100)
    opens.clear()
    small = Misbehaving(verifier(num_slots=104), closes_at=1)
    async with cluster([small], [drafter()]) as running:
        task = asyncio.create_task(generate(running.client, max_tokens=100))
        await small.in_a_pass()
        await live(running.orchestrator, NUM_SAMPLES)
        small.gate.set()
        assert_same(await task, expected)
        await running.settled(PATIENCE_S)
    assert {0, 1} <= {each.num_preemptions for each in opens}, "one gave way, and the target was told so"


async def test_a_target_that_comes_back_is_used_again() -> None:
    """The only one goes and returns on its port; the request waits for it."""
    expected = await undisturbed()
    first = Misbehaving(verifier(), closes_at=8)
    async with cluster([first], [drafter()]) as running:
        task = asyncio.create_task(generate(running.client))
        await first.in_a_pass()
        stopping = asyncio.create_task(running.targets[0].stop())
        await not_ready(running, 0)
        first.gate.set()
        await stopping
        again = create_server(verifier(), EngineSettings(port=running.targets[0].port))
        await again.start()
        try:
            assert_same(await task, expected)
        finally:
            await running.orchestrator.stop()
            await again.stop()


async def test_a_request_never_continues_with_another_model() -> None:
    """The only target goes, and one that serves another model comes in its place."""
    model, received = Misbehaving(TableVerifier(TABLE), closes_at=20), Sample()

    async def read(running: Cluster) -> None:
        async for response in running.client.stream(**REQUEST):
            if response.HasField("chunk"):
                received.add(response.chunk)

    async with asyncio.timeout(PATIENCE_S), cluster([model]) as running:
        reading = asyncio.create_task(read(running))
        await model.in_a_pass()
        [target] = running.targets
        stopping = asyncio.create_task(target.stop())
        await not_ready(running, 0)
        model.gate.set()
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
    assert all(digest in str(refused.value) for digest in (model.info.model_digest, "table-target-41"))
    assert fresh.token_ids != expected, "new requests are welcome at the other model"


async def test_a_replay_keeps_the_age_of_its_request(opens: list[TargetOpen]) -> None:
    model = Misbehaving(TableVerifier(TABLE), closes_at=5)
    async with asyncio.timeout(PATIENCE_S), cluster([model]) as running:
        request = asyncio.create_task(running.client.generate(**REQUEST))
        await model.in_a_pass()
        since = time.monotonic()
        await asyncio.sleep(0.2)
        model.script((), Preempted("planted"))
        elapsed_s = time.monotonic() - since
        model.gate.set()
        await request
    first, again = opens
    assert len(again.spec.token_ids) > len(first.spec.token_ids)
    assert again.age_s >= first.age_s + elapsed_s


async def test_neither_drains_nor_preemptions_count_as_crashes() -> None:
    """Four of each: as many crashes, also in part, would be too many for one request."""
    models = [Misbehaving(TableVerifier(TABLE), closes_at=5) for _ in range(5)]
    async with asyncio.timeout(2 * PATIENCE_S), cluster(models) as running:
        request = asyncio.create_task(running.client.generate(**REQUEST))
        there = dict(zip(models, running.targets, strict=True))
        for _ in range(4):
            while not (used := [each for each in there if each.entered.is_set()]):
                await asyncio.sleep(0.01)
            await drain(there.pop(used[0]), used[0])
        [last] = there
        await last.in_a_pass()
        last.script((), *[Preempted("planted")] * 4)
        last.gate.set()
        [sample] = await request
    expected, _ = oracle(REQUEST, 0)
    assert sample.token_ids == expected
    assert sample.finish.speculation.num_replays == 8
