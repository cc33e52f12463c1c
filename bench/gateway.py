"""``specdec bench gateway``: what HTTP costs beside gRPC: time to the first chunk, and processor time per chunk.

Table models take no time, so that all that is left is the way of messages. One run, both APIs in turns.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import httpx2 as httpx
import typer
from rich.console import Console
from rich.table import Table

from bench.harness.command import run_benchmark
from specdec.cli.processes import Service, free_ports, listening, service
from specdec.client import Client


def cpu_s(running: Service) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{running.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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


async def measure(requests: int, max_tokens: int) -> Table:
    async with AsyncExitStack() as stack:
        target, orchestrator, gateway = free_ports(3)
        await stack.enter_async_context(service("bench.models.table_service target", target, ["--pass-ms=2"]))
        flags = [f"--target=127.0.0.1:{target}", "--draft="]
        await stack.enter_async_context(service("orchestrator", orchestrator, flags))
        flags = [f"--orchestrator=127.0.0.1:{orchestrator}"]
        front = await stack.enter_async_context(service("gateway", gateway, flags))
        await listening(front)
        grpc = await stack.enter_async_context(Client(f"127.0.0.1:{orchestrator}"))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway}", timeout=60))
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


def main(
    requests: Annotated[int, typer.Option(min=10, help="streams of each API, in turns")] = 40,
    max_tokens: Annotated[int, typer.Option(min=2, help="tokens of each")] = 200,
) -> None:
    """What HTTP costs beside gRPC."""
    console = Console()
    with console.status("measuring ..."):
        table = asyncio.run(measure(requests, max_tokens))
    console.print(table)


if __name__ == "__main__":
    run_benchmark(main)
