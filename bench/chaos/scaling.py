"""Row 29: scaling targets up and down. Knows DNS names with changing addresses; does not know failing services."""

from __future__ import annotations

import asyncio
import signal

from bench.chaos.dns_deployment import Named
from bench.chaos.outcome import Outcome
from testing.lab import Lab, Process, load_of, until
from testing.traffic import Steady, check_same


async def row_29(lab: Lab, seed: int, short: bool) -> Outcome:
    """Targets are scaled 1 -> 3 -> 1 under load, three times: two are added to the DNS name; then two of the three are
    removed from it and get SIGTERM."""
    outcome = Outcome()
    async with Named(lab) as found:
        await found.start()
        slowest = 0.0
        left: list[Process] = []
        async with Steady(found.client, 4 if short else 12, 200, lab.chance) as load:
            for _ in range(1 if short else 3):
                new = [found.add("target") for _ in range(2)]
                for each in new:
                    await each.start()
                for each in new:
                    await each.healthy()
                found.show("target")
                slowest = max(slowest, *await asyncio.gather(*(_gets_work(each) for each in new)))
                await asyncio.sleep(2.0)
                leaving = lab.chance.sample(found.roles["target"], 2)
                left += leaving
                for each in leaving:
                    found.roles["target"].remove(each)
                found.show("target")
                for each in leaving:
                    each.signal(signal.SIGTERM)
                await asyncio.gather(*(_gone(each) for each in leaving))
        outcome.at_most("new ones got work after, slowest", slowest, 10.0)
        check_same(outcome, load.answers, lab.reference)
        ends = {each.returncode for each in left}
        outcome.check(ends == {0}, f"exit statuses of removed targets: {ends}")
        outcome.note(f"{sum(answer.num_replays for answer in load.answers if answer.sample.finished)} replays")
        traces = sum(each.tracebacks() for each in (*left, *found.processes))
        outcome.check(not traces, f"{traces} tracebacks in the logs")
    return outcome


async def _gets_work(target: Process) -> float:
    """Seconds until the target has done a pass."""

    async def works() -> bool:
        return bool((await load_of(target.address, "target")).passes)

    return await until(works, 30.0)


async def _gone(process: Process) -> None:
    async def ended() -> bool:
        return process.returncode is not None

    await until(ended, 30.0)
