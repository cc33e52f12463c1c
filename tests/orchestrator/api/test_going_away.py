"""An orchestrator that goes away in good order, for clients that know one address and hold one connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from orchestrator.api.server import OrchestratorServer
from orchestrator.settings import OrchestratorSettings
from specdec.client import Client
from specdec.core.errors import Draining
from specdec.transport import rpc
from specdec.v1 import generation_pb2, generation_pb2_grpc
from target_service.language_model import LmVerifier
from testing.misbehaving import Misbehaving
from testing.patience import PATIENCE_S
from testing.raw import orchestrator, target
from testing.table_model import Table, TableVerifier
from tests.balancer import Balancer
from tests.cluster import live
from tests.contract.bad import runner

IDS: dict[str, Message] = {"token_ids": generation_pb2.TokenIds(token_ids=[1, 2, 3])}


@asynccontextmanager
async def two(verifier: Any, **settings: Any) -> AsyncIterator[tuple[list[OrchestratorServer], Balancer]]:
    """Two orchestrators of one target, behind one address. Those in the list get the connections."""
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(target(verifier))
        servers = []
        for _ in range(2):
            chosen = OrchestratorSettings(target=[f"127.0.0.1:{service.server.port}"], **settings)
            servers.append(OrchestratorServer(chosen))
            await servers[-1].start()
            stack.push_async_callback(servers[-1].stop)
        balancer = Balancer(lambda: [("127.0.0.1", server.port) for server in servers])
        yield servers, await stack.enter_async_context(balancer)


async def test_what_runs_is_finished_and_the_next_request_goes_to_another_orchestrator() -> None:
    verifier = Misbehaving(LmVerifier(runner()))
    async with two(verifier) as (servers, balancer), AsyncExitStack() as stack:
        other = servers.pop()
        client = await stack.enter_async_context(Client(balancer.address))
        [expected] = await client.generate(**IDS, max_tokens=20, seed=1)
        verifier.gate.clear()
        held = asyncio.create_task(client.generate(**IDS, max_tokens=20, seed=1))
        await live(servers[0], 1)
        leaving, servers[0] = servers[0], other
        stopping = asyncio.create_task(leaving.stop(PATIENCE_S))
        async with asyncio.timeout(PATIENCE_S):
            while balancer.num_connections == 1:  # until the news is with the client, whose channel then tries anew
                client._lines[0].channel.get_state(try_to_connect=True)
                await asyncio.sleep(0.01)
        following = asyncio.create_task(client.generate(**IDS, max_tokens=20, seed=1))
        await live(other, 1)
        assert leaving.live_sequences == 1
        verifier.gate.set()
        [[first], [second]] = await asyncio.gather(held, following)
        assert first.token_ids == second.token_ids == expected.token_ids
        await stopping


@pytest.mark.parametrize("grace_s", [0.2, 1.0])
async def test_a_request_that_does_not_end_in_the_grace_is_cut_off(grace_s: float) -> None:
    verifier = Misbehaving(LmVerifier(runner()))
    async with target(verifier) as service, orchestrator([service.server.port]) as (server, client):
        verifier.gate.clear()
        stub = generation_pb2_grpc.GenerationServiceStub(client._lines[0].channel)
        held = stub.Generate(generation_pb2.GenerateRequest(**IDS, max_tokens=20))
        await live(server, 1)
        await asyncio.wait_for(server.stop(grace_s), PATIENCE_S)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in held:
                pass
        assert isinstance(rpc.error_of(refused.value), Draining)
        verifier.gate.set()


async def test_a_request_outlives_a_rolling_restart_of_all_orchestrators() -> None:
    """It gets no id in all that time: orchestrators that end in good order did not die under it."""
    verifier = Misbehaving(LmVerifier(runner()))
    async with target(verifier) as service, AsyncExitStack() as stack, asyncio.timeout(2 * PATIENCE_S):
        servers = [await _started(service.server.port) for _ in range(3)]
        client = await stack.enter_async_context(Client(*(f"127.0.0.1:{server.port}" for server in servers)))
        [expected] = await client.generate(**IDS, max_tokens=20, seed=1)
        verifier.gate.clear()
        held = asyncio.create_task(client.generate(**IDS, max_tokens=20, seed=1))
        for place, server in enumerate(servers):
            await live(server, 1)
            await server.stop(0.5)
            servers[place] = await _started(service.server.port, server.port)
            stack.push_async_callback(servers[place].stop)
        await live(servers[0], 1)
        verifier.gate.set()
        assert (await held)[0].token_ids == expected.token_ids


async def _started(target_port: int, port: int = 0) -> OrchestratorServer:
    server = OrchestratorServer(OrchestratorSettings(target=[f"127.0.0.1:{target_port}"], port=port))
    await server.start()
    return server


async def test_connections_that_age_spread_over_all_and_no_request_fails() -> None:
    async with two(TableVerifier(Table(), pass_s=0.002), max_connection_age_s=0.2) as (servers, balancer):
        homes = set()
        async with Client(balancer.address) as client, asyncio.timeout(PATIENCE_S):
            while len(homes) < 2 or balancer.num_connections < 4:
                request = asyncio.create_task(client.generate(**IDS, max_tokens=30, seed=1))
                while not request.done():
                    homes |= {server.port for server in servers if server.live_sequences}
                    await asyncio.sleep(0.005)
                assert len((await request)[0].token_ids) == 30
