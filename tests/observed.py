"""The three services as processes around a table model, with their metrics on ports of their own."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from specdec.cli.processes import free_ports
from specdec.client import Sample
from testing.lab import Deployment, Lab

PROMPT = [1, 2, 3]


@dataclass
class Observed:
    running: Deployment
    metrics_ports: dict[str, int]

    async def generate(self, seed: int = 0, **fields: object) -> Sample:
        [sample] = await self.running.client.generate(token_ids={"token_ids": [*PROMPT, seed]}, seed=seed, **fields)
        return sample

    async def scrape(self) -> dict[str, str]:
        """What Prometheus reads, by service."""
        return {name: await asyncio.to_thread(_read, port) for name, port in self.metrics_ports.items()}


@asynccontextmanager
async def observed() -> AsyncIterator[Observed]:
    """In the environment (OTEL_*) of the caller."""
    ports = dict(zip(("target", "draft", "orchestrator"), free_ports(3), strict=True))
    flags = {role: [f"--metrics-port={port}"] for role, port in ports.items()}
    async with Lab(1).deployment(pass_ms=1.0, step_ms=0.1, **flags) as running:
        yield Observed(running, ports)


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
