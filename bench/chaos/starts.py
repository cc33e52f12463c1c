"""Row 26: services that start in any order. Knows order and delays; does not know faults of running services."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from specdec.client import Client
from testing.lab import Process, start, until, uses_all
from testing.trial import Trial


async def start_in_any_order(trial: Trial) -> None:
    """Target, draft and orchestrator start in all six orders, each when the one before serves. Then a target starts
    60 s late."""
    orders = itertools.permutations(("target", "draft", "orchestrator"))
    slowest_s = max([await _used_after(trial, order, 0.0) for order in orders])
    trial.at_most("all in use after the last one serves, slowest", slowest_s, 5.0)
    late_s = 3.0 if trial.short else 60.0
    used_s = await _used_after(trial, ("draft", "orchestrator", "target"), late_s)
    trial.at_most(f"target {late_s:g} s late: in use after", used_s, 5.0)


async def _used_after(trial: Trial, order: Sequence[str], late_s: float) -> float:
    """Seconds from the moment the last service serves until all are in use."""
    async with trial.processes() as make:
        services: dict[str, Process] = {
            "target": make("testing.table_service target", "--pass-ms=1"),
            "draft": make("testing.table_service draft"),
        }
        flags = [f"--{role}={process.address}" for role, process in services.items()]
        services["orchestrator"] = make("orchestrator", *flags)
        for role in order:
            if role == order[-1]:
                await asyncio.sleep(late_s)
            await start(services[role])
        async with Client(services["orchestrator"].address) as client:
            used_s = await until(lambda: uses_all(client, 2), 30.0)
            await trial.check_serves(client, 2, 40, ", ".join(order))
        starts = {role: each.num_starts for role, each in services.items() if each.num_starts > 1 or each.returncode}
        trial.check(not starts, f"ended or started again: {starts or 'none'}")
        return used_s
