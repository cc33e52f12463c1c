"""Row 29: scaling targets up and down. Knows DNS names with changing addresses; does not know failing services."""

from __future__ import annotations

import asyncio
import signal

from bench.chaos.dns_deployment import Named
from testing.lab import Process, load_of, start, until
from testing.trial import Trial, num_replays


async def scale_targets(trial: Trial) -> None:
    """Targets are scaled 1 -> 3 -> 1 under load, three times: two are added to the DNS name; then two of the three are
    removed from it and get SIGTERM."""
    async with Named(trial) as running:
        await running.start()
        slowest_s = 0.0
        left: list[Process] = []
        async with trial.steady(running.client, 4 if trial.short else 12, 200) as load:
            for _ in range(1 if trial.short else 3):
                new = [running.add("target") for _ in range(2)]
                await start(*new)
                running.show("target")
                slowest_s = max(slowest_s, *await asyncio.gather(*(_gets_work(target) for target in new)))
                await asyncio.sleep(2.0)
                leaving = trial.chance.sample(running.roles["target"], 2)
                left += leaving
                for target in leaving:
                    running.roles["target"].remove(target)
                running.show("target")
                for target in leaving:
                    target.signal(signal.SIGTERM)
                await asyncio.gather(*(target.ended(30.0) for target in leaving))
        trial.at_most("new ones got work after, slowest", slowest_s, 10.0)
        trial.check_same(load.answers)
        ends = {target.returncode for target in left}
        trial.check(ends == {0}, f"exit statuses of removed targets: {ends}")
        trial.note(f"{num_replays(load.answers)} replays")
        trial.check_no_tracebacks([*left, *running.processes])


async def _gets_work(target: Process) -> float:
    """Seconds until the target has done a pass."""

    async def works() -> bool:
        return bool((await load_of(target.address, "target")).passes)

    return await until(works, 30.0)
