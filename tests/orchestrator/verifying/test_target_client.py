"""Which sequences are suspected when a replica is lost: those that waited for it, and no other."""

from __future__ import annotations

import asyncio
import time

import pytest

from orchestrator.verifying.target_client import TargetClient
from specdec.core.tree import EMPTY_TREE
from testing.misbehaving import Misbehaving
from testing.patience import PATIENCE_S
from testing.table_model import Table, TableVerifier
from tests.cluster import Cluster, cluster
from tests.models.fake_peers import new_sequence

TABLE = Table(vocab_size=40)


def client_of(running: Cluster) -> TargetClient:
    return TargetClient(running.orchestrator.targets, "", "", PATIENCE_S, time.monotonic())


def used_by(client: TargetClient, running: Cluster) -> int:
    """The index of the target that it is on."""
    assert client._replica is not None
    return next(i for i, each in enumerate(running.targets) if client._replica.address.endswith(f":{each.port}"))


async def test_a_replay_is_counted_also_after_an_open_that_was_refused() -> None:
    sequence = new_sequence()
    async with (
        asyncio.timeout(PATIENCE_S),
        cluster([Misbehaving(TableVerifier(TABLE))]) as running,
        client_of(running) as client,
    ):
        client._refused = True
        sequence.extend(EMPTY_TREE, await client.verify(sequence, EMPTY_TREE))
        client.park()
        await client.verify(sequence, EMPTY_TREE)
    assert sequence.statistics.replays == [("PARKED", sequence.base)]


@pytest.mark.parametrize("waiting", [False, True])
async def test_who_waits_for_a_replica_that_is_lost_is_suspected_and_who_does_not_is_not(waiting: bool) -> None:
    verifiers = [Misbehaving(TableVerifier(TABLE)), Misbehaving(TableVerifier(TABLE))]
    sequence = new_sequence()
    async with asyncio.timeout(PATIENCE_S), cluster(verifiers) as running, client_of(running) as client:
        sequence.extend(EMPTY_TREE, await client.verify(sequence, EMPTY_TREE))
        used = used_by(client, running)
        lane = client._lane
        assert lane is not None
        if waiting:
            verifiers[used].gate.clear()
            task = asyncio.create_task(client.verify(sequence, EMPTY_TREE))
            await verifiers[used].in_a_pass()
        stopping = asyncio.create_task(running.targets[used].stop())
        while not lane.lost:
            await asyncio.sleep(0.001)
        verifiers[used].gate.set()
        if not waiting:
            task = asyncio.create_task(client.verify(sequence, EMPTY_TREE))
        verdict = await task
        assert (verdict.round, verdict.base) == (0, sequence.base)
        assert used_by(client, running) != used
        assert len(client._losses) == waiting
        assert sequence.statistics.num_replays == 1
        await stopping
