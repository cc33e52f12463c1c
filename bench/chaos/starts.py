"""Row 26: services that start in any order. Knows order and delays; does not know faults of running services."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import AsyncExitStack

from bench.chaos.outcome import Outcome
from specdec.client import Client
from testing.lab import Lab, Process, until
from testing.traffic import Traffic, check_same, several


async def row_26(lab: Lab, seed: int, short: bool) -> Outcome:
    """Target, draft and orchestrator start in all six orders, each when the one before serves. Then a target starts
    60 s late."""
    outcome = Outcome()
    slowest = 0.0
    for order in itertools.permutations(("target", "draft", "orchestrator")):
        slowest = max(slowest, await _start(lab, outcome, order, 0.0))
    outcome.at_most("all in use after the last one serves, slowest", slowest, 5.0)
    late_s = 3.0 if short else 60.0
    used_s = await _start(lab, outcome, ("draft", "orchestrator", "target"), late_s)
    outcome.at_most(f"target {late_s:g} s late: in use after", used_s, 5.0)
    return outcome


async def _start(lab: Lab, outcome: Outcome, order: tuple[str, ...], late_s: float) -> float:
    """Seconds from the moment the last service serves until all are in use."""
    async with AsyncExitStack() as stack:
        make = await stack.enter_async_context(lab.processes())
        services: dict[str, Process] = {
            "target": make("testing.table_service target", "--pass-ms=1"),
            "draft": make("testing.table_service draft"),
        }
        flags = [f"--{role}={process.address}" for role, process in services.items()]
        services["orchestrator"] = make("orchestrator", *flags)
        for role in order:
            if role == order[-1]:
                await asyncio.sleep(late_s)
            await services[role].start()
            await services[role].healthy()
        served = time.monotonic()
        client = await stack.enter_async_context(Client(services["orchestrator"].address))

        async def used() -> bool:
            replicas = (await client.server_info()).replicas
            return len(replicas) == 2 and all(each.ready for each in replicas)

        await until(used, 30.0)
        used_s = time.monotonic() - served
        async with Traffic(client, several(2, 40, lab.chance)) as traffic:
            check_same(outcome, await traffic.finished(30.0), lab.reference, ", ".join(order))
        starts = {role: each.num_starts for role, each in services.items() if each.num_starts > 1 or each.returncode}
        outcome.check(not starts, f"ended or started again: {starts or 'none'}")
        return used_s
