"""A gateway in front of an orchestrator with table models, on real ports."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import queue
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from gateway.server import GatewayServer
from gateway.settings import GatewaySettings
from specdec.runner.loading import grammars
from specdec.telemetry.prometheus import Scrape
from target_service.language_model import LmVerifier
from testing.raw import started
from testing.table_model import Table, TableDrafter, TableVerifier
from tests.checkout import DEMO
from tests.cluster import Cluster, cluster
from tests.parity.conftest import load

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


def models(
    context_length: int = 65_536, ends: tuple[int, ...] = (), **fields: Any
) -> tuple[TableVerifier, TableDrafter]:
    """They have the tokenizer of the demo pair: texts have no meaning, and are texts."""
    table = dataclasses.replace(TABLE, context_length=context_length)
    verifier, drafter = TableVerifier(table, **fields), TableDrafter(table)
    for model in (verifier, drafter):
        model.info = dataclasses.replace(model.info, tokenizer_fingerprint="", eos_token_ids=ends)
    return verifier, drafter


def with_keys(directory: Path) -> dict[str, str]:
    """Settings of an orchestrator with one key, which is "secret"."""
    keys = directory / "keys.jsonl"
    keys.write_text(json.dumps({"name": "me", "sha256": hashlib.sha256(b"secret").hexdigest()}))
    return {"api_keys_file": str(keys), "client_key": "secret"}


@asynccontextmanager
async def serving(
    pass_s: float = 0.0,
    gateway: dict[str, Any] | None = None,
    client_key: str = "",
    context_length: int = 65_536,
    ends: tuple[int, ...] = (),
    adapters: tuple[str, ...] = (),
    **settings: Any,
) -> AsyncIterator[Running]:
    verifier, drafter = models(context_length, ends, pass_s=pass_s)
    verifier.info = dataclasses.replace(verifier.info, adapters=adapters)
    client = {"api_key": client_key}
    async with cluster(
        [verifier], [drafter], client=client, **{"tokenizer": str(DEMO / "target"), **settings}
    ) as deployment:
        address = f"127.0.0.1:{deployment.orchestrator.port}"
        gateway_settings = GatewaySettings(orchestrator=[address], **(gateway or {}))
        async with (
            started(GatewayServer(gateway_settings, Scrape())) as server,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as http,
        ):
            yield Running(deployment, server, http)


@asynccontextmanager
async def serving_demo(tokenizer: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway in front of the demo target, which knows grammars."""
    runner = load("target", "float32")
    verifier = LmVerifier(runner, grammars=grammars(DEMO / "target", runner.info))
    async with cluster([verifier], tokenizer=tokenizer) as deployment:
        address = f"127.0.0.1:{deployment.orchestrator.port}"
        async with (
            started(GatewayServer(GatewaySettings(orchestrator=[address], **settings), Scrape())) as server,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as http,
        ):
            yield http


@pytest.fixture
def running_in_a_thread(tmp_path: Path) -> Iterator[str]:
    """The address of a gateway on another thread, for clients without one. Their answers are the same in every run:
    the server's temperature is 0, and none of them asks for another."""
    tokenizer = shutil.copytree(DEMO / "target", tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    greedy = {"do_sample": False, "eos_token_id": 0}
    (tokenizer / "generation_config.json").write_text(json.dumps(greedy))
    served = {"tokenizer": str(tokenizer), "generation_config": "auto"}
    address: queue.Queue[str] = queue.Queue()
    ended: list[Callable[[], object]] = []

    async def serve() -> None:
        end = asyncio.Event()
        ended.append(lambda: loop.call_soon_threadsafe(end.set))
        async with serving(context_length=1024, ends=tuple(range(0, 4096, 16)), **served) as running:
            address.put(running.url)
            await end.wait()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield address.get(timeout=60)
    finally:
        ended[0]()
        thread.join()
        loop.close()
