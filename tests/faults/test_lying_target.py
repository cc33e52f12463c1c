"""A target that answers what cannot be is ejected. Its sequences continue elsewhere, and their text is unharmed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from specdec.transport import rpc
from specdec.v1 import common_pb2, target_pb2, target_pb2_grpc
from testing.raw import orchestrator
from testing.table_model import Table, TableDrafter, TableVerifier
from tests.cluster import cluster, connected

TABLE = Table(vocab_size=40, acceptance=1.0)
REQUEST: dict[str, Any] = {"token_ids": {"token_ids": [1, 2, 3]}, "max_tokens": 60, "seed": 3, "n": 4}
Lie = Callable[[target_pb2.Verdict], Any]
AT_ONCE: dict[str, Lie] = {
    "another round": lambda verdict: setattr(verdict, "round", verdict.round + 1),
    "another base": lambda verdict: setattr(verdict, "base", verdict.base - 1),
    "a node that was not sent": lambda verdict: verdict.accepted.append(77),
    "a refusal of what was not drawn": lambda verdict: (
        verdict.ClearField("accepted"),
        setattr(verdict, "refused", True),
    ),
}
LATER: dict[str, Lie] = AT_ONCE | {
    "a path that begins in the middle": lambda verdict: verdict.accepted.pop(0),
    "a node twice": lambda verdict: verdict.accepted.append(verdict.accepted[-1]),
    "a path upwards": lambda verdict: verdict.accepted.reverse(),
    "more to come than was allowed": lambda verdict: setattr(verdict, "num_autonomous_left", 3),
    "a token outside the vocabulary": lambda verdict: setattr(verdict, "next_token", 40),
}


class LyingTarget(target_pb2_grpc.TargetServiceServicer):
    """Stands before a good one and tells the ``lie`` whenever several nodes were accepted, or ``at_once`` of its first
    answer to an open."""

    def __init__(self, address: str, lie: Lie, at_once: bool) -> None:
        self._address, self._lie, self._at_once = address, lie, at_once
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


@pytest.mark.parametrize(("lie", "at_once"), [*((lie, False) for lie in LATER), *((lie, True) for lie in AT_ONCE)])
async def test_a_target_that_lies_is_ejected_and_does_no_harm(lie: str, at_once: bool) -> None:
    async with cluster([TableVerifier(TABLE)], [TableDrafter(TABLE)]) as running:
        expected = await running.client.generate(timeout_s=30.0, **REQUEST)
        good, draft = running.targets[0].port, running.drafts[0].port
        server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        liar = LyingTarget(f"127.0.0.1:{good}", LATER[lie], at_once)
        target_pb2_grpc.add_TargetServiceServicer_to_server(liar, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with orchestrator([port, good], [draft]) as (before_both, client):
                await connected(before_both)
                samples = await client.generate(timeout_s=30.0, **REQUEST)
                replicas = (await client.server_info()).replicas
        finally:
            await server.stop(0)
        await running.settled()
    [replica] = [each for each in replicas if each.address.endswith(f":{port}")]
    assert liar.num_lies > 0
    assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in expected]
    assert not replica.ready
    assert replica.problem.startswith("ejected: ")
