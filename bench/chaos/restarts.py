"""Row 21: a rolling restart of all services. Knows SIGTERM and the grace period; does not know other faults."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack

from specdec.client import Client
from testing.lab import Process, start, until, uses_all
from testing.traffic import Steady
from testing.trial import Trial, num_replays

_GRACE_S = 10.0


async def rolling_restart(trial: Trial) -> None:
    """Two of each service run under load. Each process in turn gets SIGTERM and is started again after it has ended.
    Clients know both orchestrators."""
    grace = (f"--shutdown-grace-s={_GRACE_S}",)
    async with (
        trial.deployment(2, 2, pass_ms=8.0, target=grace, draft=grace, orchestrator=grace) as running,
        AsyncExitStack() as stack,
    ):
        second = running.another_orchestrator(*grace)
        await start(second)
        orchestrators = [running.orchestrator, second]
        addresses = [orchestrator.address for orchestrator in orchestrators]
        clients = [
            await stack.enter_async_context(Client(*(addresses if number % 2 else reversed(addresses))))
            for number in range(4 if trial.short else 12)
        ]
        everything = [*running.processes, second]
        slowest_s = 0.0
        async with Steady(clients, lambda: trial.requests(2, 200)) as load:
            await _all_used(orchestrators)
            for _ in range(1 if trial.short else 3):
                for process in everything:
                    slowest_s = max(slowest_s, await _restart(trial, process))
                    await _all_used(orchestrators)
        trial.check_same(load.answers)
        trial.at_most("ended after SIGTERM, slowest", slowest_s, _GRACE_S)
        trial.note(f"{sum(process.num_starts - 1 for process in everything)} restarts")
        trial.note(f"{num_replays(load.answers)} replays")
        trial.check_no_tracebacks(everything)


async def _restart(trial: Trial, process: Process) -> float:
    """Restart the process. Seconds from SIGTERM to its end."""
    await asyncio.sleep(0.5)
    since = time.monotonic()
    process.signal(signal.SIGTERM)
    status = await process.ended(3 * _GRACE_S)
    ended_s = time.monotonic() - since
    if status != 0:
        trial.check(False, f"{process.module} ended with status {status} after {ended_s:.1f} s")
    await start(process)
    return ended_s


async def _all_used(orchestrators: list[Process]) -> None:
    """Wait until every orchestrator uses all its replicas, so that at most one is missing at a time."""
    for process in orchestrators:
        async with Client(process.address) as client:
            if await until(lambda client=client: uses_all(client), 60.0) == float("inf"):  # type: ignore[misc]
                unused = [f"{r.role}: {r.problem}" for r in (await client.server_info()).replicas if not r.ready]
                raise AssertionError(f"a replica that came back is not used: {'; '.join(unused)}")
