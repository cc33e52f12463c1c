"""When an orchestrator is ready: as long as it has a target, and a little longer. It is alive all along."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.api.server import OrchestratorServer
from specdec.cli.processes import free_ports, is_serving
from specdec.transport.rpc import LIVENESS
from testing.raw import orchestrator, target
from testing.table_model import Table, TableVerifier

PATIENCE_S = 20.0
LONG_S = 600.0


def model() -> TableVerifier:
    return TableVerifier(Table())


async def ready(server: OrchestratorServer, service: str = "") -> bool:
    return await is_serving(f"127.0.0.1:{server.port}", PATIENCE_S, service)


async def becomes(server: OrchestratorServer, expected: bool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await ready(server) != expected:
            await asyncio.sleep(0.01)


async def test_it_is_ready_from_its_first_target_on_and_alive_before() -> None:
    [port] = free_ports(1)
    async with orchestrator([port], target_wait_s=LONG_S) as (server, _):
        assert (await ready(server), await ready(server, LIVENESS)) == (False, True)
        async with target(model(), port=port):
            await becomes(server, True)


async def test_it_stays_ready_while_its_only_target_is_replaced() -> None:
    [port] = free_ports(1)
    async with orchestrator([port], target_wait_s=LONG_S) as (server, _):
        for _ in range(2):
            async with target(model(), port=port):
                await becomes(server, True)
            async with asyncio.timeout(PATIENCE_S):
                await server.targets.until(ready=False)
            assert await ready(server)


async def test_without_a_target_for_as_long_as_a_request_waits_it_is_alive_but_not_ready() -> None:
    [port] = free_ports(1)
    async with orchestrator([port], target_wait_s=0.2) as (server, _):
        for _ in range(2):
            async with target(model(), port=port):
                await becomes(server, True)
            await becomes(server, False)
            assert await ready(server, LIVENESS)


async def test_an_orchestrator_that_waits_for_its_first_target_says_so(caplog: pytest.LogCaptureFixture) -> None:
    [port] = free_ports(1)
    async with orchestrator([port], target_wait_s=0.2), asyncio.timeout(PATIENCE_S):
        while not (said := [each for each in caplog.records if "there is no target" in each.message]):
            await asyncio.sleep(0.01)
    assert f"127.0.0.1:{port}" in vars(said[0])["problems"]


@pytest.mark.parametrize("has_target", [True, False])
async def test_it_is_not_ready_once_it_stops(has_target: bool) -> None:
    [port] = free_ports(1)
    served = port if has_target else free_ports(1)[0]
    async with target(model(), port=port), orchestrator([served], target_wait_s=LONG_S) as (server, _):
        await becomes(server, has_target)
        await server.stop()
        assert not await ready(server)
