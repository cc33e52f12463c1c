"""The traps of gRPC that this system was built around, each shown not to be there."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.api.server import OrchestratorServer
from orchestrator.replicas.frames import TargetFrames
from orchestrator.replicas.link import Link
from orchestrator.settings import OrchestratorSettings
from specdec.client import Client
from specdec.core.errors import Draining, Overloaded, ReplicaLost, SpecdecError
from specdec.core.limits import MAX_CHAIN_NODES
from specdec.core.rounds import Growth, GrowthEnd
from specdec.core.settings import EngineSettings, ServiceSettings
from specdec.core.tree import SparseDistribution, TokenTree
from specdec.server.model_server import ModelServer
from specdec.server.streams import HEARTBEAT_S
from specdec.transport import rpc
from specdec.transport.framing import FRAME_BYTES
from specdec.transport.wire import MAX_SUPPORT, write_growth
from specdec.v1 import common_pb2, target_pb2, target_pb2_grpc
from target_service.codec import TargetCodec
from target_service.engine import TargetEngine
from target_service.server import SERVICE, TargetServicer, create_server
from testing.patience import eventually
from testing.raw import round_, target, target_open
from testing.table_model import Table, TableVerifier

HEALTH = health_pb2.HealthCheckRequest()
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
PATIENCE_S = 20.0


@asynccontextmanager
async def running(server: ModelServer | rpc.Server) -> AsyncIterator[tuple[Any, grpc.aio.Channel]]:
    await server.start()
    try:
        async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
            yield server, channel
    finally:
        await server.stop()


def served() -> AbstractAsyncContextManager[tuple[Any, grpc.aio.Channel]]:
    """A target service, and a channel to it."""
    return running(create_server(TableVerifier(Table()), EngineSettings()))


def listening(servicer: Any = None) -> AbstractAsyncContextManager[tuple[Any, grpc.aio.Channel]]:
    """A server of our own around any servicer of the target's, or around health alone."""
    server = rpc.Server(ServiceSettings(), [SERVICE])
    if servicer is not None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server.grpc)
    return running(server)


def linked(channel: grpc.aio.Channel) -> tuple[Link, asyncio.Task[None]]:
    link = Link(target_pb2_grpc.TargetServiceStub(channel).Verify, TargetFrames(1000), PATIENCE_S, PATIENCE_S)
    return link, asyncio.create_task(link.run())


def test_a_client_pings_less_often_than_a_server_allows() -> None:
    server, client = dict(rpc.SERVER_OPTIONS), dict(rpc.CHANNEL_OPTIONS)
    told = rpc.keepalive()
    assert told.min_ping_interval_ms == server["grpc.http2.min_ping_interval_without_data_ms"]
    assert told.keepalive_ms == client["grpc.keepalive_time_ms"] > told.min_ping_interval_ms
    assert not [name for name in server if "min_recv_ping" in name], "a spelling that nothing reads"
    assert client["grpc.http2.ping_timeout_ms"] < 60_000, "it decides how soon a frozen peer is noticed"


async def test_the_public_connection_has_longer_time_outs_than_inner_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of either, as they are made."""
    made: dict[str, dict[str, Any]] = {}
    server_of, channel_to = grpc.aio.server, grpc.aio.insecure_channel

    def server(*arguments: Any, options: Any, **others: Any) -> Any:
        made[f"server {len(made)}"] = dict(options)
        return server_of(*arguments, options=options, **others)

    def channel(address: str, options: Any) -> Any:
        made[address] = dict(options)
        return channel_to(address, options=options)

    monkeypatch.setattr(grpc.aio, "server", server)
    public = OrchestratorServer(OrchestratorSettings(target=["127.0.0.1:1"]))
    inner = rpc.Server(ServiceSettings(), [SERVICE])
    of_public, of_inner = made.values()
    monkeypatch.setattr(grpc.aio, "insecure_channel", channel)
    async with Client("127.0.0.1:1"), rpc.channel("127.0.0.1:2"):
        to_public, to_inner = made["127.0.0.1:1"], made["127.0.0.1:2"]
    for name in ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"):
        assert of_public[name] == to_public[name] >= 2 * to_inner[name] > 0
    assert of_public["grpc.keepalive_timeout_ms"] >= 2 * of_inner["grpc.keepalive_timeout_ms"]
    assert to_inner.keys() == to_public.keys()
    assert of_public["grpc.http2.min_ping_interval_without_data_ms"] < 2_000, "older clients ping every 2 s"
    for each in (public, inner):  # gRPC complains at exit of servers that were never stopped
        await each.start()
        await each.stop()


@pytest.mark.slow
async def test_an_idle_stream_outlives_its_keepalive_pings_where_both_ends_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shortened: gRPC itself pings at most once a second. Where the ends disagree the stream is lost."""
    server, client = dict(rpc.SERVER_OPTIONS), dict(rpc.CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 1000}
    monkeypatch.setattr(rpc, "CHANNEL_OPTIONS", list(client.items()))
    async with AsyncExitStack() as stack:
        opened = []
        for allowed_ms in (500, 300_000):
            changed = server | {"grpc.http2.min_ping_interval_without_data_ms": allowed_ms}
            monkeypatch.setattr(rpc, "SERVER_OPTIONS", list(changed.items()))
            _, channel = await stack.enter_async_context(served())
            link, run = linked(channel)
            opened.append((lane := link.lane(), run))
            lane.open([target_open(lane.sequence)], 16)
            await lane.receive()
        (lane, agreed), (_, disagreed) = opened
        with pytest.raises(ReplicaLost):
            await asyncio.wait_for(disagreed, PATIENCE_S)
        await asyncio.sleep(0.5)
        assert not agreed.done(), agreed.exception()
        lane.send(round_(lane.sequence, 1, 4), 20)
        assert (await lane.receive()).round == 1
        agreed.cancel()
        await asyncio.gather(agreed, return_exceptions=True)


async def test_writing_to_a_stream_that_the_server_ended_gives_the_streams_own_status() -> None:
    """Not asyncio.InvalidStateError: a drain between two rounds looks like what it is."""
    async with served() as (server, channel):
        link, run = linked(channel)
        lane = link.lane()
        lane.open([target_open(lane.sequence)], 16)
        await lane.receive()
        await server.stop(5.0)
        for number in range(1, 4):
            lane.send(round_(lane.sequence, number, 4), 20)
        with pytest.raises(Draining):
            await lane.receive()
        with pytest.raises(ReplicaLost) as lost:
            await asyncio.wait_for(run, PATIENCE_S)
        assert "InvalidState" not in str(lost.value)
        with pytest.raises(ReplicaLost):
            link.lane()


async def test_a_killed_server_ends_every_lane_with_a_lost_replica() -> None:
    verifier = TableVerifier(Table())
    servicer = TargetServicer(TargetEngine(verifier), TargetCodec(verifier.info), verifier.info, "target")
    async with listening(servicer) as (server, channel):
        link, run = linked(channel)
        lanes = [link.lane() for _ in range(3)]
        for lane in lanes:
            lane.open([target_open(lane.sequence)], 16)
        for lane in lanes:
            await lane.receive()
        await server.grpc.stop(None)
        for number, lane in enumerate(lanes):
            lane.send(round_(lane.sequence, number + 1, 4), 20)
            with pytest.raises(ReplicaLost) as lost:
                await asyncio.wait_for(lane.receive(), PATIENCE_S)
            assert not isinstance(lost.value, Draining)
        await asyncio.gather(run, return_exceptions=True)
        await servicer.streams.stop()


async def test_waiting_for_a_lane_with_a_time_out_does_not_cancel_the_stream() -> None:
    async with served() as (_, channel):
        link, run = linked(channel)
        lane = link.lane()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(lane.receive(), 0.02)
        lane.open([target_open(lane.sequence)], 16)
        assert (await asyncio.wait_for(lane.receive(), PATIENCE_S)).round == 0
        assert not run.done()
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


async def test_a_server_that_waits_for_long_does_not_cancel_its_reading() -> None:
    """The heartbeat has a time-out; it is on our own event, never on the read."""
    async with target(TableVerifier(Table(), pass_s=1.3 * HEARTBEAT_S)) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1)])
        await stream.frame_where(lambda frame: frame.progress)
        assert (await stream.answer(1)).round == 0
        await asyncio.sleep(1.3 * HEARTBEAT_S)
        assert (await stream.ask(round_(1, 1, 4))).round == 1


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
            lane.open([target_open(lane.sequence)], 16)
            await lane.receive()
            run.cancel()
            with suppress(asyncio.CancelledError):
                await run

        await one()
        await eventually(lambda: not server.load.open_streams)
        before = there()
        for _ in range(10):
            await one()
        await eventually(lambda: not (server.load.open_streams or server.load.live_sequences or there() > before))


async def test_a_deadline_is_carried_to_the_server() -> None:
    remaining: list[float] = []

    class Servicer(target_pb2_grpc.TargetServiceServicer):
        async def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[target_pb2.VerifyResponse]:
            remaining.append(context.time_remaining())
            yield target_pb2.VerifyResponse()
            await asyncio.sleep(PATIENCE_S)

    async with listening(Servicer()) as (_, channel):
        call = target_pb2_grpc.TargetServiceStub(channel).Verify(timeout=0.4)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            async for _ in call:
                pass
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert isinstance(rpc.error_of(late.value), SpecdecError)
    [told] = remaining
    assert 0 < told < 0.5, "gRPC rounds what it sends up, to hundredths of a second here"


def status(code: int, message: str) -> bytes:
    return bytes(status_pb2.Status(code=code, message=message).SerializeToString())


CONTRADICTIONS = {
    "another code": status(code_pb2.ABORTED, "no room"),
    "no code": status(99, "no room"),
    "another message": status(code_pb2.RESOURCE_EXHAUSTED, "something else"),
    "no status": b"\xff\xff",
    "nothing": b"",
}


@pytest.mark.parametrize("details", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
async def test_details_that_contradict_a_status_are_not_believed(details: bytes) -> None:
    class Servicer(target_pb2_grpc.TargetServiceServicer):
        async def GetModelInfo(self, request: Any, context: Any) -> common_pb2.GetModelInfoResponse:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room", (("grpc-status-details-bin", details),))

    async with listening(Servicer()) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await target_pb2_grpc.TargetServiceStub(channel).GetModelInfo(common_pb2.GetModelInfoRequest())
    error = rpc.error_of(failed.value)
    assert (type(error), str(error)) == (Overloaded, "no room")


class Panic(BaseException):
    """As a panic in Rust: no Exception."""


@pytest.mark.parametrize("kind", [RecursionError, Panic])
async def test_what_no_servicer_expects_is_internal_and_its_text_stays_in_the_log(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    class Servicer(target_pb2_grpc.TargetServiceServicer):
        async def GetModelInfo(self, request: Any, context: Any) -> common_pb2.GetModelInfoResponse:
            raise kind("a secret")

        async def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[target_pb2.VerifyResponse]:
            yield target_pb2.VerifyResponse()
            raise kind("a secret")

    async with listening(Servicer()) as (_, channel):
        stub = target_pb2_grpc.TargetServiceStub(channel)
        for ask in (stub.GetModelInfo(common_pb2.GetModelInfoRequest()), last_of(stub.Verify())):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await ask
            assert failed.value.code() is grpc.StatusCode.INTERNAL
            assert "secret" not in str(failed.value)
            assert kind.__name__ not in str(failed.value)
    assert "a secret" in caplog.text


async def last_of(call: Any) -> None:
    async for _ in call:
        pass


async def test_health_can_be_watched_and_stopping_ends_the_watch_soon() -> None:
    async with listening() as (server, channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch
        watches = [watch(health_pb2.HealthCheckRequest(service=service)) for service in ("", SERVICE)]
        assert [(await each.read()).status for each in watches] == [NOT_SERVING] * 2
        server.set_serving()
        assert [(await each.read()).status for each in watches] == [SERVING] * 2
        # As model services do it: without a moment of grace the end may overtake the news.
        stopping = asyncio.create_task(server.stop(0.25))
        assert [(await each.read()).status for each in watches] == [NOT_SERVING] * 2, "the news comes before the end"
        async with asyncio.timeout(10.0):
            for each in watches:
                with suppress(grpc.aio.AioRpcError):
                    while await each.read() is not grpc.aio.EOF:
                        pass
            await stopping


async def test_a_watch_that_is_cancelled_leaves_no_task_behind() -> None:
    async with served() as (_, channel):
        baseline = len(asyncio.all_tasks())
        for _ in range(10):
            watch = health_pb2_grpc.HealthStub(channel).Watch(HEALTH)
            assert (await watch.read()).status == SERVING
            watch.cancel()
        await eventually(lambda: len(asyncio.all_tasks()) <= baseline)


def test_an_orchestrator_accepts_the_largest_answer_and_not_much_more() -> None:
    """A chain with a whole distribution for each node."""
    weights = SparseDistribution(tuple(range((1 << 21) - MAX_SUPPORT, 1 << 21)), (1.0,) * MAX_SUPPORT)
    chain = TokenTree.chain(weights.token_ids[:MAX_CHAIN_NODES], [weights] * MAX_CHAIN_NODES)
    largest = write_growth(1 << 60, Growth(1, 1, (), chain, GrowthEnd.BUDGET)).ByteSize()
    accepted = dict(rpc.CHANNEL_OPTIONS)["grpc.max_receive_message_length"]
    assert max(FRAME_BYTES, largest) < accepted <= 2 * FRAME_BYTES
