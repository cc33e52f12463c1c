"""A gateway in front of an orchestrator with table models, on real ports."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

from bench.models.table_model import Table, TableDrafter, TableVerifier
from gateway.server import GatewayServer
from gateway.settings import GatewaySettings
from tests.checkout import DEMO
from tests.cluster import Cluster, cluster

TABLE = Table(vocab_size=4096)
MODEL = "table-target"


@dataclass
class Running:
    cluster: Cluster
    gateway: GatewayServer
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"


def models(**fields: Any) -> tuple[TableVerifier, TableDrafter]:
    """They have the tokenizer of the demo pair: texts have no meaning, and are texts."""
    verifier, drafter = TableVerifier(TABLE, **fields), TableDrafter(TABLE)
    for each in (verifier, drafter):
        each.info = dataclasses.replace(each.info, tokenizer_fingerprint="")
    return verifier, drafter


@asynccontextmanager
async def serving(
    pass_s: float = 0.0, gateway: dict[str, Any] | None = None, client_key: str = "", **settings: Any
) -> AsyncIterator[Running]:
    verifier, drafter = models(pass_s=pass_s)
    client = {"api_key": client_key}
    async with cluster(
        [verifier], [drafter], client=client, **{"tokenizer": str(DEMO / "target"), **settings}
    ) as found:
        address = f"127.0.0.1:{found.orchestrator.port}"
        server = GatewayServer(GatewaySettings(orchestrator=[address], **(gateway or {})))
        await server.start()
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as http:
                yield Running(found, server, http)
        finally:
            await server.stop()
