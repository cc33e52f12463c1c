"""Rows 1 to 5: processes that are killed or frozen. Knows signals; does not know the network."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

from specdec.client import Client
from testing import process_faults
from testing.lab import start
from testing.traffic import Traffic, added_gaps, interrupted
from testing.trial import Trial


async def kill_target(trial: Trial) -> None:
    """One of two targets gets SIGKILL at a random round of 50 requests, three times."""
    count, times = (12, 1) if trial.short else (50, 3)
    async with trial.deployment(num_targets=2) as running:
        gaps: list[float] = []
        for _ in range(times):
            share = trial.chance.uniform(0.1, 0.6)
            gaps += await process_faults.kill_target(trial, running, trial.requests(count, 200), share)
    trial.note_gaps(gaps, 2.0)


async def kill_only_target(trial: Trial) -> None:
    """The only target gets SIGKILL and is started again after 5 s; half of the requests have a deadline of 3 s."""
    count, away_s, deadline_s = (8, 1.5, 1.2) if trial.short else (30, 5.0, 3.0)
    async with trial.deployment(pass_ms=20.0) as running:
        asked = trial.requests(count, 300 if trial.short else 800)
        asked = [replace(each, timeout_s=deadline_s) if i % 4 < 2 else each for i, each in enumerate(asked)]
        async with Traffic(running.client, asked) as traffic:
            await asyncio.sleep(0.7)
            await running.targets[0].kill()
            await asyncio.sleep(away_s)
            await running.targets[0].start()
            answers = await traffic.finished(60.0)
    hurried = [answer for answer in answers if answer.asked.timeout_s]
    late = max((answer.ended - answer.started - deadline_s for answer in hurried), default=0.0)
    trial.at_most("past the deadline", late, 0.5)
    reasons = {getattr(answer.error, "reason", str(answer.error)) for answer in hurried}
    good = reasons <= {"DEADLINE_EXCEEDED", "NO_REPLICA", "REPLICA_LOST"}
    same = all(answer.same(trial.reference) for answer in hurried)
    trial.check(good and same, f"with a deadline: {', '.join(reasons)}")
    trial.check_same([answer for answer in answers if not answer.asked.timeout_s], "without")


async def kill_draft(trial: Trial) -> None:
    """The only draft gets SIGKILL in mid-stream, and is started again."""
    async with trial.deployment() as running:
        asked = trial.requests(8 if trial.short else 30, 300)
        await process_faults.kill_draft(trial, running, asked, trial.chance.uniform(0.1, 0.4))


async def kill_orchestrator(trial: Trial) -> None:
    """The orchestrator gets SIGKILL. Then one of two orchestrators gets it, with clients that know both."""
    asked = trial.requests(8 if trial.short else 30, 200)
    async with trial.deployment() as running, AsyncExitStack() as stack:
        await process_faults.kill_orchestrator(trial, running, asked, trial.chance.uniform(0.2, 0.5))
        async with Traffic(running.client, asked) as traffic:
            trial.check_same(await traffic.finished(), "retries")
        second = running.another_orchestrator()
        await start(second)
        client = await stack.enter_async_context(Client(running.orchestrator.address, second.address))
        share = trial.chance.uniform(0.2, 0.5)
        killed, answers = await interrupted(client, asked, share, running.orchestrator.kill)
    trial.check_same(answers, "with a second orchestrator")
    trial.note_gaps(added_gaps(answers, killed), 2.0)


async def freeze_target(trial: Trial) -> None:
    """One of two targets is frozen by SIGSTOP for 10 s."""
    async with trial.deployment(num_targets=2) as running:
        asked, later = trial.requests(8 if trial.short else 30, 300), trial.requests(8, 200)
        await process_faults.freeze_target(trial, running, asked, later, 3.0 if trial.short else 10.0)
