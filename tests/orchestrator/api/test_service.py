"""A request ends at its deadline, whatever it waits for."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest

from specdec.client import Client
from specdec.core.errors import DeadlineExceeded, InvalidArgument, ModelMismatch
from specdec.core.sequence import SequenceSpec
from specdec.core.settings import EngineSettings
from specdec.v1 import generation_pb2
from target_service.server import create_server
from testing.patience import eventually
from testing.table_model import Table, TableDrafter, TableMemory, TableVerifier
from tests.cluster import cluster, live, read_narrowly

TABLE = Table(vocab_size=64)
REQUEST: dict[str, Any] = {"token_ids": {"token_ids": [1, 2, 3]}, "max_tokens": 40_000, "seed": 5}


def deployment(**settings: Any) -> Any:
    return cluster([TableVerifier(TABLE, pass_s=0.001)], [TableDrafter(TABLE)], **settings)


class Unread:
    """In place of a gRPC context: takes one response, and is never read again."""

    def __init__(self) -> None:
        self.responses: list[generation_pb2.GenerateResponse] = []

    def time_remaining(self) -> None: ...

    async def send_initial_metadata(self, metadata: Any) -> None: ...

    async def write(self, response: generation_pb2.GenerateResponse) -> None:
        self.responses.append(response)
        if len(self.responses) > 1:
            await asyncio.Event().wait()


async def test_the_deadline_ends_a_write_that_is_never_read():
    async with deployment(request_timeout_s=0.2) as running:
        client = Unread()
        with pytest.raises(DeadlineExceeded):
            await running.orchestrator._servicer.Generate(generation_pb2.GenerateRequest(**REQUEST), client)
        assert client.responses[0].HasField("admission")
        assert running.orchestrator.live_sequences == 0
        await running.settled()


async def test_a_client_that_stops_reading_holds_nothing_past_the_deadline_and_is_told_so(monkeypatch):
    async with deployment(request_timeout_s=0.4) as running, AsyncExitStack() as stack:
        read_narrowly(monkeypatch)
        client = await stack.enter_async_context(Client(f"127.0.0.1:{running.orchestrator.port}"))
        async with aclosing(client.stream(**REQUEST)) as responses:
            assert (await anext(responses)).HasField("admission")
            await anext(responses)
            await running.settled(20.0)  # while nothing is read
            with pytest.raises(DeadlineExceeded):
                async for _ in responses:
                    pass


async def test_a_deadline_that_has_passed_starts_nothing():
    async with deployment() as running:
        with pytest.raises(DeadlineExceeded):
            await running.client.generate(timeout_s=1e-6, **REQUEST)
        await running.settled()


class Refusing(TableVerifier):
    def open(self, spec: SequenceSpec) -> TableMemory:
        raise InvalidArgument([("spec.sampling.top_k", "bad"), ("spec.token_ids", "bad"), ("spec.cache_salt", "bad")])


async def test_what_a_target_refuses_has_the_names_of_the_request():
    async with cluster([Refusing(TABLE)]) as running:
        with pytest.raises(InvalidArgument) as refused:
            await running.client.generate(**{**REQUEST, "max_tokens": 5})
    assert [name for name, _ in refused.value.violations] == ["top_k", "token_ids", "cache_salt"]


async def test_a_request_that_waited_while_the_model_was_replaced_gets_the_new_one():
    other = Table(vocab_size=64, acceptance=0.5)
    fields = {**REQUEST, "max_tokens": 20}
    async with cluster([TableVerifier(TABLE, pass_s=0.01)], max_live_sequences=1) as running:
        held = asyncio.create_task(running.client.generate(**REQUEST))
        await live(running.orchestrator, 1)
        waiting = asyncio.create_task(running.client.generate(**fields))
        await eventually(lambda: running.orchestrator._servicer.waiting_requests == 1)
        await running.targets[0].stop()
        async with AsyncExitStack() as stack:
            server = create_server(TableVerifier(other), EngineSettings(port=running.targets[0].port))
            await server.start()
            stack.push_async_callback(server.stop)
            with pytest.raises(ModelMismatch):
                await held
            [sample] = await waiting
            [again] = await running.client.generate(**fields)
            assert sample.token_ids == again.token_ids
