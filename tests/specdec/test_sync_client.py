"""The client without asyncio gives what the other one gives, from any thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from specdec.core.errors import InvalidArgument, ReplicaLost
from specdec.sync_client import SyncClient
from testing.table_model import Table, TableDrafter, TableVerifier
from tests.cluster import cluster

TABLE = Table(vocab_size=64)
FIELDS: dict[str, Any] = dict(token_ids={"token_ids": [1, 2, 3]}, max_tokens=20, seed=5)


async def test_it_gives_what_the_other_client_gives():
    async with cluster([TableVerifier(TABLE)], [TableDrafter(TABLE)]) as running:
        [expected] = await running.client.generate(**FIELDS)
        address = f"127.0.0.1:{running.orchestrator.port}"

        def use() -> None:
            with SyncClient(address) as client:
                assert client.server_info().HasField("target")
                [sample] = client.generate(timeout_s=30, **FIELDS)
                assert sample.token_ids == expected.token_ids
                responses = list(client.stream(**FIELDS))
                assert responses[0].HasField("admission")
                assert [each for r in responses for each in r.chunk.token_ids] == expected.token_ids
                with ThreadPoolExecutor(8) as threads:
                    found = list(threads.map(lambda _: client.generate(**FIELDS)[0].token_ids, range(16)))
                assert found == [expected.token_ids] * 16
                with pytest.raises(InvalidArgument, match="n"):
                    client.generate(**FIELDS, n=0)
            client.close()

        await asyncio.to_thread(use)


async def test_a_stream_that_is_left_frees_its_sequence():
    async with cluster([TableVerifier(TABLE, pass_s=0.005)], []) as running:

        def use() -> None:
            with SyncClient(f"127.0.0.1:{running.orchestrator.port}") as client:
                responses = client.stream(**{**FIELDS, "max_tokens": 5000})
                next(responses)
                responses.close()
                asyncio.run_coroutine_threadsafe(running.settled(10.0), loop).result()

        loop = asyncio.get_running_loop()
        await asyncio.to_thread(use)


def test_what_is_wrong_with_an_address_is_told():
    with pytest.raises(ValueError, match="at least one address"):
        SyncClient()
    with SyncClient("127.0.0.1:1") as client, pytest.raises(ReplicaLost):
        client.generate(**FIELDS)
