"""Which endpoints are admitted to a pool, and what keeps them connected."""

import asyncio

import pytest

from orchestrator.replicas import pool as pool_
from specdec.core.errors import ModelMismatch
from testing.patience import eventually
from testing.raw import orchestrator, target
from testing.table_model import Table, TableVerifier
from tests.cluster import cluster


async def test_a_target_with_another_model_is_refused_by_name():
    async with cluster([TableVerifier(Table())]) as running:
        info = running.targets[0].servicer.info
        with pytest.raises(ModelMismatch, match=r"10\.0\.0\.9:1"):
            running.orchestrator._admit_target("10.0.0.9:1", type(info)("x", "another", 1024, "table", 10))
        # Also while the others take nothing new: their sequences are there.
        [replica] = running.orchestrator.targets.replicas
        replica.health.serving = False
        with pytest.raises(ModelMismatch, match=r"10\.0\.0\.9:1"):
            running.orchestrator._admit_target("10.0.0.9:1", type(info)("x", "another", 1024, "table", 10))


async def test_a_target_without_the_expected_digest_is_refused_with_both_also_as_the_first():
    right, wrong = Table(), Table(acceptance=0.1)
    expected = TableVerifier(right).info.model_digest
    async with cluster([TableVerifier(right)], model_digest=expected[:14]) as running:
        async with (
            target(TableVerifier(wrong)) as other,
            orchestrator([other.server.port], model_digest=expected) as (alone, _),
        ):
            [replica] = alone.targets.replicas
            await eventually(lambda: "model_digest names" in replica.problem)
            assert f"127.0.0.1:{other.server.port}" in replica.problem
            assert replica.problem.count("table-target") == 2, "both digests, of which 12 characters are shown"
        assert running.orchestrator.targets.info is not None


async def test_a_replica_whose_streams_task_is_cancelled_is_connected_again():
    async with asyncio.timeout(20.0), cluster([TableVerifier(Table())]) as running:
        [replica] = running.orchestrator.targets.replicas
        before = replica.link
        [task] = [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "Link.run"]
        task.cancel()
        while replica.link in (before, None):
            await asyncio.sleep(0.01)
        assert len((await running.client.generate(token_ids={"token_ids": [1]}, max_tokens=3))[0].token_ids) == 3


@pytest.mark.parametrize("part", ["_read", "_write", "_watch"])
async def test_a_stream_whose_part_is_cancelled_is_lost_and_connected_again(part):
    async with asyncio.timeout(20.0), cluster([TableVerifier(Table())]) as running:
        [replica] = running.orchestrator.targets.replicas
        before = replica.link
        while not (parts := [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == f"Link.{part}"]):
            await asyncio.sleep(0.01)
        [task] = parts
        task.cancel()
        while replica.link in (before, None):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "ends",
    [None, ValueError("a fault of our own"), asyncio.CancelledError()],
    ids=["returns", "raises", "was cancelled from within"],
)
async def test_what_keeps_a_replica_connected_begins_again_however_it_ends_and_says_so(monkeypatch, caplog, ends):
    monkeypatch.setattr(pool_, "_AGAIN_AFTER_S", 0.0)
    begun = 0

    async def connect() -> None:
        nonlocal begun
        begun += 1
        if ends is not None:
            raise ends

    task = asyncio.create_task(pool_._keep(connect, "the connection to here:1"))
    while begun < 3:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert [record.task for record in caplog.records][:2] == ["the connection to here:1"] * 2
    assert {record.levelname for record in caplog.records} == {"ERROR"}
