"""Row 30: streams over HTTP while everything behind them is killed. Knows the gateway; does not know gRPC's clients."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

from bench.chaos.models import Reference
from bench.chaos.outcome import Outcome
from testing.lab import Deployment, Lab, Process, until
from testing.traffic import Asked, several


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
                    self._take(line)
        except httpx.HTTPError:
            self.cut = not self.done

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            told = json.loads(line.removeprefix("data: "))
            if "error" in told:
                self.error = told["error"]["message"]
                return
            for choice in told["choices"]:
                self.token_ids += choice.get("token_ids", ())
                self.finishes += choice["finish_reason"] is not None


async def serves(http: httpx.AsyncClient) -> bool:
    """Whether the gateway and a deployment behind it serve."""
    try:
        return (await http.get("/health")).status_code == 200
    except httpx.HTTPError:
        return False


async def row_30(lab: Lab, seed: int, short: bool) -> Outcome:
    """50 streams over HTTP: the draft, one of two targets and one of two orchestrators get SIGKILL. Then the gateway
    gets it, beside 50 more."""
    outcome = Outcome()
    count = 16 if short else 50
    async with lab.deployment(num_targets=2) as found, AsyncExitStack() as stack:
        make = await stack.enter_async_context(lab.processes())
        behind = [f"--target={','.join(each.address for each in found.targets)}", f"--draft={found.drafts[0].address}"]
        second: Process = make("orchestrator", *behind)
        gateway: Process = make("gateway", f"--orchestrator={found.orchestrator.address},{second.address}")
        for each in (second, gateway):
            await each.start()
        await second.healthy()
        limits = httpx.Limits(max_connections=None)
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{gateway.address}", timeout=60, limits=limits)
        )
        outcome.at_most("gateway serves after", await until(lambda: serves(http), 30.0), 30.0)
        streams = [Stream(each) for each in several(count, 200, lab.chance)]
        reading = [asyncio.create_task(each.read(http)) for each in streams]
        for victim in (found.drafts[0], lab.chance.choice(found.targets), found.orchestrator):
            await asyncio.sleep(lab.chance.uniform(0.1, 0.3))
            await victim.kill()
        await asyncio.wait_for(asyncio.gather(*reading), 60.0)
        right = sum(each.right(lab.reference) for each in streams)
        errors = {each.error for each in streams if each.error}
        outcome.check(right == count, f"{right} of {count} streams right, with one finish and [DONE] {errors or ''}")
        outcome.check(gateway.tracebacks() == 0, f"{gateway.tracebacks()} tracebacks in the gateway's log")
        await _without_the_gateway(outcome, lab, found, second, gateway, http, count)
    return outcome


async def _without_the_gateway(
    outcome: Outcome,
    lab: Lab,
    found: Deployment,
    second: Process,
    gateway: Process,
    http: httpx.AsyncClient,
    count: int,
) -> None:
    streams = [Stream(each) for each in several(count, 2000, lab.chance)]
    reading = [asyncio.create_task(each.read(http)) for each in streams]
    await asyncio.sleep(0.5)
    await gateway.kill()
    await asyncio.wait_for(asyncio.gather(*reading), 10.0)
    outcome.check(all(each.cut and not each.done for each in streams), "the gateway's loss ends every connection")
    prefixes = all(each.token_ids == each.asked.expected(lab.reference)[: len(each.token_ids)] for each in streams)
    outcome.check(prefixes, "what came before is right")
    alive = [each for each in (*found.targets, *found.drafts) if each.returncode is None]
    found.targets, found.drafts = [each for each in found.targets if each in alive], []
    outcome.at_most("nothing is held after", await found.freed(), 1.0)
