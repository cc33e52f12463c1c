"""Which proxies of the environment a gRPC call goes through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from specdec.cli.processes import is_serving
from specdec.core.environment import PROXY, WEB_PROXIES
from testing.table_model import Table, TableDrafter, TableVerifier
from tests.cluster import cluster

PATIENCE_S = 20.0


@asynccontextmanager
async def proxy_that_leads_nowhere() -> AsyncIterator[tuple[str, list[bytes]]]:
    """Its URL, and what it was asked for."""
    asked: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


async def test_proxies_of_the_web_catch_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of clients, between services, of health probes."""
    for variable in (*WEB_PROXIES, PROXY, "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(variable, raising=False)
    async with proxy_that_leads_nowhere() as (url, asked):
        for variable in WEB_PROXIES:
            monkeypatch.setenv(variable, url)
        async with cluster([TableVerifier(Table())], [TableDrafter(Table())]) as running:
            [sample] = await running.client.generate(token_ids={"token_ids": [1, 2]}, max_tokens=8, seed=1)
            assert sample.finished
            assert await is_serving(f"127.0.0.1:{running.orchestrator.port}", PATIENCE_S)
        assert not asked


async def test_a_proxy_that_is_named_for_grpc_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(variable, raising=False)
    async with proxy_that_leads_nowhere() as (url, asked):
        monkeypatch.setenv(PROXY, url)
        assert not await is_serving("127.0.0.1:1", PATIENCE_S)
        assert asked[0].startswith(b"CONNECT 127.0.0.1:1")
