"""Health on a port of its own, in the clear, where everything else speaks TLS."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.core.settings import ServiceSettings
from specdec.telemetry.prometheus import Scrape
from specdec.transport import rpc
from specdec.v1 import common_pb2, target_pb2_grpc
from target_service.language_model import LmVerifier
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
        server._server.set_serving(False)
        assert await health(address) == status.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError):
        await health(address)


async def test_the_orchestrator_has_a_health_port_too(ours: Path) -> None:
    async with cluster([LmVerifier(runner())], (), ours, health_port=0) as running:
        port = running.orchestrator.health_port
        assert await health(f"127.0.0.1:{port}") == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_all_ports_listen_on_ipv6_with_and_without_brackets(host: str) -> None:
    if not _has_ipv6():
        pytest.skip("no IPv6 here")
    async with target(None, health_port=0, host=host) as server:
        for port in (server.port, server.health_port):
            assert await health(f"[::1]:{port}") == health_pb2.HealthCheckResponse.SERVING
        settings = ServiceSettings(host=host)
        port = Scrape().serve(settings.host, 0)
        with socket.create_connection(("::1", port), timeout=PATIENCE_S):
            pass


def _has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as one:
        try:
            one.bind(("::1", 0))
        except OSError:
            return False
    return True
