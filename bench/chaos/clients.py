"""Rows 14 to 16: clients that disappear or do not read. Knows clients; does not know faults of replicas."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import Any

import grpc

from specdec.core.environment import DIRECT
from specdec.transport import rpc
from specdec.v1 import generation_pb2, generation_pb2_grpc
from testing.fault_proxy import FaultProxy
from testing.lab import Deployment, until
from testing.traffic import Answer, Asked, Traffic, percentile
from testing.trial import Trial

_KILLED_BOUND_S = 3.5  # the kernel closes the connections of a killed process
_UNPLUGGED_BOUND_S = (rpc.PUBLIC_KEEPALIVE_MS + rpc.PUBLIC_PING_TIMEOUT_MS) / 1e3 + 0.5  # 0.5 s for scheduling


async def cancel_requests(trial: Trial) -> None:
    """1,000 requests run, 50 at a time, and each is cancelled at a random point."""
    async with trial.deployment(pass_ms=10.0) as running:
        freed_s: list[float] = []
        gaps: list[float] = []
        num_cancelled = 0
        for _ in range(3 if trial.short else 20):
            async with Traffic(running.client, trial.requests(50, 400)) as traffic:
                num_cancelled += await traffic.cancel(trial.chance)
            gaps += [gap for answer in traffic.answers for gap in answer.gaps]
            freed_s.append(await _freed(running))
        trial.note(f"{num_cancelled} cancelled")
        trial.note(f"freed after, p50 {percentile(freed_s, 0.5) * 1e3:.0f} ms")
        round_s = percentile(gaps, 0.99)
        trial.note(f"round p99 {round_s * 1e3:.0f} ms")
        trial.at_most("freed after, slowest", max(freed_s), 0.1 + round_s)
        streams = [load.open_streams for load in await running.loads()]
        trial.check(streams == [1, 1], f"streams open: {streams}, the orchestrator's")


async def _freed(running: Deployment, timeout_s: float = 20.0) -> float:
    """Seconds until the orchestrator and the model services have released all requests; infinity on a timeout."""

    async def idle() -> bool:
        info = await running.client.server_info()
        return info.live_sequences == info.waiting_requests == 0

    started = time.monotonic()
    await asyncio.gather(running.freed(timeout_s), until(idle, timeout_s, 0.005))
    took_s = time.monotonic() - started
    return took_s if took_s < timeout_s else float("inf")


async def kill_client(trial: Trial) -> None:
    """A client process with 200 streams gets SIGKILL. Another one, behind a proxy, loses its network."""
    count = 20 if trial.short else 200
    async with trial.deployment(pass_ms=20.0) as running, FaultProxy(running.orchestrator.port) as proxy:

        async def busy() -> bool:
            return (await running.client.server_info()).live_sequences >= count

        for what, address, bound_s in (
            ("killed", running.orchestrator.address, _KILLED_BOUND_S),
            ("unplugged", f"127.0.0.1:{proxy.port}", _UNPLUGGED_BOUND_S),
        ):
            command = (sys.executable, "-m", "bench.chaos.victim", address, str(count))
            process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
            await until(busy, 30.0)
            await asyncio.sleep(0.5)
            live = (await running.client.server_info()).live_sequences
            if what == "killed":
                process.kill()
            else:
                proxy.set(hold=True)
            trial.at_most(f"{what} with {live} streams: freed after", await _freed(running), bound_s)
            with contextlib.suppress(ProcessLookupError):  # its own keepalive may have ended it
                process.kill()
            await process.wait()
        await trial.check_serves(running.client, 4, 60, "requests after it")


async def slow_readers(trial: Trial) -> None:
    """Four clients read one chunk per second beside eight normal clients. The time per token of the eight is compared,
    in turns, with that beside four normal ones. Then slow readers with parked sequences (--park-after-s 1) read on."""
    turns, window_s = (3, 2.0) if trial.short else (4, 4.0)
    async with trial.deployment(pass_ms=20.0, step_ms=0.2) as running:
        normal: list[float] = []
        slow: list[float] = []
        async with Traffic(running.client, trial.requests(8, 60_000)) as traffic:
            before_mib = running.orchestrator.rss_mib
            for _ in range(turns):
                for pause_s, times in ((0.0, normal), (1.0, slow)):
                    readers = [_Reader(running, asked, pause_s) for asked in trial.requests(4, 60_000)]
                    await asyncio.sleep(0.5)
                    times.append(await _time_per_token(traffic, window_s))
                    for reader in readers:
                        await reader.stop()
            trial.at_most("orchestrator grew", running.orchestrator.rss_mib - before_mib, 32.0, "MiB")
            trial.check(all(a.same(trial.reference) for a in traffic.answers), "the others have the right text")
        trial.note(f"time per token beside normal readers {percentile(normal, 0.5) * 1e3:.2f} ms")
        trial.at_most("beside slow readers", percentile(slow, 0.5) / percentile(normal, 0.5), 1.05, "times")
    flags = ["--park-after-s=1", "--num-draft-tokens=16"]
    async with trial.deployment(pass_ms=0.0, step_ms=0.0, orchestrator=flags) as running:
        readers = [_Reader(running, asked, 1.0) for asked in trial.requests(2, 20_000)]

        async def parked() -> bool:
            live = (await running.client.server_info()).live_sequences
            return live == len(readers) and all(load.live_sequences == 0 for load in await running.loads())

        await asyncio.sleep(1.0)
        trial.at_most("parked after", 1.0 + await until(parked, 40.0), 41.0)
        answers = await asyncio.gather(*(reader.hurry() for reader in readers))
        trial.check_same(answers, "slow readers")
        trial.at_least("fewest replays of a slow reader", min(answer.num_replays for answer in answers), 1)


async def _time_per_token(traffic: Traffic, window_s: float) -> float:
    before, started = traffic.num_tokens, time.monotonic()
    await asyncio.sleep(window_s)
    tokens = max(1, traffic.num_tokens - before)
    return (time.monotonic() - started) * len(traffic.answers) / tokens


class _Reader:
    """A client that waits ``pause_s`` after each chunk, with as little buffering as gRPC allows."""

    def __init__(self, running: Deployment, asked: Asked, pause_s: float) -> None:
        self._answer = Answer(asked)
        self._pause_s = pause_s
        options = [DIRECT, ("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        self._channel = grpc.aio.insecure_channel(running.orchestrator.address, options=options)
        stub: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._call = stub.Generate(generation_pb2.GenerateRequest(**asked.fields))
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for response in self._call:
                if response.HasField("chunk"):
                    self._answer.sample.add(response.chunk)
                await asyncio.sleep(self._pause_s)
        except (grpc.aio.AioRpcError, ValueError) as error:
            self._answer.error = error

    async def hurry(self) -> Answer:
        """Read the rest at full speed."""
        self._pause_s = 0.0
        await asyncio.wait({self._task}, timeout=60.0)
        await self.stop()
        return self._answer

    async def stop(self) -> None:
        self._call.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()
