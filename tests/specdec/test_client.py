"""The client: repeated losses of its stream, and certificates that change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec import client
from specdec.client import Client, Sample
from specdec.core.errors import DeadlineExceeded, GivenUp, ReplicaLost
from specdec.security import dev_ca as certificates
from specdec.transport import rpc
from specdec.v1 import generation_pb2, generation_pb2_grpc
from testing.certificates import stranger
from testing.fault_proxy import FaultProxy
from testing.table_model import Table, TableVerifier
from tests.balancer import Balancer
from tests.cluster import cluster

PATIENCE_S = 20.0


class Dying(generation_pb2_grpc.GenerationServiceServicer):
    """Admits every request, sends as many ids as ``num_ids`` says, one per chunk, and is lost (``died``: when)."""

    def __init__(self, num_ids: Sequence[int] = ()) -> None:
        self._num_ids = list(num_ids)
        self.died: list[float] = []

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        yield generation_pb2.GenerateResponse(admission=generation_pb2.Admission(seed=7))
        at = len(request.resume[0].token_ids)
        for position in range(at, at + (self._num_ids.pop(0) if self._num_ids else 0)):
            yield generation_pb2.GenerateResponse(
                chunk=generation_pb2.Chunk(token_ids=[position], first_position=position)
            )
        self.died.append(time.monotonic())
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


@asynccontextmanager
async def two(servicer: Dying, number: int = 2) -> AsyncIterator[Client]:
    """A client of two addresses, or of another ``number``, all of them served by ``servicer``."""
    async with AsyncExitStack() as stack:
        ports = []
        for _ in range(number):
            server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
            generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
            ports.append(server.add_insecure_port("127.0.0.1:0"))
            await server.start()
            stack.push_async_callback(server.stop, 0)
        yield await stack.enter_async_context(Client(*(f"127.0.0.1:{port}" for port in ports)))


async def read(caller: Client, sample: Sample) -> None:
    async for response in caller.stream(text="a", max_tokens=50):
        if response.HasField("chunk"):
            sample.add(response.chunk)


async def test_streams_that_die_after_admission_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.03)
    servicer = Dying()
    async with two(servicer) as caller, asyncio.timeout(PATIENCE_S):
        with pytest.raises(ReplicaLost):
            await caller.generate(text="a", max_tokens=5)
    assert len(servicer.died) == client._ROUNDS * 2
    pauses = [later - earlier for earlier, later in zip(servicer.died, servicer.died[1:], strict=False)]
    assert all(pause >= 0.015 * 2**number for number, pause in enumerate(pauses[1:])), "one by one, and ever later"


async def test_ids_are_progress_and_the_attempts_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.001)
    before = [0, 2] * client._ROUNDS + [1]
    servicer = Dying(before)
    sample = Sample()
    async with two(servicer) as caller, asyncio.timeout(PATIENCE_S):
        with pytest.raises(ReplicaLost):
            await read(caller, sample)
    assert sample.token_ids == list(range(sum(before)))
    # The loss after the last id is the first of those in a row.
    assert len(servicer.died) == len(before) + client._ROUNDS * 2 - 1


async def test_one_address_is_used_again_as_several_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the name of several orchestrators."""
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.001)
    servicer = Dying([2, 3])
    sample = Sample()
    async with two(servicer, 1) as caller, asyncio.timeout(PATIENCE_S):
        with pytest.raises(ReplicaLost):
            await read(caller, sample)
    assert sample.token_ids == list(range(5))
    assert len(servicer.died) == 2 + client._ROUNDS - 1


async def test_a_deadline_holds_while_it_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr(client, "_MAX_PAUSE_S", 60.0)
    async with two(Dying()) as caller, asyncio.timeout(PATIENCE_S):
        with pytest.raises(DeadlineExceeded):
            await caller.generate(timeout_s=0.2, text="a")


class Mortal(generation_pb2_grpc.GenerationServiceServicer):
    """An orchestrator on a port. A request gets ``num_ids`` new ids, and then meets its ``fate``."""

    def __init__(self, instance: str, fate: Callable[[Mortal], Any], num_ids: int = 0) -> None:
        self._instance, self._fate, self._num_ids = instance, fate, num_ids
        self.num_requests = 0

    async def start(self, port: int = 0) -> int:
        self._server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return self.port

    async def die(self) -> None:
        await self._server.stop(0)

    async def die_and_start_again(self) -> None:
        await self.die()
        self._instance += "'"
        await self.start(self.port)

    async def GetServerInfo(self, request: Any, context: Any) -> generation_pb2.GetServerInfoResponse:
        return generation_pb2.GetServerInfoResponse(instance=self._instance)

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        self.num_requests += 1
        await context.send_initial_metadata(((rpc.INSTANCE, self._instance),))
        for position in range(at := len(request.resume[0].token_ids), at + self._num_ids):
            yield generation_pb2.GenerateResponse(
                chunk=generation_pb2.Chunk(token_ids=[position], first_position=position)
            )
        ending = asyncio.create_task(self._fate(self))  # no part of the call that it ends
        await asyncio.wait({ending})
        finish = generation_pb2.Finish(reason=generation_pb2.FINISH_REASON_LENGTH)
        yield generation_pb2.GenerateResponse(
            chunk=generation_pb2.Chunk(finish=finish, first_position=at + self._num_ids)
        )


@asynccontextmanager
async def mortals(count: int, fate: Callable[[Mortal], Any], num_ids: int = 0) -> AsyncIterator[list[Mortal]]:
    async with AsyncExitStack() as stack:
        servicers = [Mortal(str(number), fate, num_ids) for number in range(count)]
        for each in servicers:
            await each.start()
            stack.push_async_callback(each.die)
        yield servicers


@pytest.mark.parametrize("fate", [Mortal.die, Mortal.die_and_start_again])
@pytest.mark.parametrize(("num_ids", "num_deaths"), [(0, 2), (1, 4)])
async def test_a_request_that_ends_orchestrators_is_given_up(
    fate: Callable[[Mortal], Any], num_ids: int, num_deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two of them; after four, if it had new ids from each."""
    monkeypatch.setattr(client, "_FATE_TIMEOUT_S", PATIENCE_S / 4)  # a busy machine starts them late
    async with mortals(num_deaths + 1, fate, num_ids) as servers, asyncio.timeout(PATIENCE_S):
        async with Client(*(f"localhost:{each.port}" for each in servers)) as caller:
            with pytest.raises(GivenUp, match=f"orchestrators died {num_deaths} times under this request"):
                await caller.generate(text="a")
        assert [each.num_requests for each in servers] == [1] * num_deaths + [0]


async def test_a_request_that_ends_orchestrators_behind_one_name_is_given_up() -> None:
    async with mortals(4, Mortal.die) as servers, asyncio.timeout(PATIENCE_S):
        alive = lambda: [("127.0.0.1", each.port) for each in servers if not each.num_requests]  # noqa: E731
        async with Balancer(alive) as name, Client(name.address, name.address) as caller:
            with pytest.raises(GivenUp):
                await caller.generate(text="a")
        assert sum(each.num_requests for each in servers) == 2


async def test_cuts_in_the_network_are_no_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.001)
    num_cuts = client._ROUNDS * 2 - 1

    async def cut(_: Mortal) -> None:
        if sum(each.num_requests for each in servers) <= num_cuts:
            for proxy in proxies:
                proxy.reset()

    async with mortals(2, cut) as servers, AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        proxies = [await stack.enter_async_context(FaultProxy(each.port)) for each in servers]
        caller = await stack.enter_async_context(Client(*(f"127.0.0.1:{proxy.port}" for proxy in proxies)))
        [sample] = await caller.generate(text="a")
        assert sample.finished
        assert sum(each.num_requests for each in servers) == num_cuts + 1


def connections_to(port: int) -> int:
    """Established TCP connections of this machine."""
    lines = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")).splitlines()
    return sum(fields[2].endswith(f":{port:04X}") and fields[3] == "01" for fields in map(str.split, lines))


async def test_a_running_client_takes_a_new_ca_over(tmp_path: Path) -> None:
    own, spare = tmp_path / "own", tmp_path / "spare"
    for directory in (own, spare):
        certificates.make(directory)
    request: dict[str, Any] = dict(token_ids={"token_ids": [1, 2, 3]}, seed=1)
    verifiers = [TableVerifier(Table(), pass_s=0.002)]
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        running = await stack.enter_async_context(cluster(verifiers, certificates=own))
        port, held = running.orchestrator.port, Sample()
        caller = await stack.enter_async_context(Client(f"127.0.0.1:{port}", tls=stranger(own)))
        responses = caller.stream(**request, max_tokens=100)

        async def read(num_tokens: int) -> list[int]:
            while len(held.token_ids) < num_tokens:
                response = await anext(responses)
                if response.HasField("chunk"):
                    held.add(response.chunk)
            return held.token_ids[:num_tokens]

        expected = await read(20)
        before = connections_to(port)
        for name in (certificates.CA, certificates.CERT, certificates.KEY):
            for owner in certificates.OWNERS:
                (own / owner / name).write_bytes((spare / owner / name).read_bytes())
        [other] = await caller.generate(**request, max_tokens=20)
        assert other.token_ids == expected
        assert connections_to(port) == before + 1
        assert len(await read(100)) == 100, "a request that runs continues on its own connection"
        async for _ in responses:
            pass
        while connections_to(port) > before:  # the old connection is closed
            await asyncio.sleep(0.01)
