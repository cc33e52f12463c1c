"""A request ends at its deadline, whatever it waits for."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest

from specdec.client import Client
from specdec.core.errors import DeadlineExceeded, InvalidArgument
from specdec.core.sequence import SequenceSpec
from specdec.v1 import generation_pb2
from testing.table_model import Table, TableDrafter, TableMemory, TableVerifier
from tests.cluster import cluster, read_narrowly

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
