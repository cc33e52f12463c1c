"""A target that answers what cannot be: it is set aside, its sequences go on elsewhere, their text is unharmed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from bench.models.table_model import Table, TableDrafter, TableVerifier
from orchestrator.api.server import OrchestratorServer
from orchestrator.settings import OrchestratorSettings
from specdec.client import Client
from specdec.transport import rpc
from specdec.v1 import common_pb2, target_pb2, target_pb2_grpc
from tests.cluster import Cluster, cluster, connected

TABLE = Table(vocab_size=40, acceptance=1.0)


def another_round(verdict: target_pb2.Verdict) -> None:
    verdict.round += 1


def another_base(verdict: target_pb2.Verdict) -> None:
    verdict.base -= 1


def a_node_that_was_not_sent(verdict: target_pb2.Verdict) -> None:
    verdict.accepted.append(77)


def a_path_that_begins_in_the_middle(verdict: target_pb2.Verdict) -> None:
    del verdict.accepted[0]


def a_node_twice(verdict: target_pb2.Verdict) -> None:
    verdict.accepted.append(verdict.accepted[-1])


def a_path_upwards(verdict: target_pb2.Verdict) -> None:
    verdict.accepted[:] = list(reversed(verdict.accepted))


def more_to_come_than_was_allowed(verdict: target_pb2.Verdict) -> None:
    verdict.run_on = 3


def a_token_outside_the_vocabulary(verdict: target_pb2.Verdict) -> None:
    verdict.next_token = 40


LIES = [
    another_round,
    another_base,
    a_node_that_was_not_sent,
    a_path_that_begins_in_the_middle,
    a_node_twice,
    a_path_upwards,
    more_to_come_than_was_allowed,
    a_token_outside_the_vocabulary,
]


class LyingTarget(target_pb2_grpc.TargetServiceServicer):
    """Stands before a good one and tells the ``lie`` whenever several nodes were accepted; or, ``at_once``, of its
    first answer to an open."""

    def __init__(self, address: str, lie: Callable[[target_pb2.Verdict], None], at_once: bool) -> None:
        self._address = address
        self._lie = lie
        self._at_once = at_once
        self.num_lies = 0

    async def GetModelInfo(self, request: Any, context: Any) -> common_pb2.GetModelInfoResponse:
        async with rpc.channel(self._address) as channel:
            return await target_pb2_grpc.TargetServiceStub(channel).GetModelInfo(request)

    async def Verify(self, frames: AsyncIterator[Any], context: Any) -> Any:
        async with rpc.channel(self._address) as channel:
            async for response in target_pb2_grpc.TargetServiceStub(channel).Verify(frames):
                for verdict in response.verdicts:
                    if self._at_once or len(verdict.accepted) > 1:
                        self._lie(verdict)
                        self.num_lies += 1
                yield response


async def generate(running: Cluster, lie: Callable[[Any], None], at_once: bool) -> tuple[list[list[int]], int, Any]:
    """The text of 4 samples from a deployment with a liar and a good target, how often it lied, and what became of
    it."""
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    liar = LyingTarget(f"127.0.0.1:{running.targets[0].port}", lie, at_once)
    target_pb2_grpc.add_TargetServiceServicer_to_server(liar, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    orchestrator = OrchestratorServer(
        OrchestratorSettings(
            target=[address, f"127.0.0.1:{running.targets[0].port}"],
            draft=[f"127.0.0.1:{running.drafts[0].port}"],
            num_draft_tokens=5,
        )
    )
    await orchestrator.start()
    try:
        await connected(orchestrator)
        async with Client(f"127.0.0.1:{orchestrator.port}") as client:
            samples = await client.generate(timeout_s=30.0, **REQUEST)
            [replica] = [each for each in (await client.server_info()).replicas if each.address == address]
    finally:
        await orchestrator.stop()
        await server.stop(0)
    return [sample.token_ids for sample in samples], liar.num_lies, replica


REQUEST: dict[str, Any] = {"token_ids": {"token_ids": [1, 2, 3]}, "max_tokens": 60, "seed": 3, "n": 4}


@pytest.mark.parametrize(
    ("lie", "at_once"),
    [
        *((lie, False) for lie in LIES),
        *((lie, True) for lie in (another_round, another_base, a_node_that_was_not_sent)),
    ],
    ids=lambda value: value.__name__ if callable(value) else ("at once" if value else "later"),
)
async def test_a_target_that_lies_is_set_aside_and_harms_nobody(lie, at_once):
    async with cluster([TableVerifier(TABLE)], [TableDrafter(TABLE)]) as running:
        expected = [sample.token_ids for sample in await running.client.generate(timeout_s=30.0, **REQUEST)]
        found, num_lies, replica = await generate(running, lie, at_once)
        await running.settled()
    assert num_lies > 0
    assert found == expected
    assert not replica.ready
    assert replica.problem.startswith("ejected: ")
