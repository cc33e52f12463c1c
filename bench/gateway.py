"""``specdec bench gateway``: what HTTP costs beside gRPC: time to the first chunk, and processor time per chunk.

Table models take no time, so that all that is left is the way of messages. One run, both APIs in turns. With
--slow-readers instead: what clients that do not read cost the others, from the moment at which all of them are blocked.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated

import httpx2 as httpx
import typer
from rich.console import Console
from rich.table import Table

from bench.harness.command import run_benchmark
from bench.harness.deployment import Processes, cpu_s
from specdec.cli.processes import Service, free_ports, listening, service
from specdec.client import Client
from testing.lab import load_of

_NORMAL, _TOKENS = 8, 200
"""Normal readers beside slow ones, and the tokens of each."""
_LONGEST_S = 1800.0


async def over_grpc(client: Client, ids: list[int], max_tokens: int) -> tuple[float, int]:
    """Seconds to the first chunk, and the number of chunks."""
    started, first, count = time.perf_counter(), 0.0, 0
    async for response in client.stream(token_ids={"token_ids": ids}, max_tokens=max_tokens):
        if response.HasField("chunk"):
            first = first or time.perf_counter() - started
            count += 1
    return first, count


async def over_http(client: httpx.AsyncClient, ids: list[int], max_tokens: int) -> tuple[float, int]:
    started, first, count = time.perf_counter(), 0.0, 0
    body = {"prompt": ids, "max_tokens": max_tokens, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - started
                count += 1
    return first, count


@asynccontextmanager
async def running(pass_ms: float, *flags: str) -> AsyncIterator[tuple[Service, Service, Service, int]]:
    """Target, orchestrator, and gateway, which listens at the port. ``flags``: of the orchestrator."""
    async with Processes() as processes:
        target = await processes.shared_model(("testing.table_service target", f"--pass-ms={pass_ms}"))
        behind, _ = await processes.orchestrator(f"--target={target.address}", "--draft=", *flags)
        [port] = free_ports(1)
        async with service("gateway", port, [f"--orchestrator={behind.address}"]) as front:
            await listening(front)
            yield target, behind, front, port


async def measure(requests: int, max_tokens: int) -> Table:
    async with AsyncExitStack() as stack:
        _, behind, front, port = await stack.enter_async_context(running(2.0))
        grpc = await stack.enter_async_context(Client(behind.address))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60))
        firsts: dict[str, list[float]] = {"gRPC": [], "HTTP": []}
        chunks, used_s = 0, 0.0
        for turn in range(requests + 2):
            ids = [1 + turn, 2, 3]
            of_grpc, _ = await over_grpc(grpc, ids, max_tokens)
            before = cpu_s(front)
            of_http, count = await over_http(http, ids, max_tokens)
            if turn >= 2:  # the first ones open connections
                firsts["gRPC"].append(of_grpc)
                firsts["HTTP"].append(of_http)
                chunks, used_s = chunks + count, used_s + cpu_s(front) - before
    table = Table("", "first chunk, median ms", "p90", "gateway's CPU per chunk, ms", header_style="bold")
    for name, seconds in firsts.items():
        p90 = statistics.quantiles(seconds, n=10)[-1]
        cpu = f"{1e3 * used_s / chunks:.3f}" if name == "HTTP" else ""
        table.add_row(name, f"{1e3 * statistics.median(seconds):.2f}", f"{1e3 * p90:.2f}", cpu)
    return table


async def blocked(count: int, report: Callable[[str], None]) -> Table:
    """Normal readers beside ``count`` clients that read nothing, before these come and once all are blocked."""
    async with AsyncExitStack() as stack:
        flags = [f"--max-live-sequences={count + _NORMAL}", "--park-after-s=2"]
        target, behind, front, port = await stack.enter_async_context(running(20.0, *flags))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60))
        table = Table("", "time per token, median ms", "gateway, MiB", "orchestrator, MiB", header_style="bold")
        await _row(table, "alone", http, front, behind)
        for number in range(count):
            report(f"{number} of {count} slow readers")
            stack.callback(_ask(port, number).close)
            await asyncio.sleep(0.002)
        waited = time.monotonic()
        while left := (await load_of(target.address, "target")).live_sequences:
            report(f"waiting until all are parked: {left} are not")
            assert time.monotonic() - waited < _LONGEST_S, f"{left} slow readers are not blocked"
            await asyncio.sleep(1.0)
        await _row(table, f"beside {count} blocked ones", http, front, behind)
    return table


async def _row(table: Table, name: str, http: httpx.AsyncClient, *services: Service) -> None:
    started = time.perf_counter()
    answers = await asyncio.gather(*(over_http(http, [number, 5, 6], _TOKENS) for number in range(_NORMAL)))
    assert all(count >= _TOKENS for _, count in answers)
    per_token_ms = 1e3 * (time.perf_counter() - started) / _TOKENS
    table.add_row(name, f"{per_token_ms:.2f}", *(f"{_rss_mib(service):.0f}" for service in services))


def _ask(port: int, number: int) -> socket.socket:
    """A client that sends a request and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    body = json.dumps({"prompt": [number % 1024, 2, 3], "max_tokens": 20_000, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


def _rss_mib(running: Service) -> float:
    pages = int(Path(f"/proc/{running.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(
    requests: Annotated[int, typer.Option(min=10, help="streams of each API, in turns")] = 40,
    max_tokens: Annotated[int, typer.Option(min=2, help="tokens of each")] = 200,
    slow_readers: Annotated[int, typer.Option(min=0, help="measure clients beside so many that do not read")] = 0,
) -> None:
    """What HTTP costs beside gRPC."""
    console = Console()
    with console.status("measuring ...") as status:
        measured = blocked(slow_readers, status.update) if slow_readers else measure(requests, max_tokens)
        table = asyncio.run(measured)
    console.print(table)


if __name__ == "__main__":
    run_benchmark(main)
