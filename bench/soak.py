"""Many short requests, some of them cancelled, and the resources that they leave in each process (`specdec chaos 22`).

Table models run behind the real services, each in its own process. Memory, descriptors, threads, tasks, sequences and
streams are read at equal intervals of requests. Growth after the warm-up is a leak.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from bench.harness.deployment import Processes
from specdec.cli.processes import Service
from specdec.client import Client
from specdec.transport import rpc
from specdec.v1 import common_pb2, draft_pb2_grpc, target_pb2_grpc

_PARTS = 10
_NUM_LAST_READINGS = 2
"""Readings that count as the end of the run."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Resources of one process after ``requests`` requests, read while no request runs."""

    requests: int
    process: str
    rss_kib: int
    descriptors: int
    threads: int
    tasks: int


@dataclass(frozen=True, slots=True)
class Soaked:
    """``readings`` by process, and in ``left`` what the services still hold at the end, without live requests."""

    readings: dict[str, list[Reading]]
    left: dict[str, int]

    def kib_per_10000(self, process: str) -> float:
        """Memory growth after the warm-up in KiB per 10,000 requests, a least-squares slope."""
        late = self.late(process)
        x = [reading.requests for reading in late]
        y = [reading.rss_kib for reading in late]
        mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
        slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
        return slope * 10_000

    def levels(self, process: str, what: str) -> tuple[int, int]:
        """The smallest count of descriptors, threads or tasks soon after the warm-up, and at the end. The minimum
        ignores the threads of a pool, which start and stop; leaked resources stay."""
        counts = [getattr(reading, what) for reading in self.late(process)]
        return min(counts[:-_NUM_LAST_READINGS]), min(counts[-_NUM_LAST_READINGS:])

    def late(self, process: str) -> list[Reading]:
        """The readings after the warm-up."""
        return self.readings[process][_PARTS // 2 :]


async def soak(requests: int, concurrency: int, cancelled: float, chance: random.Random) -> Soaked:
    """Run the requests, of which a share is ``cancelled`` at a random point, and read every process after each part."""
    names = ("target", "draft", "orchestrator")
    async with Processes(with_metrics=True) as processes:
        module = "testing.table_service"
        services = {name: await processes.model(f"{module} {name}") for name in names[:2]}
        services["orchestrator"], client = await processes.orchestrator(
            f"--target={services['target'].address}",
            f"--draft={services['draft'].address}",
            f"--max-live-sequences={concurrency}",
            "--num-draft-tokens=4",
            f"--max-waiting-requests={concurrency}",
        )
        readings: dict[str, list[Reading]] = {name: [] for name in names}
        for part in range(1, _PARTS + 1):
            await _burst(client, requests // _PARTS, concurrency, cancelled, chance)
            await _settled(client)
            for name in names:
                tasks = await asyncio.to_thread(processes.metric, services[name], "specdec_event_loop_tasks")
                readings[name].append(_read(services[name], name, part * requests // _PARTS, int(tasks)))
        return Soaked(readings, await _left(services, client))


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


def _read(service: Service, name: str, requests: int, tasks: int) -> Reading:
    pid = service.process.pid
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return Reading(requests, name, int(fields["VmRSS"].split()[0]), descriptors, int(fields["Threads"]), tasks)


async def _left(services: dict[str, Service], client: Client) -> dict[str, int]:
    """Sequences, KV slots and streams left in the services without live requests; one stream of each is the link."""
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
