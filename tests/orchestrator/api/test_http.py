"""``serve orchestrator --http-port``: a gateway that starts and ends with its orchestrator."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.processes import free_ports
from specdec.core.errors import SpecdecError
from testing.lab import Lab, until

pytestmark = pytest.mark.slow


async def answer(port: int, path: str, **body: Any) -> Any:
    return json.loads(await page(port, path, **body))


async def page(port: int, path: str, **body: Any) -> str:
    """Of the gateway. Raises SpecdecError while it does not serve."""

    def ask() -> str:
        data = json.dumps(body).encode() if body else None
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=10) as told:
                return str(told.read(), "utf-8")
        except (urllib.error.URLError, ConnectionError) as error:
            raise SpecdecError(str(error)) from error

    return await asyncio.to_thread(ask)


async def test_it_answers_and_ends_with_its_orchestrator() -> None:
    port = free_ports(1)[0]
    async with Lab(1).deployment(orchestrator=[f"--http-port={port}"]) as found:
        assert await until(lambda: answer(port, "/v1/models"), 20.0) < 20.0
        told = await answer(port, "/v1/completions", prompt=[1, 2, 3], max_tokens=5, temperature=0)
        assert told["usage"]["completion_tokens"] == 5
        assert 'specdec_gateway_requests_total{route="completions",status="200"} 1.0' in await page(port, "/metrics")
        [gateway] = children(found.orchestrator.pid)
        found.orchestrator.signal(signal.SIGTERM)
        assert await found.orchestrator.ended(15.0) == 0
        assert not exists(gateway)


async def test_the_orchestrator_ends_when_its_gateway_does() -> None:
    async with Lab(1).deployment(orchestrator=[f"--http-port={free_ports(1)[0]}"]) as found:
        [gateway] = children(found.orchestrator.pid)
        os.kill(gateway, signal.SIGKILL)
        assert await found.orchestrator.ended(15.0) == 1
        assert "ended with status -9" in found.orchestrator.log_tail()


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
