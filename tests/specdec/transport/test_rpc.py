"""The traps of gRPC that this system was built around, each shown not to be there."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.models.table_model import Table, TableVerifier
from orchestrator.api.server import OrchestratorServer
from orchestrator.replicas.frames import TargetFrames
from orchestrator.replicas.link import Link
from orchestrator.settings import OrchestratorSettings
from specdec.client import Client
from specdec.core.errors import Draining, Overloaded, ReplicaLost, SpecdecError
from specdec.core.settings import EngineSettings, ServiceSettings
from specdec.server.model_server import ModelServer
from specdec.server.streams import HEARTBEAT_S
from specdec.transport import rpc
from specdec.v1 import common_pb2, target_pb2, target_pb2_grpc
from target_service.server import SERVICE, create_server
from tests.contract.raw import round_, target, target_open

HEALTH = health_pb2.HealthCheckRequest()
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
PATIENCE_S = 20.0


@asynccontextmanager
async def served(**table: Any) -> AsyncIterator[tuple[ModelServer, grpc.aio.Channel]]:
    server = create_server(TableVerifier(Table(), **table), EngineSettings())
    await server.start()
    try:
        async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
            yield server, channel
    finally:
        await server.stop()


def linked(channel: grpc.aio.Channel) -> tuple[Link, asyncio.Task[None]]:
    link = Link(target_pb2_grpc.TargetServiceStub(channel).Verify, TargetFrames(1000), PATIENCE_S, PATIENCE_S)
    return link, asyncio.create_task(link.run())


def replaced(options: list[tuple[str, Any]], **values: int) -> list[tuple[str, Any]]:
    """``options`` with those whose name ends like a key set to its value."""
    changed = list(options)
    for name, value in values.items():
        [at] = [index for index, (option, _) in enumerate(changed) if option.endswith(f".{name}")]
        changed[at] = (changed[at][0], value)
    return changed


# --- keepalive ----------------------------------------------------------------------------------------------


def test_a_client_pings_less_often_than_a_server_allows() -> None:
    server, client = dict(rpc.SERVER_OPTIONS), dict(rpc.CHANNEL_OPTIONS)
    allowed = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_time_ms"] > allowed, "with room for a clock that is not quite even"
    assert not [name for name in server if "min_recv_ping" in name], "a spelling that nothing reads"
    assert client["grpc.http2.ping_timeout_ms"] < 60_000, "it decides how fast a frozen peer is seen"
    told = rpc.keepalive()
    assert (told.keepalive_ms, told.min_ping_interval_ms) == (client["grpc.keepalive_time_ms"], allowed)


async def test_clients_and_orchestrators_give_each_other_longer_than_services_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ends of the public connection as they are made, and both of an inner one."""
    made: dict[str, dict[str, Any]] = {}
    server_of, channel_to = grpc.aio.server, grpc.aio.insecure_channel

    def server(*arguments: Any, options: Any, **others: Any) -> Any:
        made["server"] = dict(options)
        return server_of(*arguments, options=options, **others)

    def channel(address: str, options: Any) -> Any:
        made[address] = dict(options)
        return channel_to(address, options=options)

    monkeypatch.setattr(grpc.aio, "server", server)
    monkeypatch.setattr(grpc.aio, "insecure_channel", channel)
    public = OrchestratorServer(OrchestratorSettings(target=["127.0.0.1:1"]))
    async with Client("127.0.0.1:1"), rpc.channel("127.0.0.1:2"):
        for end in ("server", "127.0.0.1:1"):
            assert made[end]["grpc.keepalive_time_ms"] == 5_000, end
            assert made[end]["grpc.keepalive_timeout_ms"] == made[end]["grpc.http2.ping_timeout_ms"] == 5_000, end
        assert made["127.0.0.1:2"]["grpc.http2.ping_timeout_ms"] == 1_000
        assert made["127.0.0.1:2"].keys() == made["127.0.0.1:1"].keys()
    # Clients of before ping every 2 s, and are to live.
    assert made["server"]["grpc.http2.min_ping_interval_without_data_ms"] < 2_000
    inner = rpc.Server(ServiceSettings(), [SERVICE])
    assert made["server"]["grpc.keepalive_timeout_ms"] == 1_000
    for each in (public._server, inner):  # gRPC complains at exit of servers that were never stopped
        await each.start()
        await each.stop()


@pytest.mark.slow
@pytest.mark.parametrize("agree", [True, False])
async def test_an_idle_stream_outlives_its_keepalive_pings(agree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortened: gRPC itself pings at most once a second. Where they disagree the stream is lost."""
    allowed_ms = 500 if agree else 300_000
    monkeypatch.setattr(
        rpc, "SERVER_OPTIONS", replaced(rpc.SERVER_OPTIONS, min_ping_interval_without_data_ms=allowed_ms)
    )
    monkeypatch.setattr(rpc, "CHANNEL_OPTIONS", replaced(rpc.CHANNEL_OPTIONS, keepalive_time_ms=1000))
    async with served() as (_, channel):
        link, run = linked(channel)
        lane = link.lane()
        lane.open([target_open(lane.sequence)])
        await lane.receive()
        done, _ = await asyncio.wait([run], timeout=4.5)
        if agree:
            assert not done, run.exception()
            lane.send(round_(lane.sequence, 1, 4))
            assert (await lane.receive()).round == 1
        else:
            with pytest.raises(ReplicaLost):
                await asyncio.wait_for(run, PATIENCE_S)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


# --- streams ------------------------------------------------------------------------------------------------


async def test_writing_to_a_stream_that_the_server_ended_gives_the_streams_own_status() -> None:
    """Not asyncio.InvalidStateError: a drain between two rounds looks like what it is."""
    async with served() as (server, channel):
        link, run = linked(channel)
        lane = link.lane()
        lane.open([target_open(lane.sequence)])
        await lane.receive()
        await server.stop(5.0)
        for number in range(1, 4):
            lane.send(round_(lane.sequence, number, 4))
        with pytest.raises(Draining):
            await lane.receive()
        with pytest.raises(ReplicaLost) as lost:
            await asyncio.wait_for(run, PATIENCE_S)
        assert "InvalidState" not in str(lost.value)
        with pytest.raises(ReplicaLost):
            link.lane()


async def test_a_killed_server_ends_every_lane_with_a_lost_replica() -> None:
    async with served() as (server, channel):
        link, run = linked(channel)
        lanes = [link.lane() for _ in range(3)]
        for lane in lanes:
            lane.open([target_open(lane.sequence)])
        for lane in lanes:
            await lane.receive()
        await server._server.grpc.stop(None)
        for number, lane in enumerate(lanes):
            lane.send(round_(lane.sequence, number + 1, 4))
            with pytest.raises(ReplicaLost) as lost:
                await asyncio.wait_for(lane.receive(), PATIENCE_S)
            assert not isinstance(lost.value, Draining)
        await asyncio.gather(run, return_exceptions=True)


async def test_waiting_for_a_lane_with_a_time_out_does_not_cancel_the_stream() -> None:
    async with served() as (_, channel):
        link, run = linked(channel)
        lane = link.lane()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(lane.receive(), 0.02)
        lane.open([target_open(lane.sequence)])
        assert (await asyncio.wait_for(lane.receive(), PATIENCE_S)).round == 0
        assert not run.done()
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


@pytest.mark.slow
async def test_a_server_that_waits_for_long_does_not_cancel_its_reading() -> None:
    """The heartbeat has a time-out; it is on our own event, never on the read."""
    async with target(TableVerifier(Table(), pass_s=2 * HEARTBEAT_S)) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1)])
        await stream.frame_where(lambda frame: frame.progress)
        assert (await stream.answer(1)).round == 0
        await asyncio.sleep(2 * HEARTBEAT_S)
        await stream.send(rounds=[round_(1, 1, 4)])
        assert (await stream.answer(1)).round == 1


# --- calls that nobody wants any more -----------------------------------------------------------------------


@pytest.mark.slow
async def test_cancelled_calls_leave_no_call_and_no_task() -> None:
    async with served() as (server, channel):

        def there() -> tuple[int, int]:
            gc.collect()
            calls = sum(issubclass(type(each), grpc.aio.StreamStreamCall) for each in gc.get_objects())
            return calls, len(asyncio.all_tasks())

        async def one() -> None:
            link, run = linked(channel)
            lane = link.lane()
            lane.open([target_open(lane.sequence)])
            await lane.receive()
            run.cancel()
            with suppress(asyncio.CancelledError):
                await run

        await one()
        async with asyncio.timeout(PATIENCE_S):
            while server.load.open_streams:
                await asyncio.sleep(0.01)
        before = there()
        for _ in range(30):
            await one()
        async with asyncio.timeout(PATIENCE_S):
            while server.load.open_streams or server.load.live_sequences or there() > before:
                await asyncio.sleep(0.01)


# --- deadlines ----------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_deadline_is_carried_to_the_server() -> None:
    remaining: list[float | None] = []

    class Servicer(target_pb2_grpc.TargetServiceServicer):
        async def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[target_pb2.VerifyResponse]:
            remaining.append(context.time_remaining())
            yield target_pb2.VerifyResponse()
            await asyncio.sleep(PATIENCE_S)

    server = rpc.Server(ServiceSettings(), [SERVICE])
    target_pb2_grpc.add_TargetServiceServicer_to_server(Servicer(), server.grpc)
    await server.start()
    try:
        async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
            call = target_pb2_grpc.TargetServiceStub(channel).Verify(timeout=1.5)
            with pytest.raises(grpc.aio.AioRpcError) as late:
                async for _ in call:
                    pass
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert isinstance(rpc.error_of(late.value), SpecdecError)
    finally:
        await server.stop()
    [told] = remaining
    assert told is not None
    assert 0 < told < 2, "gRPC rounds what it sends up, to hundredths of a second here"


# --- errors -------------------------------------------------------------------------------------------------


def status(code: int, message: str) -> bytes:
    data: bytes = status_pb2.Status(code=code, message=message).SerializeToString()
    return data


@pytest.mark.parametrize(
    "details",
    [
        status(code_pb2.ABORTED, "no room"),
        status(99, "no room"),
        status(code_pb2.RESOURCE_EXHAUSTED, "something else"),
        b"\xff\xff",
        b"",
    ],
    ids=["another code", "no code", "another message", "no status", "nothing"],
)
async def test_details_that_contradict_a_status_are_not_believed(details: bytes) -> None:
    class Servicer(target_pb2_grpc.TargetServiceServicer):
        async def GetModelInfo(self, request: Any, context: Any) -> common_pb2.GetModelInfoResponse:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room", (("grpc-status-details-bin", details),))

    server = grpc.aio.server()
    target_pb2_grpc.add_TargetServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await target_pb2_grpc.TargetServiceStub(channel).GetModelInfo(common_pb2.GetModelInfoRequest())
    finally:
        await server.stop(None)
    error = rpc.error_of(failed.value)
    assert type(error) is Overloaded
    assert str(error) == "no room"


# --- health -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_health_can_be_watched_and_stopping_ends_the_watch_soon(service: str) -> None:
    server = rpc.Server(ServiceSettings(), [SERVICE])
    await server.start()
    async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
        assert (await watch.read()).status == NOT_SERVING
        server.set_serving()
        assert (await watch.read()).status == SERVING
        # As model services do it: without a moment of grace the end may overtake the news.
        stopping = asyncio.create_task(server.stop(0.25))
        assert (await watch.read()).status == NOT_SERVING, "the news comes before the end"
        async with asyncio.timeout(10.0):
            with suppress(grpc.aio.AioRpcError):
                while await watch.read() is not grpc.aio.EOF:
                    pass
            await stopping


async def test_a_watch_that_is_cancelled_leaves_no_task_behind() -> None:
    async with served() as (_, channel):
        baseline = len(asyncio.all_tasks())
        for _ in range(10):
            watch = health_pb2_grpc.HealthStub(channel).Watch(HEALTH)
            assert (await watch.read()).status == SERVING
            watch.cancel()
        async with asyncio.timeout(PATIENCE_S):
            while len(asyncio.all_tasks()) > baseline:
                await asyncio.sleep(0.01)
