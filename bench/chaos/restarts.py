"""Row 21: a rolling restart of all services. Knows SIGTERM and the grace period; does not know other faults."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack

from bench.chaos.outcome import Outcome
from specdec.client import Client
from testing.lab import Lab, Process, until
from testing.traffic import Answer, ask, check_same, several

_GRACE_S = 10.0


async def row_21(lab: Lab, seed: int, short: bool) -> Outcome:
    """Two of each service run under load. Each process in turn gets SIGTERM and is started again after it has ended.
    Clients know both orchestrators."""
    outcome = Outcome()
    async with AsyncExitStack() as stack:
        make = await stack.enter_async_context(lab.processes())
        grace = f"--shutdown-grace-s={_GRACE_S}"
        targets = [make(*lab.models.service("target", 8.0), grace) for _ in range(2)]
        drafts = [make(*lab.models.service("draft", 1.0), grace) for _ in range(2)]
        flags = [
            "--target=" + ",".join(each.address for each in targets),
            "--draft=" + ",".join(each.address for each in drafts),
            grace,
        ]
        orchestrators = [make("orchestrator", *flags) for _ in range(2)]
        everything = [*targets, *drafts, *orchestrators]
        for each in everything:
            await each.start()
        for each in everything:
            await each.healthy()
        answers: list[Answer] = []
        stopping = asyncio.Event()

        async def client(number: int) -> None:
            addresses = [each.address for each in orchestrators]
            async with Client(*(addresses if number % 2 else reversed(addresses))) as found:
                while not stopping.is_set():
                    for asked in several(2, 200, lab.chance):
                        answers.append(await ask(found, asked))

        clients = [asyncio.create_task(client(number)) for number in range(4 if short else 12)]
        await _all_used(orchestrators)
        slowest = 0.0
        for _ in range(1 if short else 3):
            for each in everything:
                slowest = max(slowest, await _restart(outcome, each))
                await _all_used(orchestrators)
        stopping.set()
        await asyncio.gather(*clients)
        check_same(outcome, answers, lab.reference)
        outcome.at_most("ended after SIGTERM, slowest", slowest, _GRACE_S)
        outcome.note(f"{sum(each.num_starts - 1 for each in everything)} restarts")
        outcome.note(f"{sum(answer.num_replays for answer in answers)} replays")
        outcome.check(not sum(each.tracebacks() for each in everything), "no tracebacks in the logs")
    return outcome


async def _restart(outcome: Outcome, process: Process) -> float:
    """Restart the process. Seconds from SIGTERM to its end."""
    await asyncio.sleep(0.5)
    since = time.monotonic()
    process.signal(signal.SIGTERM)

    async def gone() -> bool:
        return process.returncode is not None

    ended_s = await until(gone, 3 * _GRACE_S, 0.02)
    if process.returncode != 0:
        outcome.check(False, f"{process.module} ended with status {process.returncode} after {ended_s:.1f} s")
    await process.kill()
    await process.start()
    await process.healthy()
    return min(ended_s, time.monotonic() - since)


async def _all_used(orchestrators: list[Process]) -> None:
    """Wait until every orchestrator uses all its replicas, so that at most one is missing at a time."""
    for each in orchestrators:
        async with Client(each.address) as client:

            async def ready(client: Client = client) -> bool:
                return all(replica.ready for replica in (await client.server_info()).replicas)

            if await until(ready, 60.0) == float("inf"):
                unused = [f"{r.role}: {r.problem}" for r in (await client.server_info()).replicas if not r.ready]
                raise AssertionError(f"a replica that came back is not used: {'; '.join(unused)}")
