"""``specdec bench soak``: many short requests, some cancelled, and what is left of them in each process.

Table models behind the real services as processes. Memory, descriptors, threads, sequences and streams are read after
equal numbers of requests; what grows after the warm-up is a leak.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specdec import rpc
from specdec.client import Client
from specdec.processes import Service, free_ports, healthy, paired, service
from specdec.v1 import common_pb2, draft_pb2_grpc, target_pb2_grpc

_PARTS = 10


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one process, after so many requests and with nothing under way."""

    requests: int
    process: str
    rss_kib: int
    descriptors: int
    threads: int


def main(
    requests: Annotated[int, typer.Option(help="requests in all")] = 20_000,
    concurrency: Annotated[int, typer.Option(help="requests at a time")] = 64,
    cancelled: Annotated[float, typer.Option(help="share of them that is cancelled at random")] = 0.1,
    seed: Annotated[int, typer.Option()] = 1,
    json_file: Annotated[str | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Run many short requests and show what grows."""
    console = Console()
    readings, left = asyncio.run(_soak(console, requests, concurrency, cancelled, seed))
    table = Table(box=None, header_style="bold")
    for column in ("process", "KiB per 10,000 requests", "RSS MiB", "descriptors", "threads"):
        table.add_column(column, justify="left" if column == "process" else "right")
    ratios: dict[str, float] = {}
    for name in dict.fromkeys(reading.process for reading in readings):
        mine = [reading for reading in readings if reading.process == name]
        slope = _slope(mine[_PARTS // 2 :]) * 10_000
        ratios[f"rss_kib_per_10000_{name}"] = round(slope, 1)
        table.add_row(
            name,
            f"{slope:.0f}",
            f"{mine[0].rss_kib / 1024:.1f} .. {mine[-1].rss_kib / 1024:.1f}",
            f"{mine[0].descriptors} .. {mine[-1].descriptors}",
            f"{mine[0].threads} .. {mine[-1].threads}",
        )
    console.print(table)
    console.print(f"left behind: {left}", highlight=False)
    if json_file:
        with open(json_file, "w") as file:
            json.dump({"readings": [asdict(r) for r in readings], "left": left, "ratios": ratios}, file, indent=1)


def _slope(readings: list[Reading]) -> float:
    """KiB per request, least squares."""
    x = [reading.requests for reading in readings]
    y = [reading.rss_kib for reading in readings]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


async def _soak(
    console: Console, requests: int, concurrency: int, cancelled: float, seed: int
) -> tuple[list[Reading], dict[str, int]]:
    chance = random.Random(seed)
    target_port, draft_port, port = free_ports(3)
    async with AsyncExitStack() as stack:

        async def start(module: str, port: int, *arguments: str) -> Service:
            return await stack.enter_async_context(service(module, port, [*arguments, "--log-level=WARNING"]))

        services = {
            "target": await start("bench.table_service target", target_port),
            "draft": await start("bench.table_service draft", draft_port),
        }
        services["orchestrator"] = await start(
            "orchestrator",
            port,
            f"--target={services['target'].address}",
            f"--draft={services['draft'].address}",
            f"--max-live-sequences={concurrency}",
            "--num-draft-tokens=4",
            f"--max-waiting-requests={concurrency}",
        )
        for each in services.values():
            await healthy(each)
        await paired(services["orchestrator"])
        client = await stack.enter_async_context(Client(services["orchestrator"].address))
        readings = []
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("requests", total=requests)
            for part in range(_PARTS):
                await _burst(client, requests // _PARTS, concurrency, cancelled, chance)
                progress.advance(task, requests // _PARTS)
                await _settled(client)
                readings += [_read(each, name, (part + 1) * requests // _PARTS) for name, each in services.items()]
        return readings, await _left(services, client)


async def _burst(client: Client, requests: int, concurrency: int, cancelled: float, chance: random.Random) -> None:
    gate = asyncio.Semaphore(concurrency)

    async def one(seed: int, cancel_after: int | None) -> None:
        async with gate:
            fields: dict[str, Any] = {"token_ids": {"token_ids": [1, 2, 3]}, "max_tokens": 12, "seed": seed}
            async with aclosing(client.stream(**fields)) as responses:
                received = 0
                async for _ in responses:
                    received += 1
                    if received == cancel_after:
                        return

    await asyncio.gather(
        *(
            one(chance.getrandbits(63), chance.randint(1, 4) if chance.random() < cancelled else None)
            for _ in range(requests)
        )
    )


async def _settled(client: Client) -> None:
    while True:
        info = await client.server_info()
        if not info.live_sequences and not info.waiting_requests:
            await asyncio.sleep(0.2)
            return
        await asyncio.sleep(0.05)


def _read(service: Service, name: str, requests: int) -> Reading:
    pid = service.process.pid
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return Reading(requests, name, int(fields["VmRSS"].split()[0]), descriptors, int(fields["Threads"]))


async def _left(services: dict[str, Service], client: Client) -> dict[str, int]:
    """Sequences, KV slots and streams on the model services when nobody generates (one stream each is the link)."""
    left = {"orchestrator_sequences": (await client.server_info()).live_sequences}
    for name, stub_class in (("target", target_pb2_grpc.TargetServiceStub), ("draft", draft_pb2_grpc.DraftServiceStub)):
        async with rpc.channel(services[name].address) as channel:
            load = (await stub_class(channel).GetModelInfo(common_pb2.GetModelInfoRequest(), timeout=5)).load
        left |= {
            f"{name}_sequences": load.live_sequences,
            f"{name}_kv_slots": load.kv_slots_used,
            f"{name}_streams": load.open_streams,
        }
    return left


if __name__ == "__main__":
    typer.run(main)
