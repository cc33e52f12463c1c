"""Row 30: streams over HTTP while everything behind them is killed. Knows the gateway; does not know gRPC's clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

from testing.lab import Deployment, Process, start, until
from testing.traffic import Asked, Reference
from testing.trial import Trial


@dataclass(slots=True)
class Stream:
    """What one client received."""

    asked: Asked
    token_ids: list[int] = field(default_factory=list)
    finishes: int = 0
    done: bool = False  # [DONE] came
    cut: bool = False  # the connection ended before
    error: str = ""

    def right(self, reference: Reference) -> bool:
        return self.done and self.finishes == 1 and self.token_ids == self.asked.expected(reference)

    async def read(self, http: httpx.AsyncClient) -> None:
        body: dict[str, Any] = {"prompt": list(self.asked.prompt), "max_tokens": self.asked.max_tokens}
        body |= {"seed": self.asked.seed, "temperature": self.asked.temperature}
        body |= {"stream": True, "return_token_ids": True}
        try:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    self._read_line(line)
        except httpx.HTTPError:
            self.cut = not self.done

    def _read_line(self, line: str) -> None:
        if line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                self.error = event["error"]["message"]
                return
            for choice in event["choices"]:
                self.token_ids += choice.get("token_ids", ())
                self.finishes += choice["finish_reason"] is not None


@asynccontextmanager
async def http_client(gateway: Process) -> AsyncIterator[httpx.AsyncClient]:
    """Waits until the gateway and a deployment behind it serve."""

    async def serves() -> bool:
        try:
            return (await http.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://{gateway.address}", timeout=60, limits=limits) as http:
        if await until(serves, 30.0) == float("inf"):
            raise TimeoutError(f"the gateway does not serve:\n{gateway.log_tail()}")
        yield http


async def http_streams(trial: Trial) -> None:
    """50 streams over HTTP: the draft, one of two targets and one of two orchestrators get SIGKILL. Then the gateway
    gets it, beside 50 more."""
    count = 16 if trial.short else 50
    async with trial.deployment(num_targets=2) as running:
        second = running.another_orchestrator()
        gateway = running.make("gateway", f"--orchestrator={running.orchestrator.address},{second.address}")
        await gateway.start()
        await start(second)
        async with http_client(gateway) as http:
            streams = [Stream(asked) for asked in trial.requests(count, 200)]
            reading = [asyncio.create_task(stream.read(http)) for stream in streams]
            for victim in (running.drafts[0], trial.chance.choice(running.targets), running.orchestrator):
                await asyncio.sleep(trial.chance.uniform(0.1, 0.3))
                await victim.kill()
            await asyncio.wait_for(asyncio.gather(*reading), 60.0)
            right = sum(stream.right(trial.reference) for stream in streams)
            errors = {stream.error for stream in streams if stream.error}
            trial.check(right == count, f"{right} of {count} streams right, with one finish and [DONE] {errors or ''}")
            trial.check_no_tracebacks([gateway], "the gateway's log")
            await _without_the_gateway(trial, running, gateway, http)


async def _without_the_gateway(trial: Trial, running: Deployment, gateway: Process, http: httpx.AsyncClient) -> None:
    streams = [Stream(asked) for asked in trial.requests(16 if trial.short else 50, 2000)]
    reading = [asyncio.create_task(stream.read(http)) for stream in streams]
    await asyncio.sleep(0.5)
    await gateway.kill()
    await asyncio.wait_for(asyncio.gather(*reading), 10.0)
    trial.check(all(each.cut and not each.done for each in streams), "the gateway's loss ends every connection")
    prefixes = all(each.token_ids == each.asked.expected(trial.reference)[: len(each.token_ids)] for each in streams)
    trial.check(prefixes, "what came before is right")
    running.targets, running.drafts = [each for each in running.targets if each.returncode is None], []
    trial.at_most("nothing is held after", await running.freed(), 1.0)
