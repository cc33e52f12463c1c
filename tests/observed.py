"""The three services as processes around a table model, with their metrics on ports of their own."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from specdec.cli.processes import Service, free_ports, healthy, paired, service
from specdec.client import Client, Sample

PROMPT = [1, 2, 3]


@dataclass
class Observed:
    client: Client
    services: dict[str, Service]
    metrics_ports: dict[str, int]

    async def generate(self, seed: int = 0, **fields: object) -> Sample:
        [sample] = await self.client.generate(token_ids={"token_ids": [*PROMPT, seed]}, seed=seed, **fields)
        return sample

    async def scrape(self) -> dict[str, str]:
        """What Prometheus reads, by service."""
        return {name: await asyncio.to_thread(_read, port) for name, port in self.metrics_ports.items()}


@asynccontextmanager
async def observed() -> AsyncIterator[Observed]:
    """In the environment (OTEL_*) of the caller."""
    *ports, first, second, third = free_ports(6)
    metrics_ports = dict(zip(("target", "draft", "orchestrator"), (first, second, third), strict=True))
    async with AsyncExitStack() as stack:

        async def start(name: str, module: str, port: int, *arguments: str) -> Service:
            scraped = f"--metrics-port={metrics_ports[name]}"
            return await stack.enter_async_context(service(module, port, [scraped, *arguments]))

        target = await start("target", "testing.table_service target", ports[0], "--pass-ms=1")
        draft = await start("draft", "testing.table_service draft", ports[1], "--pass-ms=0.1")
        addresses = (f"--target={target.address}", f"--draft={draft.address}")
        orchestrator = await start("orchestrator", "orchestrator", ports[2], *addresses)
        services = {"target": target, "draft": draft, "orchestrator": orchestrator}
        for each in services.values():
            await healthy(each)
        await paired(orchestrator)
        client = await stack.enter_async_context(Client(orchestrator.address))
        yield Observed(client, services, metrics_ports)
        for each in services.values():  # all at once: a dead collector delays each by seconds
            each.process.terminate()
        await asyncio.gather(*(each.process.wait() for each in services.values()))


_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Per name and labels: the value."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for name, labels, value in _SAMPLE.findall(text):
        pairs = tuple(sorted(re.findall(r'(\w+)="([^"]*)"', labels)))
        found.setdefault(name, {})[pairs] = float(value)
    return found


def _read(port: int) -> str:
    # As Prometheus asks.
    accept = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1"
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        return str(response.read().decode())
