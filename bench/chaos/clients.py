"""Rows 14 to 16: clients that disappear or do not read. Knows clients; does not know faults of replicas."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import Any

import grpc

from bench.chaos.outcome import Outcome, percentile
from specdec.core.environment import DIRECT
from specdec.transport import rpc
from specdec.v1 import generation_pb2, generation_pb2_grpc
from testing.fault_proxy import FaultProxy
from testing.lab import Deployment, Lab, until
from testing.traffic import Answer, Asked, Traffic, check_same, several

_KILLED_BOUND_S = 3.5  # the kernel closes the connections of a killed process
_UNPLUGGED_BOUND_S = (rpc.PUBLIC_KEEPALIVE_MS + rpc.PUBLIC_PING_TIMEOUT_MS) / 1e3 + 0.5  # 0.5 s for scheduling


async def row_14(lab: Lab, seed: int, short: bool) -> Outcome:
    """1,000 requests run, 50 at a time, and each is cancelled at a random point."""
    outcome = Outcome()
    async with lab.deployment(pass_ms=10.0) as found:
        slowest: list[float] = []
        gaps: list[float] = []
        cancelled = 0
        for _ in range(3 if short else 20):
            async with Traffic(found.client, several(50, 400, lab.chance)) as traffic:
                cancelled += await traffic.cancel(lab.chance)
            gaps += [gap for answer in traffic.answers for gap in answer.gaps]
            slowest.append(await _freed(found))
        outcome.note(f"{cancelled} cancelled")
        outcome.note(f"freed after, p50 {percentile(slowest, 0.5) * 1e3:.0f} ms")
        round_s = percentile(gaps, 0.99)
        outcome.note(f"round p99 {round_s * 1e3:.0f} ms")
        outcome.at_most("freed after, slowest", max(slowest), 0.1 + round_s)
        streams = [load.open_streams for load in await found.loads()]
        outcome.check(streams == [1, 1], f"streams open: {streams}, the orchestrator's")
    return outcome


async def _freed(found: Deployment, timeout_s: float = 20.0) -> float:
    """Seconds until the orchestrator and the model services have released all requests; infinity on a timeout."""

    async def idle() -> bool:
        info = await found.client.server_info()
        return info.live_sequences == info.waiting_requests == 0

    started = time.monotonic()
    await asyncio.gather(found.freed(timeout_s), until(idle, timeout_s, 0.005))
    took_s = time.monotonic() - started
    return took_s if took_s < timeout_s else float("inf")


async def row_15(lab: Lab, seed: int, short: bool) -> Outcome:
    """A client process with 200 streams gets SIGKILL. Another one, behind a proxy, loses its network."""
    outcome = Outcome()
    count = 20 if short else 200
    async with lab.deployment(pass_ms=20.0) as found:

        async def busy() -> bool:
            return (await found.client.server_info()).live_sequences >= count

        async def unplug(address: str) -> asyncio.subprocess.Process:
            command = (sys.executable, "-m", "bench.chaos.victim", address, str(count))
            process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
            await until(busy, 30.0)
            await asyncio.sleep(0.5)
            return process

        process = await unplug(found.orchestrator.address)
        live = (await found.client.server_info()).live_sequences
        process.kill()
        outcome.at_most(f"killed with {live} streams: freed after", await _freed(found), _KILLED_BOUND_S)
        await process.wait()
        async with FaultProxy(found.orchestrator.port) as proxy:
            process = await unplug(f"127.0.0.1:{proxy.port}")
            live = (await found.client.server_info()).live_sequences
            proxy.set(hold=True)
            outcome.at_most(f"unplugged with {live}: freed after", await _freed(found), _UNPLUGGED_BOUND_S)
            with contextlib.suppress(ProcessLookupError):  # its own keepalive may have ended it
                process.kill()
            await process.wait()
        async with Traffic(found.client, several(4, 60, lab.chance)) as traffic:
            check_same(outcome, await traffic.finished(30.0), lab.reference, "requests after it")
    return outcome


async def row_16(lab: Lab, seed: int, short: bool) -> Outcome:
    """Four clients read one chunk per second beside eight normal clients. The time per token of the eight is compared,
    in turns, with that beside four normal ones. Then slow readers with parked sequences (--park-after-s 1) read on."""
    outcome = Outcome()
    turns, window_s = (3, 2.0) if short else (4, 4.0)
    async with lab.deployment(pass_ms=20.0, step_ms=0.2) as found:
        normal: list[float] = []
        slow: list[float] = []
        async with Traffic(found.client, several(8, 60_000, lab.chance)) as traffic:
            before_mib = found.orchestrator.rss_mib
            for _ in range(turns):
                for pause_s, times in ((0.0, normal), (1.0, slow)):
                    beside = [_Reader(found, asked, pause_s) for asked in several(4, 60_000, lab.chance)]
                    await asyncio.sleep(0.5)
                    times.append(await _time_per_token(traffic, window_s))
                    for reader in beside:
                        await reader.stop()
            outcome.at_most("orchestrator grew", found.orchestrator.rss_mib - before_mib, 32.0, "MiB")
            outcome.check(all(a.same(lab.reference) for a in traffic.answers), "the others have the right text")
        outcome.note(f"time per token beside normal readers {percentile(normal, 0.5) * 1e3:.2f} ms")
        outcome.at_most("beside slow readers", percentile(slow, 0.5) / percentile(normal, 0.5), 1.05, "times")
    flags = ["--park-after-s=1", "--num-draft-tokens=16"]
    async with lab.deployment(pass_ms=0.0, step_ms=0.0, orchestrator=flags) as found:
        readers = [_Reader(found, asked, 1.0) for asked in several(2, 20_000, lab.chance)]

        async def parked() -> bool:
            running = (await found.client.server_info()).live_sequences
            return running == len(readers) and all(load.live_sequences == 0 for load in await found.loads())

        await asyncio.sleep(1.0)
        outcome.at_most("parked after", 1.0 + await until(parked, 40.0), 41.0)
        answers = await asyncio.gather(*(reader.hurry() for reader in readers))
        check_same(outcome, answers, lab.reference, "slow readers")
        outcome.at_least("fewest replays of a slow reader", min(answer.num_replays for answer in answers), 1)
    return outcome


async def _time_per_token(traffic: Traffic, window_s: float) -> float:
    before, started = traffic.num_tokens, time.monotonic()
    await asyncio.sleep(window_s)
    tokens = max(1, traffic.num_tokens - before)
    return (time.monotonic() - started) * len(traffic.answers) / tokens


class _Reader:
    """A client that waits ``pause_s`` after each chunk, with as little buffering as gRPC allows."""

    def __init__(self, found: Deployment, asked: Asked, pause_s: float) -> None:
        self._answer = Answer(asked)
        self._pause_s = pause_s
        options = [DIRECT, ("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        self._channel = grpc.aio.insecure_channel(found.orchestrator.address, options=options)
        prompt = generation_pb2.TokenIds(token_ids=asked.prompt)
        request = generation_pb2.GenerateRequest(
            token_ids=prompt, max_tokens=asked.max_tokens, seed=asked.seed, temperature=asked.temperature
        )
        stub: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._call = stub.Generate(request)
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
