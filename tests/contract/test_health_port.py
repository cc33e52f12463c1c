"""Health on a port of its own, in the clear, where everything else speaks TLS."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec import rpc
from specdec.v1 import common_pb2, target_pb2_grpc
from target_service.lm_verifier import LmVerifier
from tests.cluster import cluster
from tests.contract.bad import runner
from tests.contract.over_tls import PATIENCE_S, target


async def health(address: str, service: str = "") -> int:
    async with rpc.channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)
        return int(answer.status)


async def test_the_health_port_tells_health_in_the_clear_and_nothing_else(ours: Path) -> None:
    status = health_pb2.HealthCheckResponse
    async with target(ours, health_port=0) as server:
        address = f"127.0.0.1:{server.health_port}"
        for service in ("", "specdec.v1.TargetService"):
            assert await health(address, service) == status.SERVING
        async with rpc.channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await target_pb2_grpc.TargetServiceStub(channel).GetModelInfo(common_pb2.GetModelInfoRequest())
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await server._server.set_serving(False)
        assert await health(address) == status.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError):
        await health(address)


async def test_the_orchestrator_has_a_health_port_too(ours: Path) -> None:
    async with cluster([LmVerifier(runner())], (), ours, health_port=0) as running:
        port = running.orchestrator.health_port
        assert await health(f"127.0.0.1:{port}") == health_pb2.HealthCheckResponse.SERVING
